"""`--profile_steps`: which steps are profiled, what is written, and where the table says their time went."""

import gzip
import json
import os
import subprocess
import sys

import pytest
from accelerate import Accelerator
from training_runs import LLAMA, ROOT, TWO, forget_the_end

from hope_hf.training.watch.profile import MOST_STEPS, STEP, StepProfile, parse_profiled


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


def rows_of(table: str) -> list[list[float]]:
    """Milliseconds of the step, of computing and of communication, a row per rank."""
    lines = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    return [[float(cell.replace(",", "")) for cell in cells[1:]] for cells in lines[2:]]


def test_a_run_leaves_a_trace_and_a_table_and_never_writes_over_them(run, tmp_path, capsys):
    folder = tmp_path / "a" / "profile-3-4"
    run("a", "--profile_steps", "3-4", "--checkpointing_steps", "2", "--save_total_limit", "9")
    table = (folder / "table.md").read_text()
    assert table in capsys.readouterr().out
    ((whole, compute, communication),) = rows_of(table)
    assert whole > compute > 0 == communication
    with gzip.open(folder / "trace_rank0.json.gz", "rt") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    assert {name for name in names if name.startswith(STEP)} == {f"{STEP}3", f"{STEP}4"} and "aten::mm" in names

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
    folder = tmp_path / "run" / "profile-2-3"
    assert all((folder / f"trace_rank{rank}.json.gz").exists() for rank in (0, 1))
    table = (folder / "table.md").read_text()
    rows = rows_of(table)
    assert len(rows) == 2 and all(whole > compute > 0 < communication for whole, compute, communication in rows)
    assert table in ended.stdout
