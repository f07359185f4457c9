"""Each process writes a line per step, its stacks if no line follows, and rows about the use of its memory."""

import json
import time
from pathlib import Path

import pytest
import torch
from training_runs import change_losses

from hope_hf.training.watch import monitor
from hope_hf.training.watch.process_files import Heartbeat
from hope_hf.training.watch.telemetry import utilization_meter


def json_rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_line_per_step_is_on_the_disk_at_once(tmp_path):
    file = tmp_path / "heartbeat_rank3.jsonl"
    heart = Heartbeat(str(tmp_path), 3, watchdog_seconds=0)
    for step in (1, 2):
        heart.beat(step, loss=0.5 * step)
        last = json_rows(file)[-1]
        assert last.pop("time") <= time.time() + 0.001
        assert last == {"step": step, "loss": 0.5 * step}
    heart.close()
    again = Heartbeat(str(tmp_path), 3, watchdog_seconds=0)
    again.beat(3)
    again.close()
    assert [row["step"] for row in json_rows(file)] == [1, 2, 3]
    assert list(tmp_path.iterdir()) == [file]


def hang(seconds: float):
    time.sleep(seconds)


GPU = torch.device("cuda", 3)


def test_a_gpu_that_tells_how_busy_it_is_is_read(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: asked.append(device) or 10 * len(asked))
    read = utilization_meter(GPU)
    assert (read(), read()) == (20, 30) and asked == [GPU] * 3
    assert utilization_meter(torch.device("cpu")) is None and len(asked) == 3


@pytest.mark.parametrize(("seconds", "hangs"), [(0.1, False), (1.2, True)])
def test_a_process_that_hangs_says_where(tmp_path, seconds, hangs):
    heart = Heartbeat(str(tmp_path), 0, watchdog_seconds=0.8)
    for step in range(3):
        hang(seconds)
        heart.beat(step)
    heart.close()
    stacks = tmp_path / "stacks_rank0.txt"
    assert stacks.exists() is hangs and (not hangs or "in hang" in stacks.read_text())


def test_a_run_that_runs_out_of_memory_in_a_step_says_what_filled_it(run, tmp_path, monkeypatch, capsys):
    def full(count, loss):
        if count == 4:
            raise torch.OutOfMemoryError("full")
        return loss

    # In the second batch of a step, with the gradients of the first.
    change_losses(monkeypatch, full)
    monkeypatch.setattr(monitor, "utilization_meter", lambda device: lambda: 37)
    status, _ = run("a", "--ram_report_steps", 2, "--gradient_accumulation_steps", 2)
    assert status == 2 and "processes/ram_rank0.jsonl" in capsys.readouterr().err
    processes = tmp_path / "a" / "processes"
    (beat,) = json_rows(processes / "heartbeat_rank0.jsonl")
    assert beat["gpu_percent"] == 37
    rows = json_rows(processes / "ram_rank0.jsonl")
    assert all(row["peak_gib"] > 0 and row["free_gib"] > 0 for row in rows)
    events = [("start", 0), ("last batch", 1), ("step", 1), ("last batch", 2), ("out of memory", None)]
    assert [(row["event"], row["step"]) for row in rows] == events
    weights = rows[0]["parameters_gib"]
    assert [row["gradients_gib"] for row in rows] == [0, *[weights] * 4]
    moments = rows[2]["optimizer_gib"]
    assert [row["optimizer_gib"] for row in rows] == [0, 0, moments, moments, moments] and moments > 0
