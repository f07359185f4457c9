"""Process setup of every program: threads, and warnings and errors as sentences."""

import ctypes
import io
import os
import re
import signal
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import torch

_format_warning = warnings.formatwarning


def set_up_cpu(threads: int | None):
    """Use `threads` threads, or `default_threads()`; flush denormals."""
    torch.set_num_threads(threads or default_threads())
    # A trained memory holds many denormals: without this its steps take 2.5 times as long on a CPU.
    torch.set_flush_denormal(True)


def default_threads() -> int:
    """OMP_NUM_THREADS, or this process's share of the cores that it may use.

    Launchers export OMP_NUM_THREADS=1 if it is not set, which would leave the other cores idle: 1 from a launcher is
    ignored.
    """
    wish = os.environ.get("OMP_NUM_THREADS", "")
    if wish.isdecimal() and int(wish) > (1 if _is_launched() else 0):
        return int(wish)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def launched_rank() -> str:
    """The rank that the launcher gave this process, also before an Accelerator exists."""
    return os.environ.get("RANK", "0")


def is_first_process() -> bool:
    """True on rank 0, also before an Accelerator exists."""
    return launched_rank() == "0"


def warn_once(sentence: str):
    """Warn on the first process only, of what all processes find."""
    if is_first_process():
        warnings.warn(sentence, stacklevel=2)


def warn_in_sentences():
    """Show the package's own warnings to the user as one line each, without the place in the code."""
    warnings.formatwarning = _as_sentence


def print_anything():
    """Let standard output and error take any text: a character that their encoding lacks is written as its escape.

    What a model generates is not known before, and a stream in cp1252 or ASCII would end the program with an error.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def die_with_launcher():
    """Get SIGTERM when the launcher is killed, so that no orphan keeps training in the same folder."""
    if _is_launched():
        die_with_parent()


def die_with_parent():
    """Linux: get SIGTERM when the process that started this one is killed."""
    if sys.platform.startswith("linux"):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGTERM))


def trim_memory():
    """Give freed memory back to the system: Linux's glibc keeps that of blocks below 32 MiB, as much as all of it."""
    if sys.platform.startswith("linux"):
        # Other C libraries have no such function.
        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def complain(error: Exception | str, status: int, everywhere: bool = False) -> int:
    """Print the error as one line on standard error, on rank 0 unless `everywhere`; returns `status`."""
    # An error of all processes is printed once.
    if everywhere or is_first_process():
        print(f"error: {error}", file=sys.stderr, flush=True)
    return status


def memory_is_full(error: BaseException) -> bool:
    """Whether `error` says that the CPU or a GPU is out of memory."""
    # torch has no exception type for this on the CPU.
    on_cpu = re.search("can't allocate memory|Storage size calculation overflowed", str(error))
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or bool(on_cpu)


def _is_launched() -> bool:
    return "WORLD_SIZE" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ


def _as_sentence(message, category, filename, lineno, line=None) -> str:
    # Our warnings are for the user, who does not need the place in the code; other warnings keep it.
    if category is UserWarning and Path(filename).is_relative_to(Path(__file__).parents[1]):
        return f"warning: {message}\n"
    return _format_warning(message, category, filename, lineno, line)
