"""The learning rate of every step, by transformers' `get_scheduler`, and how a run that goes on continues it."""

import inspect
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import transformers
from torch.optim.lr_scheduler import LRScheduler
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from hope_hf.common.process import one_line
from hope_hf.common.run_arguments import OptimizationArguments

from .flag_values import parse_settings

MOST_WARM_UP_STEPS = 1000
# They have no last step.
ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt")
# Parameters of transformers' functions that other flags set.
_SET = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
_SAMPLES = 64


@dataclass(frozen=True)
class Schedule:
    """The learning rate of each step as a fraction of its peak, JSON-able.

    Attributes:
        kind: a value of `--lr_scheduler_type`.
        warmup: steps of the warm-up.
        end: the last step; later ones keep its rate.
        settings: keywords of transformers' function for this kind.
        begin: the step after which the schedule begins: 0, or the end of the schedule before it.
        first: the fraction at `begin`, from which the warm-up rises.
    """

    kind: str
    warmup: int
    end: int
    settings: dict = field(default_factory=dict)
    begin: int = 0
    first: float = 0.0

    def fractions(self, peak: float) -> Callable[[int], float]:
        """The fraction by the number of steps done (those of the run). `peak`: the peak learning rate, to which
        absolute settings such as `min_lr` refer."""
        scheduler = transformers.get_scheduler(
            self.kind,
            torch.optim.SGD([torch.zeros(1)], lr=peak),
            num_warmup_steps=self.warmup,
            num_training_steps=self.end - self.begin,
            scheduler_specific_kwargs=self.settings,
        )
        (factor,) = scheduler.lr_lambdas
        return partial(self._fraction, factor)

    def _fraction(self, factor: Callable[[int], float], step: int) -> float:
        done = step - self.begin
        last = done if self.kind in ENDLESS else self.end - self.begin
        share = factor(min(done, last))
        if done < self.warmup:
            share = self.first + (1 - self.first) * share
        return share

    def check(self, peak: float) -> None:
        """ValueError if the settings do not fit the kind, or give fractions outside of 0 to 1."""
        function = TYPE_TO_SCHEDULER_FUNCTION[self.kind]
        known = [name for name in inspect.signature(function).parameters if name not in _SET]
        try:
            for name in self.settings:
                if name not in known:
                    raise ValueError(f"{name!r} is unknown")
            fraction = self.fractions(peak)
            for part in range(_SAMPLES + 1):
                step = self.begin + (self.end - self.begin) * part // _SAMPLES
                if not -1e-9 <= fraction(step) <= 1 + 1e-9:
                    raise ValueError(f"the rate of step {step} would be {fraction(step):g} times its peak")
        except (ValueError, TypeError, ArithmeticError) as error:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise ValueError(
                f"--lr_scheduler_kwargs {json.dumps(self.settings)} and {self.warmup} of {self.end - self.begin} "
                f"steps as warm-up do not fit --lr_scheduler_type {self.kind} ({one_line(error)}): {takes}."
            ) from None


def schedule_of(options: OptimizationArguments, total_steps: int, begin: int = 0, first: float = 0.0) -> Schedule:
    """The schedule that the flags ask for in a run of `total_steps`; ValueError if it would end before it begins."""
    end = options.lr_scheduler_steps or total_steps
    if end <= begin:
        raise ValueError(f"--lr_scheduler_steps {end}: this run's schedule begins at step {begin}, give more.")
    steps = end - begin
    warmup = options.num_warmup_steps
    if options.lr_scheduler_type == "constant":
        # transformers' has none
        warmup = 0
    elif warmup is None:
        warmup = min(steps // 10, MOST_WARM_UP_STEPS)
    settings = parse_settings(options.lr_scheduler_kwargs)
    # transformers has no defaults for these.
    if options.lr_scheduler_type == "cosine_with_min_lr" and settings.keys().isdisjoint(("min_lr", "min_lr_rate")):
        settings["min_lr_rate"] = 0.1
    if options.lr_scheduler_type == "warmup_stable_decay":
        settings.setdefault("num_decay_steps", max(1, steps // 10))
    return Schedule(options.lr_scheduler_type, warmup, end, settings, begin, first)


def continued(
    options: OptimizationArguments, total_steps: int, peak: float, old: Schedule, step: int, rate: float
) -> Schedule:
    """The schedule of a run that goes on after `step` steps, the next of which would have had the rate `rate`.

    If the schedule `old` has not ended, or the new one has the same rate, the new one applies as from the beginning.
    Otherwise it begins again at `step`, and its warm-up rises from `rate`.
    """
    joined = schedule_of(options, total_steps, old.begin, old.first)
    end = options.lr_scheduler_steps or total_steps
    if joined == old or step < old.end or end <= step:
        return joined
    if math.isclose(joined.fractions(peak)(step) * peak, rate, rel_tol=1e-6):
        return joined
    return schedule_of(options, total_steps, begin=step, first=min(1.0, rate / peak))


def describe_change(old: Schedule, new: Schedule, peak: float, step: int, rate: float, total_steps: int) -> str:
    """The line that says how the rates of a continued run differ from those of a run with these flags from step 0."""
    if new.begin == step:
        rise = f"goes to {peak:g} without a warm-up"
        if new.warmup:
            rise = f"rises to {peak:g} in {new.warmup} steps"
        return (
            f"The schedule had ended at step {step} with a learning rate of {rate:g}: it begins again there, {rise} "
            f"and ends at step {new.end} ({new.kind}). A run of {total_steps} steps from the beginning has other "
            "rates, so its losses are not bit-equal."
        )
    before, now = old.fractions(peak), new.fractions(peak)
    if list(map(before, range(step))) == list(map(now, range(step))):
        return (
            f"The {step} steps so far had the rates of the new schedule ({new.kind}, {new.end} steps): the run goes "
            "on as if it had begun with it."
        )
    return (
        f"The schedule is now {new.kind} of {new.end} steps and was {old.kind} of {old.end}: step {step + 1} has the "
        f"learning rate {now(step) * peak:g} instead of {rate:g}. The steps before keep the old rates, so the run is "
        "not bit-equal to one with these flags from the beginning."
    )


def saved_schedule(values: dict) -> Schedule:
    """The schedule in a checkpoint; ValueError for values that no run writes."""
    schedule = Schedule(**values)
    for count in (schedule.warmup, schedule.end, schedule.begin):
        if type(count) is not int or not 0 <= count < 2**53:
            raise ValueError(f"a schedule {values}")
    is_known = schedule.kind in TYPE_TO_SCHEDULER_FUNCTION and isinstance(schedule.settings, dict)
    if not is_known or not 0 <= schedule.first <= 1 or schedule.begin >= schedule.end:
        raise ValueError(f"a schedule {values}")
    return schedule


def set_scheduler(scheduler: LRScheduler, saved: dict, step: int, same: bool) -> None:
    """Set the scheduler to `step`, with its rates.

    Args:
        saved: the state of the checkpoint's scheduler.
        same: whether rates and schedule are those of the checkpoint; ValueError if `saved` is not the state there.
    """
    state = scheduler.state_dict() | {"last_epoch": step, "_step_count": step + 1}
    rates = []
    for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        rates.append(base * factor(step))
    groups = scheduler.optimizer.param_groups
    if not same:
        scheduler.load_state_dict(state | {"_last_lr": rates})
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        return
    if saved["base_lrs"] != scheduler.base_lrs or saved["last_epoch"] != step:
        raise ValueError(f"base_lrs {saved['base_lrs']} at {saved['last_epoch']}, this run has {scheduler.base_lrs}")
    for group, saved_rate, rate in zip(groups, saved["_last_lr"], rates, strict=True):
        # The last digit may differ between machines.
        if not (math.isclose(saved_rate, rate, rel_tol=1e-6) and math.isclose(group["lr"], rate, rel_tol=1e-6)):
            raise ValueError(f"learning rates {saved['_last_lr']}, this run has {rates}")
    scheduler.load_state_dict(state | {"_last_lr": saved["_last_lr"]})
