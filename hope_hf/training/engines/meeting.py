"""How the processes of a run meet: those started again must not look for dead ones, and a long wait is told."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import PrefixStore, Store
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

PATIENCE = 60.0
"""Seconds until a wait is told."""
_SCHEME = "hope-restarted"


def meeting_place() -> str | None:
    """torch's `init_method` for this process; None is its default, the addresses in the environment.

    A launcher (`--max_restarts`) starts processes again beside the store of those before, where torch reads the
    addresses of the dead ones. Several launchers count their restarts apart, so only a lone one can name an attempt.
    """
    alone = os.environ.get("GROUP_WORLD_SIZE") == "1"
    return f"{_SCHEME}://" if alone and _restarts() else None


def _restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _meet_again(url: str, **options) -> Iterator[tuple[Store, int, int]]:
    """The meeting of the environment, in a part of the store that this attempt has for itself."""
    for store, rank, processes in rendezvous("env://", **options):
        yield PrefixStore(f"restart_{_restarts()}", store), rank, processes


register_rendezvous_handler(_SCHEME, _meet_again)


@contextmanager
def long_waits_told(timeout: float) -> Iterator[None]:
    """Say once after `PATIENCE` that this process still waits for the others; it gives up after `timeout` seconds."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    sentence = (
        f"warning: rank {os.environ.get('RANK')} has waited {PATIENCE:g} s for the others at {host}:{port}, and goes "
        f"on until --ddp_timeout ({timeout:g} s). If processes were killed and started again, end the launcher and "
        "repeat the command: it continues from the last checkpoint."
    )
    timer = threading.Timer(PATIENCE, print, [sentence], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
