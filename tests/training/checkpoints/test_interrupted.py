"""A kill or failure at any moment of writing or deleting leaves only complete checkpoints."""

import errno
import os
import resource
import shutil
import stat
from functools import partial
from pathlib import Path

import pytest
from checkpoint_run import MARK, Run, forge, names, truncate

from hope_hf.training.checkpoints.manifest import latest_checkpoint, remove_leftovers, verify

pytestmark = pytest.mark.usefixtures("one_cpu_process")


class Killed(BaseException):
    """Simulates kill -9: no error handler may catch it."""


def test_a_kill_at_any_moment_leaves_the_last_checkpoint(output_dir, monkeypatch):
    """Stop before each call that changes the disk, the rename over an existing step included."""
    run = Run()
    run.restore(output_dir)
    before = {path.name: path.read_bytes() for path in (output_dir / "checkpoint-5").iterdir()}
    calls, limit = 0, 0

    def interrupting(function):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls > limit:
                raise Killed
            return function(*args, **kwargs)

        return call

    changes = [(Path, "mkdir"), (Path, "write_text"), (Path, "rename"), (os, "fsync"), (shutil, "rmtree")]
    with monkeypatch.context() as patch:
        for owner, name in changes:
            patch.setattr(owner, name, interrupting(getattr(owner, name)))
        finished = False
        while not finished:
            calls = 0
            try:
                run.save(output_dir)
                finished = True
            except Killed:
                pass
            limit += 1
            calls = -(10**9)
            chosen = latest_checkpoint(output_dir).folder
            assert verify(chosen).step == 5
            assert before.keys() == {path.name for path in chosen.iterdir()}
    assert limit > 20
    run.save(output_dir)
    assert names(output_dir) == ["checkpoint-3", "checkpoint-5"]


def test_what_a_kill_between_two_renames_leaves(output_dir):
    """The replaced folder counts until the one that replaces it is there."""
    replaced = output_dir / f"checkpoint-5.replaced-{MARK}"
    (output_dir / "checkpoint-5").rename(replaced)
    run = Run()
    assert run.restore(output_dir).path == replaced
    run.save(output_dir)
    shutil.copytree(output_dir / "checkpoint-5", replaced)
    assert latest_checkpoint(output_dir).folder == output_dir / "checkpoint-5"
    run.step = 6
    run.save(output_dir)
    assert names(output_dir) == ["checkpoint-3", "checkpoint-5", "checkpoint-6"]


def test_rotation_does_not_count_broken_ones_and_keeps_later_ones(output_dir):
    run = Run()
    truncate(output_dir / "checkpoint-5" / "model.safetensors")
    run.step = 6
    run.save(output_dir, save_total_limit=2)
    assert names(output_dir) == ["checkpoint-3", "checkpoint-6"]
    # After a return to an older checkpoint by name, the newer ones are still kept.
    run.step = 4
    run.save(output_dir, save_total_limit=1)
    assert names(output_dir) == ["checkpoint-4", "checkpoint-6"]


def test_a_kill_while_deleting_leaves_no_half_checkpoint(output_dir, monkeypatch):
    def delete_one_file(folder, **_):
        (Path(folder) / "model.safetensors").unlink()
        raise Killed

    run = Run()
    run.step = 6
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(shutil, "rmtree", delete_one_file)
        run.save(output_dir, save_total_limit=1)
    whole = [name for name in names(output_dir) if ".tmp-" not in name]
    assert whole == ["checkpoint-3", "checkpoint-6"]
    for name in whole:
        verify(output_dir / name)
    run.save(output_dir, save_total_limit=1)
    assert names(output_dir) == ["checkpoint-6"]


FOREIGN = [
    "checkpoint-mine.tmp-2024", "checkpoint-3.replaced", "checkpoint-3.tmp-0123abcd", "best.old.tmp-1", "checkpoint-2",
    "best.replaced", "checkpoint-5.replaced-ffffffffffff", f"checkpoint-3.tmp-{MARK}", "checkpoint-01",
]  # fmt: skip


def test_folders_of_others_stay(output_dir):
    """A user's notes and copies beside the checkpoints, whatever their names are."""
    for name in FOREIGN:
        (output_dir / name).mkdir()
        (output_dir / name / "notes").write_text(name)
    copies = ["checkpoint-3.copy", "checkpoint-03", "checkpoint-3.replaced"]
    for name in copies:
        shutil.copytree(output_dir / "checkpoint-3", output_dir / name, dirs_exist_ok=True)
    # A checkpoint of another run.
    shutil.copytree(output_dir / "checkpoint-3", output_dir / "checkpoint-4")
    forge(output_dir / "checkpoint-4", step=4, run="another")
    run = Run()
    run.step = 6
    run.save(output_dir, save_total_limit=1)
    remove_leftovers(output_dir, MARK)
    assert {*names(output_dir)} == {*FOREIGN, *copies, "checkpoint-4", "checkpoint-6"}
    # The step of a folder that is not the run's.
    run.step = 7
    (output_dir / "checkpoint-7").mkdir()
    (output_dir / "checkpoint-7" / "notes").write_text("seven")
    with pytest.warns(UserWarning, match="checkpoint-7 was not of this run: it is now checkpoint-7.other-"):
        run.save(output_dir, save_total_limit=1)
    (other,) = output_dir.glob("checkpoint-7.other-*")
    assert verify(output_dir / "checkpoint-7").step == 7 and (other / "notes").read_text() == "seven"
    assert all((output_dir / name / "notes").read_text() == name for name in FOREIGN)


def test_a_full_disk_gets_one_sentence_and_its_space_back(output_dir):
    """A limit on the file size simulates a full disk: the same calls fail in the same places."""
    run = Run()
    run.step = 9
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 * 1024, hard))
    try:
        with pytest.raises(ValueError, match=r"No checkpoint .* \(.*[Ff]ile too large.*last good .*checkpoint-5\.$"):
            run.save(output_dir)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(output_dir) == ["checkpoint-3", "checkpoint-5"]


def test_a_disk_that_cannot_flush_folders_takes_checkpoints(tmp_path, monkeypatch):
    """CIFS, FUSE and WSL: a finished checkpoint must not be deleted for this; a file's refusal counts."""
    fsync = os.fsync

    def refuse(descriptor: int, refused=stat.S_ISDIR):
        if refused(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    assert verify(Run().save(tmp_path)).step == 0
    monkeypatch.setattr(os, "fsync", partial(refuse, refused=stat.S_ISREG))
    with pytest.raises(ValueError, match=r"No checkpoint .*\(Invalid argument\)"):
        Run().save(tmp_path)
    assert names(tmp_path) == ["checkpoint-0"]


def test_a_mistake_of_ours_keeps_its_traceback(output_dir):
    run = Run()
    with pytest.raises(AssertionError, match="state.data.epoch is a"):
        run.save(output_dir, data={"epoch": object()})
