"""Two machines run docs/cluster/node.sh; one is lost, comes back, and the run ends as one without a break."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from training_runs import LLAMA, ROOT, curve, free_port, read_rows

pytestmark = [pytest.mark.processes, pytest.mark.long]

STEPS = ["--max_train_steps", "30", "--checkpointing_steps", "3", "--eval_steps", "0"]
SMALL = ["--block_size", "32", "--logging_steps", "1", "--learning_rate", "5e-3", "--cpu_threads", "1"]
LONGEST = 300.0


class Machine:
    """node.sh with its launcher and its process."""

    def __init__(self, number: int, port: int, folder: Path, flags: list[str]):
        place = {
            "NODES": 2, "GPUS": 1, "NODE": number, "HEAD": "127.0.0.1", "PORT": port, "RUN": folder, "PRECISION": "no",
            "MEET_SECONDS": 200, "PAUSE_SECONDS": 1, "PYTHONPATH": ROOT, "ACCELERATE_USE_CPU": "true",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }  # fmt: skip
        environment = os.environ | {name: str(value) for name, value in place.items()}
        self.output = folder.with_name(f"{folder.name}_{number}.txt")
        self.process = subprocess.Popen(
            ["bash", str(ROOT / "docs/cluster/node.sh"), *flags],
            cwd=ROOT, env=environment, stdout=self.output.open("a"), stderr=subprocess.STDOUT,
        )  # fmt: skip

    def is_lost(self):
        """Power off: nothing of it ends in order."""
        processes = [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]
        # The shell first, which would start again.
        for process in reversed(processes):
            process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def machine():
    """Starts machines; none of them outlives the test."""
    started = []

    def start(*arguments) -> Machine:
        started.append(Machine(*arguments))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.is_lost()


def last_step(folder: Path) -> int:
    file = folder / "processes" / "heartbeat_rank0.jsonl"
    lines = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


@pytest.mark.parametrize("number", [0, 1])
def test_a_run_outlives_a_lost_machine(number, machine, run, tmp_path, corpus):
    port = free_port()
    folder, flags = tmp_path / "two", [*LLAMA, *corpus, *SMALL, *STEPS, "--per_device_train_batch_size", "2"]
    machines = [machine(place, port, folder, flags) for place in (0, 1)]
    deadline = time.monotonic() + LONGEST
    while last_step(folder) < 7:
        assert time.monotonic() < deadline, machines[0].output.read_text()[-3000:]
        time.sleep(0.005)
    machines[number].is_lost()
    assert last_step(folder) < 30
    machines[number] = machine(number, port, folder, flags)
    assert [one.process.wait(timeout=LONGEST) for one in machines] == [0, 0]
    said = "".join(one.output.read_text() for one in machines)
    assert f"node {1 - number}: the launcher ended with status 1, and the run is not complete: starting again" in said
    assert "Continuing from" in said
    status, expected = run("one", *SMALL, *STEPS)
    assert status == 0 and len(curve(expected)) == 30
    assert curve(read_rows(folder)) == pytest.approx(curve(expected), rel=1e-5)
