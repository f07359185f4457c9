"""Each process writes a line per step, its stacks if no line follows, and rows about the use of its memory."""

import json
import time

import pytest
import torch
from torch import nn
from training_runs import change_losses

from hope_hf.training.engines.base import Engine
from hope_hf.training.engines.placement import GIB
from hope_hf.training.watch import monitor
from hope_hf.training.watch.process_files import Heartbeat, RamReport
from hope_hf.training.watch.telemetry import utilization_meter


def test_a_line_per_step_is_on_the_disk_at_once(tmp_path):
    heart = Heartbeat(str(tmp_path), 3, watchdog_seconds=0)
    file = tmp_path / "heartbeat_rank3.jsonl"
    for step in (1, 2):
        heart.beat(step, loss=0.5 * step)
        (*_, last) = map(json.loads, file.read_text().splitlines())
        assert last.pop("time") <= time.time() + 0.001
        assert last == {"step": step, "loss": 0.5 * step}
    heart.close()
    again = Heartbeat(str(tmp_path), 3, watchdog_seconds=0)
    again.beat(3)
    again.close()
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def hang(seconds: float):
    time.sleep(seconds)


GPU = torch.device("cuda", 3)


def test_a_gpu_that_tells_how_busy_it_is_is_read(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: asked.append(device) or 10 * len(asked))
    read = utilization_meter(GPU)
    assert (read(), read()) == (20, 30) and asked == [GPU] * 3
    assert utilization_meter(torch.device("cpu")) is None and len(asked) == 3


def report(folder, every: int, model, optimizer) -> RamReport:
    return RamReport(str(folder), 0, torch.device("cpu"), every, Engine().adopt(model, optimizer))


def trained(steps: int, every: int, folder) -> list[dict]:
    model = nn.Linear(64, 32, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    with report(folder, every, model, optimizer) as memory:
        for step in range(1, steps + 1):
            model(torch.ones(1, 64)).sum().backward()
            memory.backward_ends(step)
            optimizer.step()
            optimizer.zero_grad()
            memory.step_ends(step)
    return [json.loads(line) for line in (folder / "ram_rank0.jsonl").read_text().splitlines()]


def test_rows_at_the_start_after_the_first_step_and_every_so_often(tmp_path):
    rows = trained(6, 3, tmp_path)
    assert [(row["event"], row["step"]) for row in rows] == [("start", 0), ("step", 1), ("step", 3), ("step", 6)]
    weight = 64 * 32 * 4 / GIB
    assert [row["parameters_gib"] for row in rows] == [weight] * 4
    assert [row["gradients_gib"] for row in rows] == [0, weight, weight, weight]
    # Two moments and a count.
    assert [row["optimizer_gib"] for row in rows[:2]] == [0, 2 * weight + 4 / GIB]
    assert all(row["peak_gib"] > 0 and row["free_gib"] > 0 for row in rows)
    assert len(trained(4, 0, tmp_path)) == len(rows) + 2


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), MemoryError(), None], ids=["gpu", "python", "cpu"])
def test_running_out_of_memory_leaves_a_row_and_is_not_swallowed(tmp_path, error):
    model = nn.Linear(2, 2)
    memory = report(tmp_path, 0, model, torch.optim.SGD(model.parameters()))
    with pytest.raises((RuntimeError, MemoryError)), memory:
        if error is not None:
            raise error
        # More than an address space has.
        torch.empty(2**58)
    with pytest.raises(RuntimeError), report(tmp_path, 0, model, torch.optim.SGD(model.parameters())):
        raise RuntimeError("something else")
    rows = [json.loads(line) for line in (tmp_path / "ram_rank0.jsonl").read_text().splitlines()]
    assert [(row["event"], row["step"]) for row in rows] == [("start", 0), ("out of memory", None), ("start", 0)]


@pytest.mark.parametrize(("seconds", "hangs"), [(0.1, False), (1.2, True)])
def test_a_process_that_hangs_says_where(tmp_path, seconds, hangs):
    heart = Heartbeat(str(tmp_path), 0, watchdog_seconds=0.8)
    for step in range(3):
        hang(seconds)
        heart.beat(step)
    heart.close()
    stacks = tmp_path / "stacks_rank0.txt"
    assert stacks.exists() is hangs and (not hangs or "in hang" in stacks.read_text())


def test_a_gpu_that_does_not_tell_is_asked_once(monkeypatch):
    def fail(device):
        raise ModuleNotFoundError("nvidia-ml-py")

    monkeypatch.setattr(torch.cuda, "utilization", fail)
    assert utilization_meter(GPU) is None


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
    (beat,) = [json.loads(line) for line in (processes / "heartbeat_rank0.jsonl").open()]
    assert beat["gpu_percent"] == 37
    rows = [json.loads(line) for line in (processes / "ram_rank0.jsonl").open()]
    events = [("start", 0), ("last batch", 1), ("step", 1), ("last batch", 2), ("out of memory", None)]
    assert [(row["event"], row["step"]) for row in rows] == events
    weights = rows[0]["parameters_gib"]
    assert [row["gradients_gib"] for row in rows] == [0, *[weights] * 4]
    moments = rows[2]["optimizer_gib"]
    assert [row["optimizer_gib"] for row in rows] == [0, 0, moments, moments, moments] and moments > 0
