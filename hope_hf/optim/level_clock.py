"""One optimizer whose parameter groups step at their own clocks."""

import warnings
from collections.abc import Callable
from itertools import zip_longest

import torch
from torch import Tensor

from .rules import RULES

# Keys that a checkpoint must match: they define what the state's tensors mean.
STRUCTURE = ("level", "optimizer", "period_steps")


class LevelClock(torch.optim.Optimizer):
    """Steps a group once per `period_steps` calls, on the mean gradient since the group's last step.

    From outside it is an ordinary `torch.optim.Optimizer`: schedulers scale `group["lr"]`, and a group uses the rate
    of the call in which it fires. Bias correction and weight decay count a group's own steps. To skip a step as a
    whole, do not call `step()`: the clocks do not advance.

    Args:
        groups: dicts with `params`, `optimizer` (a key of `RULES`), `lr`, `weight_decay` and the rule's own keys;
            `level` (None, or 0 for the fastest level) and `period_steps` (at least 1) default to None and 1,
            `period_tokens` (the period as the model states it) to 0.

    State per parameter, created for all of them by the first `step()`:
        step: float32 scalar, the parameter's own steps so far (torch's name and type); where the rule wants it.
        tick: int64 scalar on the CPU, calls since its last step; only where `period_steps` > 1.
        gradient_sum: sum of the gradients since its last step, at least float32; only where `period_steps` > 1.
        and the rule's own tensors.

    A parameter without a gradient is skipped in a call, and its clock does not advance. (The clock is kept per
    parameter because sharding engines call `step()` once per part of a group.)
    """

    def __init__(self, groups: list[dict]):
        # Level of every tensor that has a state: engines that flatten parameters keep them outside the groups.
        self._levels: dict[Tensor, int | None] = {}
        # The polynomial schedule reads the rate from the defaults.
        super().__init__(groups, {"lr": groups[0]["lr"], "level": None, "period_steps": 1, "period_tokens": 0})
        for group in self.param_groups:
            assert group["optimizer"] in RULES and group["period_steps"] >= 1, group
            group.setdefault("initial_lr", group["lr"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Add one gradient per parameter; groups whose period is full update their parameters.

        Returns what `closure` (which recomputes the loss and the gradients) returns, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.create_states()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict) -> None:
        """Add a gradient to each parameter of a group, and update those whose period ends."""
        period = group["period_steps"]
        parameters = []
        gradients = []
        states = []
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                if parameter.numel():
                    continue
                # If another process holds all of a parameter, it has no gradient here, but its clock still advances.
                gradient = torch.zeros_like(parameter)
            if period > 1:
                gradient = self._mean_gradient(parameter, gradient, period)
            if gradient is not None:
                parameters.append(parameter)
                gradients.append(gradient)
                states.append(self.state[parameter])
        if parameters:
            RULES[group["optimizer"]].update(parameters, gradients, states, group)
        if period > 1:
            for state in states:
                state["gradient_sum"].zero_()
                state["tick"].zero_()

    def _mean_gradient(self, parameter: Tensor, gradient: Tensor, period: int) -> Tensor | None:
        """Add a gradient to the parameter's sum; returns the mean at the end of a period."""
        state = self.state[parameter]
        state["gradient_sum"].add_(gradient)
        state["tick"] += 1
        if int(state["tick"]) < period:
            return None
        # Divided in place and zeroed after the update: a copy would add a third moment to the peak memory.
        return state["gradient_sum"].div_(period).to(parameter.dtype)

    def create_states(self) -> None:
        """Create the initial state of every parameter that has none."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.create_state(parameter, group)

    def create_state(self, parameter: Tensor, group: dict) -> dict[str, Tensor]:
        """The state of one tensor of a group; created if there is none."""
        self._levels[parameter] = group["level"]
        if self.state[parameter]:
            return self.state[parameter]
        device = _step_device(parameter, group)
        state = {"step": torch.zeros((), dtype=torch.float32, device=device)}
        if group["period_steps"] > 1:
            # Read in every call.
            state["tick"] = torch.zeros((), dtype=torch.int64)
            wide = torch.promote_types(parameter.dtype, torch.float32)
            state["gradient_sum"] = torch.zeros_like(parameter, dtype=wide)
        for name in RULES[group["optimizer"]].state_names:
            state[name] = torch.zeros_like(parameter)
        self.state[parameter] = state
        return state

    def load_state_dict(self, state_dict: dict):
        """Continue from `state_dict()`, a partly filled period included.

        Raises:
            ValueError: the state has other levels, rules or periods.
        """
        saved_groups = state_dict["param_groups"]
        require_same_groups(saved_groups, self.param_groups)
        super().load_state_dict(state_dict)
        # torch casts loaded state to the parameter's dtype; in bfloat16 the sums would lose precision.
        for saved_group, group in zip(saved_groups, self.param_groups, strict=True):
            for index, parameter in zip(saved_group["params"], group["params"], strict=True):
                saved = state_dict["state"].get(index, {})
                state = self.state[parameter]
                step_device = _step_device(parameter, group)
                devices = {"step": step_device, "tick": "cpu", "gradient_sum": parameter.device}
                for key, device in devices.items():
                    if key in saved:
                        state[key] = saved[key].to(device, copy=True)

    def level_report(self) -> dict[int, dict[str, int]]:
        """The state of each level's clock: {level: {updates, steps_since_update, period_steps, period_tokens}}."""
        report: dict[int, dict[str, int]] = {}
        levels = dict(self._levels)
        for group in self.param_groups:
            level = group["level"]
            levels |= dict.fromkeys(group["params"], level)
            if level is not None and level not in report:
                report[level] = {
                    "updates": 0,
                    "steps_since_update": 0,
                    "period_steps": group["period_steps"],
                    "period_tokens": group["period_tokens"],
                }
        # The parameters of a level step together; one that never had a gradient is left out.
        for parameter, level in levels.items():
            state = self.state.get(parameter)
            if state and level is not None:
                row = report[level]
                updates = int(state["step"])
                tick = int(state.get("tick", 0))
                row["updates"] = max(row["updates"], updates)
                row["steps_since_update"] = max(row["steps_since_update"], tick)
        return dict(sorted(report.items()))


def _step_device(parameter: Tensor, group: dict) -> torch.device | str:
    return parameter.device if RULES[group["optimizer"]].step_on_device else "cpu"


def recounted(calls: int, before: int, now: int) -> int:
    """The calls since a level's last step where its period of `before` calls becomes one of `now`.

    They are the same share of the period, which ends with the next call at the earliest. The sum of the gradients
    is then that of as many mean gradients: multiply it by the result over `calls`.
    """
    return min(now - 1, round(calls * now / before))


def require_same_groups(saved: list[dict], current: list[dict], keys: tuple[str, ...] = STRUCTURE) -> None:
    """ValueError if the groups of a saved state are not those of this run's optimizer, compared by `keys`."""
    saved_structure = _structure(saved, keys)
    structure = _structure(current, keys)
    for there, here in zip_longest(saved_structure, structure, fillvalue="no group"):
        if there != here:
            raise ValueError(
                f"The optimizer's state belongs to another run ({there} there, {here} here): resume with the batch "
                "size, --optimizer and --level_optimizers that it was written with."
            )


def _structure(groups: list[dict], keys: tuple[str, ...]) -> list[dict]:
    """What each group holds under these keys, and its number of parameters."""
    structure = []
    for group in groups:
        values = {key: group.get(key) for key in keys}
        structure.append(values | {"parameters": len(group["params"])})
    return structure


def warn_short_levels(optimizer: LevelClock, max_train_steps: int) -> None:
    """Warn of every level that makes fewer than 4 steps in `max_train_steps` optimizer steps.

    Levels that step every time are left out. With several processes call it on one of them.
    """
    for level, row in optimizer.level_report().items():
        periods = max_train_steps // row["period_steps"]
        # No period is shorter than a step.
        if periods < 4 and row["period_steps"] > 1:
            times = ("never", "once", "twice", "3 times")[periods]
            warnings.warn(
                f"Level {level} steps once per {row['period_steps']} optimizer steps ({row['period_tokens']} tokens), "
                f"so {times} in this run of {max_train_steps}: shorten its period in the config's level_periods or "
                "train longer.",
                stacklevel=2,
            )
