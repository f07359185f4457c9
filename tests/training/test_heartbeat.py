"""Each process leaves a line per step, and its stacks where no line follows."""

import json
import time

from hope_hf.training.heartbeat import Heartbeat


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
