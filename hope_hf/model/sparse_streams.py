"""Queries, keys and values of sparse attention, from what linear maps gave: convolved, normalised, rotated.

Nothing of it is kept for the backward pass, which computes it again: it is cheap, and each step of it is as large as
the streams. Both passes take tiles of tokens, which stay in a CPU's cache, and write into tensors of the whole text.

Axes: B row, S slot, C channel (queries, keys and values side by side), K width of the convolutions, H head of keys, G
query heads that share it, D width of a head.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, rotate_half

from .convolution_steps import convolution_gradients, convolve_padded
from .memory_scan import ScanPiece, convolve, pad_streams, tail_after
from .sparse_fused import without_autocast

# slots of a tile
TILE = 512


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

    @property
    def split(self) -> list[int]:
        """Heads of queries, keys and values, side by side."""
        return [self.heads, self.key_heads, self.key_heads]


def make_streams(
    raw: torch.Tensor,
    tail: torch.Tensor,
    weights: StreamWeights,
    angles: tuple[torch.Tensor, torch.Tensor],
    piece: ScanPiece,
    sizes: StreamSizes,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [B, H, G, S, D], keys, values [B, H, S, D] of a piece, and the tail for the next: plain operations.

    Args:
        raw: what linear maps gave [B, S, C].
        tail: last inputs of the convolutions of the piece before [B, K - 1, C].
        angles: cosines and sines of the slots' positions [B or 1, S, D].
    """
    mixed, tail = convolve(raw, tail, weights.taps, piece)
    width = weights.query_norm.shape[-1]
    heads = mixed.unflatten(-1, (-1, width)).transpose(1, 2)
    query, key, value = heads.split(sizes.split, dim=1)
    query, key = (
        F.rms_norm(part, (width,), weight, sizes.epsilon)
        for part, weight in ((query, weights.query_norm), (key, weights.key_norm))
    )
    query, key = apply_rotary_pos_emb(query, key, *angles)
    return query.unflatten(1, (sizes.key_heads, -1)), key, value, tail


def make_streams_tiled(
    raw, tail, weights: StreamWeights, angles, pieces: list[ScanPiece], sizes: StreamSizes
) -> tuple:
    """`make_streams` of all pieces of a call, in place and with gradients by hand; the tail is that of the last."""
    return _Streams.apply(raw, tail, *weights, *angles, pieces, sizes)


class _Streams(torch.autograd.Function):
    @staticmethod
    def forward(ctx, raw, tail, taps, query_norm, key_norm, cos, sin, pieces, sizes):
        (rows, length, _), width = raw.shape, query_norm.shape[-1]
        dtype = torch.promote_types(raw.dtype, cos.dtype)
        # the heads of a query side by side
        shape = (rows, sizes.key_heads, sizes.heads // sizes.key_heads, length, width)
        query = torch.empty_permuted(shape, (0, 1, 3, 2, 4), dtype=dtype, device=raw.device)
        key, value = (raw.new_empty(rows, sizes.key_heads, length, width, dtype=kind) for kind in (dtype, raw.dtype))
        weights, tails = (taps, query_norm, key_norm), []
        exact, *norms = _exact(weights)
        for piece in pieces:
            # a copy: it is a part of what the convolutions read
            tails.append(tail.clone())
            padded, mixed, angles = _mixed(raw, tail, exact, width, (cos, sin), piece)
            tail = tail_after(padded, tail, piece).to(raw.dtype)
            parts = mixed.split(sizes.split, 2)
            for part, norm in zip(parts[:2], norms, strict=True):
                part.mul_(_inverse(part, sizes.epsilon)).mul_(norm)
                turned = rotate_half(part).mul_(angles[1])
                part.mul_(angles[0]).add_(turned)
            cut, by_head = slice(piece.start, piece.stop), [part.transpose(1, 2) for part in parts]
            query[..., cut, :] = by_head[0].unflatten(1, (sizes.key_heads, -1))
            key[:, :, cut], value[:, :, cut] = by_head[1:]
        ctx.save_for_backward(raw, *weights, cos, sin, *tails)
        ctx.pieces, ctx.sizes = pieces, sizes
        return query, key, value, tail.clone()

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx, grad_query, grad_key, grad_value, grad_tail):
        # read once: a block that is recomputed gives them once
        raw, taps, query_norm, key_norm, cos, sin, *tails = ctx.saved_tensors
        weights, width, sizes = (taps, query_norm, key_norm), query_norm.shape[-1], ctx.sizes
        taps, *norms = _exact(weights)
        grad_raw = torch.empty_like(raw)
        grad_taps, *grad_norms = totals = [torch.zeros_like(weight) for weight in (taps, *norms)]
        for piece, tail in zip(reversed(ctx.pieces), reversed(tails), strict=True):
            cut = slice(piece.start, piece.stop)
            padded, mixed, (cosine, sine) = _mixed(raw, tail, taps, width, (cos, sin), piece)
            given = (grad_query[..., cut, :].flatten(1, 2), grad_key[:, :, cut], grad_value[:, :, cut])
            grad_mixed = torch.cat([part.transpose(1, 2).to(taps.dtype) for part in given], dim=2)
            # not of values, which are neither normalised nor rotated
            parts = zip(grad_mixed.split(sizes.split, 2), mixed.split(sizes.split, 2), norms, grad_norms, strict=False)
            for grad, part, norm, total in parts:
                turned = rotate_half(grad * sine)
                grad.mul_(cosine).sub_(turned)
                inverse = _inverse(part, sizes.epsilon)
                direction = part.mul_(inverse)
                total.add_((grad * direction).sum_to_size(norm.shape))
                grad.mul_(norm)
                along = torch.linalg.vecdot(grad, direction).div_(width).unsqueeze(-1)
                grad.addcmul_(direction, along, value=-1).mul_(inverse)
            grad_raw[:, cut], grad_tail = convolution_gradients(
                grad_mixed.flatten(2), grad_tail.to(taps.dtype), padded, taps, grad_taps, piece
            )
        grads = (total.to(weight.dtype) for total, weight in zip(totals, weights, strict=True))
        return grad_raw, grad_tail.to(raw.dtype), *grads, None, None, None, None


def _exact(weights: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Tiles are made in float32 (float64 where the model is), whatever the streams are kept in."""
    return [weight.to(torch.promote_types(weight.dtype, torch.float32)) for weight in weights]


def _mixed(raw, tail, taps, width: int, angles, piece: ScanPiece) -> tuple:
    """Of a tile: the padded streams, heads after the convolutions [B, n, heads, D], and angles [B or 1, n, 1, D]."""
    cut = slice(piece.start, piece.stop)
    padded = pad_streams(raw[:, cut], tail, piece).to(taps.dtype)
    mixed = convolve_padded(padded, taps, piece).unflatten(-1, (-1, width))
    return padded, mixed, [part[:, cut, None].to(taps.dtype) for part in angles]


def _inverse(heads: torch.Tensor, epsilon: float) -> torch.Tensor:
    """One over the root mean square of heads [..., D]: [..., 1]."""
    return torch.linalg.vecdot(heads, heads).div_(heads.shape[-1]).add_(epsilon).rsqrt_().unsqueeze(-1)
