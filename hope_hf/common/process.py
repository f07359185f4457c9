"""The process of every program: its rank, its signals, and warnings and errors as sentences."""

import ctypes
import io
import os
import signal
import sys
import warnings
from contextlib import suppress
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

# transformers fails on broken files with most of Python's own errors. A RecursionError is a RuntimeError.
MISTAKES = (
    OSError, ValueError, TypeError, ArithmeticError, ImportError, AttributeError, LookupError, RuntimeError,
    StrictDataclassError, SafetensorError,
)  # fmt: skip

_format_warning = warnings.formatwarning


def local_processes() -> int:
    """Processes of the run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def drop_stray_ranks():
    """Remove variables of a launcher's processes that no launcher has set: RANK may be that of a sweep over LoRAs.

    Launchers set WORLD_SIZE beside them. Libraries, such as accelerate and lm-eval, read the variables one by one.
    """
    if "WORLD_SIZE" not in os.environ:
        for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)


def launched_rank() -> str:
    """The rank that the launcher gave this process, also before an Accelerator exists."""
    return os.environ.get("RANK", "0") if "WORLD_SIZE" in os.environ else "0"


def is_first_process() -> bool:
    """True on rank 0, also before an Accelerator exists."""
    return launched_rank() == "0"


def warn_once(sentence: str):
    """Warn on the first process only; for warnings that all processes raise."""
    if is_first_process():
        warnings.warn(sentence, stacklevel=2)


def warn_in_sentences():
    """Show the package's own warnings to the user as one line each, without the place in the code."""
    warnings.formatwarning = _as_sentence


def accept_any_character():
    """Make standard output and error accept any text: a character that their encoding lacks is written as an escape.

    A model may generate any character, and a stream in cp1252 or ASCII would end the program with an error.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def sigterm_on_launcher_exit():
    """Get SIGTERM when the launcher is killed, so that no orphan keeps training in the same folder."""
    if is_launched():
        sigterm_on_parent_exit()


def sigterm_on_parent_exit():
    """Linux: get SIGTERM when the process that started this one is killed."""
    if sys.platform.startswith("linux"):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGTERM))


def trim_memory():
    """Return freed memory to the system: Linux's glibc keeps freed blocks below 32 MiB, which may be all of them."""
    if sys.platform.startswith("linux"):
        # Other C libraries have no such function.
        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def return_freed_memory():
    """As `trim_memory`, at once and from now on, for what is larger than 128 KiB; such allocations become slower.

    glibc raises the size from which it maps memory, up to 32 MiB, and then keeps what is freed in pieces.
    """
    if sys.platform.startswith("linux"):
        m_mmap_threshold = -3
        with suppress(AttributeError):
            ctypes.CDLL(None).mallopt(m_mmap_threshold, 1 << 17)


def go_offline():
    """Keep huggingface_hub, here and in processes started from now on, from contacting the Hub."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True


def print_error(error: Exception | str, status: int, everywhere: bool = False) -> int:
    """Print the error as one line on standard error, on rank 0 unless `everywhere`; returns `status`."""
    # An error that all processes raise is printed once.
    if everywhere or is_first_process():
        print(f"error: {error}", file=sys.stderr, flush=True)
    return status


def one_line(error: BaseException) -> str:
    """An error's message without its line breaks."""
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    if isinstance(error, KeyError):
        return f"{error} is missing"
    # A strict config wraps the message of its check in an error that names the check.
    reason = error.__cause__ if isinstance(error, StrictDataclassError) and error.__cause__ else error
    return " ".join(str(reason).split()) or type(error).__name__


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_launched() -> bool:
    """Whether a launcher, such as torchrun or accelerate, has started this process."""
    return "WORLD_SIZE" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ


def _as_sentence(message, category, filename, lineno, line=None) -> str:
    # Our warnings are for the user, who does not need the place in the code; other warnings keep it.
    if category is UserWarning and Path(filename).is_relative_to(Path(__file__).parents[1]):
        return f"warning: {message}\n"
    return _format_warning(message, category, filename, lineno, line)
