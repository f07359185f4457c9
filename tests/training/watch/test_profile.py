"""`--profile_steps`: which steps are profiled, what is written, and where the table says their time went."""

import os
import subprocess
import sys

import pytest
from accelerate import Accelerator
from training_runs import LLAMA, ROOT, TWO, forget_the_end

from hope_hf.training.watch.profile import MOST_STEPS, StepProfile, parse_profiled
from hope_hf.training.watch.trace import STEP, read_times, times, times_table

US = 1000


@pytest.mark.parametrize("value, steps", [("10-12", [10, 11, 12]), ("10", [10]), ("1-1", [1])])
def test_a_step_or_a_range(value, steps):
    assert list(parse_profiled(value)) == steps


@pytest.mark.parametrize("value", ["12-10", "0-3", "0", "-3", "3-", "a", "1-2-3", "1.5", "²", f"1-{MOST_STEPS + 1}"])
def test_other_values_are_refused(value, run, capsys, tmp_path):
    status, _ = run("a", f"--profile_steps={value}")
    sentence = f"--profile_steps is {value!r}: give a step or a range of at most 100 of them, counted from 1"
    assert status == 2 and sentence in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_steps_after_the_end_of_the_run_are_refused(run, capsys, tmp_path):
    status, _ = run("a", "--profile_steps", "7-9")
    assert status == 2 and "--profile_steps 7-9: the run has 8 steps, name some of these." in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def event(category: str, name: str, start: float, end: float, thread: int = 1) -> dict:
    """A span of a trace, of times in milliseconds."""
    return {"ph": "X", "cat": category, "name": name, "tid": thread, "ts": start * US, "dur": (end - start) * US}


def steps(*windows) -> list[dict]:
    return [event("user_annotation", f"{STEP}{number}", *window) for number, window in enumerate(windows)]


def test_times_of_a_gpu():
    found = times(
        [
            *steps((0, 100), (150, 250)),
            event("gpu_user_annotation", f"{STEP}0", 0, 200),
            # Two streams compute at once, and communication goes on for longer.
            event("kernel", "gemm", 10, 40, 7),
            event("kernel", "gemm", 30, 50, 8),
            event("kernel", "ncclDevKernel_AllReduce", 20, 70, 9),
            event("gpu_memcpy", "Memcpy HtoD", 60, 80, 7),
            # Between the steps: an evaluation.
            event("kernel", "gemm", 110, 140, 7),
            event("kernel", "gemm", 170, 190, 7),
            event("gpu_memset", "Memset", 190, 200, 7),
            # What the CPU does counts for nothing.
            event("cpu_op", "aten::mm", 0, 100),
            {"ph": "i", "name": "a mark", "ts": 3 * US},
        ]
    )
    assert (found.compute, found.communication, found.copies, found.waiting) == (30, 10, 10, 50)
    assert found.hidden == 15 and found.step == 100


def test_times_of_a_cpu():
    found = times(
        [
            *steps((0, 100)),
            event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 0, 60),
            event("cpu_op", "MmBackward0", 0, 50),
            event("cpu_op", "aten::mm", 5, 35),
            event("cpu_op", "aten::contiguous", 35, 50),
            event("cpu_op", "aten::copy_", 40, 50),
            event("cpu_op", "c10d::allreduce_", 50, 60),
            event("cpu_op", "aten::copy_", 52, 56),
            # Gloo's thread.
            event("user_annotation", "gloo:all_reduce", 30, 80, 2),
            event("cpu_op", "aten::add_", 70, 75, 2),
        ]
    )
    assert (found.compute, found.communication, found.copies, found.waiting) == (35, 30, 10, 25)
    assert found.hidden == 20


def test_a_run_leaves_a_trace_and_a_table_and_never_writes_over_them(run, tmp_path, capsys):
    folder = tmp_path / "a" / "profile-3-4"
    run("a", "--profile_steps", "3-4", "--checkpointing_steps", "2", "--save_total_limit", "9")
    found = read_times(folder / "trace_rank0.json.gz")
    assert min(found.compute, found.copies, found.waiting) > 0 and found.communication == found.hidden == 0
    table = (folder / "table.md").read_text()
    assert times_table([found]) in table and table in capsys.readouterr().out

    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    forget_the_end(tmp_path / "a", 4, 6, 8)
    run("a", "--profile_steps", "3-4", "--checkpointing_steps", "2", "--save_total_limit", "9")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert {path.name for path in (tmp_path / "a" / "profile-3-4.2").iterdir()} == before.keys()


def test_steps_made_before_are_left_out_with_one_warning(run, tmp_path):
    run("a", "--checkpointing_steps", "4", "--save_total_limit", "9")
    forget_the_end(tmp_path / "a", 8)
    with pytest.warns(UserWarning, match="3-6: the run continues after step 4, only 5-6 is profiled") as said:
        run("a", "--profile_steps", "3-6", "--checkpointing_steps", "4", "--save_total_limit", "9")
    assert sum("--profile_steps" in str(one.message) for one in said) == 1
    assert [path.name for path in (tmp_path / "a").glob("profile*")] == ["profile-5-6"]
    forget_the_end(tmp_path / "a", 8)
    with pytest.warns(UserWarning, match="--profile_steps 3: the run continues after step 4, nothing is profiled."):
        run("a", "--profile_steps", "3")
    assert len([*(tmp_path / "a").glob("profile*")]) == 1


def test_a_run_that_ends_within_the_steps_says_so(tmp_path):
    with pytest.warns(UserWarning, match="the run ended before step 3 did, so no trace was written"):
        with StepProfile("2-3", str(tmp_path), Accelerator(cpu=True), 0, print) as profile:
            for step in (1, 2):
                profile.step_begins(step)
                profile.step_ends(step)
            profile.step_begins(3)
    assert not [*tmp_path.iterdir()]


@pytest.mark.processes
@pytest.mark.usefixtures("warm_python")
def test_processes_communicate_and_each_has_its_trace(tmp_path, corpus):
    flags = [*LLAMA, *corpus, "--block_size", "32", "--max_train_steps", "3", "--cpu_threads", "1"]
    flags += ["--profile_steps", "2-3", "--output_dir", str(tmp_path / "run")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, *TWO, str(ROOT / "run_clm.py"), *flags]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = [read_times(tmp_path / "run" / "profile-2-3" / f"trace_rank{rank}.json.gz") for rank in (0, 1)]
    assert all(row.communication > 0 and row.compute > 0 for row in found)
    assert times_table(found) in ended.stdout
