"""The training, from top to bottom: set up, begin or continue, step, report, finish."""

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from accelerate.utils import send_to_device, set_seed
from torch.optim.lr_scheduler import LambdaLR

from hope_hf.common.files import PROCESSES
from hope_hf.common.flops import flops_per_token
from hope_hf.common.objective import can_skip_logits, check_token_ids, count_valid, model_inputs, summed_loss
from hope_hf.common.run_arguments import Arguments
from hope_hf.common.weights import weights_sampled
from hope_hf.optim import parse_level_optimizers

from .checkpoints.hook import CheckpointHook
from .checkpoints.manifest import last_good
from .checkpoints.optimizer import load_optimizer
from .checkpoints.reader import find_checkpoint, other_run
from .checkpoints.run_folder import (
    OPTIONS,
    TEXT_FILES,
    WEIGHTS,
    RunFolder,
    changes,
    differences,
    is_open,
    read_record,
    require_same_run,
)
from .checkpoints.weights import load_weights
from .checkpoints.writer import BestModel, CheckpointWriter
from .engines.base import Engine, Update
from .engines.choose import make_engine
from .engines.guard import NeighbourWatch, OneSidedError, check_same_on_all, find_neighbours
from .engines.placement import rank_lines, write_audit
from .evaluate import evaluate
from .finish import finish, push, show
from .initial import checkpoint_values, is_fake
from .preflight.facts import FreeMemory, read_free_memory, read_room
from .preflight.room import require_room
from .process import StopAfter, StopSignal, leave, prepare_process, sum_over_processes
from .sequence import learning_inputs
from .setup import Run, build_all, reads_anew, run_card
from .state import CarriedMemory, TrainState
from .watch.monitor import Monitor, Silence
from .watch.tracking import tracker_names

MOST_SKIPS_IN_A_ROW = 10


class TrainingDiverged(RuntimeError):
    """Loss, gradient or weights are not finite, and more steps would not help."""


@dataclass
class Training:
    """A run that is ready for its next step.

    Attributes:
        run: data, model, optimizer and plan.
        model: the module that runs the forward pass, wrapped by the engine.
        state: everything to save besides weights and optimizer.
        start_step: number of steps done before.
        record: content of the folder's run.json.
        flops_per_token: FLOPs of forward and backward pass per token.
        learning: arguments of every forward pass in training, for what levels learn.
        checkpoints: by step, the folders of checkpoints that this run wrote or continued from.
    """

    run: Run
    model: torch.nn.Module
    state: TrainState
    start_step: int
    record: dict
    flops_per_token: int
    learning: dict
    checkpoints: dict[int, Path]


def train(args: Arguments) -> int:
    """Run, or continue, the training that `args` describe; returns the exit status.

    Raises ValueError with one sentence for mistakes of the user, and TrainingDiverged.
    """
    engine = make_engine(args, tracker_names(args.report_to))
    accelerator = engine.accelerator
    prepare_process(args, accelerator)
    # Before the run takes any.
    free = read_free_memory(args, accelerator)
    stop_after = StopAfter(args.stop_after)
    with RunFolder(args.output_dir, accelerator) as folder:
        complete = _train(args, engine, folder, stop_after, free)
    # No other process waits for this one now, and the folder is free.
    if complete and args.push_to_hub and accelerator.is_main_process:
        push(args, read_record(args.output_dir)["run_id"])
    leave(accelerator)
    return 0


def _train(args: Arguments, engine: Engine, folder: RunFolder, stop_after: StopAfter, free: FreeMemory) -> bool:
    """Returns whether the run is complete."""
    training = begin(args, engine, folder, free)
    if training is None:
        engine.accelerator.print(
            f"The run in {args.output_dir} is complete; raise {args.length_flag} to continue it, or choose another "
            "--output_dir for a new one."
        )
        return True
    run, progress = training.run, training.state.progress
    start_step, record = training.start_step, training.record
    with Monitor(args, engine, run.plan, training.flops_per_token, start_step, record["run_id"]) as monitor:
        write_audit(Path(args.output_dir, PROCESSES), engine)
        writer = CheckpointWriter(
            args.output_dir,
            args.save_total_limit,
            only_model=args.save_only_model,
            hook=CheckpointHook(args.checkpoint_hook, args.output_dir, monitor.say),
            in_parts=engine.saves_parts(args),
            keep_every=record.get("keep_every", ()),
            mark=record["run_id"],
        )
        best = BestModel(args.output_dir, args.keep_best)

        def evaluated(stopped: Callable[[], bool] = lambda: False) -> dict | None:
            monitor.evaluation_begins(progress, len(run.data.validation.blocks))
            row = evaluate(training.model, run.data, engine.accelerator, stopped)
            if row is None:
                monitor.say(f"Evaluation after step {progress.step} ended by a signal, without a result.")
                return None
            monitor.evaluated(progress, row)
            if (facts := best.beaten_by(row)) is not None:
                own = {"engine": engine, "tokenizer": run.data.tokenizer, "state": training.state.state_dict()}
                place = writer.save(progress.step, **own, best=facts)
                monitor.say(f"best {args.keep_best} so far: the model is in {place}")
            return row

        complete = _steps(args, engine, training, monitor, writer, evaluated, stop_after)
        if complete:
            row = evaluated()
            if not math.isfinite(row["eval/loss"]):
                raise _diverged(f"The loss of the evaluation after step {progress.step} is not finite", args)
            monitor.close_tracker()
            checkpoint = training.checkpoints.get(progress.step)
            finish(args, engine, run.data, row, checkpoint)
            folder.close(record)
            show(args, engine, run.data, row, checkpoint)
    writer.close()
    return complete


def begin(args: Arguments, engine: Engine, folder: RunFolder, free: FreeMemory | None = None) -> Training | None:
    """Build and check the run, and restore its newest checkpoint; None if the run is complete.

    With `free`, a run that does not fit into it is refused before anything is written.
    """
    accelerator = engine.accelerator
    # A run may continue with other processes, rows per process and engine, if its steps stay the same.
    rows = args.rows_per_step(accelerator.num_processes)
    identity = args.identity() | {"rows_per_step": rows, "mixed_precision": accelerator.mixed_precision}
    if args.level_optimizers is not None:
        options = parse_level_optimizers(args.level_optimizers)
        identity[OPTIONS] = {str(level): asdict(own) for level, own in options.items()}
    if args.model_name_or_path and os.path.isdir(args.model_name_or_path):
        identity[WEIGHTS] = weights_sampled(args.model_name_or_path)
    changeable = args.changeable()
    record = folder.check(identity, changeable)
    if record and not is_open(record, identity):
        return None
    saved = find_checkpoint(args.output_dir, args.resume_from_checkpoint, record)
    if saved is None and record and record["complete"]:
        raise ValueError(
            f"--output_dir {args.output_dir} holds a complete run without a checkpoint, which cannot continue: choose "
            f"a new folder, and --model_name_or_path {args.output_dir} to begin from its weights."
        )
    changed = []
    if saved:
        theirs = saved.identity
        require_same_run(saved.path, identity, theirs, changeable)
        changed = differences(identity, theirs)
    was_complete = record is not None and record["complete"]
    # Its text may be another one at the place where it is now, which its tokens tell.
    only_moved = was_complete and not differences(identity, record["identity"])
    run = build_all(args, engine, saved, finished=record is None or (was_complete and not only_moved))
    check_same_on_all(accelerator, {"flags": json.dumps(identity, sort_keys=True), "data": run.data.fingerprint})
    if free is not None:
        require_room(read_room(args, engine, run, saved.step if saved else 0, free))
    identity |= {"data": run.data.fingerprint, TEXT_FILES: run.data.facts}
    former = run.data.former_fingerprint
    if saved and former is not None and theirs.get("data") == former:
        identity["data"] = former
    plan, values = run.plan, run.values
    if saved:
        require_same_run(saved.path, identity, theirs, changeable)
        if only_moved:
            return None
        if values is None:
            load_weights(run.model, saved.manifest)
        else:
            values = checkpoint_values(run.model, saved.manifest)
    # Before the engine shards the model.
    card, flops = run_card(args, engine, run), flops_per_token(run.model, plan.block_size)
    model = engine.prepare(run.model, run.optimizer)
    if values is not None:
        values.fill(list(engine.weight_slices()))
        engine.weights_loaded()
    if (saved or args.model_name_or_path) and not is_fake(run.model):
        source = saved.path if saved else f"--model_name_or_path {args.model_name_or_path}"
        require_finite_weights(engine, source)
    begun_from = other_run(args.output_dir, args.resume_from_checkpoint)
    record = folder.open(identity, args.defaults, changeable, begun_from, args.keep_every)
    # The scheduler is not prepared: accelerate would step it once per process.
    scheduler = LambdaLR(run.optimizer, plan.schedule.fractions(run.optimizer.defaults["lr"]))
    if args.torch_compile:
        run.model.compile()
    set_seed(args.seed, device_specific=True)
    carry = CarriedMemory(run.model.config if args.document_boundary == "carry" else None)
    state = TrainState(identity, plan.schedule, scheduler, carry, engine.scaling)
    if saved:
        same = not run.schedule_changes and args.LENGTH.issuperset(changed)
        load_optimizer(saved.manifest, engine, same_settings=same)
        state.load(saved, accelerator.device, same_rates=same)
        if reads_anew(args, saved):
            state.data = None
            state.carry.restart()
    start_step = state.progress.step
    accelerator.print("\n".join([card, *(f"rank {line}" for line in rank_lines(accelerator, run.model))]))
    if start_step:
        lines = changes(changed, theirs, identity, start_step) + run.schedule_changes
        accelerator.print("\n".join([f"Continuing from {saved.path} at step {start_step}.", *lines]))
    checkpoints = {saved.step: saved.path} if saved else {}
    return Training(run, model, state, start_step, record, flops, learning_inputs(args), checkpoints)


def _steps(
    args: Arguments,
    engine: Engine,
    training: Training,
    monitor: Monitor,
    writer: CheckpointWriter,
    evaluated: Callable[..., dict | None],
    stop_after: StopAfter,
) -> bool:
    """Train to the last step; returns False if a signal or `--stop_after` ended it before."""
    accelerator, run, state = engine.accelerator, training.run, training.state
    plan, progress, scheduler = run.plan, state.progress, state.scheduler

    def save(background: bool = False):
        if not weights_are_finite(engine):
            writer.finish()
            raise _diverged(f"The weights are not finite after step {progress.step}", args)
        training.checkpoints[progress.step] = writer.save(
            progress.step, engine=engine, tokenizer=run.data.tokenizer, state=state.state_dict(), background=background
        )

    training.model.train()
    batches = iter(run.data.train)
    if args.eval_on_start and progress.step == 0:
        evaluated()
    with StopSignal() as stop, NeighbourWatch(find_neighbours()):
        while progress.step < plan.total_steps:
            monitor.step_begins(progress.step + 1)
            # The whole window of accumulated batches is read first: its number of valid tokens divides the loss.
            with monitor.loading():
                window, data_state = _read(batches, args.gradient_accumulation_steps, run.model.config.vocab_size)
            own_tokens = sum(count_valid(batch["labels"]) for batch in window)
            time_is_up = stop_after.reached(progress.step - training.start_step)
            tokens, stopping, time_is_up, written = sum_over_processes(
                accelerator, own_tokens, stop.received, time_is_up, writer.written
            )
            if written == accelerator.num_processes:
                writer.finish()
            if stopping:
                writer.stop_soon()
            if stopping or time_is_up:
                break
            own_loss, loss, update = _update(args, engine, training, monitor, window, tokens)
            state.data = data_state
            progress.count(update, plan.tokens_per_step, loss, int(tokens))
            monitor.updated(update, loss / max(tokens, 1))
            if update.outcome == "skipped":
                state.carry.restart()
                if progress.skipped_in_a_row >= MOST_SKIPS_IN_A_ROW:
                    writer.finish()
                    scaled = "" if update.loss_scale is None else f", with the loss scaled by {update.loss_scale:g}"
                    last = f"in {MOST_SKIPS_IN_A_ROW} steps in a row, the last one {progress.step}{scaled}"
                    raise _diverged(f"The loss or its gradient was not finite {last}", args)
            learning_rate = scheduler.get_last_lr()[0]
            scheduler.step()
            own_mean = own_loss / own_tokens if own_tokens else float("nan")
            monitor.step_ends(progress, update, learning_rate, own_mean, writer.take_report)

            last = progress.step == plan.total_steps
            if args.eval_steps and progress.step % args.eval_steps == 0 and not last:
                evaluated(lambda: stop.received)
            due = args.checkpointing_steps and progress.step % args.checkpointing_steps == 0
            # No checkpoint is written in a series of skipped steps.
            if (due or last) and not progress.skipped_in_a_row:
                save(background=args.async_save and not last)

        writer.finish()
        if progress.empty:
            monitor.say(f"{progress.empty} of {progress.step} steps had no token to learn and changed nothing.")
        if progress.step == plan.total_steps:
            if progress.skipped_in_a_row:
                raise _diverged(f"The loss or gradient of the last step, {progress.step}, was not finite", args)
            return True
        # A checkpoint of this step is not written again: the hook may be reading it.
        if progress.step not in {0, *training.checkpoints} and not progress.skipped_in_a_row:
            save()
        again = "run the same command again to continue"
        named = args.resume_from_checkpoint
        if named not in (None, "latest") and other_run(args.output_dir, named) is None:
            again = "give --resume_from_checkpoint latest to continue"
        if args.save_only_model:
            again = "its checkpoint can begin another run (--model_name_or_path)"
        monitor.say(f"Stopped at step {progress.step}: {again}.")
        return False


def rehearse(args: Arguments, engine: Engine, training: Training) -> tuple[float, Update]:
    """One real step that is neither reported nor saved: nats per token over all processes, and the update."""
    run = training.run
    training.model.train()
    window, _ = _read(iter(run.data.train), args.gradient_accumulation_steps, run.model.config.vocab_size)
    (tokens,) = sum_over_processes(engine.accelerator, sum(count_valid(batch["labels"]) for batch in window))
    _, loss, update = _update(args, engine, training, Silence(), window, tokens)
    return loss / max(tokens, 1), update


def _update(
    args: Arguments, engine: Engine, training: Training, monitor: Monitor, window: list[dict], tokens: float
) -> tuple[float, float, Update]:
    """Forward, backward and update of one step; returns the summed loss of this process and of all, and the update."""
    own_loss = _add_gradients(engine, training, monitor, window, tokens)
    monitor.backward_ends()
    (loss,) = sum_over_processes(engine.accelerator, own_loss)
    return own_loss, loss, engine.update(loss, args.max_grad_norm, tokens)


def _add_gradients(engine: Engine, training: Training, monitor: Monitor, window: list[dict], tokens: float) -> float:
    """Forward and backward passes of one step, of `tokens` over all processes; returns this process's summed loss."""
    carry, device = training.state.carry, engine.accelerator.device
    skips_logits = can_skip_logits(engine.model)
    loss_sum = torch.zeros((), device=device)
    for index, batch in enumerate(window):
        if 0 < index == len(window) - 1:
            monitor.last_batch_begins()
        inputs, labels = send_to_device((model_inputs(batch), batch["labels"]), device, non_blocking=True)
        with engine.accelerator.accumulate(training.model):
            with monitor.forward():
                inputs |= carry.inputs() | training.learning
                loss = summed_loss(training.model, inputs, labels, skips_logits)
            engine.backward(loss * engine.loss_scale(tokens))
        carry.hand_over()
        loss_sum += loss.detach()
    return float(loss_sum)


def _read(batches: Iterator, count: int, vocab_size: int) -> tuple[list[dict], dict]:
    """The next `count` batches, and the loader's state after the last of them."""
    try:
        window = [next(batches) for _ in range(count)]
        for batch, _ in window:
            check_token_ids(batch, vocab_size)
    except ValueError as error:
        raise OneSidedError(str(error)) from error
    return [batch for batch, _ in window], window[-1][1]


def _diverged(what: str, args: Arguments) -> TrainingDiverged:
    vectors = args.vector_learning_rate
    also = "" if vectors is None else f" and --vector_learning_rate (now {vectors:g})"
    return TrainingDiverged(
        f"{what}: lower --learning_rate (now {args.learning_rate:g}){also} or raise --num_warmup_steps; last good "
        f"checkpoint: {last_good(args.output_dir)}."
    )


@torch.no_grad()
def weights_are_finite(engine: Engine) -> bool:
    """Whether all weights are finite, the same on all processes. Some buffers hold infinities, so none are checked."""
    slices = (held for held in engine.weight_slices() if not engine.trained.keys().isdisjoint(held.names))
    broken = any(not held.tensors["weight"].isfinite().all() for held in slices)
    return not any(sum_over_processes(engine.accelerator, broken))


def require_finite_weights(engine: Engine, source: object) -> None:
    """ValueError, on all processes, if weights that came from `source` are not finite."""
    if not weights_are_finite(engine):
        raise ValueError(
            f"{source} holds weights that are not finite, its run has diverged: begin from an earlier checkpoint "
            "(--model_name_or_path), with a lower --learning_rate and a new --output_dir."
        )
