"""How many functions of the model's own files a token passes: a straight way can be read in one go."""

import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch

import hope_hf
from hope_hf import HopeCache, HopeConfig, HopeForCausalLM

PACKAGE = str(Path(hope_hf.__file__).parent)
# what is no call that somebody wrote
ANONYMOUS = {"<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>"}


@contextmanager
def counted():
    """Calls by file and function while the context is open; a generator counts when it begins."""
    calls = Counter()

    def count(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name not in ANONYMOUS:
            # a resumed generator has run before
            if frame.f_lasti < 2 or not code.co_flags & 0x20:
                calls[f"{Path(code.co_filename).name}:{code.co_qualname}"] += 1

    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def told(calls: Counter) -> str:
    return f"{calls.total()} calls: " + ", ".join(f"{count} {name}" for name, count in calls.most_common())


def one_layer() -> HopeForCausalLM:
    torch.manual_seed(0)
    return HopeForCausalLM(HopeConfig(vocab_size=64, hidden_size=64, num_hidden_layers=1, head_dim=16))


def test_a_forward_pass_of_one_layer_takes_at_most_90_calls():
    model, tokens = one_layer().train(), torch.randint(0, 64, (1, 256))
    with counted() as calls:
        model(tokens, use_cache=False)
    assert calls.total() <= 90, told(calls)


def test_a_decoded_token_of_one_layer_takes_at_most_43_calls():
    model, tokens = one_layer().eval(), torch.randint(0, 64, (1, 20))
    cache = HopeCache(model.config)
    with torch.no_grad():
        model(tokens, cache=cache)
        # what is made once a process or a text
        model(tokens[:, :1], cache=cache)
        with counted() as calls:
            model(tokens[:, :1], cache=cache)
    assert calls.total() <= 43, told(calls)
