"""Memory, time and cost of a run: `python -m hope_hf.plan` beforehand, `plan_running` once it has started."""

from .run import main
from .running import Planned, plan_running
from .step import StepOptions

__all__ = ["Planned", "StepOptions", "main", "plan_running"]
