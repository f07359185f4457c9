"""Queries, keys and values of sparse attention, from what linear maps gave: convolved, normalised, rotated.

Nothing of it is kept for the backward pass, which computes it again: it is cheap, and each step of it is as large as
the streams. Both passes take tiles of tokens, which stay in a CPU's cache, and write into tensors of the whole text.

Axes: B row, S slot, C channel (queries, keys and values side by side), K width of the convolutions, H head, D width of
a head.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from .memory_scan import ScanPiece, convolve
from .sparse_fused import without_autocast

# slots of a tile
TILE = 512


class HeadNorm(nn.Module):
    """Weight [D] of the root-mean-square normalisation of queries or keys, shared by all heads.

    `forward` returns it: who normalises computes again, after a sharding engine has freed the module's parameters.
    """

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, dtype: torch.dtype) -> torch.Tensor:
        return self.weight.to(dtype, copy=True)


class StreamWeights(NamedTuple):
    """What makes the streams."""

    # oldest token first [K, 1, 1, C]
    taps: torch.Tensor
    # [D]
    query_norm: torch.Tensor
    key_norm: torch.Tensor


class StreamSizes(NamedTuple):
    """Heads of queries and of keys, and what is added to mean squares."""

    heads: int
    key_heads: int
    epsilon: float


def make_streams(
    raw: torch.Tensor,
    tail: torch.Tensor,
    weights: StreamWeights,
    angles: tuple[torch.Tensor, torch.Tensor],
    piece: ScanPiece,
    sizes: StreamSizes,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [B, H, S, D], keys and values of a piece, and the tail for the next: plain operations.

    Args:
        raw: what linear maps gave [B, S, C].
        tail: last inputs of the convolutions of the piece before [B, K - 1, C].
        angles: cosines and sines of the slots' positions [B or 1, S, D].
    """
    mixed, tail = convolve(raw, tail, weights.taps, piece)
    width = weights.query_norm.shape[-1]
    heads = mixed.unflatten(-1, (-1, width)).transpose(1, 2)
    query, key, value = heads.split([sizes.heads, sizes.key_heads, sizes.key_heads], dim=1)
    query, key = (
        F.rms_norm(part, (width,), weight, sizes.epsilon)
        for part, weight in ((query, weights.query_norm), (key, weights.key_norm))
    )
    return *apply_rotary_pos_emb(query, key, *angles), value, tail


def make_streams_tiled(
    raw, tail, weights: StreamWeights, angles, pieces: list[ScanPiece], sizes: StreamSizes
) -> tuple:
    """`make_streams` of all pieces of a call; the tail is that of the last."""
    return _Streams.apply(raw, tail, *weights, *angles, pieces, sizes)


class _Streams(torch.autograd.Function):
    @staticmethod
    def forward(ctx, raw, tail, taps, query_norm, key_norm, cos, sin, pieces, sizes):
        weights, (rows, length, _) = StreamWeights(taps, query_norm, key_norm), raw.shape
        dtype = torch.promote_types(raw.dtype, cos.dtype)
        query, key, value = (
            raw.new_empty(rows, heads, length, query_norm.shape[-1], dtype=kind)
            for heads, kind in ((sizes.heads, dtype), (sizes.key_heads, dtype), (sizes.key_heads, raw.dtype))
        )
        tails = []
        for piece in pieces:
            cut = slice(piece.start, piece.stop)
            # a copy: it is a part of what the convolutions read
            tails.append(tail.clone())
            *parts, tail = make_streams(raw[:, cut], tail, weights, (cos[:, cut], sin[:, cut]), piece, sizes)
            for whole, part in zip((query, key, value), parts, strict=True):
                whole[:, :, cut] = part
        ctx.save_for_backward(raw, *weights, cos, sin, *tails)
        ctx.pieces, ctx.sizes = pieces, sizes
        return query, key, value, tail.clone()

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx, grad, *others):
        # read once: a block that is recomputed gives them once
        raw, taps, query_norm, key_norm, cos, sin, *tails = ctx.saved_tensors
        weights = (taps, query_norm, key_norm)
        *grads, grad_tail = grad, *others
        grad_raw, grad_weights = torch.empty_like(raw), [torch.zeros_like(weight) for weight in weights]
        for piece, tail in zip(reversed(ctx.pieces), reversed(tails), strict=True):
            cut = slice(piece.start, piece.stop)
            leaves = [part.detach().requires_grad_() for part in (raw[:, cut], tail, *weights)]
            with torch.enable_grad():
                made = make_streams(
                    *leaves[:2], StreamWeights(*leaves[2:]), (cos[:, cut], sin[:, cut]), piece, ctx.sizes
                )
            wanted = [*(grad[:, :, cut] for grad in grads), grad_tail]
            grad_raw[:, cut], grad_tail, *more = torch.autograd.grad(made, leaves, wanted)
            for total, part in zip(grad_weights, more, strict=True):
                total.add_(part)
        return grad_raw, grad_tail, *grad_weights, None, None, None, None
