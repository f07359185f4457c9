"""Vectors scaled by their norms, each a single autograd node.

Written out by hand because the scans are bound by memory traffic: as elementary operations, the backward pass of a
normalisation would read and write its tensors three times as often.
"""

import torch

_EPSILON = 1e-12


def _inverse_norm(x: torch.Tensor) -> torch.Tensor:
    return torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().add_(_EPSILON))


def _project_out(gradient: torch.Tensor, direction: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    """`gradient` minus its part along `direction`, times `weight`; a new tensor."""
    along = (gradient * direction).sum(-1, keepdim=True)
    return torch.addcmul(gradient, direction, along if weight is None else along * weight, value=-1)


class _Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        inverse = _inverse_norm(x)
        y = x * inverse
        ctx.save_for_backward(y, inverse)
        return y

    @staticmethod
    def backward(ctx, gradient):
        y, inverse = ctx.saved_tensors
        return _project_out(gradient, y).mul_(inverse)


class _ClipNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, limit):
        inverse = _inverse_norm(x)
        scale = (limit * inverse).clamp_(max=1.0)
        ctx.save_for_backward(x, inverse, scale)
        return x * scale

    @staticmethod
    def backward(ctx, gradient):
        x, inverse, scale = ctx.saved_tensors
        # only a clipped vector loses its part along itself
        clipped = (scale < 1).to(x.dtype) * inverse.square()
        return _project_out(gradient, x, clipped).mul_(scale), None


class _UnitSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.nn.functional.silu(x)
        inverse = _inverse_norm(y)
        y = y.mul_(inverse)
        ctx.save_for_backward(x, y, inverse)
        ctx.mark_non_differentiable(inverse)
        return y, inverse

    @staticmethod
    def backward(ctx, gradient, _):
        x, y, inverse = ctx.saved_tensors
        return torch.ops.aten.silu_backward(_project_out(gradient, y).mul_(inverse), x)


class _BackThroughUnitSilu(torch.autograd.Function):
    """`J^T b` for `y = unit(silu(x))`, with the inverse norm clamped to `ceiling`; differentiable in `b` and `x`.

    With s = sigmoid(x), silu' = s (1 + x (1 - s)), r = min(1 / |silu(x)|, ceiling): `J^T b = r (b - y (y.b)) silu'`.
    """

    @staticmethod
    def forward(ctx, b, x, y, inverse, ceiling):
        projected = _project_out(b, y)
        clamped = inverse.clamp(max=ceiling)
        ctx.save_for_backward(b, x, y, inverse, projected)
        ctx.ceiling = ceiling
        return torch.ops.aten.silu_backward(projected * clamped, x)

    @staticmethod
    def backward(ctx, gradient):
        b, x, y, inverse, projected = ctx.saved_tensors
        clamped = inverse.clamp(max=ctx.ceiling)
        s = torch.sigmoid(x)
        rest = 1 - s
        # through silu': its derivative is s (1 - s) (2 + x (1 - 2 s))
        bend = torch.addcmul(rest.new_full((), 2.0), x, rest - s).mul_(s).mul_(rest)
        slope = torch.addcmul(rest.new_full((), 1.0), x, rest).mul_(s)
        grad_x = (gradient * projected).mul_(clamped).mul_(bend)
        through = slope.mul_(gradient)
        # through the inverse norm, where it is not clamped: d(1/|a|) = -y / |a|^2 . da
        grad_inverse = (through * projected).sum(-1, keepdim=True)
        through = through.mul_(clamped)
        along = (through * y).sum(-1, keepdim=True)
        # through y itself: -(through (y.b) + b (y.through))
        grad_y = torch.addcmul(b * -along, through, (b * y).sum(-1, keepdim=True), value=-1)
        grad_b = torch.addcmul(through, y, along, value=-1)
        free = (inverse < ctx.ceiling).to(x.dtype)
        grad_silu = _project_out(grad_y, y).mul_(inverse)
        grad_silu = torch.addcmul(grad_silu, y, grad_inverse * inverse.square() * free, value=-1)
        grad_x = grad_x.add_(torch.ops.aten.silu_backward(grad_silu, x))
        return grad_b, grad_x, None, None, None


def unit(x: torch.Tensor) -> torch.Tensor:
    """`x` scaled to norm 1 over its last axis; 0 stays 0."""
    return _Unit.apply(x)


def clip_norm(x: torch.Tensor, limit: float | None) -> torch.Tensor:
    """`x` scaled down to norm `limit` over its last axis where it is longer; unchanged for `None`."""
    return x if limit is None else _ClipNorm.apply(x, limit)


def unit_silu(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`unit(silu(x))`, and the inverse norm it was scaled by [..., 1] (not differentiable)."""
    return _UnitSilu.apply(x)


def back_through_unit_silu(
    b: torch.Tensor, x: torch.Tensor, y: torch.Tensor, inverse: torch.Tensor, ceiling: float
) -> torch.Tensor:
    """Transposed Jacobian of `unit_silu` at `x` times `b`: what an error at its output is at its input.

    Args:
        b: error at the output.
        x: input of `unit_silu`.
        y, inverse: its outputs; gradients to `x` through both are part of this function's backward.
        ceiling: largest inverse norm, beyond which the scale is taken as a constant.
    """
    return _BackThroughUnitSilu.apply(b, x, y.detach(), inverse, ceiling)
