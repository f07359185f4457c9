"""Which code computes: kernels of a GPU where they can run, torch's operators elsewhere.

`HOPE_KERNELS` in the environment asks for it:

| value | what runs |
|---|---|
| `auto` (default) | on a GPU the first kernel that can, else torch's operators, and the reason is counted |
| `torch` | torch's operators |
| `fla` | the kernels of flash-linear-attention, or a ValueError that says why they cannot |
| `triton` | HOPE's own kernels, likewise |
"""

import os
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from transformers.utils import logging

logger = logging.get_logger(__name__)

VARIABLE = "HOPE_KERNELS"
KERNELS = ("auto", "torch", "fla", "triton")


class Kernel(NamedTuple):
    """One way to compute something: what runs, and what asks why it cannot (`None`: it can)."""

    run: Callable
    obstacle: Callable[[], str | None]


def asked_kernels() -> str:
    """The value of `HOPE_KERNELS`; ValueError where it is unknown."""
    asked = os.environ.get(VARIABLE, "auto")
    if asked not in KERNELS:
        raise ValueError(f"{VARIABLE}={asked} is unknown: set it to {', '.join(KERNELS[:-1])} or {KERNELS[-1]}.")
    return asked


def operand_dtype(hidden_states: torch.Tensor) -> torch.dtype:
    """To what kernels of a GPU round their operands: the dtype that a linear map of `hidden_states` has."""
    # not asked of its weights, which may be quantised, or on no device until they are needed
    kind = hidden_states.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_states.dtype


def choose(
    name: str, asked: str, kernels: dict[str, Kernel], otherwise: Callable, fallbacks: Counter, device: torch.device
) -> Callable:
    """What computes `name`: one of the kernels, or `otherwise`.

    Args:
        asked: the value of `HOPE_KERNELS`.
        kernels: the fastest first.
        fallbacks: counts `(name, reason)` where torch's operators replace kernels on a GPU.

    Raises:
        ValueError: the kernels asked for cannot run.
    """
    if asked == "torch" or asked == "auto" and device.type != "cuda":
        return otherwise
    reasons = []
    for kernel, (run, obstacle) in kernels.items():
        if asked not in ("auto", kernel):
            continue
        reason = obstacle()
        if reason is None:
            return run
        reasons.append(reason)
    if asked != "auto":
        raise ValueError(f"{VARIABLE}={asked} cannot compute the {name}: {reasons[0]}. Set {VARIABLE}=auto or torch.")
    reason = "; ".join(reasons)
    logger.warning_once(f"HOPE computes the {name} without kernels of the GPU: {reason}.")
    fallbacks[name, reason] += 1
    return otherwise
