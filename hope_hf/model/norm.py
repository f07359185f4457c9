"""The normalisation of blocks and reads, and learned factors."""

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


class LearnedFactors(nn.Module):
    """Factors [number], learned from 1.

    `forward` returns them: who multiplies may compute again after a sharding engine has freed the module's parameters.
    """

    def __init__(self, number: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(number))

    def forward(self, dtype: torch.dtype) -> torch.Tensor:
        return self.weight.to(dtype, copy=True)
