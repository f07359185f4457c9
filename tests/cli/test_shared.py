"""What all programs share: small files, output that takes any text, pictures that never end a run."""

import io
import os
import sys

import pytest

from hope_hf.cli.files import read_small
from hope_hf.cli.pictures import as_label, draw_or_warn
from hope_hf.cli.process import print_anything


def test_a_small_file_is_read(tmp_path):
    (tmp_path / "a").write_text("Größe", encoding="utf-8")
    assert read_small(tmp_path / "a") == "Größe"


def test_a_named_pipe_a_folder_and_a_device_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ValueError, match="no regular file"):
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


def test_any_text_can_be_printed(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="cp1252"))
    print_anything()
    print("€ 你", flush=True)
    assert written.getvalue() == b"\x80 \\u4f60\n"


@pytest.mark.parametrize("text, label", [("a", "a"), ("$a_1$", r"\$a_1\$"), ("_run", " _run")])
def test_a_label_shows_what_the_user_wrote(text, label):
    assert as_label(text) == label


def test_a_picture_that_fails_is_a_warning(tmp_path):
    def fails(path):
        raise RuntimeError("no such font")

    with pytest.warns(UserWarning, match=r"loss\.png: the picture failed \(no such font\)"):
        assert draw_or_warn(fails, tmp_path / "loss.png") is None


def test_a_picture_that_succeeds_is_named(tmp_path):
    assert draw_or_warn(lambda path: path.write_bytes(b""), tmp_path / "loss.png") == tmp_path / "loss.png"
