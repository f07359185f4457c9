"""Each process writes a line per step, and its stacks if no line follows."""

import json
import time

import pytest
import torch
from training_runs import LLAMA

from hope_hf.training.watch import monitor
from hope_hf.training.watch.heartbeat import Heartbeat
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


def test_a_process_that_hangs_says_where(tmp_path):
    heart = Heartbeat(str(tmp_path), 0, watchdog_seconds=0.2)
    hang(0.5)
    heart.close()
    assert "in hang" in (tmp_path / "stacks_rank0.txt").read_text()


def test_beats_keep_the_watchdog_quiet(tmp_path):
    heart = Heartbeat(str(tmp_path), 0, watchdog_seconds=1.0)
    for step in range(8):
        hang(0.2)
        heart.beat(step)
    heart.close()
    assert not (tmp_path / "stacks_rank0.txt").exists()


GPU = torch.device("cuda", 3)


def test_a_gpu_that_tells_how_busy_it_is_is_read(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: asked.append(device) or 10 * len(asked))
    read = utilization_meter(GPU)
    assert (read(), read()) == (20, 30) and asked == [GPU] * 3
    assert utilization_meter(torch.device("cpu")) is None and len(asked) == 3


@pytest.mark.parametrize("error", [ModuleNotFoundError("nvidia-ml-py"), RuntimeError("driver"), Exception("part")])
def test_a_gpu_that_does_not_is_asked_once(monkeypatch, error):
    def fail(device):
        raise error

    monkeypatch.setattr(torch.cuda, "utilization", fail)
    assert utilization_meter(GPU) is None


@pytest.mark.parametrize("percent", [37, None])
def test_utilization_is_in_the_heartbeat_where_there_is_one(run, tmp_path, monkeypatch, percent):
    monkeypatch.setattr(monitor, "utilization_meter", lambda device: (lambda: percent) if percent else None)
    status, _ = run("a", "--max_train_steps", 2, model=LLAMA)
    beats = [json.loads(line) for line in (tmp_path / "a" / "heartbeat_rank0.jsonl").open()]
    assert status == 0
    assert [beat.get("gpu_percent", "absent") for beat in beats] == [percent or "absent"] * 2
