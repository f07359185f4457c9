"""The kinds of layers that a test of the whole model goes through, and a mixer by itself, small and in float64."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hope_hf import HopeConfig
from hope_hf.model.chunks import plan_chunks
from hope_hf.model.modeling_hope import HopeBlock

# Options of models of two layers whose mixers are memories.
MEMORIES = {
    "delta": dict(memory_projections=["k", "v"]),
    "delta-static": {},
    "paper-1": dict(memory_rule="paper"),
    "paper-2": dict(memory_rule="paper", memory_depth=2),
}
HYBRID = dict(layer_types=["hope_memory", "full_attention"], memory_projections=["k", "v"])
QWEN = dict(layer_types=["full_attention"] * 2, attention_bias=True, use_qk_norm=True, mlp_bias=True)
ATTENTION = dict(layer_types=["full_attention", "full_attention"])
SIZES = dict(sparse_block_size=8, sparse_compress_stride=4, sparse_top_k=4, sparse_window=8)
SPARSE = dict(layer_types=["sparse_attention", "sparse_attention"]) | SIZES
SPARSE_HYBRID = dict(layer_types=["hope_memory", "sparse_attention"]) | SIZES
WINDOW = dict(layer_types=["window_attention", "window_attention"], sliding_window=6, attention_sinks=2)
WINDOW_HYBRID = WINDOW | dict(layer_types=["hope_memory", "window_attention"])
# All kinds of layers, by themselves and together.
LAYERS = {
    "memory": dict(memory_projections=["k", "v"]),
    "hybrid": HYBRID,
    "attention": ATTENTION,
    "sparse": SPARSE,
    "sparse-hybrid": SPARSE_HYBRID,
    "window": WINDOW,
}
MIXERS = MEMORIES | {name: LAYERS[name] for name in ("hybrid", "attention", "sparse", "sparse-hybrid", "window")}


def build_mixer(seed=0, **options):
    """A float64 mixer of two heads of 8 whose gates are spread, so that no factor hides behind a default."""
    options = dict(num_memory_heads=2, memory_chunk_size=8) | options
    config = HopeConfig(vocab_size=8, hidden_size=16, num_hidden_layers=1, head_dim=8, **options)
    torch.manual_seed(seed)
    block = HopeBlock(config, 0).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in block.mixer.named_parameters():
            scale = 0.5 if "memory" in name else 0.3
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale)
        block.mixer.gates.dt_bias.sub_(2.0)
    return block.mixer


def run_fast(mixer, hidden_states):
    """The mixer's output for texts that begin with `hidden_states` [B, T, hidden_size]."""
    plan = plan_chunks(mixer.config, hidden_states.shape[:2], hidden_states.device)
    return mixer(hidden_states, plan=plan)[0]


class LargestTensor(TorchDispatchMode):
    """Numbers in the largest tensor that an operation makes while the context is open."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        parts = out if isinstance(out, (tuple, list)) else [out]
        self.size = max([self.size, *(part.numel() for part in parts if isinstance(part, torch.Tensor))])
        return out
