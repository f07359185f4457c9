"""The short convolutions in front of a mixer's keys, values and queries: their weights.

`memory_scan.convolve` applies them, those of a mixer's streams together.
"""

import torch
from torch import nn
from transformers import initialization as init

from .configuration_hope import HopeConfig


class ShortConvolution(nn.Module):
    """Weights [H * D, 1, K] of a causal depthwise convolution over tokens, without bias.

    `forward` returns them as taps [K, H, D], the oldest token's first.
    """

    def __init__(self, config: HopeConfig, heads: int):
        super().__init__()
        self.heads = heads
        self.weight = nn.Parameter(torch.empty(heads * config.head_dim, 1, config.conv_kernel_size))

    def forward(self, dtype: torch.dtype) -> torch.Tensor:
        return self.weight.to(dtype, copy=True).view(self.heads, -1, self.weight.shape[-1]).permute(2, 0, 1)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Uniform between -1/sqrt(K) and 1/sqrt(K)."""
        bound = self.weight.shape[-1] ** -0.5
        init.uniform_(self.weight, -bound, bound)
