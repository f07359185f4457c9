"""The frame of every program: warnings as sentences, output that cannot fail, progress, Ctrl-C."""

import errno
import functools
import gc
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from typing import TextIO

from hope_hf.interrupt import IS_PROGRAM, STATUS, while_importing

from .process import accept_any_character, drop_stray_ranks, is_first_process, print_error, warn_in_sentences

# Errors of a write after the reader of a pipe, or the terminal, is gone.
_NO_READER = (errno.EPIPE, errno.EIO)
_STREAMS = {"stdout": "standard output", "stderr": "standard error"}
# Seconds between two lines of progress in a log file.
LOG_SECONDS = 20.0


def program(main: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """Decorates the `main(argv)` of a program, which returns the exit status: 130 after Ctrl-C, 2 after a ValueError.

    A ValueError is one sentence for the user; any other exception is a bug or machine failure and keeps its traceback.
    """

    @functools.wraps(main)
    def run(argv: list[str]) -> int:
        warn_in_sentences()
        accept_any_character()
        ignore_broken_pipe()
        drop_stray_ranks()
        if signal.getsignal(signal.SIGINT) is while_importing:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return main(argv)
        except ValueError as error:
            return print_error(error, 2)
        except KeyboardInterrupt:
            return print_error("stopped by Ctrl-C.", STATUS)

    return run


@contextmanager
def importing() -> Iterator[None]:
    """For a program's `main`, which reads its flags before it imports torch and transformers.

    Inside, Ctrl-C ends the program at once: a library that is half imported may make another error of it. No garbage
    is collected, and what was imported never is: looking through it took a sixth of the time.
    """
    if not IS_PROGRAM or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, while_importing)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        signal.signal(signal.SIGINT, signal.default_int_handler)


def ignore_broken_pipe():
    """Let the program go on after the reader of its standard output or error has ended, or the log's disk is full."""
    for name, shown in _STREAMS.items():
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            setattr(sys, name, DroppingStream(stream, shown))


class DroppingStream:
    """A text stream to a file descriptor. After a failed write all text is dropped: what is printed is not the work.

    The other one of standard output and error then says so, unless a reader has gone, which `| head` does on purpose.
    `lost` is then the reason, else None.
    """

    def __init__(self, stream: TextIO, name: str = "standard output"):
        """`name`: what it is for the user."""
        self._stream, self._name = stream, name
        self.lost: str | None = None

    def __getattr__(self, name: str):
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write to the stream; returns the number of characters."""
        with self._outlived():
            self._stream.write(text)
        return len(text)

    def flush(self):
        """Flush the stream."""
        with self._outlived():
            self._stream.flush()

    @contextmanager
    def _outlived(self):
        try:
            yield
        except OSError as error:
            # The descriptor itself is replaced: libraries and child processes write to it, too.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            if error.errno not in _NO_READER:
                self._say(error)

    def _say(self, error: OSError):
        self.lost = error.strerror
        other = sys.stderr if self is sys.stdout else sys.stdout
        print(
            f"warning: {self._name} cannot be written ({error.strerror}): the program goes on, what it prints there "
            "is lost.",
            file=other,
            flush=True,
        )


def printed(status: int = 0) -> int:
    """The exit status of a command whose work is its standard output: 1, with a sentence, if that was not written.

    `status`: that of the command otherwise.
    """
    sys.stdout.flush()
    lost = getattr(sys.stdout, "lost", None)
    if lost is None:
        return status
    return print_error(
        f"the result was not written to standard output ({lost}): free space there, then repeat the command.",
        max(status, 1),
    )


class LogLines(io.TextIOBase):
    """A file for progress bars in a log: it writes one of the drawn lines to stderr every `LOG_SECONDS`.

    It may replace `sys.stderr`, since it keeps the stderr that existed when it was made.
    """

    def __init__(self, wanted: str = " of ", keeps_others: bool = False):
        """`wanted`: text that every bar contains; other text is dropped or, with `keeps_others`, written as it is."""
        self._wanted, self._keeps_others = wanted, keeps_others
        self._stderr, self._last = sys.stderr, time.monotonic()
        self._is_within_line = False

    def write(self, text: str) -> int:
        """Takes a bar as tqdm draws it, from a carriage return on."""
        line = text.strip()
        if self._wanted not in line:
            # tqdm ends a bar with a lone line break, which is dropped; one that ends another text's line is kept.
            if self._keeps_others and (line or self._is_within_line):
                self._stderr.write(text)
                self._is_within_line = not text.endswith("\n")
        elif time.monotonic() - self._last >= LOG_SECONDS:
            self._last = time.monotonic()
            print(line.splitlines()[-1], file=self._stderr, flush=True)
        return len(text)


@contextmanager
def lines_of_datasets(name: str) -> Iterator[None]:
    """Inside, a `datasets` bar of this name writes lines into a log; on a terminal it is drawn as usual.

    Only the first process shows it.
    """
    # Slow to import.
    import datasets

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
