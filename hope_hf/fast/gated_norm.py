"""The norm of reads with its gate by `cpp/gated_norm.cpp`, with and without gradients.

A norm without a gate stays torch's, whose bits a converted model owes to its source.

Axes: B row, T token, H head (1 without heads), W numbers that are normalised together, P parts of all norms.
"""

import ctypes

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from ..model.backends import once_differentiable
from .native import POINTER, VECTOR_BYTES, fields, function, run, set_addresses
from .norm import gated_norm_in_blocks

_NAME = "hope_norm"
# Of which each adds up a gradient of the weight: fixed, so that it does not depend on the number of threads.
_PARTS = 16
# numbers of a part, below which a thread takes longer to begin than to end
_LEAST_NUMBERS = 2**15
# of the axes before the last one
_OUTER = ctypes.c_int64 * 3


class _Arguments(ctypes.Structure):
    """`NormArguments` of `gated_norm.cpp`."""

    _fields_ = [
        *fields(_OUTER, "sizes"),
        *fields(ctypes.c_int64, "width"),
        *fields(ctypes.c_double, "epsilon"),
        *fields(POINTER, "weight", "x", "gate"),
        *fields(_OUTER, "x_strides", "gate_strides"),
        *fields(POINTER, "scale", "out"),
        *fields(_OUTER, "out_strides"),
        *fields(POINTER, "grad_x", "grad_gate", "grad_weight"),
        *fields(ctypes.c_int64, "parts"),
    ]


def _by_head(x: Tensor) -> Tensor:
    """[B, T, W] or [B, T, H, W] as [B, T, H, W], with the W numbers side by side."""
    if x.ndim == 3:
        x = x.unsqueeze(2)
    return x if x.stride(-1) == 1 else x.contiguous()


def _run(epsilon: float, x: Tensor, out: Tensor, gate: Tensor, **tensors: Tensor) -> None:
    """Run all parts; `tensors` are further fields of `_Arguments`, and `out` is a gradient if there is `grad_x`."""
    if is_fake(x):
        # a planner asks for shapes and sizes alone
        return
    strided = {"x": _by_head(x), "out": _by_head(out), "gate": _by_head(gate)}
    *sizes, width = strided["x"].shape
    outer_sizes = _OUTER(*sizes)
    arguments = _Arguments(sizes=outer_sizes, width=width, epsilon=epsilon, parts=_PARTS)
    set_addresses(arguments, strided | tensors)
    for name, tensor in strided.items():
        *outer, _ = tensor.stride()
        strides = _OUTER(*outer)
        setattr(arguments, f"{name}_strides", strides)
    compiled = function(_NAME, x.dtype)
    least = _LEAST_NUMBERS * _PARTS // x.numel()
    run(compiled, arguments, _PARTS, max(1, least))


class _CompiledNorm(torch.autograd.Function):
    """`rms_norm(x) weight silu(gate)` for `x` and `gate` [B, T, W] or [B, T, H, W]."""

    @staticmethod
    def forward(ctx, x, weight, gate, epsilon):
        out = x.new_empty(x.shape)
        scale = x.new_empty(x.shape[:-1])
        weight = weight.contiguous()
        _run(epsilon, x, out, gate, weight=weight, scale=scale)
        ctx.save_for_backward(x, weight, gate, scale)
        ctx.epsilon = epsilon
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        x, weight, gate, scale = ctx.saved_tensors
        grad_x = x.new_empty(x.shape)
        grad_gate = torch.empty_like(grad_x)
        grad_weight = weight.new_zeros(_PARTS, len(weight))
        _run(
            ctx.epsilon,
            x,
            grad_out,
            gate,
            weight=weight,
            scale=scale,
            grad_x=grad_x,
            grad_gate=grad_gate,
            grad_weight=grad_weight,
        )
        return grad_x, grad_weight.sum(0), grad_gate, None


def gated_norm_compiled(x: Tensor, weight: Tensor, epsilon: float, gate: Tensor | None) -> Tensor | None:
    """`layers.gated_norm` on a CPU, whose gradients have no gradients; `None` where that computes it.

    Args:
        x: [B, T, W] or [B, T, H, W], float32 or float64: narrow dtypes are computed in float32.
        weight: [W], in the dtype of `x`.
        gate: as `x`.
    """
    if gate is None or not _runs_on(x, gate):
        return gated_norm_in_blocks(x, weight, epsilon, gate)
    return _CompiledNorm.apply(x, weight, gate, epsilon)


def _runs_on(x: Tensor, gate: Tensor) -> bool:
    """Whether the compiled norm computes these tensors."""
    if gate.dtype != x.dtype or gate.shape != x.shape:
        return False
    if x.device.type != "cpu" or x.ndim not in (3, 4):
        return False
    bytes_of_row = x.shape[-1] * x.itemsize
    if not x.numel() or bytes_of_row % VECTOR_BYTES:
        return False
    return function(_NAME, x.dtype) is not None
