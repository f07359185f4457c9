"""Prepare the run as `train` does, check it, take one step, say what was found, and leave no trace of it."""

from dataclasses import replace

import torch

from hope_hf.cli.folder_lock import is_locked
from hope_hf.plan import Planned, StepOptions, plan_running
from hope_hf.step.arguments import Arguments

from ..checkpoints.run_folder import RunFolder
from ..engines.base import Engine
from ..engines.choose import make_engine
from ..initial.host_memory import is_fake
from ..process import leave, prepare_process
from ..trainer import Training, begin
from ..watch.tracking import tracker_names
from .checks import CHECKS
from .facts import Facts, Room, Text, held_bytes, local_processes, own_gpus, read_room
from .gpus import Gpu, ask_gpus
from .result import Report, Result
from .step import take_step

# On the CPU a step that does not fit would end other programs, too; a GPU only refuses it.
FORBID_THE_STEP = ("host", "memory")


def dry_run(args: Arguments) -> int:
    """Returns 0, or 1 if a check fails. Raises ValueError as `train` does."""
    # Before this process uses its GPU.
    gpus = ask_gpus()
    trackers = tracker_names(args.report_to)
    engine = make_engine(args, trackers)
    if not engine.fills_shards:
        args = replace(args, init="whole")
    accelerator = engine.accelerator
    prepare_process(args, accelerator)
    room = read_room(args, accelerator)
    training = begin(args, engine, RunFolder(args.output_dir, accelerator, only_looks=True))
    report = Report(accelerator, accelerator.print)
    if training is None:
        report.add("run", Result("warn", f"{args.output_dir} is complete: choose another --output_dir for a new run"))
    else:
        facts = _facts(args, engine, training, trackers, own_gpus(gpus, accelerator.device), room)
        for name, check in CHECKS.items():
            report.add(name, check(facts))
        does_not_fit = not facts.on_gpu and "fail" in (report.levels[name] for name in FORBID_THE_STEP)
        if does_not_fit or is_fake(training.run.model):
            report.add("step", Result("warn", "not taken, because the memory does not hold it: mend that first"))
        else:
            found = take_step(args, engine, training)
            if found is None:
                return 1
            report.add("step", found)
    accelerator.print(report.summary(args.output_dir))
    leave(accelerator, report.status)
    return report.status


def _facts(
    args: Arguments, engine: Engine, training: Training, trackers: list[str], gpus: list[Gpu] | str, room: Room
) -> Facts:
    accelerator, run = engine.accelerator, training.run
    data, step = run.data, training.start_step
    return Facts(
        args=args,
        trackers=trackers,
        processes=accelerator.num_processes,
        local_processes=local_processes(),
        in_parts=engine.saves_parts(args),
        on_gpu=accelerator.device.type == "cuda",
        gpus=gpus,
        room=room,
        sizes=_sizes(args, engine, training),
        text=Text(
            rows=None if data.train_tokens is None else data.train_tokens // data.block_size,
            rows_per_step=run.plan.tokens_per_step // data.block_size,
            validation_rows=len(data.validation.blocks),
            description=data.description,
        ),
        in_use=is_locked(args.output_dir),
        held=held_bytes(args.output_dir),
        continues=training.checkpoints.get(step),
        step=step,
        total_steps=run.plan.total_steps,
    )


def _sizes(args: Arguments, engine: Engine, training: Training) -> Planned:
    options = StepOptions(
        batch_size=args.per_device_train_batch_size,
        block_size=training.run.plan.block_size,
        accumulation=args.gradient_accumulation_steps,
        checkpointing=args.gradient_checkpointing,
        optimizer=args.optimizer,
        sync_each_batch=args.sync_each_batch,
        reduce_dtype=getattr(torch, args.fsdp_reduce_dtype),
        trust_remote_code=args.trust_remote_code,
    )
    return plan_running(training.run.model.config, engine.launch(), options, local_processes())
