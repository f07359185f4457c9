"""Output besides the tables: pictures, and progress bars on a terminal."""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain, cycle
from pathlib import Path

from tqdm.auto import tqdm

from hope_hf.common.program import LOG_SECONDS, LogLines
from hope_hf.common.results import as_label, plain_number

from .result import Number

# Of the pictures that are being drawn.
_MODEL = ContextVar("model", default="")
# Longer names of a heat map's columns are written at an angle.
MOST_LETTERS = 9

# Nested rings and dashes keep coinciding curves visible.
SOLID, DASHED = "-", (0, (3, 3))
RINGS = ((SOLID, 12), (DASHED, 9), (SOLID, 6), (DASHED, 3))
CURVE = {"marker": "o", "markerfacecolor": "none", "linewidth": 1.8, "capsize": 3, "elinewidth": 1}
SMALL_CURVE = {"fmt": "o-", "markersize": 4, "capsize": 2, "elinewidth": 1}
DOT = {"fmt": "o", "markersize": 4, "capsize": 2}


def show_progress() -> bool:
    """Whether to draw bars: only on a terminal, since they make a log file unreadable."""
    return sys.stderr.isatty()


def progress(items: Iterable | None, name: str, total: int | None = None) -> tqdm:
    """A bar over `items`, or one of `total` units to be updated; a log gets a line every `LOG_SECONDS` instead."""
    if show_progress():
        return tqdm(items, name, total, leave=False)
    words = "{desc}: {n_fmt} of {total_fmt}, {elapsed}"
    # Checked after every unit, so that a line is written as soon as it is due.
    return tqdm(items, name, total, file=LogLines(), mininterval=0, miniters=1, delay=LOG_SECONDS, bar_format=words)


# Values of a curve, each with its standard error or None; or each with its place before it.
Values = Sequence[tuple[float, float | None]]
Points = Sequence[tuple[int, tuple[float, float | None]]]
# Title of a panel -> name of a curve -> its points.
Panels = dict[str, dict[str, Points]]


def curves(path: Path, x: list[int], panels: dict[str, dict[str, Values]], x_label: str):
    """Panels side by side: title -> name of a curve -> (value, its error or None) at each x, on a logarithmic scale.

    Up to four curves that coincide are all visible: each has a smaller ring than the one below it.
    """
    figure = _figure(width=6.5 * len(panels))
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, series) in zip(grid, panels.items(), strict=True):
        for (name, points), (line, size) in zip(series.items(), cycle(RINGS), strict=False):
            values, errors = _separated(points)
            axes.errorbar(x, values, errors, label=as_label(name), linestyle=line, markersize=size, **CURVE)
        axes.set_xscale("log", base=2)
        axes.set_xticks(x, list(map("{:,}".format, x)), rotation=45)
        _finish(axes, title, x_label)
    _legend_once(figure)
    _save(figure, path)


@dataclass(frozen=True)
class Panel:
    """One heat map: its values by row, the range of its colours, and the name of matplotlib's colour map."""

    title: str
    values: list[list[float]]
    limits: tuple[float, float] = (0.0, 1.0)
    colours: str = "viridis"


def heat_maps(
    path: Path,
    panels: list[Panel],
    rows: list[str],
    columns: list[str],
    labels: tuple[str, str],
    title: str = "",
):
    """Panels side by side, every cell with its number; `labels`: those of the columns' and of the rows' axis."""
    figure = _figure(width=2 + len(panels) * max(4.5, 0.9 * len(columns)))
    is_wide = max(map(len, columns)) > MOST_LETTERS
    turned = {"rotation": 30, "ha": "right"} if is_wide else {}
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(grid, panels, strict=True):
        low, high = panel.limits
        image = axes.imshow(panel.values, cmap=panel.colours, vmin=low, vmax=high, aspect="auto")
        axes.set_xticks(range(len(columns)), list(map(as_label, columns)), **turned)
        axes.set_yticks(range(len(rows)), list(map(as_label, rows)))
        axes.set(xlabel=labels[0], ylabel=labels[1], title=as_label(panel.title))
        _write_numbers(axes, panel.values, image)
        figure.colorbar(image, ax=axes)
    _save(figure, path, title)


def _write_numbers(axes, values: list[list[float]], image) -> None:
    """Each value in its cell of a heat map; a cell of NaN is empty."""
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            if math.isnan(value):
                continue
            red, green, blue, _ = image.to_rgba(value)
            # Brightness as the eye sees it.
            is_dark = 0.3 * red + 0.6 * green + 0.1 * blue < 0.5
            axes.text(j, i, f"{value:.2f}", ha="center", va="center", color="white" if is_dark else "black")


def small_curves(path: Path, panels: Panels, x_label: str):
    """Panels in rows of three: title -> name of a curve -> (x, value with its error), on a linear scale."""
    from matplotlib.ticker import EngFormatter

    figure, grid = _grid(panels, 1)
    names_of_panels = {tuple(panel) for panel in panels.values()}
    for axes, (title, panel) in zip(grid, panels.items(), strict=True):
        colours = _colours(len(panel))
        for colour, (name, points) in zip(colours, panel.items(), strict=True):
            x, numbers = zip(*points, strict=True)
            values, errors = _separated(numbers)
            axes.errorbar(x, values, errors, label=as_label(name), color=colour, **SMALL_CURVE)
        _finish(axes, title, x_label)
        axes.title.set_fontsize(9)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        # Once for panels of the same curves.
        has_legend = len(names_of_panels) > 1 or axes is grid[-1]
        if len(panel) > 1 and has_legend:
            # The legend stands beside the panel, where it covers no curve.
            size = 8 if len(panel) <= 10 else 6
            columns = 1 + len(panel) // 20
            axes.legend(fontsize=size, loc="upper left", bbox_to_anchor=(1, 1), ncols=columns)
    _save(figure, path)


def dots(path: Path, panels: dict[str, dict[str, dict[str, Number]]]):
    """Panels in rows of three: title -> run -> row -> its value and error; rows from top to bottom."""
    names = united(panels.values())
    rows_of = {title: united(runs.values()) for title, runs in panels.items()}
    most_rows = max(map(len, rows_of.values()))
    figure, grid = _grid(panels, most_rows)
    for axes, (title, runs) in zip(grid, panels.items(), strict=True):
        rows = rows_of[title]
        for index, name in enumerate(names):
            numbers = runs.get(name, {})
            # Dots stand side by side, so that equal values stay visible.
            middle = (len(names) - 1) / 2
            shift = 0.5 * (index - middle) / len(names)
            heights = [rows.index(row) + shift for row in numbers]
            values, errors = _separated(numbers.values())
            axes.errorbar(values, heights, xerr=errors, label=as_label(name), color=f"C{index}", **DOT)
        axes.set_title(as_label(title), fontsize=9)
        axes.set_yticks(range(len(rows)), list(map(as_label, rows)), fontsize=7)
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter(plain_number)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(alpha=0.3)
    _legend_once(figure)
    _save(figure, path)


@contextmanager
def titled(name: str) -> Iterator[None]:
    """Pictures that are drawn in the body have the name of the model above them."""
    token = _MODEL.set(name)
    try:
        yield
    finally:
        _MODEL.reset(token)


def _finish(axes, title: str, x_label: str) -> None:
    """The labels, numbers and grid of a panel of curves."""
    axes.set(xlabel=x_label, **_labels(title))
    axes.yaxis.set_major_formatter(plain_number)
    axes.grid(alpha=0.3)


def united(collections: Iterable[Iterable]) -> list:
    """What the collections hold, each once, in order."""
    return list(dict.fromkeys(chain.from_iterable(collections)))


def _separated(numbers: Iterable) -> tuple[list[float], list[float]]:
    """The values, and their errors as matplotlib wants them: NaN where there is none."""
    values = []
    errors = []
    for value, error in numbers:
        values.append(value)
        errors.append(math.nan if error is None else error)
    return values, errors


def _save(figure, path: Path, title: str = "") -> None:
    words = [word for word in (_MODEL.get(), title) if word]
    if words:
        figure.suptitle(as_label(", ".join(words)))
    figure.savefig(path, dpi=100)


def _labels(name: str) -> dict[str, str]:
    """Title and vertical axis of a panel: `title, unit`, or the axis and in a second line the title."""
    if "\n" in name:
        unit, title = name.split("\n", maxsplit=1)
    else:
        title, _, unit = name.rpartition(", ")
    return {"title": as_label(title), "ylabel": as_label(unit)}


def _legend_once(figure) -> None:
    """One legend above all panels, with each curve's name once."""
    handles = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles[label] = handle
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, len(handles)))


def _grid(panels: dict, rows: int):
    """A figure with three panels per row, each high enough for `rows` lines of text."""
    from matplotlib.figure import Figure

    columns = min(3, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(5 * columns, lines * max(3.0, 1.2 + 0.18 * rows)), layout="constrained")
    grid = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes in grid[len(panels) :]:
        axes.remove()
    return figure, grid[: len(panels)]


def _colours(count: int) -> list:
    """Distinct colours for few curves, a colour scale for many."""
    from matplotlib import colormaps

    if count <= 10:
        return [f"C{i}" for i in range(count)]
    return list(colormaps["viridis"].resampled(count).colors)


def _figure(width: float):
    from matplotlib.figure import Figure

    return Figure(figsize=(width, 5), layout="constrained")
