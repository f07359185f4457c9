"""What computes: the CPU's threads, the device of `--device`, and whether a memory is full."""

import os
import re
import statistics
import time
from pathlib import Path

import torch

from .process import first_line, is_launched, local_processes, warn_once


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
    return None if wish == "1" and is_launched() and not _launcher_has_threads() else int(wish)


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


def memory_is_full(error: BaseException) -> bool:
    """Whether `error` means that the CPU or a GPU is out of memory."""
    # torch has no exception type for this on the CPU.
    on_cpu = re.search("can't allocate memory|Storage size calculation overflowed", str(error))
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or bool(on_cpu)
