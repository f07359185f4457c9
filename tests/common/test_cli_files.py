"""Small files."""

import errno
import os
import stat

import pytest

from hope_hf.common.files import flush_folder, read_small, replace_text


def test_a_named_pipe_a_folder_and_a_device_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ValueError, match="not a regular file"):
            read_small(path)
    with pytest.raises(OSError):
        read_small(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_small(tmp_path / "none")


def test_a_small_file_has_a_limit(tmp_path):
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbf" + b"x" * 8)
    # A byte order mark, as editors write it, is no part of the text.
    assert read_small(tmp_path / "a") == "x" * 8
    assert read_small(tmp_path / "a", most=11)
    with pytest.raises(ValueError, match="more than 10 bytes"):
        read_small(tmp_path / "a", most=10)


def refuse(monkeypatch, number: int, kind=stat.S_ISDIR):
    """`os.fsync` of folders, or another `kind` of file, fails as on some mounted disks."""
    fsync = os.fsync

    def refusing(descriptor: int):
        if kind(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refusing)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_a_disk_may_be_unable_to_flush_folders_and_not_files(tmp_path, monkeypatch, number):
    with monkeypatch.context() as patch:
        refuse(patch, number)
        flush_folder(tmp_path)
    refuse(monkeypatch, number, stat.S_ISREG)
    with pytest.raises(OSError) as caught:
        replace_text(tmp_path / "a", "text")
    assert caught.value.errno == number and not list(tmp_path.iterdir())


def test_a_full_disk_is_no_such_disk(tmp_path, monkeypatch):
    refuse(monkeypatch, errno.ENOSPC)
    with pytest.raises(OSError, match="No space"):
        flush_folder(tmp_path)
