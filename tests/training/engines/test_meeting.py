"""Processes that a launcher starts again meet each other, and one that waits for the others says so."""

import time

import pytest
from torch.distributed import TCPStore, rendezvous

from hope_hf.training.engines import meeting
from hope_hf.training.engines.meeting import long_waits_told, meeting_place


@pytest.fixture
def launcher(monkeypatch):
    """The store of a launcher that goes on while it starts processes again, and the variables that these have."""
    store = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    variables = {
        "RANK": "0", "WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return store


def test_processes_started_again_do_not_read_addresses_of_dead_ones(launcher, monkeypatch):
    for attempt in ("0", "1", "2"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        store, rank, processes = next(rendezvous(meeting_place() or "env://"))
        assert (rank, processes) == (0, 1)
        assert not store.check(["address"])
        store.set("address", attempt)


def test_one_of_several_launchers_meets_as_torch_does(launcher, monkeypatch):
    """Each of them counts its own restarts."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert meeting_place() is None


def test_a_long_wait_for_the_others_is_told_once(launcher, monkeypatch, capfd):
    monkeypatch.setattr(meeting, "PATIENCE", 0.01)
    with long_waits_told(1800.0):
        time.sleep(0.2)
    told = capfd.readouterr().err
    assert told.count("\n") == 1
    assert f"127.0.0.1:{launcher.port}" in told and "--ddp_timeout (1800 s)" in told and "repeat the command" in told
    monkeypatch.setattr(meeting, "PATIENCE", 0.3)
    with long_waits_told(1800.0):
        pass
    time.sleep(0.4)
    assert not capfd.readouterr().err
