"""`--dry_run` says whether the run would work, and leaves no trace of itself."""

import errno
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from training_runs import GPT2, HOPE, LLAMA, curve, forget_the_end

from hope_hf.common.folder_lock import FolderLock
from hope_hf.plan import plan_running
from hope_hf.training import trainer
from hope_hf.training.preflight import facts as facts_module
from hope_hf.training.preflight.checks import CHECKS
from hope_hf.training.preflight.facts import FreeMemory, read_free_memory

LINE = re.compile(r"(ok|warn|fail) +(\w+) +(.+)")


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch, tmp_path):
    """No GPUs, whatever this machine has."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def dry(run, capsys):
    """`dry(name, *flags)`: exit status, and (level, text) of every line by its check."""

    def start(name: str, *flags, **options):
        capsys.readouterr()
        status, _ = run(name, "--dry_run", *flags, **options)
        captured = capsys.readouterr()
        assert not captured.err or status == 2, captured.err
        found = [match.groups() for line in captured.out.splitlines() if (match := LINE.fullmatch(line))]
        assert len({name for _, name, _ in found}) == len(found)
        return status, {name: (level, text) for level, name, text in found}, captured

    return start


def contents(folder: Path) -> dict:
    """Every path in a folder, and every file with its bytes and times: a trial in a folder sets the folder's times."""
    return {str(path): _content(path) for path in folder.rglob("*")}


def _content(path: Path) -> tuple | None:
    return (path.stat().st_mtime_ns, path.stat().st_ctime_ns, path.read_bytes()) if path.is_file() else None


@pytest.mark.parametrize("model", [LLAMA, HOPE, GPT2], ids=["llama", "hope", "gpt2"])
def test_it_takes_the_first_step_of_the_run_and_makes_no_folder(dry, run, tmp_path, model):
    status, found, captured = dry("deep/run", model=model)
    assert status == 0 and [*found] == [*CHECKS, "step"]
    assert {level for level, _ in found.values()} == {"ok"}, found
    assert found["run"][1] == "begins at step 0 of 8"
    assert "Dry run: 10 ok, 0 warn, 0 fail; nothing was written" in captured.out
    assert not (tmp_path / "deep").exists()
    _, rows = run("deep/run", "--max_train_steps", "1", model=model)
    loss = float(re.search(r"loss ([\d.]+),", found["step"][1])[1])
    assert loss == pytest.approx(curve(rows)[0], rel=1e-3)


def test_the_plan_has_the_flags_of_the_step(dry, monkeypatch):
    asked = []
    monkeypatch.setattr(facts_module, "plan_running", lambda *given: asked.append(given[2]) or plan_running(*given))
    with pytest.warns(UserWarning, match="--sync_each_batch is ignored"):
        dry("a", "--sync_each_batch", "--gradient_accumulation_steps", "2")
    assert asked[0].sync_each_batch and asked[0].accumulation == 2


def test_a_run_that_would_continue_is_left_as_it_is(dry, run, tmp_path):
    saves = ["--checkpointing_steps", "3", "--save_total_limit", "9"]
    _, whole = run("a", *saves)
    folder = tmp_path / "a"
    forget_the_end(folder, 6, 8)
    before = contents(folder)
    status, found, _ = dry("a", *saves)
    assert status == 0 and found["run"] == ("ok", f"continues from {folder / 'checkpoint-3'} at step 3 of 8")
    assert contents(folder) == before
    status, rows = run("a", *saves)
    assert status == 0 and curve(rows) == curve(whole)


def test_a_complete_run_needs_no_check(dry, run, tmp_path):
    run("a", "--max_train_steps", "1")
    before = contents(tmp_path / "a")
    status, found, _ = dry("a", "--max_train_steps", "1")
    assert status == 0 and [*found] == ["run"] and found["run"][0] == "warn"
    assert contents(tmp_path / "a") == before


def test_another_run_is_one_sentence(dry, run, tmp_path):
    run("a", "--max_train_steps", "1")
    before = contents(tmp_path / "a")
    status, found, captured = dry("a", "--max_train_steps", "1", "--seed", "2")
    assert status == 2 and not found and "holds another run: seed was 42 and is now 2" in captured.err
    assert contents(tmp_path / "a") == before


def test_a_folder_in_use_fails(dry, tmp_path):
    lock = FolderLock(tmp_path / "a")
    lock.acquire()
    before = contents(tmp_path / "a")
    status, found, _ = dry("a")
    assert status == 1 and found["run"][0] == "fail" and "is in use" in found["run"][1]
    assert contents(tmp_path / "a") == before
    lock.release()
    assert dry("a")[0] == 0


def test_a_disk_that_takes_no_checkpoint_fails(dry, tmp_path, monkeypatch):
    monkeypatch.setattr(facts_module, "flush_to_disk", fails_with(errno.EINVAL))
    status, found, _ = dry("deep/run")
    assert status == 1 and found["disk"][0] == "fail" and "Invalid argument" in found["disk"][1]
    assert not (tmp_path / "deep").exists()


def fails_with(number: int):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


def test_a_tracker_is_checked_and_not_started(dry, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    status, found, captured = dry("a", "--report_to", "wandb")
    assert status == 0 and found["trackers"][0] == "warn" and found["step"][0] == "ok"
    assert "9 ok, 1 warn, 0 fail" in captured.out
    assert not list(tmp_path.rglob("*wandb*"))


def test_a_step_that_is_not_finite_fails(dry, monkeypatch):
    loss = trainer.summed_loss
    monkeypatch.setattr(trainer, "summed_loss", lambda *arguments: loss(*arguments) * float("nan"))
    status, found, _ = dry("a")
    assert status == 1 and found["step"][0] == "fail" and found["step"][1].startswith("loss nan")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB."), "CUDA out of memory"),
        (MemoryError(), "MemoryError"),
    ],
    ids=["gpu", "python"],
)
def test_a_step_that_runs_out_of_memory_fails(dry, monkeypatch, tmp_path, error, reason):
    def full(*arguments):
        raise error

    monkeypatch.setattr(trainer, "summed_loss", full)
    status, found, _ = dry("a")
    assert status == 1 and found["memory"][0] == "ok" and found["step"][0] == "fail"
    assert f"out of memory ({reason}): lower --per_device" in found["step"][1]
    assert not (tmp_path / "a").exists()


def test_a_step_that_would_fill_the_cpus_memory_is_not_taken(dry, monkeypatch):
    monkeypatch.setattr(facts_module, "free_memory", lambda device: 2**20)
    monkeypatch.setattr(trainer, "summed_loss", None)
    status, found, _ = dry("a")
    assert status == 1 and found["memory"][0] == found["host"][0] == "fail"
    assert found["step"] == ("warn", "not taken, because the run does not fit into memory: fix that first")


@pytest.mark.parametrize(
    ("room", "words"),
    [
        (FreeMemory(None, 2**20, 2**40), "needs 0.00 GiB of 0.00 GiB free: "),
        (FreeMemory(None, 2**40, 2**10), "1 checkpoint(s) of 0.00 GiB and the weights need"),
    ],
    ids=["memory", "disk"],
)
def test_a_run_that_does_not_fit_is_refused_before_its_first_step(run, tmp_path, monkeypatch, capsys, room, words):
    with monkeypatch.context() as small:
        small.setattr(trainer, "read_free_memory", lambda *given: room)
        small.setattr(trainer, "summed_loss", None)
        assert run("a", "--max_train_steps", "1") == (2, [])
    told = capsys.readouterr().err
    assert "The run in" in told and words in told and told.count("\n") == 1
    # Nothing binds the folder to the refused flags.
    status, rows = run("a", "--max_train_steps", "1", "--per_device_train_batch_size", "2")
    assert status == 0 and len(curve(rows)) == 1


def test_a_step_that_is_only_estimated_is_not_refused(run, monkeypatch):
    free = read_free_memory
    monkeypatch.setattr(trainer, "read_free_memory", lambda *given: replace(free(*given), host=2**20))
    estimated = lambda *given: replace(plan_running(*given), is_estimate=True)  # noqa: E731
    monkeypatch.setattr(facts_module, "plan_running", estimated)
    with pytest.warns(UserWarning, match="The memory may not hold the run: a step of 1 process.*, estimated, needs"):
        assert run("a", "--max_train_steps", "1")[0] == 0


@pytest.mark.parametrize(("model", "flags"), [(HOPE, []), (LLAMA, ["--optimizer", "muon"])], ids=["hope", "muon"])
def test_the_sizes_are_those_of_a_checkpoint(dry, run, tmp_path, monkeypatch, model, flags):
    seen = []
    check = CHECKS["disk"]
    monkeypatch.setitem(CHECKS, "disk", lambda facts: seen.append(facts) or check(facts))
    dry("a", *flags, model=model)
    run("a", "--max_train_steps", "1", *flags, model=model)
    files = {path.name: path.stat().st_size for path in (tmp_path / "a" / "checkpoint-1").glob("*.safetensors")}
    # The files' headers name every tensor.
    assert seen[0].sizes.weights == pytest.approx(files["model.safetensors"], rel=0.03)
    assert seen[0].sizes.optimizer == pytest.approx(files["optimizer_rank_0.safetensors"], rel=0.05)


def test_the_demo_is_tried_too(dry, corpus, tmp_path):
    few = ["--max_train_samples", "20", "--max_eval_samples", "2", "--max_train_steps", "40"]
    status, found, captured = dry("a", *few, model=HOPE, data=corpus[4:])
    assert status == 0 and found["data"][1].startswith("built-in corpus: 20 documents")
    assert "new: tiny" in captured.out and not (tmp_path / "a").exists()
