"""The lock that a killed compile of DeepSpeed's operators leaves, for which torch would wait forever."""

import os
import time

import pytest

from hope_hf.training.engines import cpu
from hope_hf.training.engines.cpu import free_stale_lock


@pytest.fixture
def lock(tmp_path):
    """A lock as a compile leaves it that was killed an hour ago."""
    (tmp_path / "lock").touch()
    hour_ago = time.time() - 3600
    os.utime(tmp_path, (hour_ago, hour_ago))
    return tmp_path / "lock"


def test_the_lock_of_a_killed_compile_is_removed_and_named(lock):
    with pytest.warns(UserWarning, match=f"{lock} was left by a compile that was killed"):
        free_stale_lock(lock.parent)
    assert not lock.exists()


def test_the_lock_of_a_compile_that_runs_is_left(lock):
    """torch itself opens it and writes nothing."""
    with lock.open():
        free_stale_lock(lock.parent)
    assert lock.exists()


def test_another_machine_may_still_compile_in_a_shared_folder(lock, monkeypatch):
    os.utime(lock.parent)
    monkeypatch.setattr(cpu, "QUIET", 0.2)
    monkeypatch.setattr(cpu.time, "sleep", lambda seconds: os.utime(lock.parent, (0, 0)))
    with pytest.warns(UserWarning) as told:
        free_stale_lock(lock.parent)
    assert "waits until another machine has compiled" in str(told[0].message) and "delete it" in str(told[0].message)
    assert not lock.exists()


def test_without_a_lock_nothing_is_said(tmp_path, recwarn):
    free_stale_lock(tmp_path)
    assert not recwarn.list
