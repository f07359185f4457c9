"""Softmax attention and levels with the fields of Llama, Qwen2 and Qwen3 compute what transformers' own modules do."""

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from hope_hf import HopeConfig, HopeForCausalLM
from hope_hf.model.attention import HopeAttention
from hope_hf.model.continuum import ContinuumLevel
from hope_hf.model.fingerprint import fingerprint

SIZES = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
OURS = SIZES | dict(vocab_size=64, layer_types=["full_attention"], level_intermediate_sizes=[24], level_periods=[1])


def ours(**options):
    return HopeConfig(**OURS, **options)


def randomized(module):
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return module


ATTENTION = {
    "llama": (LlamaAttention, LlamaConfig(**SIZES), {}),
    "biases": (LlamaAttention, LlamaConfig(**SIZES, attention_bias=True), {"attention_bias": True}),
    "qwen2": (Qwen2Attention, Qwen2Config(**SIZES), {"attention_bias": True, "attention_out_bias": False}),
    "qwen3": (Qwen3Attention, Qwen3Config(**SIZES), {"use_qk_norm": True}),
}


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ATTENTION)
def test_attention_equals_that_of_transformers(kind, kernel):
    theirs, config, options = ATTENTION[kind]
    config._attn_implementation = kernel
    own_config = ours(**options)
    own_config._attn_implementation = kernel
    theirs, own = randomized(theirs(config, 0)).eval(), HopeAttention(own_config, 0).eval()
    own.load_state_dict(theirs.state_dict())
    hidden_states = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(1))
    positions = LlamaRotaryEmbedding(config)(hidden_states, torch.arange(7)[None])
    mask = torch.full((7, 7), float("-inf")).triu(1)[None, None]
    expected, _ = theirs(hidden_states, positions, mask)
    found, _, _ = own(hidden_states, position_embeddings=positions, attention_mask=mask)
    # the norms are one operation here and five there
    tolerance = 1e-6 if kind == "qwen3" else 0.0
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options", [{}, dict(mlp_bias=True), dict(hidden_act="gelu_pytorch_tanh")], ids=str)
def test_a_level_equals_the_mlp_of_llama(options):
    theirs = randomized(LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=24, **options)))
    level = ContinuumLevel(ours(**options), 0)
    level.load_state_dict({"norm.weight": torch.ones(32), **theirs.state_dict()})
    hidden_states = torch.randn(2, 7, 32)
    assert torch.equal(level(hidden_states), theirs(level.norm(hidden_states)))


def test_the_fields_begin_as_zeros_and_ones(tiny_model):
    options = dict(layer_types=["full_attention"] * 2, attention_bias=True, mlp_bias=True, use_qk_norm=True)
    weights = tiny_model(**options).state_dict()
    biases = [weight for name, weight in weights.items() if name.endswith("bias")]
    assert len(biases) == 2 * (4 + 2 * 3) and not any(bias.any() for bias in biases)
    assert all((weights[f"model.layers.0.mixer.{name}_norm.weight"] == 1).all() for name in "qk")


def test_a_fingerprint_depends_on_the_fields_only_where_they_are_set():
    model = HopeForCausalLM(ours())
    plain = fingerprint(model)
    for field, value in (("hidden_act", "gelu"), ("mlp_bias", True), ("use_qk_norm", True)):
        setattr(model.config, field, value)
        assert fingerprint(model) != plain
        setattr(model.config, field, HopeConfig.__dataclass_fields__[field].default)
    assert fingerprint(model) == plain
