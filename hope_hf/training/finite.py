"""Whether a model's weights are finite numbers, over all processes."""

import torch

from .engines.base import Engine
from .process import sum_over_processes


@torch.no_grad()
def weights_are_finite(engine: Engine) -> bool:
    """The same on all processes, which all call it. Buffers do not count: some hold infinities on purpose."""
    slices = (part for part in engine.weight_slices() if not engine.trained.keys().isdisjoint(part.names))
    broken = any(not part.tensors["weight"].isfinite().all() for part in slices)
    return not any(sum_over_processes(engine.accelerator, broken))


def require_finite_weights(engine: Engine, source: object) -> None:
    """ValueError, on all processes, where weights that came from `source` are not finite."""
    if not weights_are_finite(engine):
        raise ValueError(
            f"{source} holds weights that are not finite, its run has diverged: begin from an earlier checkpoint "
            "(--model_name_or_path), with a lower --learning_rate and a new --output_dir."
        )
