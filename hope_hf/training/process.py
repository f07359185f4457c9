"""The process itself: threads, signals, sums over all processes, and a clean exit."""

import math
import os
import signal
import sys
import time
import warnings

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import set_seed

from hope_hf.common.devices import set_up_cpu
from hope_hf.common.process import is_first_process
from hope_hf.interrupt import quit_now, write_now

from .flag_values import parse_stop_after

QUIT = "stopped by Ctrl-C; the same command goes on from the last checkpoint."


def prepare_process(accelerator: Accelerator, seed: int, cpu_threads: int | None, tf32: bool):
    """Set threads, denormals, matmul precision and seed, the same in every process."""
    set_up_cpu(cpu_threads, warns=True)
    if accelerator.device.type == "cuda" and tf32:
        torch.set_float32_matmul_precision("high")
    set_seed(seed)
    # In fp16 the first step may have no update, because the scale begins too high. The user need not act.
    warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler.step\(\)` before `optimizer.step\(\)`")
    if not shows_bars(accelerator):
        transformers.utils.logging.disable_progress_bar()


def shows_bars(accelerator: Accelerator) -> bool:
    """Whether this process draws progress bars: in a log file, or one per process, they make all else unreadable."""
    return sys.stderr.isatty() and accelerator.is_local_main_process


def sum_over_processes(accelerator: Accelerator, *values: float) -> list[float]:
    """Each value summed over all processes, in float64 (counts are exact up to 2^53)."""
    if accelerator.num_processes == 1:
        return [float(value) for value in values]
    return accelerator.reduce(torch.tensor(values, dtype=torch.float64, device=accelerator.device), "sum").tolist()


def leave(accelerator: Accelerator, status: int = 0):
    """End trackers and process group; on gloo exit at once, since its threads can abort a finished interpreter."""
    distributed = accelerator.num_processes > 1
    accelerator.end_training()
    if distributed and accelerator.device.type == "cpu":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class StopAfter:
    """`--stop_after`: when a launch has made its steps or used its time, counted from here; never for None."""

    def __init__(self, named: str | None):
        self._steps = self._seconds = math.inf
        if named is not None:
            self._steps, self._seconds = parse_stop_after(named)
        self._start = time.monotonic()

    def reached(self, steps: int) -> bool:
        """Whether to stop before the next step; `steps`: those that this launch has made."""
        return steps >= self._steps or time.monotonic() - self._start >= self._seconds


class StopSignal:
    """Records a signal that ends the run, so that the loop can stop at a step boundary; a context manager.

    Such signals are SIGTERM, SIGUSR1 and SIGHUP (from schedulers and closed terminals; SIGHUP only if it is not
    ignored, as under nohup), and the first Ctrl-C, after which the sentence `then` is printed at once. A second Ctrl-C
    ends the process.

    After an error in the loop the process ignores SIGTERM, so that it can print the error: if one process is lost, the
    launcher sends SIGTERM to all others at once.
    """

    def __init__(self, then: str = "Stopping after this step"):
        self.received = False
        self._interrupted = False
        self._then = then

    def __enter__(self):
        numbers = [signal.SIGTERM, signal.SIGINT]
        for number in (signal.SIGHUP, signal.SIGUSR1):
            if signal.getsignal(number) is not signal.SIG_IGN:
                numbers.append(number)
        self._previous = {number: signal.signal(number, self._receive) for number in numbers}
        return self

    def __exit__(self, error, *_):
        if error is not None:
            del self._previous[signal.SIGTERM]
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number, frame):
        self.received = True
        if number == signal.SIGINT:
            if self._interrupted:
                quit_now(QUIT)
            self._interrupted = True
            if is_first_process():
                write_now(f"\n{self._then}; press Ctrl-C again to quit now.\n")
