"""Whether a run fits a GPU, which other setting fits, the largest batch, days and cost."""

from dataclasses import dataclass, replace

from hope_hf.common.flops import flops_per_token
from hope_hf.common.gpus import GIB, Gpu

from .launch import SETTINGS, STRATEGIES, Launch, StepOptions
from .memory import Memory, memory
from .parsing import Question
from .simulate import Simulation
from .traffic import Traffic, traffic

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
    launches = [asked]
    for strategy in STRATEGIES.values():
        launch = asked.under(strategy, question.args.gpus_per_node)
        # One process has nothing to share; a hybrid on one machine is full sharding.
        possible = asked.world_size > 1 and launch.world_size % launch.parts == 0
        possible = possible and not (strategy.is_hybrid and launch.replicas == 1)
        if possible and strategy.key != asked.strategy.key:
            launches.append(launch)
    return [_setting(question, launch) for launch in launches]


def _setting(question: Question, launch: Launch) -> Setting:
    step, shapes = question.step, question.shapes
    is_cast = launch.strategy.engine.startswith("fsdp") and launch.precision != "no"
    reduce = step.reduce_dtype.itemsize if is_cast else 4
    sent = traffic(shapes.count, launch, step.accumulation, step.sync_each_batch, launch.compute_bytes, reduce)
    found = memory(question.config, shapes, launch, step, question.args.gpus_per_node)
    return Setting(launch, found, sent, launch is question.launch)


def verdict(question: Question, rows: list[Setting], gpu: Gpu, simulation: Simulation | None) -> Verdict:
    """The answer for a GPU; `rows` as `settings` returns them."""
    args, asked, room = question.args, rows[0], gpu.usable
    peak = simulation.peak if simulation else asked.memory.peak
    flops = flops_per_token(question.shapes.model, question.step.block_size)
    per_second = question.launch.world_size * gpu.peak_flops(question.launch.precision) * args.mfu / flops
    days = None if question.total_tokens is None else question.total_tokens / per_second / 86_400
    has_cost = days is not None and args.price_per_gpu_hour is not None
    cost = days * 24 * question.launch.world_size * args.price_per_gpu_hour if has_cost else None
    return Verdict(
        gpu,
        peak,
        room,
        # The simulated peak of this setting corrects its arithmetic.
        largest_batch(question, question.launch, room, peak / asked.memory.peak),
        None if peak <= room else _instead(question, rows, room, peak / asked.memory.peak),
        question.tokens_per_step / per_second,
        asked.traffic.seconds(gpu.link),
        asked.traffic.seconds(args.network_gbit / 8 * 1e9),
        days,
        cost,
    )


def largest_batch(question: Question, launch: Launch, room: int, factor: float = 1.0) -> int:
    """Rows per process and forward pass that fit into `room` bytes; `factor` scales the arithmetic's bytes."""

    def fits(rows: int) -> bool:
        step = replace(question.step, batch_size=rows)
        return factor * memory(question.config, question.shapes, launch, step).peak <= room

    low, high = 0, 1
    while high <= MOST_ROWS and fits(high):
        low, high = high, 2 * high
    high = min(high, MOST_ROWS + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _instead(question: Question, rows: list[Setting], room: int, factor: float) -> str | None:
    """The first setting that fits, in words; recomputed blocks are tried last. `factor` as in `largest_batch`."""
    launches = {row.launch.strategy.key: row.launch for row in rows}
    asked = question.step
    for checkpointing in dict.fromkeys((asked.checkpointing, "block")):
        for launch in (launches[key] for key in SUGGESTED if key in launches):
            for sync in dict.fromkeys((asked.sync_each_batch, True)):
                step = replace(asked, checkpointing=checkpointing, sync_each_batch=sync)
                if factor * memory(question.config, question.shapes, launch, step).peak <= room:
                    return _words(question, launch, step)
    return None


def _words(question: Question, launch: Launch, step: StepOptions) -> str | None:
    """The flags that change to another launch and step, in words; None without changes."""
    words = []
    if launch is not question.launch:
        setting = SETTINGS.get(launch.strategy.key)
        words.append(f"accelerate_configs/{launch.strategy.launch_file}" + (f" {setting}" if setting else ""))
    if step.sync_each_batch != question.step.sync_each_batch:
        words.append("--sync_each_batch")
    if step.checkpointing != question.step.checkpointing:
        words.append("--gradient_checkpointing block")
    return " and ".join(words) or None


def require_a_fit(question: Question, rows: list[Setting], verdicts: list[Verdict]) -> None:
    """ValueError of one sentence if the batch fits no GPU under any setting."""
    if any(found.fits or found.instead for found in verdicts):
        return
    best = max(verdicts, key=lambda found: found.usable)
    batches = {row.name: largest_batch(question, row.launch, best.usable) for row in rows}
    name = max(batches, key=batches.get)
    least = min(rows, key=lambda row: row.memory.peak)
    recompute = "" if question.step.checkpointing == "block" else ", or give --gradient_checkpointing"
    raise ValueError(
        f"--per_device_train_batch_size {question.step.batch_size} fits no setting on {best.gpu.name}: the smallest, "
        f"{least.name}, needs {least.memory.peak / GIB:.1f} of {best.usable / GIB:.1f} GiB; "
        + (
            f"lower it to {batches[name]} ({name}){recompute}."
            if batches[name]
            else f"raise --world_size, lower --block_size or the model's size{recompute}."
        )
    )
