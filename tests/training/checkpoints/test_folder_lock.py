"""Two processes never train in one folder, and a killed one leaves no lock."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training_runs import EVERY_FOURTH, LLAMA, ROOT, forget_the_end, read_rows

from hope_hf.common import folder_lock
from hope_hf.common.folder_lock import LOCK_FILE, FolderLock

SENTENCE = "is in use, another process writes to it: wait for it or choose another folder."


def contents(folder: Path) -> dict:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def is_held(folder: Path) -> bool:
    other = FolderLock(folder)
    try:
        other.acquire()
    except ValueError as error:
        assert SENTENCE in str(error)
        return True
    other.release()
    return False


@pytest.fixture
def lock(tmp_path):
    """A lock on `tmp_path/a`, as if held by another process."""
    lock = FolderLock(tmp_path / "a")
    lock.acquire()
    yield lock
    lock.release()


def program(corpus, folder, *flags) -> list[str]:
    small = ["--block_size", "32", "--per_device_train_batch_size", "4", "--cpu_threads", "1", "--logging_steps", "1"]
    return [str(ROOT / "run_clm.py"), *LLAMA, *corpus, *small, "--output_dir", str(folder), *flags]


def start(command) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_lock_whose_folder_was_deleted_leaves_that_of_the_next_run(tmp_path):
    ours, theirs = FolderLock(tmp_path / "a"), FolderLock(tmp_path / "a")
    ours.acquire()
    shutil.rmtree(tmp_path / "a")
    theirs.acquire()
    ours.release()
    assert is_held(tmp_path / "a")
    theirs.release()


@pytest.mark.processes
@pytest.mark.usefixtures("warm_python")
def test_of_two_processes_started_at_once_one_trains(tmp_path, corpus):
    command = [sys.executable, *program(corpus, tmp_path / "a", "--max_train_steps", "1000000")]
    both = [start(command), start(command)]
    try:
        end = time.monotonic() + 150
        while all(process.poll() is None for process in both) and time.monotonic() < end:
            time.sleep(0.1)
        winner, loser = sorted(both, key=lambda process: process.poll() is not None)
        assert loser.poll() == 2 and SENTENCE in loser.communicate()[0]
        while not read_rows(tmp_path / "a") and winner.poll() is None:
            time.sleep(0.1)
        winner.send_signal(signal.SIGTERM)
        output, _ = winner.communicate(timeout=60)
        assert winner.returncode == 0 and "run the same command again" in output
    finally:
        for process in both:
            process.kill()
    steps = [row["step"] for row in read_rows(tmp_path / "a")]
    assert steps == list(range(1, len(steps) + 1))
    assert not (tmp_path / "a" / LOCK_FILE).exists()


HOLDER = """
import os, runpy, subprocess, sys, time
lock = runpy.run_path(sys.argv[1])["FolderLock"](sys.argv[2])
lock.acquire()
started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], close_fds=False)
forked = os.fork()
if not forked:
    # a child that unwinds its parent's stack gives nothing up
    lock.release()
    time.sleep(600)
time.sleep(1)
print(started.pid, forked, flush=True)
time.sleep(600)
"""


@pytest.mark.processes
def test_a_killed_holder_leaves_no_lock_whatever_its_children_do(tmp_path):
    folder = tmp_path / "a"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, folder_lock.__file__, str(folder)], stdout=subprocess.PIPE, text=True
    )
    children = []
    try:
        children = [int(word) for word in holder.stdout.readline().split()]
        assert len(children) == 2 and is_held(folder)
        holder.kill()
        holder.wait()
        for child in children:
            os.kill(child, 0)
        assert not is_held(folder)
    finally:
        holder.kill()
        for child in children:
            os.kill(child, signal.SIGKILL)


def test_a_folder_that_was_made_for_nothing_disappears_and_one_in_use_stays(tmp_path):
    deep = tmp_path / "runs" / "a"
    lock = FolderLock(deep)
    lock.acquire()
    assert is_held(deep)
    lock.release()
    assert list(tmp_path.iterdir()) == []
    lock.acquire()
    (deep / "run.json").touch()
    lock.release()
    lock.release()
    assert list(deep.iterdir()) == [deep / "run.json"]


def test_a_lock_on_a_file_that_was_removed_meanwhile_does_not_count(tmp_path, lock, monkeypatch):
    def release_first(descriptor, operation):
        lock.release()
        flock(descriptor, operation)

    flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", release_first)
    late = FolderLock(tmp_path / "a")
    late.acquire()
    monkeypatch.undo()
    assert is_held(tmp_path / "a")
    late.release()


def test_a_disk_without_locks_warns(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock = FolderLock(tmp_path / "a")
    with pytest.warns(UserWarning, match="without locks .*: a second process could write to it, too"):
        lock.acquire()
    lock.release()
    assert not (tmp_path / "a").exists()


def test_an_interrupted_run_waits_for_who_trains_in_it_and_a_complete_one_needs_not(
    run, trained, tmp_path, capsys, lock
):
    assert run("a")[0] == 2 and SENTENCE in capsys.readouterr().err
    lock.release()
    folder = trained("llama").copy(tmp_path / "a")
    lock.acquire()
    assert run("a", *EVERY_FOURTH)[0] == 0 and "is complete" in capsys.readouterr().out
    forget_the_end(folder, 8)
    before = contents(tmp_path)
    assert run("a", *EVERY_FOURTH)[0] == 2 and SENTENCE in capsys.readouterr().err
    assert contents(tmp_path) == before
    lock.release()
    assert run("a", *EVERY_FOURTH)[0] == 0 and not (folder / LOCK_FILE).exists()


def test_a_run_that_ends_while_another_waits_for_its_lock_is_not_repeated(run, trained, tmp_path, monkeypatch, capsys):
    folder = trained("llama").copy(tmp_path / "a")
    complete = (folder / "run.json").read_text()
    (folder / "run.json").write_text(json.dumps({**json.loads(complete), "complete": False}))
    acquire = FolderLock.acquire

    def finish_first(lock):
        (folder / "run.json").write_text(complete)
        acquire(lock)

    monkeypatch.setattr(FolderLock, "acquire", finish_first)
    before = (folder / "metrics.jsonl").stat().st_mtime_ns
    assert run("a", *EVERY_FOURTH)[0] == 0 and "is complete" in capsys.readouterr().out
    assert (folder / "metrics.jsonl").stat().st_mtime_ns == before
