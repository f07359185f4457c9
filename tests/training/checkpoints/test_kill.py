"""A run killed at a random moment continues from a verified checkpoint, and leaves none of its processes.

`make test-kill` kills 30 times (`HOPE_KILLS=30`). Quick tests hold the parts: test_interrupted.py stops before every
call that changes the disk, ../test_resume.py signals a run, and ../engines/test_guard.py loses a neighbour.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import psutil
import pytest
import warm_python
from engine_runs import NEEDS_DEEPSPEED
from training_runs import LLAMA, ROOT, curve, read_rows

from hope_hf.training.checkpoints.manifest import latest_checkpoint

pytestmark = [pytest.mark.processes, pytest.mark.long]

KILLS = int(os.environ.get("HOPE_KILLS", "3"))
INTERVAL = 3
FLAGS = ["--block_size", "32", "--checkpointing_steps", str(INTERVAL)]
FLAGS += ["--logging_steps", "1", "--learning_rate", "5e-3", "--cpu_threads", "1"]
LONGEST_DEATH = 60.0
LONGEST_START = 300.0
# Launch file, processes, flags.
ENGINES = {
    "single": ("single", 1, []),
    "fsdp2": ("fsdp2", 2, ["--async_save", "true"]),
    "zero3": ("deepspeed_zero3", 2, []),
}
EVERY_ENGINE = ["single", "fsdp2", pytest.param("zero3", marks=NEEDS_DEEPSPEED)]


class Launch:
    """`accelerate launch` of a run in `folder`; `python` is a warm one if none of its processes will be killed."""

    def __init__(self, engine: str, folder: Path, flags: list[str], python: str = sys.executable):
        config, processes, own_flags = ENGINES[engine]
        self.folder = folder
        self.begins_at = chosen_step(folder) if folder.exists() else 0
        self.size = heartbeats_size(folder)
        launcher = [python, "-m", "accelerate.commands.launch", "--num_processes", str(processes)]
        launcher += ["--config_file", str(ROOT / "accelerate_configs" / f"{config}.yaml"), str(ROOT / "run_clm.py")]
        batch = ["--per_device_train_batch_size", str(4 // processes), "--output_dir", str(folder)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        with folder.with_suffix(".txt").open("w") as output:
            self.launcher = subprocess.Popen(
                [*launcher, *LLAMA, *FLAGS, *own_flags, *flags, *batch],
                env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def alive(self) -> dict[int, psutil.Process]:
        """Processes of this run by id, the launcher among them."""
        found = {}
        for process in psutil.process_iter(["cmdline", "status"]):
            ours = str(self.folder) in (process.info["cmdline"] or [])
            if ours and process.info["status"] != psutil.STATUS_ZOMBIE:
                found[process.pid] = process
        return found

    def ranks(self) -> list[int]:
        return sorted(pid for pid in self.alive() if pid != self.launcher.pid)

    def wait_for_steps(self, count: int):
        """Wait until this launch has done this number of steps."""
        deadline = time.monotonic() + LONGEST_START
        while heartbeats_size(self.folder) == self.size or steps_done(self.folder) < self.begins_at + count:
            assert self.launcher.poll() is None and time.monotonic() < deadline, self.text()
            time.sleep(0.005)

    def wait_until_gone(self, seconds: float) -> int:
        """The launcher's status, when none of the run's processes is left."""
        deadline = time.monotonic() + seconds
        while self.launcher.poll() is None or self.alive():
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.005)
        return self.launcher.returncode

    def text(self) -> str:
        return self.folder.with_suffix(".txt").read_text()[-6000:]


def heartbeats(folder: Path) -> list[Path]:
    return list(folder.glob("processes/heartbeat_rank*.jsonl"))


def heartbeats_size(folder: Path) -> int:
    """Grows with every step of any process."""
    return sum(file.stat().st_size for file in heartbeats(folder))


def steps_done(folder: Path) -> int:
    """The last step that any process has finished."""
    last = 0
    for file in heartbeats(folder):
        whole_lines = file.read_text().rpartition("\n")[0].splitlines()
        if whole_lines:
            last = max(last, json.loads(whole_lines[-1])["step"])
    return last


def chosen_step(folder: Path) -> int:
    """The step of the checkpoint to continue from, every byte of it read; a broken one is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen = latest_checkpoint(folder)
    return 0 if chosen is None else chosen.step


@pytest.fixture
def start():
    """Launches as `Launch` does; kills what a failed test leaves running."""
    launches = []

    def launch(*arguments) -> Launch:
        launches.append(Launch(*arguments))
        return launches[-1]

    yield launch
    for launched in launches:
        for process in launched.alive().values():
            process.kill()


def kill(launch: Launch, victims: str, generator: random.Random):
    """After some steps, and a moment later, perhaps while a checkpoint is written."""
    launch.wait_for_steps(generator.randint(1, 20))
    time.sleep(generator.uniform(0, 0.15))
    ranks = launch.ranks()
    chosen = {"a rank": [generator.choice(ranks)], "all ranks": ranks, "the launcher": [launch.launcher.pid]}
    for pid in chosen[victims]:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("engine", EVERY_ENGINE)
def test_every_kind_of_victim_under_every_engine(engine, start, tmp_path, corpus):
    """Kill a run once per victim, and compare it with one that was not killed."""
    # Several seconds: a run that is killed more often is longer.
    steps = 30 * (KILLS + 1)
    flags = [*corpus, "--max_train_steps", str(steps)]
    # Until a background checkpoint is complete, the one before it counts.
    most_lost = 2 * INTERVAL if ENGINES[engine][2] else INTERVAL
    folder = tmp_path / engine
    generator = random.Random(engine)
    for victims in (["a rank", "all ranks", "the launcher"] * KILLS)[:KILLS]:
        launch = start(engine, folder, flags)
        kill(launch, victims, generator)
        launch.wait_until_gone(LONGEST_DEATH)
        done, kept = steps_done(folder), chosen_step(folder)
        print(f"{engine}: killed {victims} after step {done}, goes on from {kept}")
        assert done - kept <= most_lost, launch.text()
        if victims == "a rank" and ENGINES[engine][1] > 1:
            assert "error: another process of this run is gone (" in launch.text(), launch.text()
            assert "[rank" not in launch.text(), launch.text()
    # Under the same engine: over hundreds of steps, rounding separates the curves of two engines.
    for place in (folder, tmp_path / "uninterrupted"):
        launch = start(engine, place, flags, warm_python.executable())
        assert launch.wait_until_gone(4 * LONGEST_START) == 0, launch.text()
    own, whole = (curve(read_rows(place)) for place in (folder, tmp_path / "uninterrupted"))
    assert len(own) == steps and own == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("engine, whom, status", [("single", "group", -signal.SIGTERM), ("fsdp2", "rank", 0)])
def test_sigterm_saves_the_step_just_done(engine, whom, status, start, tmp_path, corpus):
    """The processes end with 0; a launcher that was told to stop has its own status."""
    # A signal to the process group would not reach processes that a server has forked.
    python = sys.executable if whom == "group" else warm_python.executable()
    launch = start(engine, tmp_path / "run", [*corpus, "--max_train_steps", "1000"], python)
    launch.wait_for_steps(4)
    if whom == "group":
        os.killpg(launch.launcher.pid, signal.SIGTERM)
    else:
        os.kill(launch.ranks()[-1], signal.SIGTERM)
    assert launch.wait_until_gone(LONGEST_DEATH) == status
    assert chosen_step(launch.folder) == steps_done(launch.folder)
    assert f"Stopped at step {steps_done(launch.folder)}: run the same command again" in launch.text()
