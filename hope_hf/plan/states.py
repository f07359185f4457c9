"""Bytes of weights, gradients and optimizer, per process.

Rajbhandari et al. 2020 (arXiv 1910.02054) count 16 bytes a parameter of Adam: weights and gradients 4 (or 2) each, two
moments of 4. A strategy divides those that it shares out.
"""

from dataclasses import dataclass

from .shapes import Shapes, Weight
from .strategy import GRADIENTS, OPTIMIZER, WEIGHTS, Strategy

ADAM_MOMENTS = 8
MUON_MOMENTUM = 4


@dataclass(frozen=True)
class Bytes:
    """Bytes per parameter. Here weights, gradients and moments are fp32 under every mixed precision."""

    weights: float = 4
    gradients: float = 4
    optimizer: float = ADAM_MOMENTS

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


def state_bytes(parameters: float, strategy: Strategy, parts: int, each: Bytes = Bytes()) -> float:  # noqa: B008
    """Weights, gradients and optimizer of one process, of a model cut evenly into `parts`."""
    sizes = {WEIGHTS: each.weights, GRADIENTS: each.gradients, OPTIMIZER: each.optimizer}
    return parameters * sum(size / (parts if kind in strategy.shared else 1) for kind, size in sizes.items())


def largest_model(memory: float, strategy: Strategy, parts: int, each: Bytes = Bytes()) -> float:  # noqa: B008
    """Parameters whose weights, gradients and optimizer alone fill `memory` bytes of each of `parts` processes."""
    return memory / state_bytes(1, strategy, parts, each)


def optimizer_bytes(weight: Weight, optimizer: str, periods: dict[int, int], tokens_per_step: int) -> int:
    """Bytes per element of a parameter's optimizer state.

    A level that steps less often than every step has a sum of gradients as well (`hope_hf.optim.level_clock`).

    Args:
        optimizer: "adamw" or "muon".
        periods: of the levels, in tokens.
        tokens_per_step: over all processes and accumulated batches.
    """
    moments = MUON_MOMENTUM if optimizer == "muon" and weight.is_muon else ADAM_MOMENTS
    waits = weight.level is not None and round(periods[weight.level] / tokens_per_step) > 1
    return moments + (4 if waits else 0)


def level_periods(config) -> dict[int, int]:
    """Tokens between two updates of each level; empty for models without levels."""
    return dict(enumerate(getattr(config, "level_periods", None) or ()))


def shard_bytes(shapes: Shapes, parts: int, by_rows: bool, each=lambda weight: 4) -> int:
    """Bytes of the largest part of all parameters; `each`: bytes per element of a parameter."""
    if by_rows:
        return sum(-(-w.shape[0] // parts) * (w.count // w.shape[0]) * each(w) for w in shapes.weights)
    return -(-sum(w.count * each(w) for w in shapes.weights) // parts)
