"""FLOPs and state sizes from the config are those of model, trainer and cache."""

from types import SimpleNamespace

import pytest
import torch
from models import SMALL, small_config
from transformers import LlamaConfig, MambaConfig

from hope_hf import PRESETS, HopeCache, HopeConfig, HopeForCausalLM
from hope_hf.cli.flops import attention_flops_per_token
from hope_hf.plan.flops import cache_bytes, flops_per_token
from hope_hf.plan.shapes import meta_model, shapes_of
from hope_hf.training.watch.telemetry import flops_per_token as trainers_flops


@pytest.mark.parametrize("name", [*PRESETS, "paper", "hybrid", *SMALL, "tied llama"])
def test_flops_are_the_trainers(name):
    if name in PRESETS:
        config = HopeConfig.from_preset(name)
    elif name == "tied llama":
        config = LlamaConfig(num_hidden_layers=2, tie_word_embeddings=True)
    elif name == "paper":
        config = HopeConfig.from_preset("tiny", memory_rule="paper", paper_rule={"depth": 2})
    elif name == "hybrid":
        config = HopeConfig.from_preset("tiny", layer_types=["full_attention", "hope_memory"] * 2)
    else:
        config = small_config(name)
    assert flops_per_token(config, shapes_of(config), 2048) == trainers_flops(meta_model(config), 2048)


def test_attention_of_other_models_is_counted_as_hopes_own():
    sizes = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=16, vocab_size=32)
    hope = HopeConfig(num_hidden_layers=3, layer_types=["full_attention"] * 3, **sizes)
    counted = [attention_flops_per_token(LlamaConfig(num_hidden_layers=3, **sizes), tokens) for tokens in (128, 4096)]
    assert counted == [hope.mixing_flops_per_token(tokens) for tokens in (128, 4096)]
    assert counted[0] == 2 * 3 * 64 * 128
    kinds = ["full_attention", "sliding_attention", "linear_attention"]
    mixed = SimpleNamespace(**sizes, num_hidden_layers=3, layer_types=kinds, sliding_window=10)
    # A token sees half of the text, and 10 tokens but where fewer are before it; a long window changes nothing.
    assert attention_flops_per_token(mixed, 100) == 4 * 64 * (50 + 9.5)
    assert attention_flops_per_token(mixed, 10) == 4 * 64 * (5 + 5)
    assert attention_flops_per_token(MambaConfig(), 100) == 0


@pytest.mark.parametrize(
    "fields",
    [{}, {"memory_rule": "paper"}, {"memory_projections": ["k", "v"]}, {"layer_types": ["full_attention"] * 2}]
    + [{"layer_types": ["sparse_attention"] * 2}],
)
@pytest.mark.parametrize("tokens", [5, 64, 70])
def test_state_of_a_sequence_is_the_caches(fields, tokens, tiny_config):
    config = tiny_config(**fields)
    cache = HopeCache(config)
    with torch.no_grad():
        HopeForCausalLM(config).eval()(torch.zeros(1, tokens, dtype=torch.long), past_key_values=cache)
    held = 0
    for layer in cache.layers:
        state = getattr(layer, "state", None)
        tensors = [layer.keys, layer.values] if state is None else [*state]
        flat = [part for tensor in tensors for part in (tensor if isinstance(tensor, tuple) else (tensor,))]
        held += sum(part.nbytes for part in flat)
    assert cache_bytes(config, tokens) == held
