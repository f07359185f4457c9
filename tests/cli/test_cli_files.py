"""Small files."""

import os

import pytest

from hope_hf.cli.files import read_small


def test_a_small_file_is_read(tmp_path):
    (tmp_path / "a").write_text("Größe", encoding="utf-8")
    assert read_small(tmp_path / "a") == "Größe"


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
    (tmp_path / "a").write_bytes(b"x" * 11)
    assert read_small(tmp_path / "a", most=11)
    with pytest.raises(ValueError, match="more than 10 bytes"):
        read_small(tmp_path / "a", most=10)
