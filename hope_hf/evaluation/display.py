"""Output besides the tables: pictures, and progress bars on a terminal."""

import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from tqdm.auto import tqdm

from hope_hf.common.program import LOG_SECONDS, LogLines
from hope_hf.common.results import Row, as_label, plain_number

from .result import Number

# Of the pictures that are being drawn.
_MODEL = ContextVar("model", default="")
# Longer names of a heat map's columns are written at an angle.
MOST_LETTERS = 9

# Nested rings and dashes keep coinciding curves visible.
STYLES = [
    {"linestyle": line, "linewidth": 1.8, "marker": "o", "markersize": size, "markerfacecolor": "none"}
    for line, size in zip(["-", (0, (3, 3))] * 2, (12, 9, 6, 3), strict=True)
]


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


def curves(path: Path, x: list[int], panels: dict[str, dict[str, list[tuple[float, float | None]]]], x_label: str):
    """Panels side by side: title -> name of a curve -> (value, its error or None) at each x, on a logarithmic scale.

    Up to four curves that coincide are all visible: each has a smaller ring than the one below it.
    """
    figure = _figure(width=6.5 * len(panels))
    for axes, (title, series) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for (name, points), style in zip(series.items(), cycle(STYLES), strict=False):
            values, errors = zip(*points, strict=True)
            bars = [math.nan if error is None else error for error in errors]
            axes.errorbar(x, values, bars, capsize=3, elinewidth=1, label=as_label(name), **style)
        axes.set_xscale("log", base=2)
        axes.set_xticks(x, [f"{value:,}" for value in x], rotation=45)
        axes.set(xlabel=x_label, **_labels(title))
        axes.yaxis.set_major_formatter(plain_number)
        axes.grid(alpha=0.3)
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
    figure = _figure(width=2 + len(panels) * max(4.5, 0.9 * len(columns)))
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        low, high = panel.limits
        image = axes.imshow(panel.values, cmap=panel.colours, vmin=low, vmax=high, aspect="auto")
        turned = {"rotation": 30, "ha": "right"} if max(map(len, columns)) > MOST_LETTERS else {}
        axes.set_xticks(range(len(columns)), list(map(as_label, columns)), **turned)
        axes.set_yticks(range(len(rows)), list(map(as_label, rows)))
        axes.set(xlabel=labels[0], ylabel=labels[1], title=as_label(panel.title))
        for i, row in enumerate(panel.values):
            for j, value in enumerate(row):
                if math.isnan(value):
                    continue
                red, green, blue, _ = image.to_rgba(value)
                # Brightness as the eye sees it.
                is_dark = 0.3 * red + 0.6 * green + 0.1 * blue < 0.5
                axes.text(j, i, f"{value:.2f}", ha="center", va="center", color="white" if is_dark else "black")
        figure.colorbar(image, ax=axes)
    _save(figure, path, title)


def by_depth(rows: list[Row]) -> tuple[list[list[Row]], tuple[list[str], list[str]]]:
    """Rows of every depth and length as lines of a heat map, and the names of its lines and columns."""
    lengths, depths = (sorted({row[name] for row in rows}) for name in ("length", "depth"))
    cells = {(row["depth"], row["length"]): row for row in rows}
    lines = [[cells[depth, length] for length in lengths] for depth in depths]
    return lines, ([f"{depth:g}" for depth in depths], [f"{length:,}" for length in lengths])


def small_curves(path: Path, panels: dict[str, dict[str, list[tuple[int, Number]]]], x_label: str):
    """Panels in rows of three: title -> name of a curve -> (x, value with its error), on a linear scale."""
    from matplotlib.ticker import EngFormatter

    figure, grid = _grid(panels, 1)
    for axes, (title, curves_of) in zip(grid, panels.items(), strict=True):
        colours = _colours(len(curves_of))
        for colour, (name, points) in zip(colours, curves_of.items(), strict=True):
            x, values, errors = zip(*((x, *number) for x, number in points), strict=True)
            bars = [math.nan if error is None else error for error in errors]
            label = as_label(name)
            axes.errorbar(x, values, bars, fmt="o-", color=colour, markersize=4, capsize=2, elinewidth=1, label=label)
        axes.set(xlabel=x_label, **_labels(title))
        axes.title.set_fontsize(9)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.yaxis.set_major_formatter(plain_number)
        axes.grid(alpha=0.3)
        # Once for panels of the same curves.
        if len(curves_of) > 1 and (axes is grid[-1] or any([*curves_of] != [*other] for other in panels.values())):
            # The legend stands beside the panel, where it covers no curve.
            size = 8 if len(curves_of) <= 10 else 6
            axes.legend(fontsize=size, loc="upper left", bbox_to_anchor=(1, 1), ncols=1 + len(curves_of) // 20)
    _save(figure, path)


def dots(path: Path, panels: dict[str, dict[str, dict[str, Number]]]):
    """Panels in rows of three: title -> run -> row -> its value and error; rows from top to bottom."""
    rows_of = {title: _united(runs.values()) for title, runs in panels.items()}
    names = _united(panels.values())
    figure, grid = _grid(panels, max(map(len, rows_of.values())))
    for axes, (title, runs) in zip(grid, panels.items(), strict=True):
        rows = rows_of[title]
        for index, name in enumerate(names):
            found = runs.get(name, {})
            # Dots stand side by side, so that equal values stay visible.
            shift = 0.5 * (index - (len(names) - 1) / 2) / len(names)
            places = [rows.index(row) + shift for row in found]
            errors = [math.nan if number.stderr is None else number.stderr for number in found.values()]
            values = [number.value for number in found.values()]
            label = as_label(name)
            style = {"color": f"C{index}", "markersize": 4, "capsize": 2}
            axes.errorbar(values, places, xerr=errors, fmt="o", label=label, **style)
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


def _save(figure, path: Path, title: str = "") -> None:
    words = ", ".join(filter(None, (_MODEL.get(), title)))
    if words:
        figure.suptitle(as_label(words))
    figure.savefig(path, dpi=100)


def _labels(name: str) -> dict[str, str]:
    """Title and vertical axis of a panel named `measure, unit` or `measure`, with a second line for a table."""
    first, line, table = name.partition("\n")
    measure, _, unit = (table, line, first) if line else name.rpartition(", ")
    return {"title": as_label(measure), "ylabel": as_label(unit)}


def _legend_once(figure) -> None:
    """One legend above all panels, with each curve's name once."""
    found = {}
    for axes in figure.axes:
        found |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=min(4, len(found)))


def _united(lists: Iterable[Iterable[str]]) -> list[str]:
    """All words of the lists, each once, in order."""
    return list(dict.fromkeys(word for words in lists for word in words))


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

    return [f"C{i}" for i in range(count)] if count <= 10 else list(colormaps["viridis"].resampled(count).colors)


def _figure(width: float):
    from matplotlib.figure import Figure

    return Figure(figsize=(width, 5), layout="constrained")
