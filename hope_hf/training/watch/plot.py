"""Pictures of `metrics.jsonl`: `hope-hf plot DIR [DIR ...]`, several in one `loss.png`.

With `--memory`: the rows `memory/<layer>/...`, `sparse/<layer>/...` and `level/<level>/...` of one run, in
`memory.png`.
"""

import json
import math
import os
from contextlib import suppress
from functools import partial
from pathlib import Path

from hope_hf.common.files import RUN_FILE, read_object, read_small
from hope_hf.common.flags import Checked
from hope_hf.common.parser import Parser
from hope_hf.common.program import program
from hope_hf.common.results import architecture, as_label, draw_or_warn, markdown_table, plain_number

from ..checkpoints.run_folder import TEXT_FILES, WEIGHTS
from .model_report import ALL
from .rates import KEY as RATE
from .rates import learning_rates
from .tracking import METRICS_FILE, curve, read_metrics

# Title, label of the vertical axis, and the keys behind `memory/<layer>/`: solid, then dashed.
LAYER_PANELS = (
    ("step size of writes", "learning rate eta", ("learning_rate_mean",)),
    ("kept by a token", "share alpha of the memory", ("retention_mean",)),
    ("surprise before (-), after (--) writes", "norm of the error", ("surprise_before", "surprise_after")),
    ("change of the state", "norm over the identity's", ("state_norm_ratio",)),
    ("gradient into the initial states", "norm before clipping", ("initial_state_grad_norm",)),
)
# Drawn if a layer has sparse attention.
SPARSE_PANELS = (
    (
        "sparse gates: entropy (-), collapsed (--)",
        "nats; share of gates",
        ("gate_entropy_mean", "gate_collapse_fraction"),
    ),
    ("distance to a block: median (-), 95 % (--)", "tokens", ("selected_distance_median", "selected_distance_p95")),
)
# The same for `level/<level>/`: solid, dashed, then dotted. The last two are drawn if levels learn from the text.
LEVEL_PANELS = (
    ("updates of the levels", "updates", ("updates",)),
    (
        "learning: steps (-), gated (--), not finite (:)",
        "periods of a row",
        ("steps", "skipped_gate", "skipped_not_finite"),
    ),
    ("learning: largest drift", "norm over the matrix's", ("drift",)),
)
KINDS = ("memory", "sparse", "level")
SHARES = ("share_compressed", "share_selected", "share_window")
STYLES = ("-", "--", ":")
# Shown on a logarithmic axis: they span decades.
LOGARITHMIC = {"initial_state_grad_norm"}


def require_memories(folder: str | Path) -> None:
    """Raise ValueError if the run's rows hold nothing to draw."""
    rows = read_metrics(folder)
    if not any(_indices(rows, kind) for kind in KINDS):
        raise ValueError(f"{folder} has no rows of memories or levels: name a run of a HOPE.")


def draw_memory(folder: str | Path, target: str | Path) -> None:
    """Draw the run's memories, sparse attention and levels, over tokens, into `target`; needs matplotlib."""
    from matplotlib.figure import Figure

    rows = read_metrics(folder)
    layers, sparse, levels = (_indices(rows, kind) for kind in KINDS)
    panels = [("memory", layers, *panel) for panel in LAYER_PANELS] if layers else []
    if sparse:
        panels += [("sparse", sparse, *panel) for panel in SPARSE_PANELS]
        panels.append(("shares", [], "sparse attention: branches", "share", SHARES))
    panels += [("level", levels, *panel) for panel in LEVEL_PANELS if _has(rows, "level", levels, panel[2])]
    lines = math.ceil(len(panels) / 3)
    figure = Figure(figsize=(13, 3.5 * lines), layout="constrained")
    axes = list(figure.subplots(lines, 3, sharex=True, squeeze=False).flat)
    for axis in axes[len(panels) :]:
        axis.remove()
    axes = axes[: len(panels)]
    for axis, (kind, numbers, title, unit, keys) in zip(axes, panels, strict=True):
        if kind == "shares":
            _draw_shares(axis, rows, keys)
        else:
            _draw_lines(axis, rows, kind, numbers, keys)
        axis.set(title=title, ylabel=unit, yscale="log" if LOGARITHMIC & {*keys} else "linear")
    _share_tokens(axes)
    explained = set()
    for axis, (kind, *_) in zip(axes, panels, strict=True):
        # Layers have their colours in all panels of a kind, and levels theirs.
        if axis.has_data() and kind not in explained:
            explained.add(kind)
            axis.legend(fontsize="small", ncols=2)
    figure.suptitle(_title([folder]))
    figure.savefig(target, dpi=120)


def _draw_lines(axis, rows: list[dict], kind: str, numbers: list[int], keys: tuple[str, ...]) -> None:
    """Lines for each layer, or each level: one per key."""
    from matplotlib.cm import viridis

    for index, number in enumerate(numbers):
        if kind == "level":
            # Each level's line is narrower, since levels of one period coincide.
            name, look = f"level {number}", {"color": f"C{number}", "lw": 1.5 * (len(numbers) - number)}
        else:
            name, look = f"layer {number}", {"color": viridis(index / max(1, len(numbers) - 1) * 0.9)}
        for key, style in zip(keys, STYLES, strict=False):
            label = name if style == "-" else None
            _draw(axis, rows, f"{kind}/{number}/{key}", linestyle=style, label=label, **look)


def _draw_shares(axis, rows: list[dict], keys: tuple[str, ...]) -> None:
    for share in keys:
        _draw(axis, rows, f"sparse/{ALL}/{share}", label=share.removeprefix("share_"))
    axis.set(ylim=(0, 1))


def _has(rows: list[dict], kind: str, numbers: list[int], keys: tuple[str, ...]) -> bool:
    return any(f"{kind}/{number}/{key}" in row for row in rows for number in numbers for key in keys)


def _indices(rows: list[dict], kind: str) -> list[int]:
    names = {key.split("/")[1] for row in rows for key in row if key.startswith(f"{kind}/")}
    return sorted(int(name) for name in names if name.isdecimal())


def _share_tokens(axes: list) -> None:
    """Label the panels' common axis of tokens."""
    from matplotlib.ticker import EngFormatter

    for axis in axes:
        axis.set(xlabel="training tokens")
        axis.yaxis.set_major_formatter(plain_number)
        axis.tick_params(labelbottom=True)
        axis.grid(alpha=0.3)
    axes[0].xaxis.set_major_formatter(EngFormatter(sep=""))


def _draw(axis, rows: list[dict], key: str, **options) -> None:
    points = curve(rows, key)
    # A line of one point would be invisible.
    marker = "o" if len(points) == 1 else None
    axis.plot([x for x, _ in points], [y for _, y in points], marker=marker, **options)


PANELS = (
    ("loss", "nats per token", ("train/loss", "eval/loss")),
    ("learning rate", "matrices outside the levels", (RATE,)),
    ("gradient", "norm before clipping", ("train/grad_norm",)),
    ("speed", "tokens per second", ("train/tokens_per_second",)),
)
_WORDS = {"train": "training", "eval": "held-out text"}


def draw_curves(folders: list[str | Path], target: str | Path) -> None:
    """Draw the curves of the runs in `folders` over tokens into `target`; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True).flat
    runs = [(folder, as_label(Path(folder).resolve().name), read_metrics(folder)) for folder in folders]
    for axis, (title, unit, names) in zip(axes, PANELS, strict=True):
        for index, (folder, run, rows) in enumerate(runs):
            for name in names:
                points = learning_rates(folder, rows) if name == RATE else curve(rows, name)
                # A line of one point would be invisible.
                style = "o--" if name.startswith("eval") else "-" if len(points) > 1 else "o"
                words = _WORDS[name.split("/")[0]]
                label = f"{run}, {words}" if len(runs) > 1 else words
                if points:
                    axis.plot(*zip(*points, strict=True), style, label=label, color=f"C{index}", markersize=4)
        axis.set(title=title, ylabel=unit)
    _share_tokens(figure.axes)
    # Otherwise a few percent of noise would fill the panel.
    figure.axes[-1].set_ylim(bottom=0)
    if figure.axes[0].has_data():
        figure.axes[0].legend()
    figure.suptitle(_title(folders))
    figure.savefig(target, dpi=120)


def difference_table(folders: list[str]) -> str:
    """The flags in which runs differ and their last evaluations, a row for each run, as Markdown."""
    flags = [_flags_of(Path(folder)) for folder in folders]
    names = sorted(set().union(*flags))
    differ = [name for name in names if any(run.get(name) != flags[0].get(name) for run in flags)]
    rows = []
    for folder, run in zip(folders, flags, strict=True):
        losses = curve(read_metrics(folder), "eval/loss")
        shown = {name: "-" if run.get(name) is None else str(run[name]) for name in differ}
        rows.append({"run": folder, **shown, "eval/loss": f"{losses[-1][1]:.4f}" if losses else "-"})
    return markdown_table(rows)


def _flags_of(folder: Path) -> dict:
    """The flags of a run; none if the folder has metrics alone."""
    if not (folder / RUN_FILE).exists():
        return {}
    record = read_object(folder / RUN_FILE, "--output_dir", "draw a run's own folder")
    identity = record.get("identity")
    if not isinstance(identity, dict):
        return {}
    # What was read differs wherever a flag that names it does.
    return {name: value for name, value in identity.items() if name not in ("data", TEXT_FILES, WEIGHTS)}


def _title(folders: list[str | Path]) -> str:
    """The run with its architecture; of several, their architectures."""
    kinds = " and ".join(dict.fromkeys(filter(None, map(_architecture, folders))))
    name = as_label(Path(folders[0]).resolve().name) if len(folders) == 1 else f"{len(folders)} runs"
    return f"{name} ({kinds})" if kinds else name


def _architecture(folder: str | Path) -> str:
    """The architecture of a run's model, '' if unknown: its config is there once a checkpoint has been written."""
    files = [Path(folder) / "config.json", *sorted(Path(folder).glob("checkpoint-*/config.json"))]
    for file in files:
        # A picture needs no name.
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            return architecture(str(json.loads(read_small(file))["model_type"]))
    return ""


def make_parser() -> Parser:
    """All flags."""
    parser = Parser((), prog="hope-hf plot", description=__doc__, allow_abbrev=False)
    parser.add_argument("dir", metavar="DIR", nargs="+", action=Checked, help="the --output_dir of a run")
    drawn = "draw memories, sparse attention and levels of one run into memory.png"
    parser.add_argument("--memory", action="store_true", help=drawn)
    return parser


@program
def main(argv: list[str]) -> int:
    """Draw each folder's own loss.png, or for several folders one comparison in the working directory.

    Returns 0, 1 if the picture failed, or 2 after a mistake of the user.
    """
    args = make_parser().parse_args(argv)
    folders = args.dir
    for folder in folders:
        if not os.path.isfile(os.path.join(folder, METRICS_FILE)):
            raise ValueError(f"{folder} holds no {METRICS_FILE}: name the --output_dir of a run.")
        read_metrics(folder)
    if args.memory and len(folders) > 1:
        raise ValueError("--memory draws one run: name one folder.")
    if args.memory:
        require_memories(folders[0])
    draw = partial(draw_memory, folders[0]) if args.memory else partial(draw_curves, folders)
    place = Path(folders[0]) if len(folders) == 1 else Path()
    picture = draw_or_warn(draw, place / ("memory.png" if args.memory else "loss.png"))
    if picture is None:
        return 1
    print(picture)
    if len(folders) > 1:
        print(f"\n{difference_table(folders)}")
    return 0
