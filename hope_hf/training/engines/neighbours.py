"""If another process of this machine ends, report it and exit, even if a collective still blocks.

A killed process closes its connections, and the collectives of the others fail. gloo's do not always: if the process
ends between two checks of its connection, gloo waits until `--ddp_timeout`, in an all-reduce or in a send.
"""

import os
import select
import socket
import sys
import threading

from accelerate.utils import gather_object

from hope_hf.cli.process import complain

from .guard import gone

PATIENCE = 5.0
"""Seconds in which the collective may fail by itself: its error says more."""


class NeighbourWatch:
    """During training, ends this process soon after one of `neighbours` ends; a context manager."""

    def __init__(self, neighbours: list[int]):
        """`neighbours`: process ids; empty except on Linux."""
        self._neighbours = neighbours

    def __enter__(self):
        if self._neighbours:
            self._leave = os.eventfd(0)
            self._processes = {}
            for pid in self._neighbours:
                try:
                    self._processes[os.pidfd_open(pid)] = pid
                except OSError:
                    # Some sandboxes forbid it.
                    continue
            self._thread = threading.Thread(target=self._wait, name="neighbours", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_):
        if self._neighbours:
            os.eventfd_write(self._leave, 1)
            self._thread.join()
            for descriptor in (self._leave, *self._processes):
                os.close(descriptor)

    def _wait(self):
        ends = select.poll()
        for descriptor in (self._leave, *self._processes):
            ends.register(descriptor, select.POLLIN)
        ended = [self._processes[descriptor] for descriptor, _ in ends.poll() if descriptor in self._processes]
        for descriptor in self._processes:
            ends.unregister(descriptor)
        if ended and not ends.poll(1000 * PATIENCE):
            complain(gone(f"process {ended[0]} has ended"), 1, everywhere=True)
            # The main thread may never return.
            os._exit(1)


def find_neighbours() -> list[int]:
    """Ids of the run's other processes on this machine and in this container. All processes call it.

    Empty except on Linux: only there can a process be told of the end of another that is not its child.
    """
    if not sys.platform.startswith("linux"):
        return []
    place = socket.gethostname(), os.readlink("/proc/self/ns/pid")
    everyone = gather_object([(place, os.getpid())])
    return [pid for other, pid in everyone if other == place and pid != os.getpid()]
