"""Set-up of every program's process: output that takes any text, and threads."""

import io
import sys
import warnings

import pytest
import torch

from hope_hf.common import devices
from hope_hf.common.devices import choose_device
from hope_hf.common.process import accept_any_character


def test_any_text_can_be_printed(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="cp1252"))
    accept_any_character()
    print("€ 你", flush=True)
    assert written.getvalue() == b"\x80 \\u4f60\n"


def test_a_cuda_build_without_a_driver_computes_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(None) == torch.device("cpu")
    with pytest.raises(ValueError, match="--device cuda cannot be used: this machine has cpu"):
        choose_device("cuda")


@pytest.mark.parametrize("free, threads, says", [(8, 8, True), (3, 2, True), (0, 1, False)])
def test_threads_give_way_to_other_programs(monkeypatch, free, threads, says):
    taken = [0]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(devices, "default_threads", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: taken[-1])
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    # One that has no core makes all wait.
    monkeypatch.setattr(devices, "_slowdown", lambda threads, fewer: 20.0 if threads > free else 0.6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        devices.set_up_cpu(None, says)
    assert taken[-1] == threads
    said = [str(warning.message) for warning in caught]
    assert len(said) == (says and threads < 8)
    assert all("--cpu_threads" in sentence for sentence in said)


def test_threads_that_the_user_chose_stay(monkeypatch):
    monkeypatch.setattr(devices, "_slowdown", None)
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    try:
        for wish, threads in ((3, 3), (None, 2)):
            devices.set_up_cpu(wish)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
