"""The process itself: engine, threads, signals, and a clean way out.

accelerate decides the engine from the launcher's environment, and some wrong launches start silently as
something else (one process where two were asked for, plain DDP instead of FSDP). Here they stop with a sentence.
"""

import ctypes
import os
import signal
import sys

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import set_seed

from hope_hf.cli.process import set_up_cpu

from .arguments import Arguments
from .guard import check_devices


def make_accelerator(args: Arguments, trackers: list[str]) -> Accelerator:
    """The Accelerator of this run, after checking that what was launched is what runs.

    Raises ValueError for engines this trainer does not drive and for launches that fell apart.
    """
    for variable, name in (("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed")):
        if os.environ.get(variable, "false").lower() == "true":
            raise ValueError(f"The trainer does not run under {name} yet: launch with accelerate_configs/ddp.yaml.")
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    # On a machine without accelerator a torchrun-type launch becomes WORLD_SIZE separate runs unless cpu is asked for.
    separate = world_size > 1 and not torch.accelerator.is_available()
    accelerator = Accelerator(
        cpu=separate,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        log_with=trackers or None,
        project_dir=args.output_dir,
    )
    if accelerator.num_processes != world_size:
        raise ValueError(
            f"WORLD_SIZE is {world_size} but {accelerator.num_processes} process(es) train together: "
            "launch with accelerate_configs/ddp.yaml."
        )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise ValueError(
            f"mixed_precision {accelerator.mixed_precision} is not supported: set 'no' or bf16 in the config."
        )
    check_devices(accelerator)
    return accelerator


def prepare_process(args: Arguments, accelerator: Accelerator):
    """Threads, denormals, matmul precision and seed; the same in every process."""
    set_up_cpu(args.cpu_threads)
    if accelerator.device.type == "cuda" and args.tf32:
        torch.set_float32_matmul_precision("high")
    set_seed(args.seed)
    if not shows_bars(accelerator):
        transformers.utils.logging.disable_progress_bar()
    _die_with_launcher()


def shows_bars(accelerator: Accelerator) -> bool:
    """Whether this process draws progress bars: in a log file, or one per process, they make all else unreadable."""
    return sys.stderr.isatty() and accelerator.is_local_main_process


def sum_over_processes(accelerator: Accelerator, *values: float) -> list[float]:
    """Each value summed over all processes, in float64 (counts are exact up to 2^53)."""
    if accelerator.num_processes == 1:
        return [float(value) for value in values]
    return accelerator.reduce(torch.tensor(values, dtype=torch.float64, device=accelerator.device), "sum").tolist()


def leave(accelerator: Accelerator):
    """End trackers and process group; on gloo leave at once, since its threads can abort a finished interpreter."""
    distributed = accelerator.num_processes > 1
    accelerator.end_training()
    if distributed and accelerator.device.type == "cpu":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


class StopSignal:
    """Remembers SIGTERM or the first Ctrl-C, so that the loop can stop at a step boundary; a context manager."""

    def __init__(self):
        self.received = False

    def __enter__(self):
        self._previous = {s: signal.signal(s, self._receive) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *exception):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number, frame):
        self.received = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _die_with_launcher():
    """Linux: a launcher that is killed passes SIGTERM on, so no orphan trains on in the same folder."""
    launched = "WORLD_SIZE" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ
    if launched and sys.platform.startswith("linux"):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGTERM))
