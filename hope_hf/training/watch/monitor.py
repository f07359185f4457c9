"""Measures and reports a run: the trainer calls the monitor at each event of a step."""

import math
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

from hope_hf.common.devices import threads_of_user
from hope_hf.common.files import PROCESSES
from hope_hf.common.gpus import peak_flops
from hope_hf.common.run_arguments import RunArguments

from ..engines.base import Engine, Update
from ..state import Counters
from .model_report import (
    KernelReport,
    MixerReport,
    initial_state_gradients,
    level_rows,
    memory_statistics,
)
from .process_files import Heartbeat, RamReport
from .profile import StepProfile
from .telemetry import Stopwatch, ThreadLimit, peak_memory_gib, utilization_meter
from .tracking import Tracker, eval_line, train_line

# Steps from one row of metrics to the next, and rows of a short run: a curve of fewer shows little.
MOST_BETWEEN, LEAST_ROWS = 10, 50


def steps_between_rows(total_steps: int) -> int:
    """The value of `--logging_steps` that no flag names."""
    return max(1, min(MOST_BETWEEN, total_steps // LEAST_ROWS))


class Monitor:
    """Metrics, console, heartbeat, RAM report and profile of one run, step by step; a context manager around it.

    The trainer calls `step_begins`, `loading`, `forward`, `backward_ends`, `updated` and `step_ends`, in this order;
    if batches accumulate, `last_batch_begins` as well.
    """

    def __init__(
        self,
        options: RunArguments,
        engine: Engine,
        plan,
        *,
        flops_per_token: int,
        start_step: int,
        run_id: str,
        flags: dict,
    ):
        """`plan`: the run's plan; `flops_per_token`: FLOPs of its model, for the MFU; `flags`: for the trackers."""
        self._engine, self._accelerator, self._plan = engine, engine.accelerator, plan
        self._device = engine.accelerator.device
        self._logging_steps = options.logging_steps or steps_between_rows(plan.total_steps)
        self._flops, self._peak = flops_per_token, peak_flops(self._device, self._accelerator.mixed_precision)
        folder, rank = str(Path(options.output_dir, PROCESSES)), engine.accelerator.process_index
        with ExitStack() as opened:
            self._tracker = Tracker(engine.accelerator, options, plan.total_steps, start_step, run_id, flags)
            opened.callback(self._tracker.close)
            self._heart = Heartbeat(folder, rank, options.watchdog_seconds)
            opened.callback(self._heart.close)
            self._ram = opened.enter_context(RamReport(folder, rank, self._device, options.ram_report_steps, engine))
            self._profile = opened.enter_context(
                StepProfile(
                    options.profile_steps, options.output_dir, self._accelerator, start_step, self._tracker.say
                )
            )
            self._opened = opened.pop_all()
        self._kernels = KernelReport(engine.model)
        self._mixers = MixerReport(engine.model)
        self._stopwatch, self._utilization = Stopwatch(), utilization_meter(self._device)
        self.say = self._tracker.say
        self._warned_of_empty = False
        chosen = options.cpu_threads is not None or threads_of_user() is not None
        self._threads = None if chosen or self._device.type != "cpu" else ThreadLimit(self.say)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return self._opened.__exit__(*error)

    def step_begins(self, step: int) -> None:
        """`step`: the number of the one that begins, from 1."""
        self._step = step
        is_end = step in (1, self._plan.total_steps)
        self._logs = is_end or step % self._logging_steps == 0
        self._rows: dict = {}
        self._profile.step_begins(step)
        self._stopwatch.step_begins()

    def loading(self) -> AbstractContextManager:
        """Context of waiting for data."""
        return self._stopwatch.loading()

    @contextmanager
    def forward(self):
        """Context of a forward pass. In a logged step mixers measure the first pass, or add up all passes."""
        is_first = self._logs and not self._rows
        model = self._engine.model
        with (
            memory_statistics(model, self._rows, enabled=is_first),
            self._mixers.forward(self._logs),
        ):
            yield

    def last_batch_begins(self) -> None:
        """Called before the last of the accumulated batches."""
        self._ram.last_batch_begins(self._step)

    def backward_ends(self) -> None:
        """Called after the last backward pass, before gradients are clipped."""
        if self._logs:
            self._rows |= initial_state_gradients(self._engine)
        self._ram.backward_ends(self._step)

    def updated(self, update: Update, mean_loss: float) -> None:
        """Called after the optimizer's step was made or left out."""
        if update.outcome == "overflowed":
            self.say(
                f"step {self._step} left out: the gradient overflowed at loss scale {update.loss_scale:g}, the next "
                f"one is {self._engine.scaling.scale:g}"
            )
        elif update.outcome == "skipped":
            self.say(f"step {self._step} skipped: loss {mean_loss:g}, gradient norm {update.grad_norm:g}")
        elif update.outcome == "empty" and not self._warned_of_empty:
            self._warned_of_empty = True
            self.say(
                f"step {self._step} has no token to learn, so it changes nothing: all its labels are masked, as in "
                "chats that end before an answer. Such steps are counted as empty."
            )
        self._ram.step_ends(self._step)

    def step_ends(self, counters: Counters, update: Update, learning_rate: float, own_loss: float, report) -> None:
        """Write a heartbeat, and the row of a step that is logged.

        Args:
            counters: those of the loop, this step included.
            update: the outcome of the step.
            learning_rate: the step's learning rate.
            own_loss: nats per token of this process's own tokens; NaN if none counted.
            report: called for more values if a row is written.
        """
        plan = self._plan
        processes = self._accelerator.num_processes
        seconds, data_seconds = self._stopwatch.step_ends(plan.tokens_per_step)
        self._profile.step_ends(self._step)
        if self._threads is not None:
            self._threads.step_ends(seconds - data_seconds)
        self._heart.beat(
            counters.step,
            loss=_finite(own_loss),
            tokens_per_second=plan.tokens_per_step / processes / seconds,
            data_seconds=data_seconds,
            memory_gib=peak_memory_gib(self._device),
            **({"gpu_percent": self._utilization()} if self._utilization else {}),
        )
        self._tracker.advance()
        if not self._logs:
            return
        row = self._row(counters, update, learning_rate, report())
        self._tracker.log(counters.step, counters.tokens, row, train_line(row))
        for sentence in self._mixers.warnings():
            self.say(sentence)

    def _row(self, counters: Counters, update: Update, learning_rate: float, report: dict[str, float]) -> dict:
        """The metrics of a logged step."""
        plan = self._plan
        speed = self._stopwatch.read(plan.total_steps - counters.step)
        row = {
            "train/loss": counters.take_mean_loss(),
            "train/grad_norm": _finite(update.grad_norm),
            "train/learning_rate": learning_rate,
            "train/skipped_steps": counters.skipped,
            "train/peak_memory_gib": peak_memory_gib(self._device),
            **speed,
        }
        for name, value in self._rows.items():
            row[name] = _finite(float(value))
        row |= level_rows(self._engine.optimizer, plan.tokens_per_step) | report
        row |= self._kernels.rows() | self._mixers.rows()
        if counters.empty:
            row["train/empty_steps"] = counters.empty
        if update.loss_scale is not None:
            row |= {"train/loss_scale": update.loss_scale, "train/overflowed_steps": counters.overflowed}
        if self._peak:
            flops = speed["train/tokens_per_second"] * self._flops
            row["train/mfu_percent"] = 100 * flops / self._accelerator.num_processes / self._peak
        return row

    def evaluation_begins(self, counters: Counters, rows: int) -> None:
        """Say so, since an evaluation may take long; `rows`: of the held-out text."""
        self._tracker.tell(counters.step, f"evaluating {rows:,} rows of held-out text ...")

    def evaluated(self, counters: Counters, row: dict) -> None:
        """Write the row of an evaluation."""
        finite = {name: _finite(value) for name, value in row.items()}
        self._tracker.log(counters.step, counters.tokens, finite, eval_line(row))

    def close_tracker(self) -> None:
        """Close the tracker, so that later prints begin on a new line; print the kernels that did not run."""
        self._tracker.close()
        table = self._kernels.table()
        if table:
            self._accelerator.print(f"\n{table}\n")


class Silence:
    """Takes the place of a `Monitor` if nothing is to be measured or written."""

    def __getattr__(self, event: str):
        return lambda *arguments, **keywords: nullcontext()


def _finite(value: float) -> float | None:
    # JSON has no NaN and no infinity.
    return value if math.isfinite(value) else None
