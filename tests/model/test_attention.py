"""Softmax attention and levels with the fields of Llama, Qwen2 and Qwen3 compute what transformers' own modules do."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from hope_hf import HopeConfig, HopeForCausalLM
from hope_hf.model.attention import HopeAttention
from hope_hf.model.cache_file import fingerprint
from hope_hf.model.continuum import ContinuumLevel

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
        default = getattr(model.config, field)
        setattr(model.config, field, value)
        assert fingerprint(model) != plain
        setattr(model.config, field, default)
    assert fingerprint(model) == plain


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
# torch's compiler uses what torch will remove
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_flex_attention_takes_masks_of_its_own(tiny_model):
    """A window as a `BlockMask` gives the values of the same window as a mask of four dimensions."""
    model = tiny_model(layer_types=["full_attention"] * 2)
    ids = torch.randint(1, 64, (2, 40), generator=torch.Generator().manual_seed(1))
    query, key = torch.arange(40)[:, None], torch.arange(40)
    band = ((query >= key) & (query - key < 7)).expand(2, 1, -1, -1)
    packed = dict(position_ids=torch.cat([torch.arange(25), torch.arange(15)]).expand(2, -1), use_cache=False)
    with torch.no_grad():
        expected = model(ids, attention_mask=band).logits, model(ids, **packed).logits
    blocks = create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < 7), None, None, 40, 40, device="cpu")
    with pytest.raises(ValueError, match="BlockMask"):
        model(ids, attention_mask=blocks)
    model.set_attn_implementation("flex_attention")
    # compiled, it takes ten seconds
    torch.compiler.set_stance("force_eager")
    try:
        with torch.no_grad():
            found = model(ids, attention_mask=blocks).logits, model(ids, **packed).logits
    finally:
        torch.compiler.set_stance("default")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="row of its own"):
        model.generate(ids, attention_mask=blocks)
