"""The learning rate in loss.png is that of every step, not a line through a few."""

import json
import math

import pytest

from hope_hf.training.watch.monitor import steps_between_rows
from hope_hf.training.watch.rates import learning_rates

WARM_UP, END, PEAK = 4, 20, 0.5


def cosine(step: int) -> float:
    """The rate of a step, from 1, by hand."""
    done = step - 1
    if done < WARM_UP:
        return PEAK * done / WARM_UP
    return PEAK * 0.5 * (1 + math.cos(math.pi * (done - WARM_UP) / (END - WARM_UP)))


@pytest.fixture
def folder(tmp_path):
    """A run's folder with its last checkpoint, as far as the picture reads it."""
    schedule = {"kind": "cosine", "warmup": WARM_UP, "end": END, "settings": {}, "begin": 0, "first": 0.0}
    for step in (10, 20):
        checkpoint = tmp_path / f"checkpoint-{step}"
        checkpoint.mkdir()
        (checkpoint / "trainer.json").write_text(json.dumps({"schedule": schedule | {"end": step}}))
        (checkpoint / "scheduler.json").write_text(json.dumps({"base_lrs": [PEAK, 0.1]}))
    return tmp_path


def rows(*steps: int, factor: float = 1.0) -> list[dict]:
    return [{"step": s, "tokens": 100 * s, "train/learning_rate": factor * cosine(s)} for s in steps]


def test_the_schedule_itself_is_drawn_between_three_rows(folder):
    found = learning_rates(folder, rows(1, 10, 20))
    assert [tokens for tokens, _ in found] == [100 * step for step in range(1, 21)]
    assert [rate for _, rate in found] == pytest.approx([cosine(step) for step in range(1, 21)])
    assert max(rate for _, rate in found) == PEAK


def test_steps_of_another_schedule_are_those_of_the_rows(folder):
    before, behind = rows(1, 5, factor=0.3), rows(10, 20)
    found = learning_rates(folder, before + behind)
    assert found[:2] == [(100, 0.0), (500, pytest.approx(0.3 * PEAK))]
    assert [tokens for tokens, _ in found[2:]] == [100 * step for step in range(10, 21)]


@pytest.mark.parametrize("content", [None, "{", "[]", json.dumps({"schedule": {"kind": "x"}})])
def test_without_a_schedule_the_rows_are_drawn(folder, content):
    file = folder / "checkpoint-20" / "trainer.json"
    file.unlink() if content is None else file.write_text(content)
    assert learning_rates(folder, rows(1, 10)) == [(100, 0.0), (1000, cosine(10))]


@pytest.mark.parametrize(("total", "every"), [(1, 1), (99, 1), (352, 7), (500, 10), (10**6, 10)])
def test_a_short_run_has_fifty_rows(total, every):
    assert steps_between_rows(total) == every
