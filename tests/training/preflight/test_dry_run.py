"""`--dry_run` says whether the run would work, and leaves no trace of itself."""

import errno
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from training_runs import EVERY_FOURTH, GPT2, HOPE, change_losses, curve, forget_the_end

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


def test_a_step_that_would_fill_the_cpus_memory_is_not_taken(dry, monkeypatch):
    monkeypatch.setattr(facts_module, "free_memory", lambda device: 2**20)
    monkeypatch.setattr(trainer, "summed_loss", None)
    status, found, _ = dry("a")
    assert status == 1 and found["memory"][0] == found["host"][0] == "fail"
    assert found["step"] == ("warn", "not taken, because the run does not fit into memory: fix that first")


def test_a_step_that_is_only_estimated_is_not_refused(run, monkeypatch):
    free = read_free_memory
    monkeypatch.setattr(trainer, "read_free_memory", lambda *given: replace(free(*given), host=2**20))
    estimated = lambda *given: replace(plan_running(*given), is_estimate=True)  # noqa: E731
    monkeypatch.setattr(facts_module, "plan_running", estimated)
    with pytest.warns(UserWarning, match="The memory may not hold the run: a step of 1 process.*, estimated, needs"):
        assert run("a", "--max_train_steps", "1")[0] == 0


@pytest.mark.parametrize("model", [HOPE, GPT2], ids=["hope", "gpt2"])
def test_it_takes_the_first_step_of_the_run_and_makes_no_folder(dry, run, tmp_path, monkeypatch, model):
    seen, check = [], CHECKS["disk"]
    monkeypatch.setitem(CHECKS, "disk", lambda facts: seen.append(facts) or check(facts))
    status, found, captured = dry("deep/run", model=model)
    assert status == 0 and [*found] == [*CHECKS, "step"] and "10 ok, 0 warn, 0 fail" in captured.out
    assert found["run"][1] == "begins at step 0 of 8"
    assert not (tmp_path / "deep").exists()
    _, rows = run("deep/run", "--max_train_steps", "1", model=model)
    loss = float(re.search(r"loss ([\d.]+),", found["step"][1])[1])
    assert loss == pytest.approx(curve(rows)[0], rel=1e-3)
    # The files' headers name every tensor.
    for size, file in ((seen[0].sizes.weights, "model"), (seen[0].sizes.optimizer, "optimizer_rank_0")):
        written = (tmp_path / "deep/run/checkpoint-1" / f"{file}.safetensors").stat().st_size
        assert size == pytest.approx(written, rel=0.05)


def test_a_folder_is_left_as_it_is(dry, run, trained, tmp_path):
    """Of a run that is complete, that would continue, that is another one, and that another process writes."""
    folder = trained("llama").copy(tmp_path / "a")
    before = contents(folder)
    status, found, _ = dry("a", *EVERY_FOURTH)
    assert status == 0 and [(name, level) for name, (level, _) in found.items()] == [("run", "warn")]
    status, found, captured = dry("a", *EVERY_FOURTH, "--seed", "2")
    assert status == 2 and not found and "seed was 42 and is now 2" in captured.err
    assert contents(folder) == before
    forget_the_end(folder, 8)
    before = contents(folder)
    status, found, _ = dry("a", *EVERY_FOURTH)
    assert status == 0 and found["run"] == ("ok", f"continues from {folder / 'checkpoint-4'} at step 4 of 8")
    assert contents(folder) == before
    lock = FolderLock(folder)
    lock.acquire()
    before = contents(folder)
    status, found, _ = dry("a", *EVERY_FOURTH)
    assert status == 1 and found["run"][0] == "fail" and "is in use" in found["run"][1]
    assert contents(folder) == before
    lock.release()


def raises(error):
    def fail(*_):
        raise error

    return fail


def test_a_disk_that_takes_no_checkpoint_fails_and_a_tracker_is_not_started(dry, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setattr(facts_module, "flush_to_disk", raises(OSError(errno.EINVAL, "Invalid argument")))
    status, found, captured = dry("deep/run", "--report_to", "wandb")
    assert status == 1 and found["disk"][0] == "fail" and "Invalid argument" in found["disk"][1]
    assert found["trackers"][0] == "warn" and found["step"][0] == "ok" and "8 ok, 1 warn, 1 fail" in captured.out
    assert not (tmp_path / "deep").exists() and not list(tmp_path.rglob("*wandb*"))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB."), "(CUDA out of memory)"),
        (MemoryError(), "(MemoryError)"),
        (None, "loss nan"),
    ],
    ids=["gpu", "python", "nan"],
)
def test_a_step_that_fails_is_told(dry, monkeypatch, tmp_path, error, words):
    def fail(count, loss):
        if error is not None:
            raise error
        return loss * float("nan")

    change_losses(monkeypatch, fail)
    status, found, _ = dry("a")
    assert status == 1 and found["memory"][0] == "ok" and found["step"][0] == "fail" and words in found["step"][1]
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("room", "words"),
    [
        (FreeMemory(None, 2**20, 2**40), "needs 0.00 GiB of 0.00 GiB free"),
        (FreeMemory(None, 2**40, 2**10), "1 checkpoint(s) of 0.00 GiB"),
    ],
    ids=["memory", "disk"],
)
def test_a_run_that_does_not_fit_is_refused_before_its_first_step(run, tmp_path, monkeypatch, capsys, room, words):
    monkeypatch.setattr(trainer, "read_free_memory", lambda *given: room)
    monkeypatch.setattr(trainer, "summed_loss", None)
    assert run("a", "--max_train_steps", "1") == (2, [])
    assert words in capsys.readouterr().err
    monkeypatch.undo()
    # Nothing binds the folder to the refused flags.
    assert run("a", "--max_train_steps", "1", "--per_device_train_batch_size", "2")[0] == 0
