"""Tiny models whose levels learn much from a text, and texts for them."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

TEACHES = dict(periods=[8], rate=0.3, drift=2.0, gate=False, brake=0.0)
ALL = ["gate_proj", "up_proj", "down_proj"]


def one_level(tiny_model, dtype=torch.float64, learning=TEACHES, **options):
    """A tiny model with one level a block, which learns much."""
    options = dict(level_periods=[1], level_intermediate_sizes=[40], num_hidden_layers=3) | options
    if "layer_types" in options:
        options["layer_types"] = (options["layer_types"] * 2)[: options["num_hidden_layers"]]
    return tiny_model(dtype, level_learning=learning, **options)


class Products(TorchDispatchMode):
    """Multiplications of matrix products while the context is open, of those with a matrix that has this size."""

    NAMES = ("mm", "bmm", "addmm", "baddbmm")

    def __init__(self, size: int):
        super().__init__()
        self.size = size
        self.number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        if function.__name__.split(".")[0] in self.NAMES:
            factors = [arg for arg in args if isinstance(arg, torch.Tensor)][-2:]
            if self.size in (*factors[0].shape, *factors[1].shape):
                self.number += factors[0].numel() * factors[1].shape[-1]
        return out
