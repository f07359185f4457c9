"""The plan as text, as JSON and as a picture."""

import operator
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hope_hf.common.defaults import default_lines
from hope_hf.common.files import write_errors
from hope_hf.common.flops import flops_per_token
from hope_hf.common.gpus import GIB
from hope_hf.common.recompute_flag import parse_recomputed
from hope_hf.common.results import Row, architecture, markdown_table

from .parsing import Question
from .sequence_state import cache_bytes
from .verdict import Setting, Verdict

if TYPE_CHECKING:
    from .simulate import Simulation

# Columns of the table -> the categories of memory that they add up.
COLUMNS = {
    "weights": ("weights",),
    "gradients": ("gradients", "whole gradients", "buckets"),
    "optimizer": ("optimizer",),
    "gathered": ("gathered", "weight copies"),
    "activations": ("activations", "backward"),
}


@dataclass(frozen=True)
class Plan:
    """What is printed.

    Attributes:
        rows: the setting that was asked for, then the others.
        verdicts: one a GPU.
        simulation: of the setting that was asked for, if `--simulate` asks for it.
        no_simulation: the reason why there is none then.
    """

    question: Question
    rows: list[Setting]
    verdicts: list[Verdict]
    simulation: "Simulation | None"
    no_simulation: str | None

    @property
    def asked(self) -> Setting:
        return self.rows[0]


def as_text(plan: Plan) -> str:
    """The text to print."""
    question = plan.question
    memory = plan.asked.memory
    parts = [
        _heading(question),
        markdown_table([_row(plan, row) for row in plan.rows]),
        "Weights, gradients and optimizer per process in GB (10^9 bytes), offloaded ones included.",
        markdown_table(list(map(_states_row, plan.rows))),
    ]
    if question.defaults:
        parts.append("\n".join(["Defaults of a small text:", *default_lines(question.defaults)]))
    if question.args.simulate:
        parts.append(_simulated(plan))
    if memory.gathered_block:
        parts.append(f"Largest gathered block: {memory.gathered_block / GIB:.3f} GiB.")
    if memory.between_batches:
        parts.append(
            f"Whole gradients between batches: {memory.between_batches / GIB:.2f} GiB; with --sync_each_batch "
            "gradients are reduced after each batch."
        )
    if memory.is_estimate:
        parts.append(
            f"The activations of a {question.config.model_type} are estimated from the shapes of its weights."
        )
    sentences = [_sentence(plan, verdict) for verdict in plan.verdicts]
    parts.append("\n".join(sentences))
    return "\n\n".join(parts)


def _heading(question: Question) -> str:
    step = question.step
    launch = question.launch
    shapes = question.shapes
    flops = flops_per_token(shapes.model, step.block_size)
    text = (
        f"{question.config.model_type}, {shapes.count:,} parameters (largest block {shapes.largest_block:,}), "
        f"{flops / 1e9:.2f} GFLOP per token"
    )
    state = cache_bytes(question.config, step.block_size)
    if state is not None:
        text += f", {state / 2**20:.1f} MiB of state per sequence after {step.block_size:,} tokens"
    text += (
        f"\n{launch.world_size:,} processes x {step.accumulation} batches x {step.batch_size} rows x "
        f"{step.block_size:,} tokens = {question.tokens_per_step:,} tokens per step; precision {launch.precision}, "
        f"{step.optimizer}"
    )
    if parse_recomputed(step.checkpointing).part != "none":
        text += f", recomputed: {step.checkpointing}"
    units = "Memory per process in GiB (2^30 bytes); traffic per process and step in GB (10^9 bytes)."
    return f"{text}\n{units}"


def _row(plan: Plan, row: Setting) -> Row:
    memory = row.memory
    cells: Row = {"setting": row.name, "peak": _gib(memory.peak)}
    if row.is_asked:
        cells["setting"] += " (asked)"
    sizes = Counter(memory.split)
    for column, categories in COLUMNS.items():
        cells[column] = _gib(sum(map(sizes.__getitem__, categories)))
    cells["at"] = memory.moment
    cells["host"] = _gib(memory.host)
    cells["GB sent"] = f"{row.traffic.total / 1e9:.2f}"
    cells["network s"] = f"{row.traffic.seconds(plan.question.network):.3g}"
    for verdict in plan.verdicts:
        cells[verdict.gpu.name] = "fits" if memory.peak <= verdict.usable else "no"
    return cells


def _states_row(row: Setting) -> Row:
    states = row.memory.states
    cells: Row = {"setting": row.name}
    total = 0
    for name in ("weights", "gradients", "optimizer", "buckets"):
        size = states.get(name, 0)
        total += size
        cells[name] = _gb(size)
    cells["sum"] = _gb(total)
    return cells


def _simulated(plan: Plan) -> str:
    simulation = plan.simulation
    if simulation is None:
        return f"No simulation: {plan.no_simulation}."
    sizes = [f"{name} {_gib(size)}" for name, size in simulation.split.items()]
    split = ", ".join(sizes)
    peak = _gib(simulation.peak)
    planned = _gib(plan.asked.memory.peak)
    heading = f"Simulated step of {plan.asked.name} ({simulation.seconds:.0f} s)"
    return f"{heading}: {peak} GiB ({split}); planned: {planned}."


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def _gb(size: float) -> str:
    return f"{size / 1e9:.3f}"


def _sentence(plan: Plan, verdict: Verdict) -> str:
    question = plan.question
    answer = "fits" if verdict.fits else "does not fit"
    text = f"{verdict.gpu.name}: {plan.asked.name} {answer}"
    peak = verdict.peak / GIB
    usable = verdict.usable / GIB
    text += f", {peak:.1f} of {usable:.1f} usable GiB"
    if not verdict.fits:
        text += f"; what would: {verdict.instead}" if verdict.instead else "; no setting fits"
    text += f"; largest batch {verdict.largest_batch}" if verdict.largest_batch else "; not even one row fits"
    precision = question.launch.precision
    if precision == "no":
        precision = "TF32"
    text += f"; a step computes for {verdict.step_seconds:.3g} s"
    text += f" at {100 * question.args.mfu:.3g}% of the {precision} peak"
    if plan.asked.traffic.total:
        text += f" and sends for {verdict.link_seconds:.3g} s inside a machine"
        text += f", {verdict.network_seconds:.3g} s between them"
    if verdict.days is not None:
        text += f"; {question.total_tokens:.3g} tokens take {verdict.days:.1f} days"
    if verdict.cost is not None:
        text += f" and cost {verdict.cost:,.0f}"
    return f"{text}."


def as_json(plan: Plan) -> dict:
    """The plan as an object of JSON: sizes in bytes, times in seconds unless a name gives another unit."""
    question = plan.question
    gpus = {}
    for verdict in plan.verdicts:
        answer = {"fits": verdict.fits, **vars(verdict)}
        gpu = answer.pop("gpu")
        gpus[gpu.name] = answer
    return {
        "model_type": question.config.model_type,
        "parameters": question.shapes.count,
        "largest_block": question.shapes.largest_block,
        "flops_per_token": flops_per_token(question.shapes.model, question.step.block_size),
        "state_bytes_per_sequence": cache_bytes(question.config, question.step.block_size),
        "world_size": question.launch.world_size,
        "mixed_precision": question.launch.precision,
        "tokens_per_step": question.tokens_per_step,
        "settings": list(map(_setting_of_json, plan.rows)),
        "simulation": vars(plan.simulation) if plan.simulation else None,
        "no_simulation": plan.no_simulation,
        "gpus": gpus,
    }


def _setting_of_json(row: Setting) -> dict:
    return {
        "setting": row.name,
        "is_asked": row.is_asked,
        "launch_file": row.launch.strategy.launch_file,
        "peak": row.memory.peak,
        **vars(row.memory),
        "gather_bytes": row.traffic.gather,
        "reduce_bytes": row.traffic.reduce,
    }


def draw(plan: Plan, path: str) -> None:
    """Write the picture; ValueError if matplotlib is missing or the file cannot be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'hope_hf[plot]'.") from None
    question = plan.question
    figure = Figure(figsize=(1.2 * len(plan.rows) + 3, 4.5), layout="constrained")
    axes = figure.subplots()
    names = [row.name for row in plan.rows]
    # The sizes of all settings by category.
    heights: dict[str, list[float]] = {}
    for index, row in enumerate(plan.rows):
        for category, size in row.memory.split.items():
            heights.setdefault(category, [0.0] * len(names))[index] = size / GIB
    tops = [0.0] * len(names)
    for category, sizes in heights.items():
        axes.bar(names, sizes, bottom=tops, label=category)
        tops = list(map(operator.add, tops, sizes))
    for index, verdict in enumerate(plan.verdicts):
        label = f"usable, {verdict.gpu.name}"
        axes.axhline(verdict.usable / GIB, color=f"C{index}", linestyle="--", label=label)
    model = architecture(question.config.model_type)
    count = question.launch.world_size
    millions = question.shapes.count / 1e6
    axes.set_title(f"{model}, {millions:,.4g} million parameters, {count:,} process(es)")
    axes.set_ylabel("memory of a process, GiB")
    axes.set_xlabel("way of sharding")
    axes.tick_params(axis="x", rotation=30)
    axes.legend(fontsize="small", bbox_to_anchor=(1, 1), loc="upper left")
    with write_errors(f"--plot {path}"):
        figure.savefig(path, dpi=130)
