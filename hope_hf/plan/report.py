"""The plan as text, as JSON and as a picture."""

from hope_hf.common.defaults import default_lines
from hope_hf.common.files import write_errors
from hope_hf.common.flops import flops_per_token
from hope_hf.common.gpus import GIB
from hope_hf.common.recompute import parse_recomputed
from hope_hf.common.results import Row, architecture, markdown_table

from .activations import cache_bytes
from .parsing import Question
from .simulate import Simulation
from .verdict import Setting, Verdict

# Columns of the table that add up several categories of memory.
GROUPED = {
    "gathered": ("gathered", "weight copies"),
    "gradients": ("gradients", "whole gradients", "buckets"),
    "activations": ("activations", "backward"),
}


def as_text(question: Question, rows: list[Setting], verdicts: list[Verdict], found: Simulation | str) -> str:
    """The text to print; `found`: the simulation, or why there is none."""
    parts = [
        _heading(question),
        markdown_table([_row(question, row, verdicts) for row in rows]),
        "Weights, gradients and optimizer per process in GB (10^9 bytes), offloaded ones included.",
        markdown_table([_states_row(row) for row in rows]),
    ]
    if question.defaults:
        parts.append("\n".join(["Defaults of a small text:", *default_lines(question.defaults)]))
    asked = rows[0]
    if isinstance(found, Simulation):
        split = ", ".join(f"{name} {size / GIB:.2f}" for name, size in found.split.items())
        parts.append(
            f"Simulated step of {asked.name} ({found.seconds:.0f} s): {found.peak / GIB:.2f} GiB ({split}); "
            f"arithmetic alone: {asked.memory.peak / GIB:.2f}."
        )
    else:
        parts.append(f"No simulation: {found}.")
    if asked.memory.gathered_block:
        parts.append(f"Largest gathered block: {asked.memory.gathered_block / GIB:.3f} GiB.")
    if asked.memory.between_batches:
        parts.append(
            f"Whole gradients between batches: {asked.memory.between_batches / GIB:.2f} GiB; with --sync_each_batch "
            "gradients are reduced after each batch."
        )
    if asked.memory.is_estimate:
        parts.append(
            f"The activations of a {question.config.model_type} are estimated from the shapes of its weights."
        )
    return "\n\n".join([*parts, "\n".join(_sentence(question, rows, one) for one in verdicts)])


def _heading(question: Question) -> str:
    step, launch, shapes = question.step, question.launch, question.shapes
    flops = flops_per_token(shapes.model, step.block_size)
    state = cache_bytes(question.config, step.block_size)
    kept = "" if state is None else f", {state / 2**20:.1f} MiB of state per sequence after {step.block_size:,} tokens"
    recomputed = "" if parse_recomputed(step.checkpointing).part == "none" else f", recomputed: {step.checkpointing}"
    return (
        f"{question.config.model_type}, {shapes.count:,} parameters (largest block {shapes.largest_block:,}), "
        f"{flops / 1e9:.2f} GFLOP per token{kept}\n"
        f"{launch.world_size:,} processes x {step.accumulation} batches x {step.batch_size} rows x "
        f"{step.block_size:,} tokens = {question.tokens_per_step:,} tokens per step; precision {launch.precision}, "
        f"{step.optimizer}{recomputed}\n"
        "Memory per process in GiB (2^30 bytes), by arithmetic; traffic per process and step in GB (10^9 bytes)."
    )


def _row(question: Question, row: Setting, verdicts: list[Verdict]) -> Row:
    split = dict(row.memory.split)
    cells: Row = {"setting": row.name + (" (asked)" if row.is_asked else ""), "peak": _gib(row.memory.peak)}
    for name in ("weights", "gradients", "optimizer", "gathered", "activations"):
        cells[name] = _gib(sum(split.pop(part, 0) for part in GROUPED.get(name, (name,))))
    cells["at"] = row.memory.moment
    cells["host"] = _gib(row.memory.host)
    cells["GB sent"] = f"{row.traffic.total / 1e9:.2f}"
    network = row.traffic.seconds(question.args.network_gbit / 8 * 1e9)
    cells["network s"] = f"{network:.3g}"
    for one in verdicts:
        cells[one.gpu.name] = "fits" if row.memory.peak <= one.usable else "no"
    return cells


def _states_row(row: Setting) -> Row:
    states = {name: row.memory.states.get(name, 0) for name in ("weights", "gradients", "optimizer", "buckets")}
    cells = {name: f"{size / 1e9:.3f}" for name, size in (states | {"sum": sum(states.values())}).items()}
    return {"setting": row.name, **cells}


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def _sentence(question: Question, rows: list[Setting], one: Verdict) -> str:
    words = f"{one.gpu.name}: {rows[0].name} "
    words += f"{'fits' if one.fits else 'does not fit'}, {one.peak / GIB:.1f} of {one.usable / GIB:.1f} usable GiB"
    if not one.fits:
        words += f"; what would: {one.instead}" if one.instead else "; no setting fits"
    peak = "TF32" if question.launch.precision == "no" else question.launch.precision
    words += f"; largest batch {one.largest_batch}" if one.largest_batch else "; not even one row fits"
    words += f"; a step computes for {one.step_seconds:.3g} s at {100 * question.args.mfu:.3g}% of the {peak} peak"
    if rows[0].traffic.total:
        words += f" and sends for {one.link_seconds:.3g} s inside a machine, {one.network_seconds:.3g} s between them"
    if one.days is not None:
        words += f"; {question.total_tokens:.3g} tokens take {one.days:.1f} days"
    if one.cost is not None:
        words += f" and cost {one.cost:,.0f}"
    return words + "."


def as_json(question: Question, rows: list[Setting], verdicts: list[Verdict], found: Simulation | str) -> dict:
    """The plan as an object of JSON: sizes in bytes, times in seconds unless a name gives another unit."""
    simulated = isinstance(found, Simulation)
    return {
        "model_type": question.config.model_type,
        "parameters": question.shapes.count,
        "largest_block": question.shapes.largest_block,
        "flops_per_token": flops_per_token(question.shapes.model, question.step.block_size),
        "state_bytes_per_sequence": cache_bytes(question.config, question.step.block_size),
        "world_size": question.launch.world_size,
        "mixed_precision": question.launch.precision,
        "tokens_per_step": question.tokens_per_step,
        "settings": [
            {
                "setting": row.name,
                "is_asked": row.is_asked,
                "launch_file": row.launch.strategy.launch_file,
                "peak": row.memory.peak,
                **vars(row.memory),
                "gather_bytes": row.traffic.gather,
                "reduce_bytes": row.traffic.reduce,
            }
            for row in rows
        ],
        "simulation": vars(found) if simulated else None,
        "no_simulation": None if simulated else found,
        "gpus": {
            one.gpu.name: {"fits": one.fits, **{name: value for name, value in vars(one).items() if name != "gpu"}}
            for one in verdicts
        },
    }


def draw(question: Question, rows: list[Setting], verdicts: list[Verdict], path: str) -> None:
    """Write the picture; ValueError if matplotlib is missing or the file cannot be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'hope_hf[plot]'.") from None
    figure = Figure(figsize=(1.2 * len(rows) + 3, 4.5), layout="constrained")
    axes = figure.subplots()
    names = [row.name for row in rows]
    floor = [0.0] * len(rows)
    for category in dict.fromkeys(name for row in rows for name in row.memory.split):
        sizes = [row.memory.split.get(category, 0) / GIB for row in rows]
        axes.bar(names, sizes, bottom=floor, label=category)
        floor = [low + size for low, size in zip(floor, sizes, strict=True)]
    for index, one in enumerate(verdicts):
        axes.axhline(one.usable / GIB, color=f"C{index}", linestyle="--", label=f"usable, {one.gpu.name}")
    model, count = architecture(question.config.model_type), question.launch.world_size
    axes.set_title(f"{model}, {question.shapes.count / 1e6:,.4g} million parameters, {count:,} process(es)")
    axes.set_ylabel("memory of a process, GiB (by arithmetic)")
    axes.set_xlabel("way of sharding")
    axes.tick_params(axis="x", rotation=30)
    axes.legend(fontsize="small", bbox_to_anchor=(1, 1), loc="upper left")
    with write_errors(f"--plot {path}"):
        figure.savefig(path, dpi=130)
