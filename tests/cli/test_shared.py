"""What all programs share: small files, output that takes any text, pictures that never end a run."""

import io
import os
import sys
import warnings

import pytest
import torch

from hope_hf.cli import process
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


@pytest.mark.parametrize("free, threads", [(8, 8), (3, 2), (0, 1)])
def test_threads_give_way_to_other_programs(monkeypatch, free, threads):
    taken = [0]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(process, "default_threads", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: taken[-1])
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    # One that has no core makes all wait.
    monkeypatch.setattr(process, "_slowdown", lambda threads, fewer: 20.0 if threads > free else 0.6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        process.set_up_cpu(None)
    assert taken[-1] == threads
    said = [str(warning.message) for warning in caught]
    assert (said == []) if threads == 8 else ("compute faster than 8" in said[0] and "(--cpu_threads)" in said[0])


def test_threads_that_the_user_chose_stay(monkeypatch):
    monkeypatch.setattr(process, "_slowdown", None)
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    try:
        for wish, threads in ((3, 3), (None, 2)):
            process.set_up_cpu(wish)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_the_slowdown_is_measured():
    before = torch.get_num_threads()
    try:
        assert process._slowdown(1, 1) > 0
    finally:
        torch.set_num_threads(before)
