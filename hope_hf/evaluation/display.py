"""Output besides the tables: pictures, and progress bars on a terminal."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain, cycle
from pathlib import Path
from textwrap import fill

from hope_hf.common.results import as_label, plain_number

from .result import Number

# Of the pictures that are being drawn.
_MODEL = ContextVar("model", default="")
# Longer names of a heat map's columns are written at an angle.
MOST_LETTERS = 9
# Of a line above one of three panels.
LETTERS_OF_TITLE = 36

# Nested rings and dashes keep coinciding curves visible.
SOLID, DASHED = "-", (0, (3, 3))
RINGS = ((SOLID, 12), (DASHED, 9), (SOLID, 6), (DASHED, 3))
CURVE = {"marker": "o", "markerfacecolor": "none", "linewidth": 1.8, "capsize": 3, "elinewidth": 1}
SMALL_CURVE = {"fmt": "o-", "markersize": 4, "capsize": 2, "elinewidth": 1}
DOT = {"fmt": "o", "markersize": 4, "capsize": 2}


# The numbers of a curve; or each after its x.
Values = Sequence[Number]
Points = Sequence[tuple[int, Number]]
# Title of a panel -> name of a curve -> its points.
Panels = dict[str, dict[str, Points]]


def curves(path: Path, x: list[int], panels: dict[str, dict[str, Values]], x_label: str):
    """Panels side by side: title -> name of a curve -> its number at each x, on a logarithmic scale.

    Up to four curves that coincide are all visible: each has a smaller ring than the one below it.
    """
    figure, grid = _side_by_side(panels, width=6.5 * len(panels))
    x_names = list(map("{:,}".format, x))
    for axes, title in zip(grid, panels, strict=True):
        curves_of_panel = panels[title]
        for name, (line, size) in zip(curves_of_panel, cycle(RINGS), strict=False):
            numbers = curves_of_panel[name]
            _curve(axes, x, numbers, name, linestyle=line, markersize=size, **CURVE)
        axes.set_xscale("log", base=2)
        axes.set_xticks(x, x_names, rotation=45)
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
    path: Path, panels: list[Panel], rows: list[str], columns: list[str], labels: tuple[str, str], title: str = ""
):
    """Panels side by side, every cell with its number; `labels`: those of the columns' and of the rows' axis."""
    width_of_panel = max(4.5, 0.9 * len(columns))
    figure, grid = _side_by_side(panels, width=2 + len(panels) * width_of_panel)
    x_label, y_label = labels
    angle = {}
    if max(map(len, columns)) > MOST_LETTERS:
        angle = {"rotation": 30, "ha": "right"}
    for axes, panel in zip(grid, panels, strict=True):
        low, high = panel.limits
        image = axes.imshow(panel.values, cmap=panel.colours, vmin=low, vmax=high, aspect="auto")
        _name_ticks(axes.set_xticks, columns, **angle)
        _name_ticks(axes.set_yticks, rows)
        axes.set(xlabel=x_label, ylabel=y_label, title=as_label(panel.title))
        _write_numbers(axes, panel.values, image)
        figure.colorbar(image, ax=axes)
    _save(figure, path, title)


def _name_ticks(set_ticks: Callable, names: list[str], **style) -> None:
    """The names at 0, 1, 2, ... of an axis whose ticks `set_ticks` sets."""
    labels = list(map(as_label, names))
    set_ticks(range(len(names)), labels, **style)


def _write_numbers(axes, values: list[list[float]], image) -> None:
    """Each value in its cell of a heat map; a cell of NaN is empty."""
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            if math.isnan(value):
                continue
            red, green, blue, _ = image.to_rgba(value)
            # As the eye sees it.
            brightness = 0.3 * red + 0.6 * green + 0.1 * blue
            colour = "white" if brightness < 0.5 else "black"
            axes.text(j, i, f"{value:.2f}", ha="center", va="center", color=colour)


def small_curves(path: Path, panels: Panels, x_label: str):
    """Panels in rows of three: title -> name of a curve -> (x, value with its error), on a linear scale."""
    from matplotlib.ticker import EngFormatter

    figure, grid = _grid(panels, 1)
    names_of_panels = set(map(tuple, panels.values()))
    has_same_curves = len(names_of_panels) == 1
    for axes, title in zip(grid, panels, strict=True):
        panel = panels[title]
        colours = _colours(len(panel))
        for colour, name in zip(colours, panel, strict=True):
            x, numbers = zip(*panel[name], strict=True)
            _curve(axes, x, numbers, name, color=colour, **SMALL_CURVE)
        _finish(axes, title, x_label)
        axes.title.set_fontsize(9)
        kilo = EngFormatter(sep="")
        axes.xaxis.set_major_formatter(kilo)
        # Once for panels of the same curves.
        if len(panel) == 1 or (has_same_curves and axes is not grid[-1]):
            continue
        # The legend stands beside the panel, where it covers no curve.
        size = 8 if len(panel) <= 10 else 6
        columns = 1 + len(panel) // 20
        axes.legend(fontsize=size, loc="upper left", bbox_to_anchor=(1, 1), ncols=columns)
    _save(figure, path)


def dots(path: Path, panels: dict[str, dict[str, dict[str, Number]]]):
    """Panels in rows of three: title -> run -> row -> its value and error; rows from top to bottom."""
    run_names = united(panels.values())
    middle = (len(run_names) - 1) / 2
    rows_of_panels = [united(runs.values()) for runs in panels.values()]
    most_rows = max(map(len, rows_of_panels))
    figure, grid = _grid(panels, most_rows)
    for axes, title, rows in zip(grid, panels, rows_of_panels, strict=True):
        for index, name in enumerate(run_names):
            numbers = panels[title].get(name, {})
            # Dots stand side by side, so that equal values stay visible.
            shift = 0.5 * (index - middle) / len(run_names)
            heights = [rows.index(row) + shift for row in numbers]
            values, errors = _separated(numbers.values())
            label = as_label(name)
            axes.errorbar(values, heights, xerr=errors, label=label, color=f"C{index}", **DOT)
        lines = [fill(line, LETTERS_OF_TITLE) for line in title.splitlines()]
        axes.set_title(as_label("\n".join(lines)), fontsize=9)
        _name_ticks(axes.set_yticks, rows, fontsize=7)
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


def _curve(axes, x: Sequence[int], numbers: Values, name: str, **style) -> None:
    """A curve with error bars in a panel."""
    values, errors = _separated(numbers)
    axes.errorbar(x, values, errors, label=as_label(name), **style)


def _finish(axes, title: str, x_label: str) -> None:
    """The labels, numbers and grid of a panel of curves."""
    axes.set(xlabel=x_label, **_labels(title))
    axes.yaxis.set_major_formatter(plain_number)
    axes.grid(alpha=0.3)


def united(collections: Iterable[Iterable]) -> list:
    """What the collections hold, each once, in order."""
    return list(dict.fromkeys(chain.from_iterable(collections)))


def _separated(numbers: Iterable[Number]) -> tuple[list[float], list[float]]:
    """The values, and their errors for matplotlib: NaN where there is none, as at a length that did not fit."""
    values = []
    errors = []
    for value, error in numbers:
        values.append(math.nan if value is None else value)
        errors.append(math.nan if error is None else error)
    return values, errors


def _save(figure, path: Path, title: str = "") -> None:
    words = filter(None, (_MODEL.get(), title))
    title = ", ".join(words)
    if title:
        figure.suptitle(as_label(title))
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
        of_panel, labels = axes.get_legend_handles_labels()
        handles |= zip(labels, of_panel, strict=True)
    columns = min(4, len(handles))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns)


def _grid(panels: dict, rows: int):
    """A figure with three panels per row, each high enough for `rows` lines of text."""
    from matplotlib.figure import Figure

    columns = min(3, len(panels))
    lines = math.ceil(len(panels) / columns)
    height = max(3.0, 1.2 + 0.18 * rows)
    size = 5 * columns, lines * height
    figure = Figure(figsize=size, layout="constrained")
    grid = list(figure.subplots(lines, columns, squeeze=False).flat)
    number = len(panels)
    for axes in grid[number:]:
        axes.remove()
    return figure, grid[:number]


def _colours(count: int) -> list:
    """Distinct colours for few curves, a colour scale for many."""
    from matplotlib import colormaps

    if count <= 10:
        return [f"C{i}" for i in range(count)]
    scale = colormaps["viridis"].resampled(count)
    return list(scale.colors)


def _side_by_side(panels: Collection, width: float):
    """A figure with one row of panels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 5), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False)
    return figure, list(grid.flat)
