"""The training loop, top to bottom: set up, continue or begin, step, report, finish."""

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass

import transformers
from accelerate.utils import send_to_device, set_seed

from .arguments import Arguments
from .card import run_card
from .carry import CarriedMemory
from .checkpoints.manifest import last_good
from .checkpoints.reader import find_checkpoint, load_weights, restore_checkpoint
from .checkpoints.run_folder import RunFolder, require_same_run
from .checkpoints.writer import CheckpointWriter
from .engines.base import Engine
from .engines.choose import make_engine
from .engines.guard import OneSidedError, check_same_on_all
from .engines.neighbours import NeighbourWatch, find_neighbours
from .engines.placement import rank_lines, write_audit
from .evaluate import evaluate
from .finish import finish
from .objective import check_token_ids, count_valid, model_inputs, summed_loss
from .process import StopSignal, leave, prepare_process, sum_over_processes
from .push import push
from .setup import build_all
from .watch.heartbeat import Heartbeat
from .watch.ram import MemoryReport
from .watch.telemetry import (
    Stopwatch,
    flops_per_token,
    initial_state_gradients,
    level_rows,
    memory_statistics,
    peak_flops,
    peak_memory_gib,
    utilization_meter,
)
from .watch.tracking import Tracker, eval_line, tracker_names, train_line

MOST_SKIPS_IN_A_ROW = 10


class TrainingDiverged(RuntimeError):
    """Too many steps in a row had a non-finite loss or gradient."""


@dataclass
class Progress:
    """Where the run stands: everything the loop itself must remember, JSON-able."""

    step: int = 0
    """Optimizer steps done, skipped ones included."""
    tokens: int = 0
    """Tokens read by the model, over all processes."""
    skipped: int = 0
    """Steps skipped for a non-finite loss or gradient."""
    skipped_in_a_row: int = 0
    overflowed: int = 0
    """Steps left out because the gradient, scaled for fp16, overflowed: not among the skipped, and no harm."""
    loss_sum: float = 0.0
    """Summed loss since the last log, in nats."""
    loss_tokens: int = 0
    """Valid tokens since the last log."""


def train(args: Arguments) -> int:
    """Run, or continue, the training that `args` describe; returns the exit status.

    Raises ValueError with one sentence for mistakes of the user, and TrainingDiverged.
    """
    engine = make_engine(args, tracker_names(args.report_to))
    accelerator = engine.accelerator
    prepare_process(args, accelerator)
    with RunFolder(args.output_dir, accelerator) as folder, ExitStack() as at_exit:
        complete = _train(args, engine, folder, at_exit)
    # No process waits for this one any more, and the folder is free.
    if complete and args.push_to_hub and accelerator.is_main_process:
        push(args)
    leave(accelerator)
    return 0


def _train(args: Arguments, engine: Engine, folder: RunFolder, at_exit: ExitStack) -> bool:
    """Returns whether the run is complete."""
    accelerator = engine.accelerator
    # A run may go on with other processes, rows per process and engine, as long as its steps stay the same.
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * accelerator.num_processes
    launched = {"rows_per_step": rows, "mixed_precision": accelerator.mixed_precision}
    identity = args.identity() | launched
    record = folder.check(identity)
    if record and record["complete"]:
        accelerator.print(f"The run in {args.output_dir} is complete; choose another --output_dir for a new one.")
        return True

    saved = find_checkpoint(args.output_dir, args.resume_from_checkpoint)
    run = build_all(args, accelerator, saved.data_state if saved else None)
    check_same_on_all(accelerator, {"flags": json.dumps(identity, sort_keys=True), "data": run.data.fingerprint})
    identity |= {"data": run.data.fingerprint}
    if saved:
        require_same_run(saved.path, identity, saved.trainer_state["identity"])
    record = folder.open(identity)
    config, plan = run.model.config, run.plan
    if saved:
        load_weights(run.model, saved.path)
    # What the model says about itself, while it is whole.
    card = run_card(args, engine, run)
    flops, peak = flops_per_token(run.model, plan.block_size), peak_flops(accelerator.device)
    model = engine.prepare(run.model, run.optimizer)
    # The scheduler is not prepared: accelerate would step it once per process.
    scheduler = transformers.get_scheduler(
        args.lr_scheduler_type, run.optimizer, num_warmup_steps=plan.warmup_steps, num_training_steps=plan.total_steps
    )
    if args.torch_compile:
        run.model.compile()
    set_seed(args.seed, device_specific=True)
    memory = CarriedMemory(config if args.document_boundary == "carry" else None)
    progress, start_step = Progress(), 0
    if saved:
        restore_checkpoint(saved, engine=engine, scheduler=scheduler)
        memory.load(saved.carried, accelerator.device)
        progress = Progress(**saved.trainer_state["progress"])
        if engine.scaling is not None:
            engine.scaling.load(saved.trainer_state["loss_scaling"])
        start_step = progress.step

    accelerator.print("\n".join([card, *(f"rank {line}" for line in rank_lines(accelerator, run.model))]))
    if start_step:
        accelerator.print(f"Continuing from {saved.path} at step {start_step}.")
    tracker = Tracker(accelerator, args, plan.total_steps, start_step, record["run_id"])
    at_exit.callback(tracker.close)
    place = args.output_dir, accelerator.process_index
    heart = Heartbeat(*place, args.watchdog_seconds)
    at_exit.callback(heart.close)
    write_audit(*place, run.model)
    memory_report = at_exit.enter_context(MemoryReport(*place, accelerator.device, args.memory_dump_steps, engine))
    watch, utilization = Stopwatch(), utilization_meter(accelerator.device)
    model.train()
    batches = iter(run.data.train)

    writer = CheckpointWriter(args.output_dir, args.save_total_limit, args.save_only_model)

    checkpoints = {saved.step: saved.path} if saved else {}

    def save(background=False):
        checkpoints[progress.step] = writer.save(
            progress.step,
            engine=engine,
            tokenizer=run.data.tokenizer,
            scheduler=scheduler,
            trainer_state={
                "progress": asdict(progress),
                "identity": identity,
                "loss_scaling": None if engine.scaling is None else engine.scaling.state(),
            },
            data_state=data_state,
            carried=memory.state_tensors(),
            background=background,
        )

    with StopSignal() as stop, NeighbourWatch(find_neighbours()):
        while progress.step < plan.total_steps:
            watch.step_begins()
            # The whole window of accumulated batches is read first: the number of its valid tokens divides the loss.
            with watch.loading():
                window = _read(batches, args.gradient_accumulation_steps, config.vocab_size)
            counted = sum(count_valid(batch["labels"]) for batch, _ in window)
            valid_tokens, stopping, written = sum_over_processes(accelerator, counted, stop.received, writer.written)
            if written == accelerator.num_processes:
                writer.finish()
            if stopping:
                break
            rows, step_loss = {}, 0.0
            logs = progress.step == 0 or (progress.step + 1) % args.logging_steps == 0

            for index, (batch, _) in enumerate(window):
                inputs = send_to_device(model_inputs(batch), accelerator.device, non_blocking=True)
                with accelerator.accumulate(model):
                    with memory_statistics(run.model, rows, enabled=logs and index == 0):
                        output = model(**inputs, **memory.inputs())
                    loss = summed_loss(output.logits, batch["labels"])
                    engine.backward(loss * engine.loss_scale(valid_tokens))
                memory.hand_over()
                step_loss += loss.detach()

            if logs:
                rows |= initial_state_gradients(engine)
            memory_report.backward_ends(progress.step + 1)
            grad_norm = engine.clip(args.max_grad_norm)
            own_loss = float(step_loss)
            (step_loss,) = sum_over_processes(accelerator, own_loss)
            data_state = window[-1][1]
            progress.step += 1
            progress.tokens += plan.tokens_per_step
            scaling = engine.scaling
            loss_scale = scaling.scale if scaling is not None else None
            # Both numbers are the same on all processes, so all of them skip or none.
            if math.isfinite(step_loss) and math.isfinite(grad_norm):
                engine.step()
                progress.skipped_in_a_row = 0
                progress.loss_sum += step_loss
                progress.loss_tokens += int(valid_tokens)
            elif math.isfinite(step_loss) and scaling is not None and scaling.can_fall:
                engine.skip(lower_scale=True)
                progress.overflowed += 1
                progress.loss_sum += step_loss
                progress.loss_tokens += int(valid_tokens)
                tracker.say(
                    f"step {progress.step} left out: the gradient overflowed at loss scale {loss_scale:g}, the next "
                    f"one is {scaling.scale:g}"
                )
            else:
                engine.skip()
                progress.skipped += 1
                progress.skipped_in_a_row += 1
                memory.restart()
                mean = step_loss / max(valid_tokens, 1)
                tracker.say(f"step {progress.step} skipped: loss {mean:g}, gradient norm {grad_norm:g}")
                if progress.skipped_in_a_row >= MOST_SKIPS_IN_A_ROW:
                    writer.finish()
                    raise _diverged(progress, args, loss_scale)
            memory_report.step_ends(progress.step)
            learning_rate = scheduler.get_last_lr()[0]
            scheduler.step()
            seconds, data_seconds = watch.step_ends(plan.tokens_per_step)
            heart.beat(
                progress.step,
                loss=own_loss / counted if counted and math.isfinite(own_loss) else None,
                tokens_per_second=plan.tokens_per_step / accelerator.num_processes / seconds,
                data_seconds=data_seconds,
                memory_gib=peak_memory_gib(accelerator.device),
                **({"gpu_percent": utilization()} if utilization else {}),
            )
            tracker.advance()

            if logs:
                speed = watch.read(plan.total_steps - progress.step)
                rows = {
                    "train/loss": progress.loss_sum / progress.loss_tokens if progress.loss_tokens else None,
                    "train/grad_norm": _finite(grad_norm),
                    "train/learning_rate": learning_rate,
                    "train/skipped_steps": progress.skipped,
                    "train/peak_memory_gib": peak_memory_gib(accelerator.device),
                    **speed,
                    **{name: _finite(float(value)) for name, value in rows.items()},
                    **level_rows(run.optimizer, plan.tokens_per_step),
                    **writer.take_report(),
                }
                if loss_scale is not None:
                    rows |= {"train/loss_scale": loss_scale, "train/overflowed_steps": progress.overflowed}
                if peak:
                    used = speed["train/tokens_per_second"] * flops / accelerator.num_processes
                    rows["train/mfu_percent"] = 100 * used / peak
                tracker.log(progress.step, progress.tokens, rows, train_line(rows))
                progress.loss_sum, progress.loss_tokens = 0.0, 0
            if args.eval_steps and progress.step % args.eval_steps == 0 and progress.step < plan.total_steps:
                row = evaluate(model, run.data, accelerator)
                tracker.log(progress.step, progress.tokens, row, eval_line(row))
            # A streak of skipped steps is no good place to come back to.
            due = args.checkpointing_steps and progress.step % args.checkpointing_steps == 0
            if not progress.skipped_in_a_row and (due or progress.step == plan.total_steps):
                save(background=args.async_save and progress.step < plan.total_steps)

        writer.finish()
        if progress.step < plan.total_steps:
            if progress.step > start_step and not progress.skipped_in_a_row:
                save()
            again = "run the same command again to continue"
            if args.save_only_model:
                again = "its checkpoint can begin another run (--model_name_or_path)"
            tracker.say(f"Stopped at step {progress.step}: {again}.")
            return False

    row = evaluate(model, run.data, accelerator)
    tracker.log(progress.step, progress.tokens, row, eval_line(row))
    tracker.close()
    finish(args, engine, run.data, row, checkpoints.get(progress.step))
    folder.close(record)
    return True


def _read(batches: Iterator, count: int, vocab_size: int) -> list:
    try:
        window = [next(batches) for _ in range(count)]
        for batch, _ in window:
            check_token_ids(batch, vocab_size)
    except ValueError as error:
        raise OneSidedError(str(error)) from error
    return window


def _finite(value: float) -> float | None:
    # JSON has no word for the others.
    return value if math.isfinite(value) else None


def _diverged(progress: Progress, args: Arguments, loss_scale: float | None) -> TrainingDiverged:
    scaled = "" if loss_scale is None else f", with the loss scaled by {loss_scale:g}"
    vectors = args.vector_learning_rate
    also = "" if vectors is None else f" and --vector_learning_rate (now {vectors:g})"
    return TrainingDiverged(
        f"The loss or its gradient was not finite in {MOST_SKIPS_IN_A_ROW} steps in a row, the last one "
        f"{progress.step}{scaled}: lower --learning_rate (now {args.learning_rate:g}){also} or raise "
        f"--num_warmup_steps; last good checkpoint: {last_good(args.output_dir)}."
    )
