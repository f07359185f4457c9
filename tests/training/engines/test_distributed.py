"""Two processes give the results of one process with the same global batch."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import ddp_worker
import pytest
from training_runs import HOPE, LLAMA, ROOT, TWO, curve, read_rows, reset_accelerate

from hope_hf.common import process
from hope_hf.common.process import default_threads
from hope_hf.common.run_arguments import Arguments
from hope_hf.training import setup
from hope_hf.training.engines import choose
from hope_hf.training.engines.choose import make_engine

WORKER = str(Path(ddp_worker.__file__))
SMALL = ["--block_size", "32", "--max_train_steps", "6", "--logging_steps", "1", "--learning_rate", "5e-3"]
SMALL += ["--max_grad_norm", "0.5", "--cpu_threads", "1"]
# What README tells users: the launcher, the config, the variable.
ACCELERATE = ["-m", "accelerate.commands.launch", "--config_file"]
ACCELERATE += [str(ROOT / "accelerate_configs" / "ddp.yaml"), "--num_processes", "2"]


def start(launcher, folder, corpus, *flags, model):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, *launcher, WORKER, *model, *corpus, *SMALL, "--output_dir", str(folder), *flags]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finished(process, folder):
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    return output, read_rows(folder)


@pytest.mark.processes
@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("model", [LLAMA, HOPE], ids=["llama", "hope"])
def test_two_processes_give_the_curve_of_one(run, tmp_path, corpus, monkeypatch, model):
    batch = "--per_device_train_batch_size"
    launcher = TWO if model is LLAMA else ACCELERATE
    flags = [batch, "1", "--gradient_accumulation_steps", "2"] if model is LLAMA else [batch, "2"]
    two = start(launcher, tmp_path / "two", corpus, *flags, model=model)
    # Meanwhile, one process here:
    monkeypatch.setattr(setup, "build_data", ddp_worker.masked_data)
    status, single = run("one", batch, "4", *SMALL, model=model)
    output, double = finished(two, tmp_path / "two")
    assert status == 0
    assert "x 2 process(es)" in output
    assert len(curve(single)) == 6
    assert curve(double) == pytest.approx(curve(single), rel=1e-5)
    assert curve(double, "train/grad_norm") == pytest.approx(curve(single, "train/grad_norm"), rel=1e-4)
    assert curve(double, "eval/loss") == pytest.approx(curve(single, "eval/loss"), rel=1e-5)
    # The masks differ between processes: a mean of each process's mean would not pass this.
    assert curve(double, "eval/tokens") == curve(single, "eval/tokens")
    assert curve(double, "eval/accuracy") == pytest.approx(curve(single, "eval/accuracy"), abs=1e-3)
    assert output.count("step 6/6 | loss") == 1
    for rank in (0, 1):
        beats = [json.loads(line) for line in (tmp_path / "two" / "processes" / f"heartbeat_rank{rank}.jsonl").open()]
        assert [beat["step"] for beat in beats] == [1, 2, 3, 4, 5, 6]
        assert not (tmp_path / "two" / "processes" / f"stacks_rank{rank}.txt").exists()


def started_by_hand(rank: int, port: int, folder, corpus, *flags) -> subprocess.Popen:
    """One of two processes without a launcher, as on two machines."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": port, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": ROOT}
    environment = os.environ | {name: str(value) for name, value in place.items()}
    command = [sys.executable, str(ROOT / "run_clm.py"), *LLAMA, *corpus, *SMALL, "--output_dir", str(folder), *flags]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.processes
@pytest.mark.usefixtures("warm_python")
def test_processes_started_with_other_flags_stop(tmp_path, corpus, free_port):
    folder = tmp_path / "run"
    processes = [started_by_hand(r, free_port, folder, corpus, "--adam_beta1", f"0.8{r}") for r in (0, 1)]
    errors = [process.communicate(timeout=200)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], errors
    assert "Rank 1" in errors[0] and "has other flags than rank 0" in errors[0]
    assert not list(folder.glob("checkpoint-*"))


@pytest.mark.processes
@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_meets_nobody_says_so(tmp_path, corpus, free_port, rank):
    alone = started_by_hand(rank, free_port, tmp_path / "run", corpus, "--ddp_timeout", "2")
    _, errors = alone.communicate(timeout=200)
    assert alone.returncode == 2, errors
    assert f"Rank {rank} did not meet the others at 127.0.0.1:{free_port} within 2 s (--ddp_timeout)" in errors
    assert not (tmp_path / "run").exists()


def arguments(tmp_path) -> Arguments:
    return Arguments(output_dir=str(tmp_path))


def test_launch_that_fell_apart_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    alone = SimpleNamespace(num_processes=1)
    monkeypatch.setattr(choose, "Accelerator", lambda **options: alone)
    monkeypatch.setattr(choose, "cpu_accelerator", lambda wanted, options: alone)
    with pytest.raises(ValueError, match="WORLD_SIZE is 2 but 1 process"):
        make_engine(arguments(tmp_path), [])


def test_the_environment_neither_accumulates_nor_compiles(tmp_path, monkeypatch):
    reset_accelerate()
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert make_engine(arguments(tmp_path), []).accelerator.gradient_accumulation_steps == 1
    reset_accelerate()
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    with pytest.raises(ValueError, match="compiles the model .dynamo_backend INDUCTOR.: set it to 'NO'"):
        make_engine(arguments(tmp_path), [])


def test_engine_that_would_not_run_is_refused(tmp_path, monkeypatch):
    reset_accelerate()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="asks for FSDP and NO runs: launch at least two processes"):
        make_engine(arguments(tmp_path), [])
    reset_accelerate()


def test_threads_are_shared_between_the_processes_of_a_machine(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # The default of launchers.
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(process, "_launcher_has_threads", lambda: False)
    assert default_threads() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert default_threads() == 2


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "variables, words, threads",
    [({}, [], 8), ({"OMP_NUM_THREADS": "1"}, [], 1), ({}, ["--num-cpu-threads-per-process", "1"], 1)],
)
def test_one_thread_is_what_the_user_asked_the_launcher_for(monkeypatch, variables, words, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8))
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


def test_threads_are_those_of_the_environment_where_the_user_has_set_it(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    for value, threads in (("1", 1), ("3", 3), ("0", 8), ("many", 8)):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert default_threads() == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert default_threads() == 3
