"""The kinds of layers that a test of the whole model goes through."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Options of models of two layers whose mixers are memories.
MEMORIES = {
    "delta": dict(memory_projections=["k", "v"]),
    "delta-static": {},
    "paper-1": dict(memory_rule="paper"),
    "paper-2": dict(memory_rule="paper", memory_depth=2),
}
HYBRID = dict(layer_types=["hope_memory", "full_attention"], memory_projections=["k", "v"])
ATTENTION = dict(layer_types=["full_attention", "full_attention"])
SIZES = dict(sparse_block_size=8, sparse_compress_stride=4, sparse_top_k=4, sparse_window=8)
SPARSE = dict(layer_types=["sparse_attention", "sparse_attention"]) | SIZES
WINDOW = dict(layer_types=["window_attention", "window_attention"], sliding_window=6, attention_sinks=2)
RETAINING = dict(layer_types=["retaining_attention", "retaining_attention"], sliding_window=6, attention_sinks=2)
RETAINING |= dict(retained_block_size=4)
# Memories, whose states have one size; keys and values, which grow; and all kinds of layers in one model.
MIXED = (
    WINDOW
    | SIZES
    | dict(
        layer_types=[
            "hope_memory", "window_attention", "retaining_attention", "sparse_attention", "full_attention"
        ],
        retained_block_size=4,
        memory_projections=["k", "v"],
        num_hidden_layers=5,
    )
)
STATES = {"memory": {}, "attention": ATTENTION, "mixed": MIXED}


class LargestTensor(TorchDispatchMode):
    """Numbers in the largest tensor that an operation makes while the context is open."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        parts = out if isinstance(out, (tuple, list)) else [out]
        self.size = max([self.size, *(part.numel() for part in parts if isinstance(part, torch.Tensor))])
        return out


def random_ids(*shape, seed=1):
    """Tokens without 0, which is padding."""
    return torch.randint(1, 64, shape, generator=torch.Generator().manual_seed(seed))
