"""Attention with a window and sinks: what its peers give, and that state and scores do not grow with the text.

`test_equivalence.py` compares it with its definition, in all situations.
"""

import pytest
import torch
from mixers import LargestTensor, random_ids
from transformers import MistralConfig, MistralForCausalLM

from hope_hf import HopeCache, HopeConfig, HopeForCausalLM
from hope_hf.fast.window_reads import read_bands_for_training
from hope_hf.model.chunks import Past
from hope_hf.model.streams import Streams
from hope_hf.model.window_attention import WindowState, read_window
from hope_hf.model.window_plan import WindowSizes, plan_window

SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, head_dim=8, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, initializer_range=0.3)


def build(window, sinks, **options):
    torch.manual_seed(0)
    layers = dict(layer_types=["window_attention"] * 2, sliding_window=window, attention_sinks=sinks)
    levels = dict(level_periods=[1], level_intermediate_sizes=[24])
    return HopeForCausalLM(HopeConfig(**SIZES, **layers, **levels, **options)).double().eval()


# a part of a name in Mistral, and the same in HOPE
NAMES = {
    "self_attn.": "mixer.",
    "post_attention_layernorm": "continuum.levels.0.norm",
    ".mlp.": ".continuum.levels.0.",
}


@torch.no_grad()
def test_mistral_with_a_window_gives_the_same_logits():
    torch.manual_seed(0)
    fields = MistralConfig(**SIZES, intermediate_size=24, sliding_window=6, rms_norm_eps=1e-6)
    mistral, model = MistralForCausalLM(fields).eval(), build(6, 0).float()
    weights = {}
    for name, weight in mistral.state_dict().items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        weights[name] = weight
    model.load_state_dict(weights)
    ids = random_ids(2, 40)
    torch.testing.assert_close(model(ids).logits, mistral(ids).logits, rtol=1e-5, atol=2e-5)


@torch.no_grad()
def test_the_state_has_one_size():
    model = build(6, 2)
    cache = HopeCache(model.config, archive=False)
    sizes = set()
    for part in random_ids(2, 40).split([1, 1, 9, 1, 20, 7, 1], dim=1):
        model(part, cache=cache)
        sizes.add(sum(tensor.nbytes for tensor in cache.state_tensors().values()))
    assert len(sizes) == 1


def test_nothing_of_the_size_of_the_square_is_built():
    model, length = build(16, 2), 2048
    with LargestTensor() as mode:
        model(random_ids(1, length), use_cache=False).logits.sum().backward()
    # logits, which are larger than scores of a band
    assert mode.size <= 64 * length


def test_dropout_acts_in_training_alone():
    model, ids = build(6, 2, attention_dropout=0.5), random_ids(1, 20)
    assert torch.equal(model(ids).logits, model(ids).logits)
    model.train()
    assert (model(ids).logits - model(ids).logits).abs().max() > 1e-3


# sinks, window, tokens of the call, tokens read before
CALLS = {
    "goes on": (4, 200, 300, 500),
    "begins": (4, 200, 300, 0),
    "sinks beside the window": (4, 250, 300, 0),
    "no sinks": (0, 200, 300, 500),
    "fewer tokens than sinks": (6, 3, 5, 0),
    "a state that is not full": (4, 200, 300, 100),
}


@pytest.mark.parametrize("name", CALLS)
def test_gradients_by_hand_are_those_of_autograd_to_the_bit(name):
    sinks, window, length, before = CALLS[name]
    device = torch.device("cpu")
    draw = torch.Generator().manual_seed(0)
    past = Past(before, True, torch.tensor([before, before])) if before else None
    plan = plan_window(WindowSizes(sinks, window), torch.float32, (2, length), device, past)
    asks = torch.randn(3, 2, 4, length, 8, generator=draw)
    offers = torch.randn(2, 2, 2, length, 8, generator=draw)
    state = None
    if before:
        ring_keys, ring_values = torch.randn(2, 2, 2, sinks + window, 8, generator=draw)
        state = WindowState(ring_keys, ring_values)
    results = []
    for read_fast in (None, read_bands_for_training):
        queries, sink_queries, keys, values = (x.clone().requires_grad_() for x in (*asks[:2], *offers))
        reads, _ = read_window(Streams(queries, sink_queries, keys, values), state, plan, False, 0.0, read_fast)
        asked = [queries, sink_queries, keys, values]
        gradients = torch.autograd.grad(reads, asked, asks[2], allow_unused=True, materialize_grads=True)
        results.append((reads, *gradients))
    plain, fast = results
    assert type(fast[0].grad_fn).__name__ == "_WindowReadsBackward"
    torch.testing.assert_close(fast, plain, rtol=0, atol=0)


def test_states_of_earlier_calls_have_gradients_where_these_are_asked_for(monkeypatch):
    """As in training on a text in several calls, through the keys and values that the first call left."""
    ids = random_ids(2, 40)
    gradients = []
    for kernels in ("plain", "auto"):
        monkeypatch.setenv("HOPE_KERNELS", kernels)
        model = build(6, 2)
        cache = HopeCache(model.config)
        for part in ids.split([13, 27], dim=1):
            logits = model(part, cache=cache).logits
        gradients.append(torch.autograd.grad(logits.square().sum(), list(model.parameters())))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-11, atol=1e-11)
