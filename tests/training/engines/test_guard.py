"""Launches that waste GPUs, share one or mix code are refused; a process whose neighbour ends does not wait for it."""

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from hope_hf.training.engines import guard
from hope_hf.training.engines.guard import check_devices, check_same_on_all, code_fingerprint, gone, lost_process


@pytest.fixture
def gpus(monkeypatch):
    """Pretend that a number of GPUs is visible; other variables of the machine have no effect."""
    for name in ("CI", guard.ALLOW_SINGLE_RANK):
        monkeypatch.delenv(name, raising=False)

    def pretend(count: int, bf16: bool = True):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old GPU")

    return pretend


def others_say(monkeypatch, *others):
    monkeypatch.setattr(guard, "gather_object", lambda own: [*own, *others])


def accelerator(device="cuda:0", num_processes=1, mixed_precision="no"):
    return SimpleNamespace(device=torch.device(device), num_processes=num_processes, mixed_precision=mixed_precision)


def test_one_process_does_not_leave_gpus_idle(gpus, monkeypatch):
    gpus(8)
    others_say(monkeypatch)
    with pytest.raises(ValueError, match="8 GPUs are visible .* --num_processes 8 -m hope_hf train"):
        check_devices(accelerator())
    monkeypatch.setenv("CI", "true")
    with pytest.warns(UserWarning, match="8 GPUs are visible"):
        check_devices(accelerator())
    monkeypatch.setenv("CI", "false")
    with pytest.raises(ValueError, match="8 GPUs"):
        check_devices(accelerator())
    monkeypatch.setenv(guard.ALLOW_SINGLE_RANK, "1")
    check_devices(accelerator())


def test_bf16_is_refused_where_it_would_be_emulated(gpus, monkeypatch):
    gpus(1, bf16=False)
    others_say(monkeypatch)
    check_devices(accelerator())
    with pytest.raises(ValueError, match="bf16 is not supported by Old GPU"):
        check_devices(accelerator(mixed_precision="bf16"))


@pytest.mark.parametrize("name", ["code", "flags", "data"])
def test_the_rank_that_differs_is_named(monkeypatch, name):
    own = {"flags": "f", "data": "d"}
    same = {"code": code_fingerprint(), **own, "host": "elsewhere"}
    others_say(monkeypatch, same)
    check_same_on_all(accelerator("cpu", 2), own)
    others_say(monkeypatch, same, same | {name: "another"})
    with pytest.raises(ValueError, match=f"Rank 2 on elsewhere has other {name} than rank 0"):
        check_same_on_all(accelerator("cpu", 3), own)


def test_a_lost_connection_is_told_from_other_errors():
    gloo = "[/sources/gloo/transport/tcp/pair.cc:53] Read error [::1]:4021: Connection reset by peer. This is.\nX"
    assert lost_process(RuntimeError(gloo)) == "Read error [::1]:4021: Connection reset by peer"
    assert lost_process(torch.distributed.DistBackendError("NCCL communicator was aborted")) is not None
    assert lost_process(RuntimeError("The size of tensor a (3) must match")) is None
    assert lost_process(None) is None


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells")

# A neighbour that ends soon, and a loop that runs for `seconds` without noticing.
WATCHES = """
import subprocess, sys, time
from hope_hf.training.engines import guard

guard.PATIENCE = 0.5
other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
with guard.NeighbourWatch([other.pid]):
    other.{end}()
    time.sleep({seconds})
print("after the loop")
other.kill()
other.wait()
"""


def watch(end: str, seconds: float) -> subprocess.CompletedProcess:
    program = WATCHES.format(end=end, seconds=seconds)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)


@linux
@pytest.mark.processes
@pytest.mark.usefixtures("warm_python")
def test_hanging_beside_a_process_that_is_gone_ends_with_a_sentence():
    start = time.monotonic()
    ended = watch("kill", 60)
    assert ended.returncode == 1
    assert "error: another process of this run is gone (process " in ended.stderr
    assert "after the loop" not in ended.stdout
    assert time.monotonic() - start < 50


@linux
@pytest.mark.processes
@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("end, seconds", [("poll", 1.5), ("kill", 0.1)], ids=["alive", "noticed"])
def test_who_has_no_dead_neighbour_or_notices_by_itself_goes_on(end, seconds):
    ended = watch(end, seconds)
    assert (ended.returncode, ended.stdout, "gone" in ended.stderr) == (0, "after the loop\n", False)


@linux
def test_neighbours_are_those_of_the_same_machine_and_container(monkeypatch):
    monkeypatch.setattr(guard.os, "getpid", lambda: 7)

    def everyone(own):
        (((machine, container), _),) = own
        return [*own, ((machine, container), 8), (("another", container), 9), ((machine, "pid:[1]"), 10)]

    monkeypatch.setattr(guard, "gather_object", everyone)
    assert guard.find_neighbours() == [8]


def test_an_address_of_a_dead_process_is_not_blamed_on_the_timeout():
    """gloo's words after a restart whose store still holds the addresses of before."""
    told = gone("Gloo connectFullMesh failed with timed out connecting: SO_ERROR: Connection refused")
    assert "cannot be reached" in told and "end all launchers, then repeat the command" in told
    assert "--ddp_timeout" not in told and "--ddp_timeout" in gone("Timed out waiting 1800000ms for recv operation")


def test_more_processes_than_gpus_are_refused_before_they_talk(gpus, monkeypatch):
    gpus(2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr(guard, "gather_object", None)
    with pytest.raises(ValueError, match=r"3 processes share 2 GPU\(s\)"):
        check_devices(accelerator(num_processes=3))


def test_two_processes_do_not_share_a_gpu(gpus, monkeypatch):
    gpus(2)
    own = accelerator(num_processes=3)
    host = guard.socket.gethostname()
    others_say(monkeypatch, f"cuda:1 of {host}", "cuda:0 of another")
    check_devices(own)
    others_say(monkeypatch, f"cuda:1 of {host}", f"cuda:0 of {host}")
    with pytest.raises(ValueError, match="Ranks 0, 2 share cuda:0"):
        check_devices(own)
