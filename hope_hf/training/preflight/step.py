"""The step of a dry run: forward, backward and update, on all processes and by the engine that was launched."""

import time

import torch

from hope_hf.cli.process import memory_is_full
from hope_hf.step.arguments import Arguments
from hope_hf.step.gpus import GIB

from ..engines.base import Engine, Update
from ..engines.neighbours import NeighbourWatch, find_neighbours
from ..trainer import Training, rehearse
from ..watch.telemetry import peak_memory_gib
from .checks import COMFORTABLE, smaller_steps
from .result import Result, line


def take_step(args: Arguments, engine: Engine, training: Training) -> Result | None:
    """None where this process runs out of memory, which it says itself: the others only see it go."""
    device, rank = engine.accelerator.device, engine.accelerator.process_index
    start = time.perf_counter()
    try:
        with NeighbourWatch(find_neighbours()):
            loss, update = rehearse(args, engine, training)
    except (RuntimeError, MemoryError) as error:
        if not memory_is_full(error):
            raise
        reason = str(error).partition(". ")[0].splitlines()[0]
        mend = ", ".join(smaller_steps(args))
        print(line("step", Result("fail", f"out of memory ({reason}): {mend} (rank {rank})")), flush=True)
        return None
    total = torch.cuda.get_device_properties(device).total_memory / GIB if device.type == "cuda" else None
    return judge(args, loss, update, time.perf_counter() - start, peak_memory_gib(device), total)


def judge(args: Arguments, loss: float, update: Update, seconds: float, peak: float, total: float | None) -> Result:
    """Of a step that was taken.

    Args:
        loss: nats per token.
        peak, total: GiB of this process so far, and of its GPU; None on the CPU.
    """
    figures = f"loss {loss:.4g}, gradient norm {update.grad_norm:.3g}"
    if update.outcome == "skipped":
        mend = "look at the weights and data, or take bf16 or no mixed precision"
        return Result("fail", f"{figures}, so nothing was updated: {mend}", peak)
    if update.outcome == "overflowed":
        figures += f", update left out (fp16 began at loss scale {update.loss_scale:g}, the run lowers it)"
    figures += f", {seconds:.1f} s (a first step is slow), peak {peak:.2f} GiB"
    if total is not None and peak > COMFORTABLE * total:
        return Result("warn", f"{figures} of {total:.2f}, almost all: {', '.join(smaller_steps(args))}", peak)
    return Result("ok", figures, peak)
