"""Pictures of `metrics.jsonl`: `hope-hf plot DIR [DIR ...]`, several in one `loss.png`.

With `--memory`: the rows `memory/<layer>/...`, `sparse/<layer>/...` and `level/<level>/...` of one run, in
`memory.png`.
"""

import json
import math
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hope_hf.common.files import RUN_FILE, TEXT_FILES, read_object, read_small
from hope_hf.common.flags import Checked
from hope_hf.common.parser import Parser
from hope_hf.common.program import program
from hope_hf.common.results import architecture, as_label, draw_or_warn, markdown_table, plain_number

from ..checkpoints.run_folder import WEIGHTS
from .metrics_file import ALL, METRICS_FILE, curve, read_metrics


@dataclass(frozen=True)
class Panel:
    """A part of a picture.

    Attributes:
        title: of the panel; its signs explain the styles of lines.
        unit: label of the vertical axis.
        names: of rows, behind `<kind>/<layer or level>/`; solid, then dashed, then dotted.
        kind: "memory", "sparse" or "level"; "shares": of all layers with sparse attention together.
    """

    title: str
    unit: str
    names: tuple[str, ...]
    kind: str


LAYER_PANELS = (
    Panel("step size of writes", "learning rate eta", ("learning_rate_mean",), "memory"),
    Panel("kept by a token", "share alpha of the memory", ("retention_mean",), "memory"),
    Panel(
        "surprise before (-), after (--) writes", "norm of the error", ("surprise_before", "surprise_after"), "memory"
    ),
    Panel("change of the state", "norm over the identity's", ("state_norm_ratio",), "memory"),
    Panel("gradient into the initial states", "norm before clipping", ("initial_state_grad_norm",), "memory"),
)
# Drawn if a layer has sparse attention.
SPARSE_PANELS = (
    Panel(
        "sparse gates: entropy (-), collapsed (--)",
        "nats; share of gates",
        ("gate_entropy_mean", "gate_collapse_fraction"),
        "sparse",
    ),
    Panel(
        "distance to a block: median (-), 95 % (--)",
        "tokens",
        ("selected_distance_median", "selected_distance_p95"),
        "sparse",
    ),
)
LEVEL_PANEL = Panel("updates of the levels", "updates", ("updates",), "level")
SHARES = ("share_compressed", "share_selected", "share_window")
SHARES_PANEL = Panel("sparse attention: branches", "share", SHARES, "shares")
STYLES = ("-", "--", ":")
# Shown on a logarithmic axis: they span decades.
LOGARITHMIC = {"initial_state_grad_norm"}


def require_memories(folder: str | Path) -> None:
    """Raise ValueError if the run's rows hold nothing to draw."""
    if not _numbers(read_metrics(folder)):
        raise ValueError(f"{folder} has no rows of memories or levels: name a run of a HOPE.")


def draw_memory(folder: str | Path, target: str | Path) -> None:
    """Draw the run's memories, sparse attention and levels, over tokens, into `target`; needs matplotlib."""
    from matplotlib.figure import Figure

    rows = read_metrics(folder)
    numbers = _numbers(rows)
    panels = [panel for panel in LAYER_PANELS + SPARSE_PANELS if panel.kind in numbers]
    if "sparse" in numbers:
        panels.append(SHARES_PANEL)
    if "level" in numbers:
        panels.append(LEVEL_PANEL)
    lines = math.ceil(len(panels) / 3)
    figure = Figure(figsize=(13, 3.5 * lines), layout="constrained")
    axes = list(figure.subplots(lines, 3, sharex=True, squeeze=False).flat)
    for axis in axes[len(panels) :]:
        axis.remove()
    axes = axes[: len(panels)]
    explained = set()
    for axis, panel in zip(axes, panels, strict=True):
        axis.set(title=panel.title, ylabel=panel.unit)
        if panel is SHARES_PANEL:
            _draw_shares(axis, rows)
        else:
            _draw_lines(axis, rows, panel, numbers[panel.kind])
        # Layers have their colours in all panels of a kind, and levels theirs.
        if axis.has_data() and panel.kind not in explained:
            explained.add(panel.kind)
            axis.legend(fontsize="small", ncols=2)
    _share_tokens(axes)
    figure.suptitle(_title([folder]))
    figure.savefig(target, dpi=120)


def _draw_shares(axis, rows: list[dict]) -> None:
    for share in SHARES:
        _draw(axis, rows, f"sparse/{ALL}/{share}", label=share.removeprefix("share_"))
    axis.set(ylim=(0, 1))


def _draw_lines(axis, rows: list[dict], panel: Panel, numbers: list[int]) -> None:
    """Lines for each layer, or each level: one per name."""
    from matplotlib.cm import viridis

    for index, number in enumerate(numbers):
        if panel.kind == "level":
            # Each level's line is narrower, since levels of one period coincide.
            label = f"level {number}"
            look = {"color": f"C{number}", "lw": 1.5 * (len(numbers) - number)}
        else:
            label = f"layer {number}"
            height = index / max(1, len(numbers) - 1)
            look = {"color": viridis(height * 0.9)}
        for name, style in zip(panel.names, STYLES, strict=False):
            column = f"{panel.kind}/{number}/{name}"
            _draw(axis, rows, column, linestyle=style, label=label, **look)
            label = None
    if LOGARITHMIC & set(panel.names):
        axis.set_yscale("log")


def _numbers(rows: list[dict]) -> dict[str, list[int]]:
    """By kind, the layers or levels that have rows."""
    numbers: dict[str, set[int]] = {}
    for row in rows:
        for name in row:
            kind, _, rest = name.partition("/")
            number = rest.partition("/")[0]
            if kind in ("memory", "sparse", "level") and number.isdecimal():
                numbers.setdefault(kind, set()).add(int(number))
    return {kind: sorted(of_kind) for kind, of_kind in numbers.items()}


def _share_tokens(axes: list) -> None:
    """Label the panels' common axis of tokens."""
    from matplotlib.ticker import EngFormatter

    for axis in axes:
        axis.set(xlabel="training tokens")
        axis.yaxis.set_major_formatter(plain_number)
        axis.tick_params(labelbottom=True)
        axis.grid(alpha=0.3)
    axes[0].xaxis.set_major_formatter(EngFormatter(sep=""))


def _draw(axis, rows: list[dict], name: str, **look) -> None:
    points = curve(rows, name)
    # A line of one point would be invisible.
    if len(points) == 1:
        look["marker"] = "o"
    tokens, values = zip(*points, strict=True) if points else ((), ())
    axis.plot(tokens, values, **look)


# Title, unit and rows.
PANELS = (
    ("loss", "nats per token", ("train/loss", "eval/loss")),
    ("learning rate", "matrices outside the levels", ("train/learning_rate",)),
    ("gradient", "norm before clipping", ("train/grad_norm",)),
    ("speed", "tokens per second", ("train/tokens_per_second",)),
)


def draw_curves(folders: list[str | Path], target: str | Path) -> None:
    """Draw the curves of the runs in `folders` over tokens into `target`; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    figure.subplots(2, 2, sharex=True)
    for index, folder in enumerate(folders):
        rows = read_metrics(folder)
        run = f"{as_label(Path(folder).resolve().name)}, " if len(folders) > 1 else ""
        for axis, (title, unit, names) in zip(figure.axes, PANELS, strict=True):
            axis.set(title=title, ylabel=unit)
            for name in names:
                is_evaluation = name.startswith("eval")
                label = run + ("held-out text" if is_evaluation else "training")
                look = {"linestyle": "--", "marker": "o", "markersize": 4} if is_evaluation else {}
                if curve(rows, name):
                    _draw(axis, rows, name, label=label, color=f"C{index}", **look)
    _share_tokens(figure.axes)
    # Otherwise a few percent of noise would fill the panel.
    figure.axes[-1].set_ylim(bottom=0)
    if figure.axes[0].has_data():
        figure.axes[0].legend()
    figure.suptitle(_title(folders))
    figure.savefig(target, dpi=120)


def difference_table(folders: list[str]) -> str:
    """The flags in which runs differ and their last evaluations, a row for each run, as Markdown."""
    flags_of_runs = [_flags_of(Path(folder)) for folder in folders]
    differing = []
    for name in sorted(set().union(*flags_of_runs)):
        values = [flags.get(name) for flags in flags_of_runs]
        if values != values[:1] * len(values):
            differing.append(name)
    rows = []
    for folder, flags in zip(folders, flags_of_runs, strict=True):
        row = {"run": folder}
        for name in differing:
            row[name] = "-" if flags.get(name) is None else str(flags[name])
        losses = curve(read_metrics(folder), "eval/loss")
        row["eval/loss"] = f"{losses[-1][1]:.4f}" if losses else "-"
        rows.append(row)
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
    if len(folders) == 1:
        name = as_label(Path(folders[0]).resolve().name)
    else:
        name = f"{len(folders)} runs"
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
    target = Path(folders[0]) if len(folders) == 1 else Path()
    picture = draw_or_warn(draw, target / ("memory.png" if args.memory else "loss.png"))
    if picture is None:
        return 1
    print(picture)
    if len(folders) > 1:
        print(f"\n{difference_table(folders)}")
    return 0
