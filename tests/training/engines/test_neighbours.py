"""A process whose neighbour ends does not keep waiting in its collective."""

import subprocess
import sys
import time

import pytest

from hope_hf.training.engines import neighbours

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells")

# A neighbour that ends soon, and a loop that runs for `seconds` without noticing.
WATCHES = """
import subprocess, sys, time
from hope_hf.training.engines import neighbours

neighbours.PATIENCE = 0.5
other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
with neighbours.NeighbourWatch([other.pid]):
    other.{end}()
    time.sleep({seconds})
print("after the loop")
other.kill()
other.wait()
"""


def watch(end: str, seconds: float) -> subprocess.CompletedProcess:
    program = WATCHES.format(end=end, seconds=seconds)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)


@pytest.mark.processes
@pytest.mark.usefixtures("warm_python")
def test_hanging_beside_a_process_that_is_gone_ends_with_a_sentence():
    start = time.monotonic()
    ended = watch("kill", 60)
    assert ended.returncode == 1
    assert "error: another process of this run is gone (process " in ended.stderr
    assert "after the loop" not in ended.stdout
    assert time.monotonic() - start < 50


@pytest.mark.processes
@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("end, seconds", [("poll", 1.5), ("kill", 0.1)], ids=["alive", "noticed"])
def test_who_has_no_dead_neighbour_or_notices_by_itself_goes_on(end, seconds):
    ended = watch(end, seconds)
    assert (ended.returncode, ended.stdout, "gone" in ended.stderr) == (0, "after the loop\n", False)


def test_neighbours_are_those_of_the_same_machine_and_container(monkeypatch):
    monkeypatch.setattr(neighbours.os, "getpid", lambda: 7)

    def everyone(own):
        (((machine, container), _),) = own
        return [*own, ((machine, container), 8), (("another", container), 9), ((machine, "pid:[1]"), 10)]

    monkeypatch.setattr(neighbours, "gather_object", everyone)
    assert neighbours.find_neighbours() == [8]
