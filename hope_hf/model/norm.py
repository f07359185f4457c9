"""The normalisation of blocks, reads, queries and keys."""

import torch
import torch.nn.functional as F
from torch import nn


class HopeRMSNorm(nn.Module):
    """Root-mean-square normalisation over the last axis, in the input's dtype but computed in float32.

    One kernel on a GPU, where weight and input have one dtype.
    """

    def __init__(self, width: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.variance_epsilon)
