"""Whether a run fits a GPU, which other setting fits, the largest batch, days and cost."""

import itertools
from bisect import bisect
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hope_hf.common.flops import flops_per_token
from hope_hf.common.gpus import GIB, Gpu

from .launch import SETTINGS, STRATEGIES, Launch, StepOptions
from .memory import Memory
from .parsing import Question
from .traffic import Traffic, traffic

if TYPE_CHECKING:
    from .simulate import Simulation

# Suggested settings, the fastest first.
SUGGESTED = ("ddp", "shard_grad_op", "full_shard", "fsdp_offload")
MOST_ROWS = 65_536


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    launch: Launch
    memory: Memory
    traffic: Traffic
    is_asked: bool

    @property
    def name(self) -> str:
        key = self.launch.strategy.key
        return "single" if key == "ddp" and self.launch.world_size == 1 else key


@dataclass(frozen=True)
class Verdict:
    """The answer for one GPU.

    Attributes:
        peak: bytes, simulated if there is a simulation.
        usable: bytes.
        largest_batch: rows per process and forward pass that fit; 0 if one row does not fit.
        instead: the first setting that fits; None if the setting asked for fits.
        step_seconds: compute time of a step at `--mfu`.
        days, cost: of the whole run; None without the flags for them.
    """

    gpu: Gpu
    peak: int
    usable: int
    largest_batch: int
    instead: str | None
    step_seconds: float
    link_seconds: float
    network_seconds: float
    days: float | None
    cost: float | None

    @property
    def fits(self) -> bool:
        return self.peak <= self.usable


def settings(question: Question) -> list[Setting]:
    """The setting that was asked for, then all others that are possible with this number of processes."""
    asked = question.launch
    rows = [_setting(question, asked)]
    if asked.world_size == 1:
        # One process has nothing to share.
        return rows
    for strategy in STRATEGIES.values():
        launch = asked.under(strategy, question.args.gpus_per_node)
        divides = launch.world_size % launch.parts == 0
        # A hybrid on one machine is full sharding.
        is_full = strategy.is_hybrid and launch.replicas == 1
        repeats = is_full or strategy.key == asked.strategy.key
        if divides and not repeats:
            rows.append(_setting(question, launch))
    return rows


def _setting(question: Question, launch: Launch) -> Setting:
    step = question.step
    reduce_bytes = 4
    if launch.strategy.is_fsdp and launch.precision != "no":
        reduce_bytes = step.reduce_dtype.itemsize
    memory = question.memory(launch, step)
    sent = traffic(
        question.shapes.count,
        launch,
        step.accumulation,
        step.sync_each_batch,
        gather_bytes=launch.compute_bytes,
        reduce_bytes=reduce_bytes,
    )
    return Setting(launch, memory, sent, is_asked=launch is question.launch)


def verdict(question: Question, rows: list[Setting], gpu: Gpu, simulation: "Simulation | None") -> Verdict:
    """The answer for a GPU; `rows` as `settings` returns them."""
    args = question.args
    launch = question.launch
    asked = rows[0]
    peak = simulation.peak if simulation else asked.memory.peak
    # The simulated peak of this setting corrects the plans of others.
    factor = peak / asked.memory.peak
    flops = flops_per_token(question.shapes.model, question.step.block_size)
    flops_per_second = launch.world_size * gpu.peak_flops(launch.precision) * args.mfu
    tokens_per_second = flops_per_second / flops
    days = None
    cost = None
    if question.total_tokens is not None:
        days = question.total_tokens / tokens_per_second / 86_400
        if args.price_per_gpu_hour is not None:
            gpu_hours = days * 24 * launch.world_size
            cost = gpu_hours * args.price_per_gpu_hour
    instead = None
    if peak > gpu.usable:
        instead = _instead(question, rows, gpu.usable, factor)
    return Verdict(
        gpu=gpu,
        peak=peak,
        usable=gpu.usable,
        largest_batch=largest_batch(question, launch, gpu.usable, factor),
        instead=instead,
        step_seconds=question.tokens_per_step / tokens_per_second,
        link_seconds=asked.traffic.seconds(gpu.link),
        network_seconds=asked.traffic.seconds(question.network),
        days=days,
        cost=cost,
    )


def largest_batch(question: Question, launch: Launch, room: int, factor: float = 1.0) -> int:
    """Rows per process and forward pass that fit into `room` bytes; `factor` scales the planned bytes."""

    def is_too_large(rows: int) -> bool:
        step = replace(question.step, batch_size=rows)
        memory = question.memory(launch, step)
        return factor * memory.peak > room

    return bisect(range(1, MOST_ROWS + 1), False, key=is_too_large)


def _instead(question: Question, rows: list[Setting], room: int, factor: float) -> str | None:
    """The first setting that fits, in words; recomputed blocks are tried last. `factor` as in `largest_batch`."""
    launches = {row.launch.strategy.key: row.launch for row in rows}
    suggested = [launches[key] for key in SUGGESTED if key in launches]
    step = question.step
    # each value once, that of the question first
    recomputed = dict.fromkeys((step.checkpointing, "block"))
    synced = dict.fromkeys((step.sync_each_batch, True))
    for checkpointing, launch, sync in itertools.product(recomputed, suggested, synced):
        changed = replace(step, checkpointing=checkpointing, sync_each_batch=sync)
        memory = question.memory(launch, changed)
        if factor * memory.peak <= room:
            return _changes(question, launch, changed)
    return None


def _changes(question: Question, launch: Launch, step: StepOptions) -> str | None:
    """The file and the flags that change to another launch and step, in words; None without changes."""
    changes = []
    strategy = launch.strategy
    if launch is not question.launch:
        change = f"accelerate_configs/{strategy.launch_file}"
        if strategy.key in SETTINGS:
            change += f" {SETTINGS[strategy.key]}"
        changes.append(change)
    if step.sync_each_batch != question.step.sync_each_batch:
        changes.append("--sync_each_batch")
    if step.checkpointing != question.step.checkpointing:
        changes.append("--gradient_checkpointing block")
    return " and ".join(changes) or None


def require_a_fit(question: Question, rows: list[Setting], verdicts: list[Verdict]) -> None:
    """ValueError of one sentence if the batch fits no GPU under any setting."""
    if any(verdict.fits or verdict.instead for verdict in verdicts):
        return
    best = max(verdicts, key=lambda verdict: verdict.usable)
    batches = {}
    for row in rows:
        batches[row.name] = largest_batch(question, row.launch, best.usable)
    name = max(batches, key=batches.get)
    least = min(rows, key=lambda row: row.memory.peak)
    needed = least.memory.peak / GIB
    usable = best.usable / GIB
    fix = "raise --world_size, lower --block_size or the model's size"
    if batches[name]:
        fix = f"lower it to {batches[name]} ({name})"
    if question.step.checkpointing != "block":
        fix += ", or give --gradient_checkpointing"
    raise ValueError(
        f"--per_device_train_batch_size {question.step.batch_size} fits no setting on {best.gpu.name}: the smallest, "
        f"{least.name}, needs {needed:.1f} of {usable:.1f} GiB; {fix}."
    )
