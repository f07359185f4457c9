"""What surrounds the work of every program: warnings as sentences, output that cannot fail, and Ctrl-C."""

import errno
import functools
import os
import signal
import sys
from collections.abc import Callable
from contextlib import contextmanager
from typing import TextIO

from hope_hf.interrupt import STATUS, while_importing

from .process import complain, print_anything, warn_in_sentences

# The reader of a pipe, or the terminal, is gone.
_NO_READER = (errno.EPIPE, errno.EIO)


def program(main: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """Decorates the `main(argv)` of a program, which returns the exit status: 130 after Ctrl-C."""

    @functools.wraps(main)
    def run(argv: list[str]) -> int:
        warn_in_sentences()
        print_anything()
        outlive_readers()
        if signal.getsignal(signal.SIGINT) is while_importing:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return main(argv)
        except KeyboardInterrupt:
            return complain("stopped by Ctrl-C.", STATUS)

    return run


def outlive_readers():
    """Let the program go on where nobody reads its standard output and error any more."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            setattr(sys, name, Outliving(stream))


class Outliving:
    """A stream of text to a file descriptor. What is written after its reader has gone goes nowhere."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str):
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """As the stream's."""
        with self._without_reader():
            self._stream.write(text)
        return len(text)

    def flush(self):
        """As the stream's."""
        with self._without_reader():
            self._stream.flush()

    @contextmanager
    def _without_reader(self):
        try:
            yield
        except OSError as error:
            if error.errno not in _NO_READER:
                raise
            # The descriptor itself: libraries and child processes write to it, too.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
