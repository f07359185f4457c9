"""Memory, time and cost of a run: `hope-hf plan` beforehand, `plan_running` once it has started."""

from hope_hf.lazy import late_names

# By module, what the other rooms take from there.
NAMES = {
    "launch": ("STRATEGIES", "UNSHARDED", "Launch", "StepOptions", "Strategy", "fsdp_strategy", "zero_strategy"),
    "program": ("main",),
    "run": ("Planned", "plan_running"),
}
__getattr__, __dir__ = late_names(__name__, NAMES)
