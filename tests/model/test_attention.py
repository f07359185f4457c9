"""Softmax attention and levels with the fields of Llama, Qwen2 and Qwen3 compute what transformers' own modules do."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from hope_hf import HopeConfig
from hope_hf.model.attention import HopeAttention
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


@pytest.fixture
def eager_flex_attention():
    """Compiled, it takes ten seconds."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@torch.no_grad()
@pytest.mark.usefixtures("eager_flex_attention")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
# torch's compiler uses what torch will remove
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_flex_attention_takes_masks_of_its_own(tiny_model):
    """A window as a `BlockMask` gives the values of the same window as a mask of four dimensions."""
    model = tiny_model(layer_types=["full_attention"] * 2)
    ids = torch.randint(1, 64, (2, 40), generator=torch.Generator().manual_seed(1))
    distance = torch.arange(40)[:, None] - torch.arange(40)
    band = ((distance >= 0) & (distance < 7)).expand(2, 1, -1, -1)
    blocks = create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < 7), None, None, 40, 40, device="cpu")
    expected = model(ids, attention_mask=band).logits
    with pytest.raises(ValueError, match="BlockMask"):
        model(ids, attention_mask=blocks)
    model.set_attn_implementation("flex_attention")
    torch.testing.assert_close(model(ids, attention_mask=blocks).logits, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="row of its own"):
        model.generate(ids, attention_mask=blocks)
