"""The learning rate of every step for the picture: the rows of metrics.jsonl have that of logged steps alone."""

import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from hope_hf.common.files import CHECKPOINT, read_small

from ..schedule import saved_schedule
from .tracking import curve

KEY = "train/learning_rate"
# Points from one row to the next.
MOST_BETWEEN = 20


@dataclass(frozen=True)
class _Logged:
    step: int
    tokens: int
    rate: float


def learning_rates(folder: str | Path, rows: list[dict]) -> list[tuple[float, float]]:
    """Tokens and learning rate of the steps, by the schedule of the newest checkpoint.

    Steps before it applied (its run was continued with other flags) are those of the rows.
    """
    rate_of = _rate_by_step(Path(folder))
    if rate_of is None:
        return curve(rows, KEY)
    logged = []
    for row in rows:
        if type(row.get(KEY)) is float:
            logged.append(_Logged(row["step"], row["tokens"], row[KEY]))
    first = _first_agreeing(logged, rate_of)
    points = [(one.tokens, one.rate) for one in logged[:first]]
    for one, following in pairwise(logged[first:]):
        points += _between(one, following, rate_of)
    if first < len(logged):
        points.append((logged[-1].tokens, logged[-1].rate))
    return points


def _first_agreeing(logged: list[_Logged], rate_of: Callable[[int], float]) -> int:
    """The index from which on all rows have the schedule's rates."""
    first = len(logged)
    for index in reversed(range(len(logged))):
        one = logged[index]
        if not math.isclose(one.rate, rate_of(one.step), rel_tol=1e-6, abs_tol=1e-12):
            break
        first = index
    return first


def _between(one: _Logged, following: _Logged, rate_of: Callable[[int], float]) -> list[tuple[float, float]]:
    """Points from a row up to the next one, whose tokens are read evenly."""
    steps = following.step - one.step
    tokens_per_step = (following.tokens - one.tokens) / max(1, steps)
    stride = max(1, steps // MOST_BETWEEN)
    points = []
    for done in range(0, steps, stride):
        tokens = one.tokens + done * tokens_per_step
        points.append((tokens, rate_of(one.step + done)))
    return points


def _rate_by_step(folder: Path) -> Callable[[int], float] | None:
    """The learning rate by the number of a step, from 1; None without a checkpoint that says it."""
    newest = max(folder.glob("checkpoint-*"), key=_step_of, default=folder)
    # Without its files the picture has the rows alone.
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        trainer = json.loads(read_small(newest / "trainer.json"))
        scheduler = json.loads(read_small(newest / "scheduler.json"))
        peak = float(scheduler["base_lrs"][0])
        fraction = saved_schedule(trainer["schedule"]).fractions(peak)
        return lambda step: peak * fraction(step - 1)
    return None


def _step_of(checkpoint: Path) -> int:
    found = CHECKPOINT.fullmatch(checkpoint.name)
    return int(found[1]) if found else -1
