"""Memory, time and cost of a run: `hope-hf plan` beforehand, `plan_running` once it has started."""

from .launch import STRATEGIES, UNSHARDED, Launch, StepOptions, Strategy, fsdp_strategy, zero_strategy
from .run import Planned, main, plan_running

__all__ = [
    "STRATEGIES", "UNSHARDED", "Launch", "Planned", "StepOptions", "Strategy", "fsdp_strategy", "main", "plan_running",
    "zero_strategy",
]  # fmt: skip
