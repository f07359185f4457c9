"""The state of the loop besides weights and optimizer: written to checkpoints, and read from them."""

import math
from dataclasses import asdict, dataclass, field, fields

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from hope_hf import HopeCache, HopeConfig

from .checkpoints.reader import SavedRun
from .checkpoints.state_files import not_of_a_run, restore_rng, rng_state
from .engines.base import Update
from .engines.loss_scaling import LossScaling
from .schedule import Schedule, set_scheduler


class CarriedMemory:
    """Passes the model's cache from batch to batch, detached from the graph; does nothing without a config."""

    def __init__(self, config: HopeConfig | None):
        self._config = config
        self._cache = None
        self.restart()

    def inputs(self) -> dict:
        """Arguments of the next forward pass."""
        return {"use_cache": False} if self._cache is None else {"cache": self._cache}

    def hand_over(self):
        """Keep the memories of the forward pass for the next one, detached; called after the backward pass."""
        if self._cache is not None:
            self._cache.detach_()

    def restart(self):
        """Reset the memories: after a non-finite step they may be non-finite, too."""
        if self._config is not None:
            # a run has no end, and nothing is recalled from it
            self._cache = HopeCache(self._config, archive=False)

    def state_tensors(self) -> dict[str, Tensor]:
        """The memories by name, on the CPU, for a checkpoint; empty if none are carried."""
        tensors = {} if self._cache is None else self._cache.state_tensors()
        return {name: tensor.cpu() for name, tensor in tensors.items()}

    def load(self, tensors: dict[str, Tensor], device: torch.device):
        """Continue with the memories of a checkpoint."""
        if self._config is not None and tensors:
            tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
            self._cache = HopeCache.from_state_tensors(self._config, tensors)
            self._cache.archive.stop()


@dataclass
class Counters:
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
    empty: int = 0
    """Steps left out because no process had a token to learn."""
    loss_sum: float = 0.0
    """Summed loss since the last log, in nats."""
    loss_tokens: int = 0
    """Valid tokens since the last log."""

    def count(self, update: Update, tokens: int, loss: float, valid_tokens: int) -> None:
        """Add one step, whose summed `loss` over `valid_tokens` counts unless the step was skipped."""
        self.step += 1
        self.tokens += tokens
        if update.outcome == "empty":
            self.empty += 1
            return
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
        """Nats per token since the last call; None if no step counted."""
        mean = self.loss_sum / self.loss_tokens if self.loss_tokens else None
        self.loss_sum, self.loss_tokens = 0.0, 0
        return mean


@dataclass
class LoopState:
    """Everything a checkpoint holds besides weights, tokenizer and the optimizer's state.

    Attributes:
        identity: the flags and data that define the run.
        schedule: that of the learning rate.
        scheduler: what sets the rates of the optimizer's groups by it.
        carry: the memories carried from one step to the next.
        scaling: the scaling of the loss in fp16, or None.
        counters: of steps, tokens and losses.
        data: the loader's own state after the last batch trained on.
    """

    identity: dict
    schedule: Schedule
    scheduler: LRScheduler
    carry: CarriedMemory
    scaling: LossScaling | None
    counters: Counters = field(default_factory=Counters)
    data: dict | None = None

    def state_dict(self) -> dict[str, dict]:
        """The state by file: "scheduler" and "trainer" are the same on all processes, "rank" is this process's own."""
        return {
            "scheduler": self.scheduler.state_dict(),
            "trainer": {
                "progress": asdict(self.counters),
                "identity": self.identity,
                "schedule": asdict(self.schedule),
                "loss_scaling": None if self.scaling is None else self.scaling.state(),
            },
            "rank": {"rng": rng_state(), "data": self.data, "carried": self.carry.state_tensors()},
        }

    def load(self, saved: SavedRun, device: torch.device, same_rates: bool = True) -> None:
        """Continue from `state_dict()`; without random generators if another number of processes wrote it.

        `same_rates`: whether rates and schedule are still those of the checkpoint.

        Raises ValueError that names the file for values that no run writes.
        """
        trainer, rank = saved.state["trainer"], saved.state["rank"]
        file = "trainer.json"
        try:
            self.counters = _read_counters(trainer["progress"], saved.step)
            if self.scaling is not None:
                self.scaling.load(trainer["loss_scaling"])
            file = "scheduler.json"
            set_scheduler(self.scheduler, saved.state["scheduler"], saved.step, same_rates)
            file = f"rank_{saved.rank}.json"
            self.data = rank["data"]
            for tensor in rank["carried"].values():
                if not tensor.isfinite().all():
                    raise ValueError("memories that are not finite")
            self.carry.load(rank["carried"], device)
            if rank["rng"] is not None:
                restore_rng(rank["rng"])
        # RuntimeError: torch's generator has another size.
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
            raise not_of_a_run(saved.path / file, error) from None


def _read_counters(values: dict, step: int) -> Counters:
    counters = Counters(**values)
    for counter in fields(Counters):
        value = getattr(counters, counter.name)
        if type(value) not in (int, counter.type) or not math.isfinite(value) or value < 0:
            raise ValueError(f"{counter.name} is {value!r}")
    if counters.step != step:
        raise ValueError(f"step is {counters.step} and not {step}")
    return counters
