"""`sparse_branches.make_qkv` in time tiles that fit a CPU's cache, in place and with gradients written by hand.

It saves only its inputs: the backward pass computes the rest again, which is cheap.

Axes: B row, S slot, n slot of a tile, H head of keys, G query heads that share it, D head width, C channel (q, k and v
side by side), K kernel size.
"""

from collections.abc import Callable
from functools import wraps
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import rotate_half

from ..model.backends import once_differentiable
from ..model.chunks import ChunkSpan, SlotPlan, convolution_spans
from ..model.layers import tail_after, with_tail
from ..model.sparse_branches import SparseInputs, SparseSizes
from .convolution import convolution_gradients, convolve_padded

# slots per tile
_TIME_TILE = 512


def without_autocast(backward: Callable) -> Callable:
    """Wrap a backward pass, which may start within autocast and would then round its products."""

    @wraps(backward)
    def run(ctx, grad, *others):
        with torch.autocast(grad.device.type, enabled=False):
            return backward(ctx, grad, *others)

    return run


def make_qkv_tiled(
    inputs: SparseInputs, tail: Tensor, slots: SlotPlan, sizes: SparseSizes
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`make_qkv` of all slots of a call; the tail [B, K - 1, C] is that of the last one."""
    length = inputs.raw.shape[1]
    tail_size = len(inputs.conv_weights) - 1
    tile_size = _TIME_TILE
    if slots.offset is not None:
        # the first tile holds the first token of every row, behind as many empty slots as a block has
        tile_size = max(tile_size, int(slots.offset.max()) + 1)
    spans = convolution_spans(slots, length, tail_size, tile_size)
    # tiles are computed in float32, or in float64 in a float64 model
    dtype = torch.promote_types(inputs.conv_weights.dtype, torch.float32)
    conv_weights = inputs.conv_weights.to(dtype)
    query_norm = inputs.query_norm.to(dtype)
    key_norm = inputs.key_norm.to(dtype)
    return _Qkv.apply(inputs.raw, tail, conv_weights, query_norm, key_norm, inputs.cos, inputs.sin, spans, sizes)


class _Tile(NamedTuple):
    """What both passes make of a span."""

    # inputs of the convolutions with the tail in front [B, K - 1 + n, C]
    padded: Tensor
    # after the convolutions [B, n, heads, D]
    query: Tensor
    key: Tensor
    value: Tensor
    # [B or 1, n, 1, D]
    cos: Tensor
    sin: Tensor

    @classmethod
    def of(
        cls,
        raw: Tensor,
        tail: Tensor,
        conv_weights: Tensor,
        cos: Tensor,
        sin: Tensor,
        span: ChunkSpan,
        sizes: SparseSizes,
    ) -> "_Tile":
        """The tile in the dtype of `conv_weights`; the other tensors are those of all slots."""
        part = slice(span.start, span.stop)
        dtype = conv_weights.dtype
        padded = with_tail(raw[:, part], tail, span).to(dtype)
        tail_size = tail.shape[1]
        mixed = torch.empty_like(padded[:, tail_size:])
        convolve_padded([padded], [conv_weights], span, [mixed])
        width = cos.shape[-1]
        by_head = mixed.unflatten(-1, (-1, width))
        query, key, value = by_head.split(sizes.heads_of_qkv, dim=2)
        cos = cos[:, part, None].to(dtype)
        sin = sin[:, part, None].to(dtype)
        return cls(padded, query, key, value, cos, sin)

    def rotate(self, heads: Tensor, norm: Tensor, epsilon: float) -> None:
        """Normalise and rotate queries or keys [B, n, heads, D], in place; `norm` [D] are the norm's factors."""
        heads.mul_(_inverse(heads, epsilon)).mul_(norm)
        turned = rotate_half(heads).mul_(self.sin)
        heads.mul_(self.cos).add_(turned)

    def differentiate(self, grad: Tensor, heads: Tensor, norm: Tensor, grad_norm: Tensor, epsilon: float) -> None:
        """Turn the gradient of what `rotate` makes into that of `heads`, in place.

        Adds to `grad_norm`, and overwrites `heads`.
        """
        turned = rotate_half(grad * self.sin)
        grad.mul_(self.cos).sub_(turned)
        inverse = _inverse(heads, epsilon)
        direction = heads.mul_(inverse)
        grad_norm.add_((grad * direction).sum_to_size(norm.shape))
        grad.mul_(norm)
        row_dot = torch.linalg.vecdot(grad, direction).div_(len(norm))
        grad.addcmul_(direction, row_dot.unsqueeze(-1), value=-1).mul_(inverse)


def _inverse(heads: Tensor, epsilon: float) -> Tensor:
    """One over the root mean square of heads [..., D]: [..., 1]."""
    mean_square = torch.linalg.vecdot(heads, heads).div_(heads.shape[-1])
    return mean_square.add_(epsilon).rsqrt_().unsqueeze(-1)


class _Qkv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, raw, tail, conv_weights, query_norm, key_norm, cos, sin, spans, sizes):
        rows, length, _ = raw.shape
        width = cos.shape[-1]
        dtype = torch.promote_types(raw.dtype, cos.dtype)
        key_heads = sizes.key_heads
        group = sizes.heads // key_heads
        # the heads of a query side by side
        shape = rows, key_heads, group, length, width
        query = torch.empty_permuted(shape, (0, 1, 3, 2, 4), dtype=dtype, device=raw.device)
        key = raw.new_empty(rows, key_heads, length, width, dtype=dtype)
        value = raw.new_empty(rows, key_heads, length, width)
        tails = []
        for span in spans:
            # cloned, since the tail is a view of the padded inputs
            tails.append(tail.clone())
            tile = _Tile.of(raw, tail, conv_weights, cos, sin, span, sizes)
            tail = tail_after(tile.padded, tail, span).to(raw.dtype)
            tile.rotate(tile.query, query_norm, sizes.epsilon)
            tile.rotate(tile.key, key_norm, sizes.epsilon)
            part = slice(span.start, span.stop)
            by_head = tile.query.transpose(1, 2)
            query[..., part, :] = by_head.unflatten(1, (key_heads, -1))
            key[:, :, part] = tile.key.transpose(1, 2)
            value[:, :, part] = tile.value.transpose(1, 2)
        ctx.save_for_backward(raw, conv_weights, query_norm, key_norm, cos, sin, *tails)
        ctx.spans = spans
        ctx.sizes = sizes
        return query, key, value, tail.clone()

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx, grad_query, grad_key, grad_value, grad_tail):
        # unpacked once, since a recomputed block provides the saved tensors once
        raw, conv_weights, query_norm, key_norm, cos, sin, *tails = ctx.saved_tensors
        sizes = ctx.sizes
        dtype = conv_weights.dtype
        grad_raw = torch.empty_like(raw)
        grad_conv_weights = torch.zeros_like(conv_weights)
        grad_query_norm = torch.zeros_like(query_norm)
        grad_key_norm = torch.zeros_like(key_norm)
        for span, tail in zip(reversed(ctx.spans), reversed(tails), strict=True):
            part = slice(span.start, span.stop)
            tile = _Tile.of(raw, tail, conv_weights, cos, sin, span, sizes)
            grad_query_of_tile = grad_query[..., part, :].flatten(1, 2)
            grads_of_tile = []
            for grad in (grad_query_of_tile, grad_key[:, :, part], grad_value[:, :, part]):
                # [B, heads, n, D] to [B, n, heads, D]
                grads_of_tile.append(grad.transpose(1, 2).to(dtype))
            grad_mixed = torch.cat(grads_of_tile, dim=2)
            # values are neither normalised nor rotated
            grad_query_heads, grad_key_heads, _ = grad_mixed.split(sizes.heads_of_qkv, dim=2)
            tile.differentiate(grad_query_heads, tile.query, query_norm, grad_query_norm, sizes.epsilon)
            tile.differentiate(grad_key_heads, tile.key, key_norm, grad_key_norm, sizes.epsilon)
            grad_raw[:, part], grad_tail = convolution_gradients(
                grad_mixed.flatten(2), grad_tail.to(dtype), tile.padded, conv_weights, grad_conv_weights, span
            )
        grad_tail = grad_tail.to(raw.dtype)
        return grad_raw, grad_tail, grad_conv_weights, grad_query_norm, grad_key_norm, None, None, None, None
