"""One more token of a text: equal to the whole text read at once, whatever was done to the model in between.

`test_equivalence.py` goes through mixers and situations.
"""

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import StaticCache

from hope_hf import HopeCache, HopeConfig, HopeForCausalLM
from hope_hf.fast import one_token
from hope_hf.model.memory_mixer import SelfModifyingTitans

SIZES = {"vocab_size": 32, "hidden_size": 24, "num_hidden_layers": 2, "head_dim": 8, "memory_chunk_size": 4}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def build(**options):
    torch.manual_seed(0)
    model = HopeForCausalLM(HopeConfig(**SIZES | options)).double().eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def mixers_of(model):
    return [module for module in model.modules() if isinstance(module, SelfModifyingTitans)]


def twin(model):
    """A copy whose mixers run the plain scan, and whose modules are all called."""
    other = copy.deepcopy(model)
    for mixer in mixers_of(other):
        mixer.kernels = "plain"
    for layer in other.model.layers:
        layer.continuum.register_forward_hook(lambda *_: None)
    return other


def read(model, pieces):
    """Logits of all pieces, and the tensors of the cache after them."""
    cache = HopeCache(model.config)
    logits = torch.cat([model(piece, cache=cache).logits for piece in pieces], dim=1)
    return [logits, *cache.state_tensors().values()]


def assert_equal(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


class Names(TorchDispatchMode):
    """Names of the operators that run inside."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("cache", [HopeCache, partial(StaticCache, max_cache_len=32)], ids=["growing", "static"])
def test_a_token_waits_for_no_device_and_asks_for_no_kernel(cache, monkeypatch):
    model = build()
    cache = cache(model.config)
    read_on = partial(model, cache=cache, use_cache=True)
    read_on(torch.randint(32, (1, 9)))
    monkeypatch.setattr(SelfModifyingTitans, "runs_on_kernels", lambda *_: pytest.fail("a kernel was chosen"))
    # token ids are looked at on the CPU alone
    token = model.get_input_embeddings()(torch.tensor([[1]]))
    # makes what is kept
    read_on(inputs_embeds=token)
    with Names() as names:
        read_on(inputs_embeds=token)
    assert not names.seen & {"_local_scalar_dense", "nonzero", "lift_fresh"}


def test_taught_levels_are_read_in_both_ways():
    model = build(level_learning={"rate": 0.1})
    text = torch.randint(32, (1, 12))
    cache = HopeCache(model.config)
    model.learn(text, cache=cache)
    other = copy.deepcopy(cache)
    assert_equal([model(text[:, :1], cache=cache).logits], [twin(model)(text[:, :1], cache=other).logits])


@pytest.mark.filterwarnings("ignore:Calling register_constant:FutureWarning")
def test_int8_weights_are_read_as_in_a_text():
    # `make` installs torchao for the tests alone.
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model, text = build(mlp_bias=True).float(), torch.randint(32, (2, 14))
    quantize_(model, Int8WeightOnlyConfig())
    found = read(model, text.split([5] + [1] * 9, dim=1))
    expected = read(twin(model), [text])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    kept = one_token._WEIGHTS[model.model.layers[0]]
    assert kept.memory is not None and kept.levels is not None


@pytest.mark.processes
@pytest.mark.usefixtures("warm_python")
def test_a_sharded_model_reads_tokens_as_the_whole_one_does():
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    subprocess.run([*launch, str(Path(__file__).with_name("sharded_tokens.py"))], check=True, timeout=300)


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


# changes between two tokens of a text


def in_place(model):
    for parameter in model.parameters():
        parameter.add_(0.1)


def by_data(model):
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.1


def by_optimizer(model):
    """Which does not count versions."""
    model.requires_grad_()
    text = torch.randint(32, (1, 8))
    with torch.enable_grad():
        model(text, labels=text).loss.backward()
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()


def by_state_dict(model):
    weights = {name: value + 0.1 for name, value in model.state_dict().items()}
    model.load_state_dict(weights, assign=True)


def by_configuration(model):
    model.config.memory_learning_rate_max = 0.1


def by_hook(model):
    mixers_of(model)[1].k_proj.register_forward_hook(lambda module, inputs, output: 2 * output)


def by_pre_hook(model):
    mixers_of(model)[1].gates.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))


def by_hook_of_a_level(model):
    norm = model.model.layers[0].continuum.levels[0].norm
    norm.register_forward_hook(lambda module, inputs, output: 2 * output)


def by_parametrization(model):
    parametrize.register_parametrization(mixers_of(model)[0].k_conv1d, "weight", Doubled())


def by_wrapping(model):
    mixer = mixers_of(model)[0]
    mixer.v_proj = nn.Sequential(mixer.v_proj, Doubled())


def by_another_forward(model):
    projection = mixers_of(model)[0].o_proj
    projection.forward = lambda x: 2 * F.linear(x, projection.weight)


CHANGES = [
    in_place,
    by_data,
    by_optimizer,
    by_state_dict,
    by_configuration,
    by_hook,
    by_pre_hook,
    by_hook_of_a_level,
    by_parametrization,
    by_wrapping,
    by_another_forward,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_two_tokens_counts_at_the_next(change):
    model, text = build(), torch.randint(32, (1, 8))
    cache = HopeCache(model.config)
    for piece in text.split([5, 1, 1, 1], dim=1):
        before = model(piece, cache=cache).logits
    held = copy.deepcopy(cache)
    change(model)
    other = twin(model)
    found = model(text[:, :1], cache=cache).logits
    expected = other(text[:, :1], cache=held).logits
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    assert (found - before).abs().max() > 1e-4


def test_writes_to_data_count_from_the_next_text_on():
    """They change neither version nor address."""
    model = build(layer_types=["hope_memory", "full_attention"], num_attention_heads=3)
    text = torch.randint(32, (1, 8))
    pieces = text.split([5, 1, 1, 1], dim=1)
    read(model, pieces)
    for parameter in model.parameters():
        parameter.data.add_(0.1)
    assert_equal(read(model, pieces), read(twin(model), [text]))


def kept_of(model):
    """References to what is kept of each block's mixer."""
    return [weakref.ref(one_token._WEIGHTS[block].memory.power) for block in model.model.layers]


def test_what_is_kept_is_no_part_of_the_model_and_ends_with_it_or_with_the_text():
    model, text = build(), torch.randint(32, (1, 8))
    size = len(pickle.dumps(model))
    read(model, text.split(1, dim=1))
    kept = kept_of(model)
    assert len(pickle.dumps(model)) == size
    assert not any(block in one_token._WEIGHTS for block in copy.deepcopy(model).model.layers)
    read(model, [text])
    assert [reference() for reference in kept] == [None, None]
    read(model, text.split(1, dim=1))
    kept = kept_of(model)
    del model
    gc.collect()
    assert [reference() for reference in kept] == [None, None]


def test_what_was_kept_in_inference_mode_serves_without():
    model, cache, text = build(), HopeCache(build().config), torch.randint(32, (1, 8))
    pieces = text.split([5, 1, 1, 1], dim=1)
    with torch.inference_mode():
        for piece in pieces[:3]:
            model(piece, cache=cache)
    assert_equal([model(pieces[3], cache=cache).logits], [twin(model)(text).logits[:, 7:]])
