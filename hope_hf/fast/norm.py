"""The norm of reads or hidden states with its gate, in blocks of tokens that fit a CPU's cache; gradients by hand."""

import torch
import torch.nn.functional as F
from transformers.utils import is_tracing

from ..model.layers import gated_norm

# numbers in a block of tokens: 256 KiB in float32
_BLOCK = 2**16


class _GatedNorm(torch.autograd.Function):
    """`rms_norm(x) weight silu(gate)` for tensors [B, T, ..., W] and `weight` [W]; `gate` may be `None`.

    Blocks of tokens pass through all operations, since a whole text does not fit into a CPU's cache.
    """

    @staticmethod
    def forward(ctx, x, weight, gate, epsilon):
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        scale = x.new_empty(*x.shape[:-1], 1)
        for into, part, factor, gated in _token_blocks(x, out, x, scale, gate):
            # the operations of torch's norm, for the same bits: a text is also read without gradients
            torch.mean(part.square(), -1, keepdim=True, out=factor).add_(epsilon).rsqrt_()
            torch.mul(part, factor, out=into).mul_(weight)
            if gated is not None:
                into.mul_(F.silu(gated))
        ctx.save_for_backward(x, weight, gate, scale)
        ctx.epsilon = epsilon
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight, gate, scale = ctx.saved_tensors
        if torch.is_grad_enabled():
            # the gradient itself is differentiated
            wanted = [part for part in (x, weight, gate) if part is not None and part.requires_grad]
            plain = gated_norm(x, weight, ctx.epsilon, gate, kernels="plain")
            found = iter(torch.autograd.grad(plain, wanted, grad, create_graph=True))
            return *(next(found) if needed else None for needed in ctx.needs_input_grad[:3]), None
        grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        grad_weight, grad_gate = torch.zeros_like(weight), None if gate is None else torch.empty_like(gate)
        for above, part, factor, gated, into, into_gate in _token_blocks(x, grad, x, scale, gate, grad_x, grad_gate):
            unit = part * factor
            product = above * unit
            if gated is None:
                torch.mul(above, weight, out=into)
            else:
                active = F.silu(gated)
                torch.ops.aten.silu_backward.grad_input(product * weight, gated, grad_input=into_gate)
                product.mul_(active)
                torch.mul(active, weight, out=into).mul_(above)
            grad_weight.add_(product.flatten(0, -2).sum(0))
            row_dot = product.mul_(weight).sum(-1, keepdim=True).div_(x.shape[-1])
            into.addcmul_(unit, row_dot, value=-1).mul_(factor)
        return grad_x, grad_weight, grad_gate, None


def _token_blocks(x: torch.Tensor, *tensors: torch.Tensor | None):
    """For successive tokens of `x` [B, T, ...], about 64K numbers together, the parts of all tensors or `None`s."""
    # an operator on fake tensors takes as long for a block as for all tokens
    size = max(1, x.shape[1] if is_tracing(x) else _BLOCK * x.shape[1] // max(1, x.numel()))
    parts = [[None] * -(-x.shape[1] // size) if part is None else part.split(size, dim=1) for part in tensors]
    return zip(*parts, strict=True)


def gated_norm_in_blocks(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, gate: torch.Tensor | None
) -> torch.Tensor | None:
    """`layers.gated_norm` for training on a CPU; `None` where that computes it.

    Args:
        x: [B, T, ..., W], float32 or float64: narrow dtypes are computed in float32.
        weight: [W], in the dtype of `x`.
        gate: as `x`.
    """
    is_training = x.device.type == "cpu" and x.ndim > 2 and torch.is_grad_enabled()
    has_wide_dtypes = x.dtype in (torch.float32, torch.float64) and (gate is None or gate.dtype == x.dtype)
    if not (is_training and has_wide_dtypes):
        return None
    return _GatedNorm.apply(x, weight, gate, epsilon)
