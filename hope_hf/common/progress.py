"""Progress bars of programs."""

import sys
from collections.abc import Iterable

from tqdm.auto import tqdm

from .program import LOG_SECONDS, LogLines


def show_progress() -> bool:
    """Whether to draw bars: only on a terminal, since they make a log file unreadable."""
    return sys.stderr.isatty()


def progress(items: Iterable | None, name: str, total: int | None = None) -> tqdm:
    """A bar over `items`, or one of `total` units to be updated; a log gets a line every `LOG_SECONDS` instead."""
    if show_progress():
        return tqdm(items, name, total, leave=False)
    words = "{desc}: {n_fmt} of {total_fmt}, {elapsed}"
    # Checked after every unit, so that a line is written as soon as it is due.
    return tqdm(items, name, total, file=LogLines(), mininterval=0, miniters=1, delay=LOG_SECONDS, bar_format=words)
