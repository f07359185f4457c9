"""The norm of reads or hidden states with its gate, in blocks of tokens that fit a CPU's cache; gradients by hand."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.utils import is_tracing

from ..model.backends import once_differentiable

# numbers in a block of tokens: 256 KiB in float32
_BLOCK = 2**16


class _GatedNorm(torch.autograd.Function):
    """`rms_norm(x) weight silu(gate)` for tensors [B, T, ..., W] and `weight` [W]; `gate` may be `None`.

    Blocks of tokens pass through all operations, since a whole text does not fit into a CPU's cache.
    """

    @staticmethod
    def forward(ctx, x, weight, gate, epsilon):
        out = x.new_empty(x.shape)
        scale = x.new_empty(*x.shape[:-1], 1)
        for tokens in _token_blocks(x):
            x_block = x[:, tokens]
            scale_block = scale[:, tokens]
            out_block = out[:, tokens]
            # the operations of torch's norm, for the same bits: a text is also read without gradients
            torch.mean(x_block.square(), -1, keepdim=True, out=scale_block)
            scale_block.add_(epsilon).rsqrt_()
            torch.mul(x_block, scale_block, out=out_block)
            out_block.mul_(weight)
            if gate is not None:
                active = F.silu(gate[:, tokens])
                out_block.mul_(active)
        ctx.save_for_backward(x, weight, gate, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        x, weight, gate, scale = ctx.saved_tensors
        grad_x = x.new_empty(x.shape)
        grad_weight = torch.zeros_like(weight)
        grad_gate = None if gate is None else torch.empty_like(gate)
        for tokens in _token_blocks(x):
            grad_block = grad_out[:, tokens]
            grad_x_block = grad_x[:, tokens]
            scale_block = scale[:, tokens]
            unit = x[:, tokens] * scale_block
            # gradient of each number's weight
            product = grad_block * unit
            if gate is None:
                torch.mul(grad_block, weight, out=grad_x_block)
            else:
                gate_block = gate[:, tokens]
                active = F.silu(gate_block)
                torch.ops.aten.silu_backward.grad_input(
                    product * weight,
                    gate_block,
                    grad_input=grad_gate[:, tokens],
                )
                product.mul_(active)
                torch.mul(active, weight, out=grad_x_block)
                grad_x_block.mul_(grad_block)
            products = product.flatten(0, -2)
            grad_weight.add_(products.sum(0))
            row_dot = product.mul_(weight).sum(-1, keepdim=True)
            row_dot.div_(x.shape[-1])
            grad_x_block.addcmul_(unit, row_dot, value=-1)
            grad_x_block.mul_(scale_block)
        return grad_x, grad_weight, grad_gate, None


def _token_blocks(x: Tensor) -> Iterator[slice]:
    """Successive tokens of `x` [B, T, ...], about 64K numbers together."""
    length = x.shape[1]
    # an operator on fake tensors takes as long for a block as for all tokens
    size = length
    if not is_tracing(x):
        size = _BLOCK * length // max(1, x.numel())
    size = max(1, size)
    for start in range(0, length, size):
        yield slice(start, start + size)


def gated_norm_in_blocks(
    x: Tensor,
    weight: Tensor,
    epsilon: float,
    gate: Tensor | None,
) -> Tensor | None:
    """`layers.gated_norm` for training on a CPU, whose gradients have no gradients; `None` where that computes it.

    Args:
        x: [B, T, ..., W], float32 or float64: narrow dtypes are computed in float32.
        weight: [W], in the dtype of `x`.
        gate: as `x`.
    """
    is_training = x.device.type == "cpu" and x.ndim > 2 and torch.is_grad_enabled()
    is_wide = x.dtype in (torch.float32, torch.float64)
    gate_fits = gate is None or gate.dtype == x.dtype
    if not (is_training and is_wide and gate_fits):
        return None
    return _GatedNorm.apply(x, weight, gate, epsilon)
