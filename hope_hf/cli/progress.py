"""Progress of long work in a log file: a line from time to time, where a terminal would show a bar."""

import io
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import datasets

from .process import is_first_process

LOG_SECONDS = 20.0


class LogLines(io.TextIOBase):
    """A file for bars that go to a log: writes one of the drawn lines to stderr every `LOG_SECONDS`.

    It may take the place of stderr, where it is made before.
    """

    def __init__(self, wanted: str = " of ", keeps_others: bool = False):
        """`wanted`: what a bar's text contains; other text is dropped, or goes to stderr as it is."""
        self._wanted, self._keeps_others = wanted, keeps_others
        self._stderr, self._last = sys.stderr, time.monotonic()
        self._is_within_line = False

    def write(self, text: str) -> int:
        """Takes a bar as tqdm draws it, from a carriage return on."""
        line = text.strip()
        if self._wanted not in line:
            # tqdm ends a bar with a line break alone; others end their own lines with it.
            if self._keeps_others and (line or self._is_within_line):
                self._stderr.write(text)
                self._is_within_line = not text.endswith("\n")
        elif time.monotonic() - self._last >= LOG_SECONDS:
            self._last = time.monotonic()
            print(line.splitlines()[-1], file=self._stderr, flush=True)
        return len(text)


@contextmanager
def lines_of_datasets(name: str) -> Iterator[None]:
    """In the body a bar of `datasets` with this name writes lines into a log; on a terminal it is drawn as ever.

    Only the first process shows it.
    """
    if sys.stderr.isatty() or not is_first_process() or datasets.config.HF_DATASETS_DISABLE_PROGRESS_BARS:
        yield
        return
    disabled = datasets.are_progress_bars_disabled()
    datasets.enable_progress_bars()
    try:
        with redirect_stderr(LogLines(name, keeps_others=True)):
            yield
    finally:
        if disabled:
            datasets.disable_progress_bars()
