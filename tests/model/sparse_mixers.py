"""Mixers of sparse attention, small and in float64, and texts for them."""

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hope_hf import HopeConfig
from hope_hf.model.chunks import plan_slots
from hope_hf.model.sparse_attention import HopeSparseAttention

WIDTH = 32
FEW = dict(sparse_block_size=8, sparse_compress_stride=4, sparse_top_k=4, sparse_window=16)


def config_of(**options):
    options = {"num_attention_heads": 4, "num_key_value_heads": 2} | options
    return HopeConfig(
        vocab_size=16, hidden_size=WIDTH, num_hidden_layers=1, head_dim=8, layer_types=["sparse_attention"], **options
    )


def random_mixer(**options):
    torch.manual_seed(0)
    mixer = HopeSparseAttention(config_of(**options), 0).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            # large enough that attention is far from a mean
            parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5 * 1.5)
    return mixer


def texts(*shape, seed=1):
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def angles_of(mixer, hidden_states):
    return LlamaRotaryEmbedding(mixer.config)(hidden_states, torch.arange(hidden_states.shape[-2])[None])


def run(mixer, hidden_states):
    """Of rows that each begin a document."""
    plan = plan_slots(mixer.sizes.block, hidden_states.shape[:2], hidden_states.device)
    return mixer(hidden_states, blocks=plan, block_positions=angles_of(mixer, hidden_states))[0]
