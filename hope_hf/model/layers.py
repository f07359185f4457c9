"""Small layers that mixers and levels share: normalisation, learned factors, and the short convolution.

The convolution is causal and depthwise and stays within a document. `convolve` is its plain form; `convolve_padded`
and `convolution_gradients` are the same in place, for scans whose backward pass is written by hand.

Axes: b row, C slot of a piece, X channel, K width of the convolution.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

from .chunks import ScanPiece
from .configuration_hope import HopeConfig


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


def tail_after(padded: torch.Tensor, tail: torch.Tensor, piece: ScanPiece) -> torch.Tensor:
    """What the next piece needs of padded streams, of the shape of `tail`."""
    if piece.tail_out is None:
        return padded[:, padded.shape[1] - tail.shape[1] :]
    return padded.gather(1, piece.tail_out.expand_as(tail))


def convolve(
    raw: torch.Tensor, tail: torch.Tensor, taps: torch.Tensor, piece: ScanPiece
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal depthwise convolution within each document [b, C, 3 D], and the inputs that the next piece needs."""
    reach, length = tail.shape[1], raw.shape[1]
    padded = torch.cat([tail, raw], dim=1)
    if piece.tail_in is not None:
        padded = padded.scatter(1, piece.tail_in.expand_as(tail), tail)
    mixed = taps[reach] * padded[:, reach:]
    for tap in range(reach):
        term = padded[:, tap : tap + length]
        mixed = mixed + taps[tap] * (term if piece.inside is None else term * piece.inside[tap])
    return mixed, padded[:, length:] if piece.tail_out is None else padded.gather(1, piece.tail_out.expand_as(tail))


def convolve_padded(padded: torch.Tensor, taps: torch.Tensor, piece: ScanPiece) -> torch.Tensor:
    """What `layers.convolve` makes [b, C, X] of padded streams."""
    reach = taps.shape[0] - 1
    size = padded.shape[1] - reach
    mixed = taps[reach] * padded[:, reach:]
    for tap in range(reach):
        term = padded[:, tap : tap + size]
        mixed.addcmul_(taps[tap], term if piece.inside is None else term * piece.inside[tap])
    return mixed


def convolution_gradients(
    grad_mixed: torch.Tensor,
    grad_tail: torch.Tensor | None,
    padded: torch.Tensor,
    taps: torch.Tensor,
    grad_taps: torch.Tensor,
    piece: ScanPiece,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the raw streams [b, C, X] and of the tail of the piece before [b, K - 1, X].

    Args:
        grad_mixed: of what `convolve_padded` made of `padded`.
        grad_tail: of the tail for the next piece, or `None` where nothing reads it.
        grad_taps: added to in place.
    """
    reach, size = taps.shape[0] - 1, grad_mixed.shape[1]
    grad_padded = torch.zeros_like(padded)
    for tap in range(reach + 1):
        part = grad_mixed if tap == reach or piece.inside is None else grad_mixed * piece.inside[tap]
        grad_padded[:, tap : tap + size].addcmul_(taps[tap], part)
        grad_taps[tap].add_((part * padded[:, tap : tap + size]).sum_to_size(taps[tap].shape))
    if grad_tail is not None and piece.tail_out is None:
        grad_padded[:, size:].add_(grad_tail)
    elif grad_tail is not None:
        grad_padded.scatter_add_(1, piece.tail_out.expand_as(grad_tail), grad_tail)
    grad_tail = grad_padded[:, :reach]
    if piece.tail_in is not None:
        moved_in = piece.tail_in.expand_as(grad_tail)
        grad_moved = grad_padded.gather(1, moved_in)
        grad_padded.scatter_(1, moved_in, 0.0)
        grad_tail = grad_tail + grad_moved
    return grad_padded[:, reach:], grad_tail
