"""A checkpoint written in the background equals one that the training waits for."""

import errno
import random
import threading
from pathlib import Path

import numpy as np
import pytest
from checkpoint_run import MARK, Run, contents, names

from hope_hf.training.checkpoints import writer as writer_module
from hope_hf.training.checkpoints.manifest import latest_checkpoint, verify
from hope_hf.training.checkpoints.writer import CheckpointWriter

pytestmark = pytest.mark.usefixtures("one_cpu_process")


@pytest.fixture
def slow_disk(monkeypatch):
    """Nothing is written before the event is set."""
    free = threading.Event()
    save_state = writer_module.save_state

    def wait_and_save(*arguments):
        assert free.wait(60)
        save_state(*arguments)

    monkeypatch.setattr(writer_module, "save_state", wait_and_save)
    yield free
    free.set()


def trained(steps: int) -> Run:
    random.seed(0)
    np.random.seed(0)
    run = Run()
    run.train(steps)
    return run


def test_it_holds_the_moment_at_which_it_began(tmp_path, slow_disk):
    (tmp_path / "background").mkdir()
    run, writer = trained(5), CheckpointWriter(tmp_path / "background", mark=MARK)
    folder = run.save_with(writer, background=True)
    uninterrupted = run.train(3)
    assert not writer.written and not folder.exists()
    slow_disk.set()
    writer.finish()
    assert contents(folder) == contents(trained(5).save(tmp_path / "at_once"))
    other = Run(seed=1)
    assert other.restore(tmp_path / "background").step == 5
    assert other.train(3) == uninterrupted


def test_the_next_one_waits_for_it(tmp_path, slow_disk):
    run, writer = Run(), CheckpointWriter(tmp_path, save_total_limit=1, mark=MARK)
    run.step = 1
    run.save_with(writer, background=True)
    run.step = 2
    threading.Timer(0.2, slow_disk.set).start()
    run.save_with(writer, background=True)
    assert latest_checkpoint(tmp_path).folder.name == "checkpoint-1"
    writer.finish()
    assert not writer.written
    # Old ones are deleted in the background, too.
    writer.finish()
    assert names(tmp_path) == ["checkpoint-2"]


def test_a_disk_that_fills_up_meanwhile_is_told_at_the_end(output_dir, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    run, writer = Run(), CheckpointWriter(output_dir, mark=MARK)
    run.step = 9
    monkeypatch.setattr(writer_module, "save_state", full)
    run.save_with(writer, background=True)
    with pytest.raises(ValueError, match=r"No checkpoint .*No space left on device.*last good .*checkpoint-5\.$"):
        writer.finish()
    assert names(output_dir) == ["checkpoint-3", "checkpoint-5"]


def test_what_another_process_is_still_writing_is_not_taken_for_a_file(tmp_path, monkeypatch):
    def write_beside(folder, *_):
        (folder / ".tmpAbCdEf").write_text("half")
        (folder / "rank_1.json").write_text("of another process")

    monkeypatch.setattr(writer_module, "save_optimizer", write_beside)
    listed = verify(Run().save(tmp_path)).files.keys()
    assert {"config.json", "rank_0.json", "trainer.json"} < listed
    assert not {".tmpAbCdEf", "rank_1.json"} & listed


def test_the_model_alone_is_saved_and_cannot_be_continued(tmp_path):
    run = Run()
    folder = run.save_with(CheckpointWriter(tmp_path, only_model=True, mark=MARK))
    present = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} < present
    assert not [name for name in present if "rank" in name or "optimizer" in name]
    with pytest.raises(ValueError, match="--save_only_model.*--model_name_or_path"):
        run.restore(tmp_path)


def test_a_disk_that_the_machines_do_not_share_is_named(tmp_path, monkeypatch):
    """This process makes the folder but does not find it, like another machine."""
    is_dir = Path.is_dir
    monkeypatch.setattr(Path, "is_dir", lambda path: ".tmp-" not in path.name and is_dir(path))
    with pytest.raises(ValueError, match="No checkpoint .* must be on a disk that all machines share"):
        Run().save(tmp_path)
