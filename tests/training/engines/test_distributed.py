"""Processes that a launcher starts, or none does: they meet, agree on their flags and share the machine's threads."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from training_runs import LLAMA, ROOT, free_port

from hope_hf.common import devices
from hope_hf.common.devices import default_threads
from hope_hf.common.run_arguments import Arguments
from hope_hf.training.engines import choose
from hope_hf.training.engines.choose import make_engine

SMALL = ["--block_size", "32", "--max_train_steps", "6", "--cpu_threads", "1"]


def started_by_hand(rank: int, port: int, folder, corpus, *flags) -> subprocess.Popen:
    """One of two processes without a launcher, as on two machines."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": port, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": ROOT}
    environment = os.environ | {name: str(value) for name, value in place.items()}
    command = [sys.executable, str(ROOT / "run_clm.py"), *LLAMA, *corpus, *SMALL, "--output_dir", str(folder), *flags]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.processes
@pytest.mark.usefixtures("warm_python")
def test_processes_started_with_other_flags_stop(tmp_path, corpus):
    folder = tmp_path / "run"
    port = free_port()
    processes = [started_by_hand(rank, port, folder, corpus, "--adam_beta1", f"0.8{rank}") for rank in (0, 1)]
    errors = [process.communicate(timeout=200)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], errors
    assert "Rank 1" in errors[0] and "other flags than rank 0" in errors[0]
    assert not list(folder.glob("checkpoint-*"))


@pytest.mark.processes
@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_meets_nobody_says_so(tmp_path, corpus, rank):
    port = free_port()
    alone = started_by_hand(rank, port, tmp_path / "run", corpus, "--ddp_timeout", "2")
    _, errors = alone.communicate(timeout=200)
    assert alone.returncode == 2, errors
    assert f"Rank {rank}" in errors and f"127.0.0.1:{port}" in errors and "--ddp_timeout" in errors
    assert not (tmp_path / "run").exists()


@pytest.fixture
def arguments(tmp_path, fresh_accelerate):
    return Arguments(output_dir=str(tmp_path))


def test_launch_that_fell_apart_is_refused(arguments, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(choose, "cpu_accelerator", lambda wanted, options: SimpleNamespace(num_processes=1))
    monkeypatch.setattr(choose, "Accelerator", lambda **options: SimpleNamespace(num_processes=1))
    with pytest.raises(ValueError, match="WORLD_SIZE is 2 but 1 process"):
        make_engine(arguments, [])


def test_the_environment_does_not_accumulate(arguments, monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert make_engine(arguments, []).accelerator.gradient_accumulation_steps == 1


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "dynamo_backend"), ("ACCELERATE_USE_FSDP", "true", "asks for FSDP")],
)
def test_an_environment_that_the_run_does_not_follow_is_refused(arguments, monkeypatch, name, value, words):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        make_engine(arguments, [])


@pytest.fixture
def eight_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8))


def test_threads_are_shared_between_the_processes_of_a_machine(eight_cores, monkeypatch):
    # The default of launchers.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(devices, "_launcher_has_threads", lambda: False)
    assert default_threads() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert default_threads() == 2


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "variables, words, threads",
    [({}, [], 8), ({"OMP_NUM_THREADS": "1"}, [], 1), ({}, ["--num-cpu-threads-per-process", "1"], 1)],
)
def test_one_thread_is_what_the_user_asked_the_launcher_for(eight_cores, monkeypatch, variables, words, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("WORLD_SIZE", "1")
    # Stands in for the launcher: it has begun its work when it answers.
    launcher = subprocess.Popen(
        ["sh", "-c", "echo; read line", "sh", *words],
        env={"PATH": os.environ["PATH"]} | variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    launcher.stdout.readline()
    monkeypatch.setattr(os, "getppid", lambda: launcher.pid)
    assert default_threads() == threads
    launcher.communicate(b"\n")
