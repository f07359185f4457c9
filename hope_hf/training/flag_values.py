"""Values of flags of `hope-hf train` that are more than a number or a name."""

import json
import math
import re

from hope_hf.common.process import one_line

# The most steps of `--profile_steps`.
MOST_STEPS = 100


def parse_stop_after(named: str) -> tuple[float, float]:
    """The steps and the seconds of `--stop_after`, one of them infinite; ValueError for anything else."""
    match = re.fullmatch(r"(?P<steps>\d{1,9})|(?P<time>\d{1,9}(\.\d{1,9})?)(?P<unit>[smh])", named.strip(), re.ASCII)
    steps = seconds = math.inf
    if match and match["steps"]:
        steps = int(match["steps"])
    elif match:
        seconds = float(match["time"]) * {"s": 1, "m": 60, "h": 3600}[match["unit"]]
    if not match or 0 in (steps, seconds):
        raise ValueError(f"--stop_after is {named!r}: give steps or a time, such as 500, 30s, 90m or 11.5h.")
    return steps, seconds


def parse_settings(text: str | None) -> dict:
    """`--lr_scheduler_kwargs` as keywords; ValueError if it is no JSON object of numbers and words."""
    try:
        settings = json.loads(text or "{}")
        if not isinstance(settings, dict) or any(isinstance(value, dict | list) for value in settings.values()):
            raise ValueError("it is no object of numbers and words")
    # RecursionError: thousands of nested brackets.
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f'--lr_scheduler_kwargs cannot be read ({one_line(error)}): give a JSON object, {{"min_lr_rate": 0.1}}.'
        ) from None
    return settings


def parse_profiled(value: str) -> range:
    """The steps that `--profile_steps` names, as `10-12` or `10`; ValueError for any other value."""
    first, dash, last = value.partition("-")
    ends = [first, last] if dash else [first, first]
    if all(end.isascii() and end.isdigit() and len(end) < 10 for end in ends):
        steps = range(int(ends[0]), int(ends[1]) + 1)
        if steps and steps[0] > 0 and len(steps) <= MOST_STEPS:
            return steps
    raise ValueError(
        f"--profile_steps is {value[:40]!r}: give a step or a range of at most {MOST_STEPS} of them, counted from 1, "
        "such as 10-12."
    )
