"""Measurements of a process: speed, memory, FLOPs, and fewer threads if other programs need the cores."""

import resource
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial

import torch

from hope_hf.common.gpus import GIB


class Stopwatch:
    """Seconds of training and of data loading in it; averages leave out evaluation, checkpoints and first steps."""

    WARM_UP_STEPS = 3

    def __init__(self):
        self._interval = [0.0, 0.0, 0]  # seconds, data seconds, tokens since the last log
        self._steady = [0.0, 0]  # seconds and steps, without the first steps
        self._steps = 0
        self._data = 0.0

    def step_begins(self):
        self._start, self._data = time.perf_counter(), 0.0

    @contextmanager
    def loading(self):
        """Time spent inside counts as waiting for data."""
        start = time.perf_counter()
        yield
        self._data += time.perf_counter() - start

    def step_ends(self, tokens: int) -> tuple[float, float]:
        """Returns the seconds of this step, and its seconds of waiting for data."""
        seconds = time.perf_counter() - self._start
        self._steps += 1
        for index, value in enumerate((seconds, self._data, tokens)):
            self._interval[index] += value
        if self._steps > self.WARM_UP_STEPS:
            self._steady[0] += seconds
            self._steady[1] += 1
        return seconds, self._data

    def read(self, steps_left: int) -> dict[str, float]:
        """Speed rows since the last call, and the time left."""
        seconds, data_seconds, tokens = self._interval
        steady_seconds, steady_steps = self._steady
        per_step = steady_seconds / steady_steps if steady_steps else seconds
        self._interval = [0.0, 0.0, 0]
        return {
            "train/tokens_per_second": tokens / seconds,
            "train/data_loading_percent": 100 * data_seconds / seconds,
            "train/eta_seconds": per_step * steps_left,
        }


def peak_memory_gib(device: torch.device) -> float:
    """Largest memory so far of this process: reserved by torch on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / GIB
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


def utilization_meter(device: torch.device) -> Callable[[], int] | None:
    """A function that reads a GPU's recent utilization in percent; None if it is not available.

    It is not available without a GPU or the package `nvidia-ml-py`, or on a part of a GPU. This is checked once.
    """
    if device.type != "cuda":
        return None
    read = partial(torch.cuda.utilization, device)
    try:
        read()
    # The driver has its own error types.
    except Exception:
        return None
    return read


SLOWER = 10
"""Times as slow as the fastest step."""
IN_A_ROW = 3
SHORTEST = 1.0
"""Seconds of a step that is worth it."""


class ThreadLimit:
    """Halves this process's threads after steps far slower than the fastest one; `say` prints a line for the user."""

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._fastest = float("inf")
        self._slow = 0

    def step_ends(self, seconds: float) -> None:
        """`seconds`: duration of a step, without waiting for data."""
        self._fastest = min(self._fastest, seconds)
        is_slow = seconds > max(SLOWER * self._fastest, SHORTEST)
        self._slow = self._slow + 1 if is_slow else 0
        threads = torch.get_num_threads()
        if self._slow < IN_A_ROW or threads == 1:
            return
        self._slow = 0
        torch.set_num_threads(threads // 2)
        self._say(
            f"warning: the last {IN_A_ROW} steps took over {SLOWER} times as long as the fastest, so another program "
            f"may need the cores: {threads // 2} thread(s) from here on, and not {threads} (--cpu_threads)."
        )
