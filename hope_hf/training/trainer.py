"""The training, from top to bottom: set up, begin or continue, step, report, finish."""

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device, set_seed
from torch.optim.lr_scheduler import LambdaLR

from hope_hf.common.files import PROCESSES, TEXT_FILES
from hope_hf.common.flags import TEXT_SOURCES
from hope_hf.common.flops import flops_per_token
from hope_hf.common.objective import can_skip_logits, check_token_ids, count_valid, model_inputs, summed_loss
from hope_hf.common.run_arguments import Arguments, RunArguments
from hope_hf.common.weights import weights_sampled
from hope_hf.optim import parse_level_optimizers
from hope_hf.plan import StepOptions

from .card import run_card
from .checkpoints.hook import CheckpointHook
from .checkpoints.manifest import last_good
from .checkpoints.optimizer import load_optimizer
from .checkpoints.reader import SavedRun, find_checkpoint, other_run
from .checkpoints.run_folder import (
    OPTIONS,
    WEIGHTS,
    RunFolder,
    changes,
    differences,
    is_open,
    read_record,
    require_same_run,
)
from .checkpoints.writer import BestModel, CheckpointWriter
from .engines.base import Engine, EngineOptions, Update
from .engines.choose import make_engine
from .engines.guard import (
    NeighbourWatch,
    OneSidedError,
    check_same_on_all,
    find_neighbours,
    require_finite_weights,
    weights_are_finite,
)
from .engines.placement import rank_lines, write_audit
from .evaluate import evaluate
from .finish import finish, push, show
from .initial import is_fake
from .parsing import repo_id
from .preflight.facts import FreeMemory, RoomOptions, read_free_memory, read_room
from .preflight.room import require_room
from .process import StopAfter, StopSignal, leave, prepare_process, sum_over_processes
from .setup import RunParts, build_all, reads_anew
from .state import CarriedMemory, LoopState
from .watch.monitor import Monitor, Silence
from .watch.tracking import tracker_names

MOST_SKIPS_IN_A_ROW = 10


class TrainingDiverged(RuntimeError):
    """Loss, gradient or weights are not finite, and more steps would not help."""


@dataclass
class Training:
    """A run that is ready for its next step.

    Attributes:
        parts: data, model, optimizer and plan.
        model: the module that runs the forward pass, wrapped by the engine.
        state: everything to save besides weights and optimizer.
        start_step: number of steps done before.
        record: content of the folder's run.json.
        flops_per_token: FLOPs of forward and backward pass per token.
        checkpoints: by step, the folders of checkpoints that this run wrote or continued from.
    """

    parts: RunParts
    model: torch.nn.Module
    state: LoopState
    start_step: int
    record: dict
    flops_per_token: int
    checkpoints: dict[int, Path]


def train(args: Arguments) -> int:
    """Run, or continue, the training that `args` describe; returns the exit status.

    Raises ValueError with one sentence for mistakes of the user, and TrainingDiverged.
    """
    engine = make_engine(args.part(EngineOptions), tracker_names(args.report_to))
    accelerator = engine.accelerator
    prepare_process(accelerator, args.seed, args.cpu_threads, args.tf32)
    # Before the run takes any.
    free = read_free_memory(args.output_dir, accelerator.device)
    stop_after = StopAfter(args.stop_after)
    with RunFolder(args.output_dir, accelerator) as folder:
        complete = _train(args, engine, folder, stop_after, free)
    # No other process waits for this one now, and the folder is free.
    if complete and args.push_to_hub and accelerator.is_main_process:
        run_id = read_record(args.output_dir)["run_id"]
        push(Path(args.output_dir), run_id, repo_id(args), args.hub_private_repo)
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
    parts, record = training.parts, training.record
    monitor = Monitor(
        args.part(RunArguments),
        engine,
        parts.plan,
        flops_per_token=training.flops_per_token,
        start_step=training.start_step,
        run_id=record["run_id"],
        flags=args.identity(),
    )
    with monitor:
        write_audit(Path(args.output_dir, PROCESSES), engine)
        writer = CheckpointWriter(
            args.output_dir,
            args.save_total_limit,
            only_model=args.save_only_model,
            hook=CheckpointHook(args.checkpoint_hook, args.output_dir, monitor.say),
            in_parts=engine.saves_parts(args.save_sharded),
            keep_every=record.get("keep_every", ()),
            mark=record["run_id"],
        )
        loop = Loop(args, engine, training, monitor, writer)
        complete = loop.run(stop_after)
        if complete:
            evaluation = loop.evaluate()
            if not math.isfinite(evaluation["eval/loss"]):
                step = training.state.counters.step
                raise _diverged(f"The loss of the evaluation after step {step} is not finite", args)
            monitor.close_tracker()
            _finish(args, engine, folder, training, evaluation)
    writer.close()
    return complete


def _finish(args: Arguments, engine: Engine, folder: RunFolder, training: Training, evaluation: dict) -> None:
    """Write the model and what was reached into the run's folder, mark the run as complete, and show the result."""
    step, data = training.state.counters.step, training.parts.data
    in_parts = engine.saves_parts(args.save_sharded)
    checkpoint = training.checkpoints.get(step)
    finish(folder.path, engine, data, evaluation, checkpoint, in_parts)
    folder.close(training.record)
    show(
        folder.path,
        engine,
        data,
        evaluation,
        parts_in=checkpoint if in_parts else None,
        seed=args.seed,
        length_flag=args.length_flag,
        is_chat=args.assistant_only_loss,
        names_text=any(getattr(args, name) for name in TEXT_SOURCES),
    )


def begin(args: Arguments, engine: Engine, folder: RunFolder, free: FreeMemory | None = None) -> Training | None:
    """Build and check the run, and restore its newest checkpoint; None if the run is complete.

    With `free`, a run that does not fit into it is refused before anything is written.
    """
    accelerator = engine.accelerator
    identity = _identity(args, accelerator)
    record = folder.check(identity, args.changeable())
    if record and not is_open(record, identity):
        return None
    saved = _find_saved(args, identity, record)
    was_complete = record is not None and record["complete"]
    # Its text may be another one at the place where it is now, which its tokens tell.
    only_moved = was_complete and not differences(identity, record["identity"])
    parts = build_all(args, engine, saved, finished=record is None or (was_complete and not only_moved))
    flags = json.dumps(identity, sort_keys=True)
    check_same_on_all(accelerator, {"flags": flags, "data": parts.data.fingerprint})
    if free is not None:
        step_options = StepOptions.of(args, parts.plan.block_size)
        start_step = saved.step if saved else 0
        options = args.part(RoomOptions)
        room = read_room(options, step_options, engine, parts, start_step, free, is_rough=True)
        require_room(room)
    identity |= {"data": parts.data.fingerprint, TEXT_FILES: parts.data.facts}
    if saved:
        require_same_run(saved.path, identity, saved.identity, args.changeable())
        if only_moved:
            return None
        parts.load_weights(saved.manifest)
    # Before the engine shards the model.
    card = run_card(args, engine, parts, saved)
    training = new_run(args, engine, folder, parts, identity, source=saved.path if saved else None)
    continuing = resume(args, engine, training, saved) if saved else []
    lines = [card]
    lines += [f"rank {line}" for line in rank_lines(accelerator, parts.model)]
    lines += continuing
    accelerator.print("\n".join(lines))
    return training


def new_run(
    args: Arguments, engine: Engine, folder: RunFolder, parts: RunParts, identity: dict, source: Path | None
) -> Training:
    """A run before its first step: parts prepared by the engine, weights filled in, its record in the folder.

    `source`: the checkpoint that has given the weights, if one has.
    """
    plan = parts.plan
    flops = flops_per_token(parts.model, plan.block_size)
    model = engine.prepare(parts.model, parts.optimizer)
    if parts.initial_values is not None:
        parts.initial_values.fill(list(engine.weight_slices()))
        engine.weights_loaded()
    if (source or args.model_name_or_path) and not is_fake(parts.model):
        require_finite_weights(engine, source or f"--model_name_or_path {args.model_name_or_path}")
    begun_from = other_run(args.output_dir, args.resume_from_checkpoint)
    record = folder.open(identity, args.defaults, args.changeable(), begun_from, args.keep_every)
    # The scheduler is not prepared: accelerate would step it once per process.
    scheduler = LambdaLR(parts.optimizer, plan.schedule.fractions(parts.optimizer.defaults["lr"]))
    if args.torch_compile:
        parts.model.compile()
    set_seed(args.seed, device_specific=True)
    carry = CarriedMemory(parts.model.config if args.document_boundary == "carry" else None)
    state = LoopState(identity, plan.schedule, scheduler, carry, engine.scaling)
    return Training(
        parts,
        model,
        state,
        start_step=0,
        record=record,
        flops_per_token=flops,
        checkpoints={},
    )


def resume(args: Arguments, engine: Engine, training: Training, saved: SavedRun) -> list[str]:
    """Continue a new run from a checkpoint, whose weights it has; returns lines for the user, one for each change."""
    state, schedule_change = training.state, training.parts.schedule_change
    changed = [name for name in differences(state.identity, saved.identity) if name != "data"]
    same_rates = schedule_change is None and args.LENGTH.issuperset(changed)
    load_optimizer(saved.manifest, engine, same_settings=same_rates)
    state.load(saved, engine.accelerator.device, same_rates=same_rates)
    if reads_anew(args, saved):
        state.data = None
        state.carry.restart()
    training.start_step = state.counters.step
    training.checkpoints[saved.step] = saved.path
    lines = [f"Continuing from {saved.path} at step {training.start_step}."]
    lines += changes(changed, saved.identity, state.identity, training.start_step)
    if schedule_change is not None:
        lines.append(schedule_change)
    return lines


def _identity(args: Arguments, accelerator: Accelerator) -> dict:
    """What makes two runs the same: flags, steps and precision, and the content of files that flags name."""
    # A run may continue with other processes, rows per process and engine, if its steps stay the same.
    rows = args.rows_per_step(accelerator.num_processes)
    identity = args.identity() | {"rows_per_step": rows, "mixed_precision": accelerator.mixed_precision}
    if args.level_optimizers is not None:
        levels = parse_level_optimizers(args.level_optimizers)
        identity[OPTIONS] = {str(level): asdict(options) for level, options in levels.items()}
    if args.model_name_or_path and os.path.isdir(args.model_name_or_path):
        identity[WEIGHTS] = weights_sampled(args.model_name_or_path)
    return identity


def _find_saved(args: Arguments, identity: dict, record: dict | None) -> SavedRun | None:
    """The checkpoint to continue from, of a run with this identity; None for a new run."""
    saved = find_checkpoint(args.output_dir, args.resume_from_checkpoint, record)
    if saved is not None:
        require_same_run(saved.path, identity, saved.identity, args.changeable())
    elif record and record["complete"]:
        raise ValueError(
            f"--output_dir {args.output_dir} holds a complete run without a checkpoint, which cannot continue: choose "
            f"a new folder, and --model_name_or_path {args.output_dir} to begin from its weights."
        )
    return saved


class Loop:
    """The steps of a run, and the evaluations and checkpoints between them. All processes make one and call it."""

    def __init__(
        self, args: Arguments, engine: Engine, training: Training, monitor: Monitor, writer: CheckpointWriter
    ):
        self._args, self._engine, self._training = args, engine, training
        self._monitor, self._writer = monitor, writer
        self._counters = training.state.counters
        self._best = BestModel(args.output_dir, args.keep_best)

    def run(self, stop_after: StopAfter) -> bool:
        """Train to the last step; returns False if a signal or `--stop_after` ended it before."""
        counters, last = self._counters, self._training.parts.plan.total_steps
        self._training.model.train()
        batches = iter(self._training.parts.data.train)
        if self._args.eval_on_start and counters.step == 0:
            self.evaluate()
        with StopSignal() as stop, NeighbourWatch(find_neighbours()):
            while counters.step < last and self._step(batches, stop, stop_after):
                is_last = counters.step == last
                if is_due(counters.step, self._args.eval_steps) and not is_last:
                    self.evaluate(lambda: stop.received)
                # No checkpoint is written in a series of skipped steps.
                is_saved = is_last or is_due(counters.step, self._args.checkpointing_steps)
                if is_saved and not counters.skipped_in_a_row:
                    self._save(background=self._args.async_save and not is_last)
            self._writer.finish()
            if counters.empty:
                empty = f"{counters.empty} of {counters.step} steps had no token to learn and changed nothing."
                self._monitor.say(empty)
            if counters.step < last:
                self._stop_early()
            elif counters.skipped_in_a_row:
                raise _diverged(f"The loss or gradient of the last step, {counters.step}, was not finite", self._args)
            return counters.step == last

    def _step(self, batches: Iterator, stop: StopSignal, stop_after: StopAfter) -> bool:
        """One step, counted and reported; returns False, without a step, if the run has to stop."""
        args, monitor, counters = self._args, self._monitor, self._counters
        training, state = self._training, self._training.state
        monitor.step_begins(counters.step + 1)
        # The whole window of accumulated batches is read first: its number of valid tokens divides the loss.
        with monitor.loading():
            vocab_size = training.parts.model.config.vocab_size
            window, data_state = _read(batches, args.gradient_accumulation_steps, vocab_size)
        own_tokens = sum(count_valid(batch["labels"]) for batch in window)
        tokens, stops = self._agree(own_tokens, stop, stop_after)
        if stops:
            return False
        own_loss, loss, update = _update(self._engine, training, monitor, window, tokens, args.max_grad_norm)
        state.data = data_state
        counters.count(update, training.parts.plan.tokens_per_step, loss, int(tokens))
        monitor.updated(update, loss / max(tokens, 1))
        if update.outcome == "skipped":
            state.carry.restart()
            if counters.skipped_in_a_row >= MOST_SKIPS_IN_A_ROW:
                self._writer.finish()
                raise _diverged(_skips(counters.step, update), args)
        learning_rate = state.scheduler.get_last_lr()[0]
        state.scheduler.step()
        own_mean = own_loss / own_tokens if own_tokens else math.nan
        monitor.step_ends(counters, update, learning_rate, own_mean, self._writer.take_report)
        return True

    def _agree(self, own_tokens: int, stop: StopSignal, stop_after: StopAfter) -> tuple[float, bool]:
        """The step's tokens over all processes, and whether any of them has to stop before it.

        A checkpoint that all processes have written in the background is finished here.
        """
        accelerator, writer = self._engine.accelerator, self._writer
        time_is_up = stop_after.reached(self._counters.step - self._training.start_step)
        tokens, signals, times_up, written = sum_over_processes(
            accelerator, own_tokens, stop.received, time_is_up, writer.written
        )
        if written == accelerator.num_processes:
            writer.finish()
        if signals:
            writer.stop_soon()
        return tokens, bool(signals or times_up)

    def evaluate(self, stopped: Callable[[], bool] = lambda: False) -> dict | None:
        """The row of an evaluation, of which the best model is saved; None if `stopped()` became true meanwhile."""
        step, data = self._counters.step, self._training.parts.data
        self._monitor.evaluation_begins(self._counters, len(data.validation.blocks))
        row = evaluate(self._training.model, data, self._engine.accelerator, stopped)
        if row is None:
            self._monitor.say(f"Evaluation after step {step} ended by a signal, without a result.")
            return None
        self._monitor.evaluated(self._counters, row)
        facts = self._best.beaten_by(row)
        if facts is not None:
            folder = self._write(best=facts)
            self._monitor.say(f"best {self._args.keep_best} so far: the model is in {folder}")
        return row

    def _save(self, background: bool = False) -> None:
        step = self._counters.step
        if not weights_are_finite(self._engine):
            self._writer.finish()
            raise _diverged(f"The weights are not finite after step {step}", self._args)
        self._training.checkpoints[step] = self._write(background=background)

    def _write(self, **options) -> Path:
        return self._writer.save(
            self._counters.step,
            engine=self._engine,
            tokenizer=self._training.parts.data.tokenizer,
            state=self._training.state.state_dict(),
            **options,
        )

    def _stop_early(self) -> None:
        args, step = self._args, self._counters.step
        # A checkpoint of this step is not written again: the hook may be reading it.
        if step not in {0, *self._training.checkpoints} and not self._counters.skipped_in_a_row:
            self._save()
        again = "run the same command again to continue"
        named = args.resume_from_checkpoint
        if args.save_only_model:
            again = "its checkpoint can begin another run (--model_name_or_path)"
        elif named not in (None, "latest") and other_run(args.output_dir, named) is None:
            again = "give --resume_from_checkpoint latest to continue"
        self._monitor.say(f"Stopped at step {step}: {again}.")


def is_due(step: int, every: int) -> bool:
    """Whether something happens after `step` that happens after `every` steps; 0: never."""
    return every > 0 and step % every == 0


def _skips(step: int, update: Update) -> str:
    scaled = "" if update.loss_scale is None else f", with the loss scaled by {update.loss_scale:g}"
    return (
        f"The loss or its gradient was not finite in {MOST_SKIPS_IN_A_ROW} steps in a row, the last one {step}{scaled}"
    )


def rehearse(engine: Engine, training: Training, accumulated: int, max_grad_norm: float) -> tuple[float, Update]:
    """One real step that is neither reported nor saved: nats per token over all processes, and the update."""
    parts = training.parts
    training.model.train()
    window, _ = _read(iter(parts.data.train), accumulated, parts.model.config.vocab_size)
    own_tokens = sum(count_valid(batch["labels"]) for batch in window)
    (tokens,) = sum_over_processes(engine.accelerator, own_tokens)
    _, loss, update = _update(engine, training, Silence(), window, tokens, max_grad_norm)
    return loss / max(tokens, 1), update


def _update(
    engine: Engine, training: Training, monitor: Monitor, window: list[dict], tokens: float, max_grad_norm: float
) -> tuple[float, float, Update]:
    """Forward, backward and update of one step; returns the summed loss of this process and of all, and the update."""
    own_loss = _add_gradients(engine, training, monitor, window, tokens)
    monitor.backward_ends()
    (loss,) = sum_over_processes(engine.accelerator, own_loss)
    return own_loss, loss, engine.update(loss, max_grad_norm, tokens)


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
                inputs |= carry.inputs()
                loss = summed_loss(training.model, inputs, labels, skips_logits)
            engine.backward(loss * engine.loss_scale(tokens))
        carry.hand_over()
        loss_sum += loss.detach()
    return float(loss_sum)


def _read(batches: Iterator, count: int, vocab_size: int) -> tuple[list[dict], dict]:
    """The next `count` batches, and the loader's state after the last of them."""
    window = []
    try:
        while len(window) < count:
            batch, data_state = next(batches)
            check_token_ids(batch, vocab_size)
            window.append(batch)
    except ValueError as error:
        raise OneSidedError(str(error)) from error
    return window, data_state


def _diverged(what: str, args: Arguments) -> TrainingDiverged:
    vectors = args.vector_learning_rate
    also = "" if vectors is None else f" and --vector_learning_rate (now {vectors:g})"
    return TrainingDiverged(
        f"{what}: lower --learning_rate (now {args.learning_rate:g}){also} or raise --num_warmup_steps; last good "
        f"checkpoint: {last_good(args.output_dir)}."
    )
