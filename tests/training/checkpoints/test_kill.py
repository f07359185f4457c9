"""A run killed at a random moment continues from a verified checkpoint, and leaves none of its processes.

The long test kills every kind of process under every engine; `make test-kill` does so 30 times (`HOPE_KILLS=30`).
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import warm_python
from engine_runs import NEEDS_DEEPSPEED
from training_runs import LLAMA, ROOT, curve, read_rows

from hope_hf.training.checkpoints.manifest import latest_checkpoint

pytestmark = pytest.mark.processes

KILLS = int(os.environ.get("HOPE_KILLS", "3"))
INTERVAL = 3
FLAGS = ["--block_size", "32", "--checkpointing_steps", str(INTERVAL)]
FLAGS += ["--logging_steps", "1", "--learning_rate", "5e-3", "--cpu_threads", "1"]
LONGEST_DEATH = 60.0
# DeepSpeed compiles an operation in the first run on a machine.
LONGEST_START = 300.0


@dataclass(frozen=True)
class Kill:
    victims: str
    """"a rank", "all ranks" or "the launcher"."""
    steps: int
    """After this number of steps of the process,"""
    seconds: float
    """and this much later, perhaps while a checkpoint is written."""


def seeded_kills(seed: int, victims: list[str]) -> list[Kill]:
    generator = random.Random(seed)
    return [Kill(victim, generator.randint(1, 20), generator.uniform(0, 0.15)) for victim in victims]


class Launch:
    """`accelerate launch` of a run in `folder`, by one of accelerate_configs/.

    `python` is `warm_python.executable()` if none of its processes will be killed.
    """

    def __init__(self, config: str, processes: int, folder: Path, flags: list[str], python: str = sys.executable):
        self.folder = folder
        self.begins_at = chosen_step(folder) if folder.exists() else 0
        self.beats = beats(folder)
        batch = ["--per_device_train_batch_size", str(4 // processes)]
        launcher = [python, "-m", "accelerate.commands.launch"]
        launcher += ["--config_file", str(ROOT / "accelerate_configs" / config), "--num_processes", str(processes)]
        command = [*launcher, str(ROOT / "run_clm.py"), *LLAMA, *flags, *FLAGS, *batch, "--output_dir", str(folder)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        self.output = folder.with_suffix(".txt").open("w")
        self.launcher = subprocess.Popen(
            command, env=environment, stdout=self.output, stderr=subprocess.STDOUT, start_new_session=True
        )

    def alive(self) -> dict[int, psutil.Process]:
        """Processes of this run by id, the launcher among them."""
        found = {}
        for process in psutil.process_iter(["cmdline", "status"]):
            ours = str(self.folder) in (process.info["cmdline"] or [])
            if ours and process.info["status"] != psutil.STATUS_ZOMBIE:
                found[process.pid] = process
        return found

    def wait_for_steps(self, count: int):
        """Wait until this launch has done this number of steps."""
        self.wait_until(
            lambda: beats(self.folder) > self.beats and steps_done(self.folder) >= self.begins_at + count,
            LONGEST_START,
            "the run did not get to its step",
        )

    def kill(self, victims: str, generator: random.Random):
        ranks = sorted(pid for pid in self.alive() if pid != self.launcher.pid)
        chosen = {"a rank": [generator.choice(ranks)], "all ranks": ranks, "the launcher": [self.launcher.pid]}
        for pid in chosen[victims]:
            os.kill(pid, signal.SIGKILL)

    def wait_until(self, condition, seconds: float, what: str):
        deadline = time.monotonic() + seconds
        while not condition():
            assert condition == self.gone or self.launcher.poll() is None, f"it ended by itself; output: {self.text()}"
            assert time.monotonic() < deadline, f"{what}; output: {self.text()}"
            time.sleep(0.005)

    def gone(self) -> bool:
        self.launcher.poll()
        return not self.alive()

    def text(self) -> str:
        return self.folder.with_suffix(".txt").read_text()[-6000:]


def beats(folder: Path) -> int:
    """Grows with every step of any process."""
    return sum(file.stat().st_size for file in folder.glob("processes/heartbeat_rank*.jsonl"))


def steps_done(folder: Path) -> int:
    """The last step that any process has finished."""
    last = 0
    for file in folder.glob("processes/heartbeat_rank*.jsonl"):
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


# Launch file, processes, flags.
ENGINES = {
    "single": ("single.yaml", 1, []),
    "fsdp2": ("fsdp2.yaml", 2, ["--async_save", "true"]),
    "zero3": ("deepspeed_zero3.yaml", 2, []),
}


@pytest.fixture
def start():
    """Launches as `Launch` does; kills what a failed test leaves running."""
    launches = []

    def launch(*arguments) -> Launch:
        launches.append(Launch(*arguments))
        return launches[-1]

    yield launch
    for launched in launches:
        launched.output.close()
        for process in launched.alive().values():
            process.kill()


def survives(engine: str, victims: list[str], start, tmp_path: Path, corpus: list[str]):
    """Kill a run once per victim, and compare it with one that was not killed."""
    # Several seconds: a run that is killed more often is longer.
    steps = 30 * (len(victims) + 1)
    corpus = [*corpus, "--max_train_steps", str(steps)]
    config, processes, flags = ENGINES[engine]
    # Until a background checkpoint is complete, the one before it counts.
    most_lost = 2 * INTERVAL if flags else INTERVAL
    folder = tmp_path / engine
    generator = random.Random(engine)
    for number, kill in enumerate(seeded_kills(len(engine), victims), 1):
        launch = start(config, processes, folder, corpus + flags)
        launch.wait_for_steps(kill.steps)
        time.sleep(kill.seconds)
        launch.kill(kill.victims, generator)
        killed = time.monotonic()
        launch.wait_until(launch.gone, LONGEST_DEATH, f"orphans after {kill}")
        seconds = time.monotonic() - killed
        done, kept = steps_done(folder), chosen_step(folder)
        print(
            f"{engine} {number:2}: killed {kill.victims} after step {done}, gone in {seconds:.1f} s, "
            f"goes on from {kept}"
        )
        assert done - kept <= most_lost, launch.text()
        if kill.victims == "a rank" and processes > 1:
            assert "error: another process of this run is gone (" in launch.text(), launch.text()
            assert "[rank" not in launch.text(), launch.text()
    launch = start(config, processes, folder, corpus + flags, warm_python.executable())
    launch.wait_until(launch.gone, 4 * LONGEST_START, "the last launch did not end")
    assert launch.launcher.wait() == 0, launch.text()

    # Under the same engine: over hundreds of steps, rounding separates the curves of two engines.
    whole = start(config, processes, tmp_path / "uninterrupted", corpus + flags, warm_python.executable())
    whole.wait_until(whole.gone, 4 * LONGEST_START, "the uninterrupted run did not end")
    assert whole.launcher.wait() == 0, whole.text()
    assert len(curve(read_rows(folder))) == steps
    assert curve(read_rows(folder)) == pytest.approx(curve(read_rows(whole.folder)), rel=1e-6)


ZERO3 = pytest.param("zero3", ["all ranks"], marks=NEEDS_DEEPSPEED)


@pytest.mark.parametrize(
    "engine, victims", [("single", ["the launcher"]), ("fsdp2", ["a rank", "the launcher"]), ZERO3]
)
def test_a_killed_run_goes_on_and_leaves_no_orphan(engine, victims, start, tmp_path, corpus):
    survives(engine, victims, start, tmp_path, corpus)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["single", "fsdp2", pytest.param("zero3", marks=NEEDS_DEEPSPEED)])
def test_every_kind_of_victim_under_every_engine(engine, start, tmp_path, corpus):
    victims = (["a rank", "all ranks", "the launcher"] * KILLS)[:KILLS]
    survives(engine, victims, start, tmp_path, corpus)


@pytest.mark.parametrize("engine, whom, status", [("single", "group", -signal.SIGTERM), ("fsdp2", "rank", 0)])
def test_sigterm_saves_the_step_just_done(engine, whom, status, start, tmp_path, corpus):
    """The processes end with 0; a launcher that was told to stop has its own status."""
    config, processes, _ = ENGINES[engine]
    # A signal to the process group would not reach processes that a server has forked.
    python = sys.executable if whom == "group" else warm_python.executable()
    launch = start(config, processes, tmp_path / "run", [*corpus, "--max_train_steps", "1000"], python)
    launch.wait_for_steps(4)
    if whom == "group":
        os.killpg(launch.launcher.pid, signal.SIGTERM)
    else:
        os.kill(max(pid for pid in launch.alive() if pid != launch.launcher.pid), signal.SIGTERM)
    launch.wait_until(launch.gone, LONGEST_DEATH, "it trains on")
    assert launch.launcher.wait() == status
    assert chosen_step(launch.folder) == steps_done(launch.folder)
    assert f"Stopped at step {steps_done(launch.folder)}: run the same command again" in launch.text()
