"""Attention with a window and sinks: what its peers give, and that state and scores do not grow with the text.

`test_equivalence.py` compares it with its definition, in all situations.
"""

import pytest
import torch
from mixers import LargestTensor
from transformers import MistralConfig, MistralForCausalLM

from hope_hf import HopeCache, HopeConfig, HopeForCausalLM

SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, head_dim=8, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, initializer_range=0.3)


def build(window, sinks, kind="window_attention", dtype=torch.float64, **options):
    torch.manual_seed(0)
    levels = dict(level_periods=[1], level_intermediate_sizes=[24])
    options = dict(layer_types=[kind] * 2, sliding_window=window, attention_sinks=sinks) | options
    return HopeForCausalLM(HopeConfig(**SIZES, **levels, **options)).to(dtype).eval()


def random_ids(*shape):
    return torch.randint(64, shape, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("window, sinks", [(6, 2), (6, 0), (1, 3), (3, 7), (100, 4)])
def test_weights_of_full_attention_read_the_same_while_the_text_is_short(window, sinks):
    full, ids = build(None, 0, "full_attention"), random_ids(2, 40)
    model = build(window, sinks)
    model.load_state_dict(full.state_dict())
    ours, theirs = model(ids).logits, full(ids).logits
    short = window + sinks
    torch.testing.assert_close(ours[:, :short], theirs[:, :short], rtol=0, atol=1e-10)
    assert short >= 40 or (ours - theirs)[:, short:].abs().max() > 0.1


@torch.no_grad()
@pytest.mark.parametrize("cuts", [[40], [13, 27], [1] * 40], ids=["one call", "two calls", "token by token"])
def test_mistral_with_a_window_gives_the_same_logits(cuts):
    torch.manual_seed(0)
    fields = MistralConfig(**SIZES, intermediate_size=24, sliding_window=6, rms_norm_eps=1e-6)
    mistral, model = MistralForCausalLM(fields).eval(), build(6, 0, dtype=torch.float32)
    names = {"self_attn.": "mixer.", "post_attention_layernorm": "continuum.levels.0.norm",
             ".mlp.": ".continuum.levels.0."}  # fmt: skip
    weights = {}
    for name, weight in mistral.state_dict().items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        weights[name] = weight
    model.load_state_dict(weights)
    ids, cache = random_ids(2, 40), HopeCache(model.config)
    logits = torch.cat([model(part, cache=cache).logits for part in ids.split(cuts, dim=1)], dim=1)
    torch.testing.assert_close(logits, mistral(ids).logits, rtol=1e-5, atol=2e-5)


@torch.no_grad()
def test_the_state_has_one_size_and_a_call_changes_no_state_in_place():
    model, ids = build(6, 2), random_ids(2, 40)
    cache, sizes = HopeCache(model.config), set()
    for part in ids.split([1, 1, 9, 1, 20, 7, 1], dim=1):
        before = cache.state_tensors()
        held = {name: tensor.clone() for name, tensor in before.items()}
        model(part, cache=cache)
        sizes.add(sum(tensor.nbytes for tensor in cache.state_tensors().values()))
        assert all(torch.equal(held[name], tensor) for name, tensor in before.items())
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
