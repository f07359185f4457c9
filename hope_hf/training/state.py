"""The state of a run besides weights and optimizer: written to checkpoints, and read from them."""

from dataclasses import asdict, dataclass

import torch
from torch.optim.lr_scheduler import LRScheduler

from .carry import CarriedMemory
from .checkpoints.state_files import restore_rng, rng_state
from .engines.base import Update
from .engines.loss_scaling import LossScaling


@dataclass
class Progress:
    """The counters of the loop, JSON-able."""

    step: int = 0
    """Optimizer steps done, skipped ones included."""
    tokens: int = 0
    """Tokens read by the model, over all processes."""
    skipped: int = 0
    """Steps skipped for a non-finite loss or gradient."""
    skipped_in_a_row: int = 0
    overflowed: int = 0
    """Steps left out because the gradient, scaled for fp16, overflowed: harmless, and not counted as skipped."""
    loss_sum: float = 0.0
    """Summed loss since the last log, in nats."""
    loss_tokens: int = 0
    """Valid tokens since the last log."""

    def count(self, update: Update, tokens: int, loss: float, valid_tokens: int) -> None:
        """Add one step, whose summed `loss` over `valid_tokens` counts unless the step was skipped."""
        self.step += 1
        self.tokens += tokens
        if update.outcome == "skipped":
            self.skipped += 1
            self.skipped_in_a_row += 1
            return
        self.loss_sum += loss
        self.loss_tokens += valid_tokens
        if update.outcome == "stepped":
            self.skipped_in_a_row = 0
        else:
            self.overflowed += 1

    def take_mean_loss(self) -> float | None:
        """Nats per token since the last call; None where no step counted."""
        mean = self.loss_sum / self.loss_tokens if self.loss_tokens else None
        self.loss_sum, self.loss_tokens = 0.0, 0
        return mean


class TrainState:
    """Everything a checkpoint holds besides weights, tokenizer and the optimizer's state.

    Attributes:
        identity: the flags and data that define the run.
        progress: the loop's counters.
        scheduler: of the learning rate.
        carry: the memories carried from one step to the next.
        scaling: of the loss in fp16, or None.
        data: the loader's own state after the last batch trained on.
    """

    def __init__(self, identity: dict, scheduler: LRScheduler, carry: CarriedMemory, scaling: LossScaling | None):
        self.identity = identity
        self.progress = Progress()
        self.scheduler, self.carry, self.scaling = scheduler, carry, scaling
        self.data: dict | None = None

    def state_dict(self) -> dict[str, dict]:
        """By file: "scheduler" and "trainer", the same on all processes, and "rank", this process's own."""
        return {
            "scheduler": self.scheduler.state_dict(),
            "trainer": {
                "progress": asdict(self.progress),
                "identity": self.identity,
                "loss_scaling": None if self.scaling is None else self.scaling.state(),
            },
            "rank": {"rng": rng_state(), "data": self.data, "carried": self.carry.state_tensors()},
        }

    def load_state_dict(self, saved: dict[str, dict], device: torch.device) -> None:
        """Continue from `state_dict()`; without random generators where another number of processes wrote it."""
        self.scheduler.load_state_dict(saved["scheduler"])
        self.progress = Progress(**saved["trainer"]["progress"])
        if self.scaling is not None:
            self.scaling.load(saved["trainer"]["loss_scaling"])
        self.data = saved["rank"]["data"]
        self.carry.load(saved["rank"]["carried"], device)
        if saved["rank"]["rng"] is not None:
            restore_rng(saved["rank"]["rng"])
