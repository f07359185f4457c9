"""The process itself: engine, threads, signals, and a clean way out.

accelerate decides the engine from the launcher's environment, and some wrong launches start silently as
something else (one process where two were asked for, plain DDP instead of FSDP). Here they stop with a sentence.
"""

import datetime
import importlib.util
import os
import signal
import sys
import warnings

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs, set_seed

from hope_hf.cli.process import set_up_cpu, warn_once

from .arguments import Arguments
from .engine import LOW_PRECISION, Engine
from .engine_cpu import cpu_accelerator
from .engine_fsdp import FSDP2
from .engine_fsdp1 import FSDP1
from .engine_zero import Zero
from .guard import check_devices
from .launch_file import check_launch_file

ENGINE_TYPES = {"fsdp": DistributedType.FSDP, "deepspeed": DistributedType.DEEPSPEED}


class OneSidedError(ValueError):
    """A mistake that one process met, and perhaps no other, so each that meets it says so."""


def make_engine(args: Arguments, trackers: list[str]) -> Engine:
    """The engine that the launcher asked for, with its Accelerator.

    Raises ValueError for launches that fell apart or became something else, and where the processes do not meet.
    """
    check_launch_file()
    wanted = wanted_engine()
    timeout = datetime.timedelta(seconds=args.ddp_timeout)
    options = {
        "kwargs_handlers": [InitProcessGroupKwargs(timeout=timeout)],
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "log_with": trackers or None,
        "project_dir": args.output_dir,
    }
    if wanted == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        raise ValueError("The launch file asks for DeepSpeed, which is not installed: pip install hope_hf[deepspeed].")
    try:
        accelerator = Accelerator(**options) if torch.accelerator.is_available() else cpu_accelerator(wanted, options)
    except torch.distributed.DistError as error:
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        raise OneSidedError(
            f"Rank {os.environ.get('RANK')} did not meet the others at {host}:{port} within {args.ddp_timeout:g} s "
            f"(--ddp_timeout): {str(error).splitlines()[0]}"
        ) from None
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != world_size:
        raise ValueError(
            f"WORLD_SIZE is {world_size} but {accelerator.num_processes} process(es) train together: "
            "launch with accelerate_configs/ddp.yaml."
        )
    if accelerator.mixed_precision not in ("no", *LOW_PRECISION):
        raise ValueError(
            f"mixed_precision {accelerator.mixed_precision} is not supported: set 'no', bf16 or fp16 in the config."
        )
    if accelerator.mixed_precision == "fp16" and wanted != "deepspeed" and accelerator.scaler is None:
        # accelerate drops it there without a word.
        raise ValueError(
            f"mixed_precision fp16 needs a GPU and this process has {accelerator.device}: set 'no' or bf16 in the "
            "config."
        )
    runs = accelerator.distributed_type
    if wanted in ENGINE_TYPES and runs != ENGINE_TYPES[wanted]:
        raise ValueError(
            f"The launch file asks for {ENGINE_TYPES[wanted].value} and {runs.value} runs: launch at least two "
            "processes with it (--num_processes), or take accelerate_configs/single.yaml."
        )
    check_devices(accelerator)
    _warn_of_ignored(args, wanted == "fsdp", accelerator)
    if wanted == "plain":
        return Engine(accelerator)
    if wanted == "deepspeed":
        return Zero(accelerator, args)
    return FSDP2(accelerator, args) if accelerator.is_fsdp2 else FSDP1(accelerator, args)


def _warn_of_ignored(args: Arguments, fsdp: bool, accelerator: Accelerator):
    mixed = accelerator.mixed_precision in LOW_PRECISION
    for name, is_ignored, reason in (
        ("fsdp_prefetch", not fsdp, "the launch file asks for no FSDP"),
        ("fsdp_limit_all_gathers", not fsdp, "the launch file asks for no FSDP"),
        ("fsdp_reduce_dtype", not (fsdp and mixed), "the launch file does not ask for FSDP with bf16 or fp16"),
    ):
        if is_ignored and getattr(args, name) != getattr(Arguments, name):
            warn_once(f"--{name} is ignored: {reason}.")


def wanted_engine() -> str:
    """What the launcher's environment asks for: "fsdp", "deepspeed" or "plain" (single process, DDP)."""
    for name in ("fsdp", "deepspeed"):
        if os.environ.get(f"ACCELERATE_USE_{name.upper()}", "false").lower() == "true":
            return name
    return "plain"


def prepare_process(args: Arguments, accelerator: Accelerator):
    """Threads, denormals, matmul precision and seed; the same in every process."""
    set_up_cpu(args.cpu_threads)
    if accelerator.device.type == "cuda" and args.tf32:
        torch.set_float32_matmul_precision("high")
    set_seed(args.seed)
    # A first step without update is none of the user's making: the scale of fp16 begins too high.
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


def leave(accelerator: Accelerator):
    """End trackers and process group; on gloo leave at once, since its threads can abort a finished interpreter."""
    distributed = accelerator.num_processes > 1
    accelerator.end_training()
    if distributed and accelerator.device.type == "cpu":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


class StopSignal:
    """Remembers SIGTERM or the first Ctrl-C, so that the loop can stop at a step boundary; a context manager.

    A loop that ends in an error leaves the process deaf to SIGTERM until it has said so and is gone: where one process
    is lost, the launcher sends it to all others at once.
    """

    def __init__(self):
        self.received = False

    def __enter__(self):
        self._previous = {s: signal.signal(s, self._receive) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, error, *_):
        if error is not None:
            del self._previous[signal.SIGTERM]
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number, frame):
        self.received = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
