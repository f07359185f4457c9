"""Process setup of every program: threads, and warnings and errors as sentences."""

import ctypes
import io
import os
import re
import signal
import statistics
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path

import torch
from huggingface_hub import constants
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

# transformers fails on broken files with most of Python's own errors. A RecursionError is a RuntimeError.
MISTAKES = (
    OSError, ValueError, TypeError, ArithmeticError, ImportError, AttributeError, LookupError, RuntimeError,
    StrictDataclassError, SafetensorError,
)  # fmt: skip

_format_warning = warnings.formatwarning


def set_up_cpu(threads: int | None, warns: bool = False):
    """Use `threads` threads (None: `default_threads()`, or fewer if other programs use the cores); flush denormals.

    `warns`: whether fewer threads are worth a warning. It names --cpu_threads, which the program must have.
    """
    torch.set_num_threads(threads or default_threads())
    if threads is None and threads_of_user() is None:
        _reduce_threads_if_busy(warns)
    # A trained memory holds many denormals: without this its steps take 2.5 times as long on a CPU.
    torch.set_flush_denormal(True)


def choose_device(name: str | None) -> torch.device:
    """`--device`, or the accelerator, or the CPU. Raises ValueError for a device that does not exist."""
    # A build for CUDA names CUDA on a machine without a driver, too.
    default = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if name is None:
        return default
    kinds = dict.fromkeys(("cpu", default.type))
    try:
        # On `meta` and some other devices nothing can be computed.
        if torch.device(name).type not in kinds:
            raise ValueError(f"--device {name} cannot be used: this machine has {' and '.join(kinds)}.")
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name} cannot be used, try --device cpu: {first_line(error)}") from None
    return torch.device(name)


def default_threads() -> int:
    """OMP_NUM_THREADS if the user has set it, or this process's share of the cores that it may use."""
    wished = threads_of_user()
    if wished is not None:
        return wished
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_processes())


def local_processes() -> int:
    """Processes of the run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _reduce_threads_if_busy(warns: bool):
    """Halve the threads while fewer of them compute faster: all threads wait for one whose core is busy."""
    first = threads = torch.get_num_threads()
    while threads > 1 and _slowdown(threads, threads // 2) > 1.5:
        threads //= 2
    torch.set_num_threads(threads)
    if warns and threads < first:
        warn_once(
            f"Other programs use the cores, so {threads} thread(s) compute faster than {first}: this run uses "
            f"{threads} (--cpu_threads)."
        )


def _slowdown(threads: int, fewer: int) -> float:
    """Time with `threads` threads divided by the time with `fewer`: the median of short trials, 0.1 s in total."""
    matrix = torch.ones(256, 1024)
    ratios = []
    for _ in range(5):
        seconds = []
        for number in (threads, fewer):
            torch.set_num_threads(number)
            start = time.perf_counter()
            for _ in range(5):
                (matrix @ matrix.T).exp_().sum()
            seconds.append(time.perf_counter() - start)
        ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios)


def threads_of_user() -> int | None:
    """OMP_NUM_THREADS if the user has set it, else None.

    Launchers export OMP_NUM_THREADS=1 if it is not set, which would leave the other cores idle.
    """
    wish = os.environ.get("OMP_NUM_THREADS", "")
    if not wish.isdecimal() or int(wish) < 1:
        return None
    return None if wish == "1" and _is_launched() and not _launcher_has_threads() else int(wish)


def _launcher_has_threads() -> bool:
    """Linux: whether the launcher itself was started with OMP_NUM_THREADS or a flag for threads; else False."""
    launcher = Path(f"/proc/{os.getppid()}")
    try:
        variables = (launcher / "environ").read_bytes().split(b"\0")
        words = (launcher / "cmdline").read_bytes().replace(b"-", b"_").split(b"\0")
    except OSError:
        return False
    return any(variable.startswith(b"OMP_NUM_THREADS=") for variable in variables) or any(
        word.startswith(b"__num_cpu_threads_per_process") for word in words
    )


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
    if _is_launched():
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


def memory_is_full(error: BaseException) -> bool:
    """Whether `error` means that the CPU or a GPU is out of memory."""
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
