"""Prepare the run as `train` does, check it, take one step, report the results, and leave no trace."""

import time
from collections import Counter
from dataclasses import fields, replace

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from hope_hf.common.devices import memory_is_full
from hope_hf.common.folder_lock import is_locked
from hope_hf.common.gpus import GIB
from hope_hf.common.process import first_line
from hope_hf.common.run_arguments import Arguments
from hope_hf.plan import StepOptions

from ..checkpoints.run_folder import RunFolder
from ..engines.base import Engine, EngineOptions, Update
from ..engines.choose import make_engine
from ..engines.guard import NeighbourWatch, find_neighbours
from ..initial import is_fake
from ..process import leave, prepare_process
from ..trainer import Training, begin, rehearse
from ..watch.telemetry import peak_memory_gib
from ..watch.tracking import tracker_names
from .checks import CHECKS, COMFORTABLE, LEVELS, Result, line, smaller_steps, worst
from .facts import Facts, FreeMemory, Gpu, RoomOptions, Text, read_free_memory, read_gpu, read_room

# On the CPU a step that does not fit may make the system end other programs; a GPU only refuses the memory.
FORBID_THE_STEP = ("host", "memory")


def dry_run(args: Arguments) -> int:
    """Returns 0, or 1 if a check fails. Raises ValueError as `train` does."""
    gpu = read_gpu()
    trackers = tracker_names(args.report_to)
    engine = make_engine(args.part(EngineOptions), trackers)
    if not engine.fills_shards:
        args = replace(args, init="whole")
    accelerator = engine.accelerator
    prepare_process(accelerator, args.seed, args.cpu_threads, args.tf32)
    free = read_free_memory(args.output_dir, accelerator.device)
    training = begin(args, engine, RunFolder(args.output_dir, accelerator, only_looks=True))
    report = Report(accelerator)
    if training is None:
        report.add("run", Result("warn", f"{args.output_dir} is complete: choose another --output_dir for a new run"))
    else:
        facts = _facts(args, engine, training, trackers, gpu, free)
        for name, check in CHECKS.items():
            report.add(name, check(facts))
        does_not_fit = not facts.on_gpu and "fail" in (report.levels[name] for name in FORBID_THE_STEP)
        if does_not_fit or is_fake(training.parts.model):
            report.add("step", Result("warn", "not taken, because the run does not fit into memory: fix that first"))
        else:
            result = take_step(args, engine, training)
            if result is None:
                return 1
            report.add("step", result)
    accelerator.print(report.summary(args.output_dir))
    leave(accelerator, report.status)
    return report.status


def _facts(
    args: Arguments, engine: Engine, training: Training, trackers: list[str], gpu: Gpu | str | None, free: FreeMemory
) -> Facts:
    parts, step = training.parts, training.start_step
    data, step_options = parts.data, StepOptions.of(args, parts.plan.block_size)
    room = read_room(args.part(RoomOptions), step_options, engine, parts, step, free)
    return Facts(
        **{field.name: getattr(room, field.name) for field in fields(room)},
        trackers=trackers,
        gpu=gpu,
        text=Text(
            rows=None if data.train_tokens is None else data.train_tokens // data.block_size,
            rows_per_step=parts.plan.tokens_per_step // data.block_size,
            validation_rows=len(data.validation.blocks),
            description=data.description,
        ),
        in_use=is_locked(args.output_dir),
        continues=training.checkpoints.get(step),
    )


class Report:
    """Prints one line per check on rank 0; all processes add their own results, and get those of all."""

    def __init__(self, accelerator: Accelerator):
        self._accelerator = accelerator
        self.levels: dict[str, str] = {}

    def add(self, name: str, own_result: Result) -> None:
        """The result of this process."""
        result = worst(gather_object([own_result]))
        self.levels[name] = result.level
        self._accelerator.print(line(name, result))

    @property
    def status(self) -> int:
        """1 if a check failed."""
        return int("fail" in self.levels.values())

    def summary(self, output_dir: str) -> str:
        """The last line."""
        counts = Counter(self.levels.values())
        shown = ", ".join(f"{counts[level]} {level}" for level in LEVELS)
        return f"Dry run: {shown}; nothing was written to {output_dir}."


def take_step(args: Arguments, engine: Engine, training: Training) -> Result | None:
    """The result of one step. None if this process ran out of memory, which it prints: others cannot see it."""
    device, rank = engine.accelerator.device, engine.accelerator.process_index
    options = args.part(RoomOptions)
    start = time.perf_counter()
    try:
        with NeighbourWatch(find_neighbours()):
            loss, update = rehearse(engine, training, args.gradient_accumulation_steps, args.max_grad_norm)
    except (RuntimeError, MemoryError) as error:
        if not memory_is_full(error):
            raise
        reason = first_line(error).partition(". ")[0]
        fix = ", ".join(smaller_steps(options))
        print(line("step", Result("fail", f"out of memory ({reason}): {fix} (rank {rank})")), flush=True)
        return None
    total = torch.cuda.get_device_properties(device).total_memory / GIB if device.type == "cuda" else None
    return judge(options, loss, update, time.perf_counter() - start, peak_memory_gib(device), total)


def judge(
    options: RoomOptions, loss: float, update: Update, seconds: float, peak: float, total: float | None
) -> Result:
    """The result of a step that was taken.

    Args:
        loss: nats per token.
        peak, total: GiB of this process so far, and of its GPU; None on the CPU.
    """
    figures = f"loss {loss:.4g}, gradient norm {update.grad_norm:.3g}"
    if update.outcome == "skipped":
        fix = "look at the weights and data, or take bf16 or no mixed precision"
        return Result("fail", f"{figures}, so nothing was updated: {fix}", peak)
    if update.outcome == "empty":
        return Result("warn", "the first step has no token to learn: look at the data (masked labels)", peak)
    if update.outcome == "overflowed":
        figures += f", update left out (fp16 began at loss scale {update.loss_scale:g}, the run lowers it)"
    figures += f", {seconds:.1f} s (a first step is slow), peak {peak:.2f} GiB"
    if total is not None and peak > COMFORTABLE * total:
        return Result("warn", f"{figures} of {total:.2f}, almost all: {', '.join(smaller_steps(options))}", peak)
    return Result("ok", figures, peak)
