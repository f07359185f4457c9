"""Choice of the code that computes an operation: GPU kernels, fast paths for CPUs, or the plain code.

The environment variable `HOPE_KERNELS` chooses:

| value | what runs |
|---|---|
| `auto` (default) | on a GPU flash-linear-attention's kernels where they can, else `torch`; the reason is counted |
| | on a CPU the scan in C++ where there is a compiler, else `torch` |
| `torch` | torch's operators, with the fast paths of `hope_hf.fast` |
| `plain` | the plain code on every device, to change a rule in one file: no kernel and no fast path runs |
| `fla` | the kernels of flash-linear-attention, or a ValueError that says why they cannot |
"""

import os
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.utils import logging

logger = logging.get_logger(__name__)

VARIABLE = "HOPE_KERNELS"
KERNELS = ("auto", "torch", "plain", "fla")
# Fast paths by name: the results of the plain code in less time. `hope_hf.fast` fills it.
FAST: dict[str, Callable] = {}


class Kernel(NamedTuple):
    """A function, and a second one that returns the reason why the first cannot run (`None` if it can)."""

    run: Callable
    obstacle: Callable[[], str | None]


def asked_kernels() -> str:
    """The value of `HOPE_KERNELS`; ValueError for an unknown one."""
    asked = os.environ.get(VARIABLE, "auto")
    if asked not in KERNELS:
        *others, last = KERNELS
        raise ValueError(f"{VARIABLE}={asked} is unknown: set it to {', '.join(others)} or {last}.")
    return asked


def is_compiled() -> bool:
    """Whether `torch.compile` traces the call, and not `torch.export`."""
    # torch 2.11 gives `is_exporting() == True` to every graph
    return torch.compiler.is_compiling() and not torch.compiler._is_exporting_flag


def is_transformed() -> bool:
    """Whether a transform of torch.func, such as `grad` or `jacrev`, goes over the operations."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def runs_plain(asked: str) -> bool:
    """Whether the plain code runs: it is asked for (see `asked_kernels`), or a tracer or torch.func reads it."""
    return asked == "plain" or torch.compiler.is_compiling() or is_transformed()


def registered(name: str, asked: str) -> Callable | None:
    """The fast path of that name, with `auto` the one in C++ if there are two; `None` if there is none."""
    of_torch = FAST.get(name)
    return FAST.get(f"compiled_{name}", of_torch) if asked == "auto" else of_torch


def fast_path(name: str, asked: str) -> Callable | None:
    """The fast path of that name; `None` if there is none or the plain code runs."""
    return None if runs_plain(asked) else registered(name, asked)


def borrow_fast_paths() -> None:
    """Fill `FAST` in a copy of this code, such as one from the Hub, if `hope_hf` is installed with the same code."""
    if __name__.startswith("hope_hf."):
        return
    # in a `try` block: transformers demands all other packages that the code of a model imports
    try:
        from hope_hf.fast import PATHS, is_written_for
    except Exception:
        # not installed, of another version, or broken: the copy needs it not
        return
    if is_written_for(Path(__file__).parent):
        FAST.update(PATHS)


def runs_torch(asked: str, device: torch.device) -> bool:
    """Whether torch's operators run without a look at the kernels."""
    return asked == "torch" or asked == "auto" and device.type != "cuda"


def operand_dtype(hidden_states: Tensor) -> torch.dtype:
    """The dtype of a linear map's output for `hidden_states`, to which GPU kernels round their operands."""
    # not read off the map's weights, which may be quantised or on the meta device
    kind = hidden_states.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_states.dtype


def once_differentiable(backward: Callable) -> Callable:
    """The backward pass of an `autograd.Function`, of a tuple, that refuses to be differentiated.

    torch's own decorator refuses it only if the gradients that come in require one themselves. That of a loss is 1,
    and a penalty on its gradient would be left out in silence.
    """

    @wraps(backward)
    def first_derivative(ctx, *gradients):
        with torch.no_grad():
            results = backward(ctx, *gradients)
        # enabled by `create_graph=True`
        if not torch.is_grad_enabled():
            return results
        anchor = torch.zeros((), requires_grad=True)
        return _NoSecondDerivative.apply(anchor, *results)

    return first_derivative


class _NoSecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor, *gradients):
        return tuple(None if gradient is None else gradient.view_as(gradient) for gradient in gradients)

    @staticmethod
    def backward(ctx, *_):
        raise ValueError(
            f"the fast paths and the loss of skip_logits=True have no second derivative: set {VARIABLE}=plain before "
            "the model is made"
        )


def choose(
    name: str, asked: str, kernel: Kernel, otherwise: Callable | None, fallbacks: Counter, device: torch.device
) -> Callable | None:
    """The function that computes `name`: the kernel, or `otherwise`.

    Args:
        asked: the value of `HOPE_KERNELS`, except `plain`.
        fallbacks: counts `(name, reason)` where torch's operators replace kernels on a GPU.

    Raises:
        ValueError: the kernel is asked for and cannot run.
    """
    if runs_torch(asked, device):
        return otherwise
    reason = kernel.obstacle()
    if reason is None:
        return kernel.run
    if asked != "auto":
        raise ValueError(f"{VARIABLE}={asked} cannot compute the {name}: {reason}. Set {VARIABLE}=auto or torch.")
    logger.warning_once(f"HOPE computes the {name} without kernels of the GPU: {reason}.")
    fallbacks[name, reason] += 1
    return otherwise
