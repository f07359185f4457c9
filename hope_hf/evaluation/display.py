"""Output besides the tables: pictures, and progress bars on a terminal."""

import io
import math
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import datasets
import transformers
from tqdm.auto import tqdm

LOG_SECONDS = 20.0

# Nested rings and dashes keep curves that coincide visible.
STYLES = [
    {"linestyle": line, "linewidth": 1.8, "marker": "o", "markersize": size, "markerfacecolor": "none"}
    for line, size in zip(["-", (0, (3, 3))] * 2, (12, 9, 6, 3), strict=True)
]


def show_progress() -> bool:
    """Whether to draw bars: only on a terminal, since they make a log file unreadable."""
    return sys.stderr.isatty()


def progress(items: Iterable | None, name: str, total: int | None = None) -> tqdm:
    """A bar over `items`, or one of `total` units to be updated; in a log a line every `LOG_SECONDS` instead."""
    if show_progress():
        return tqdm(items, name, total, leave=False)
    words = "{desc}: {n_fmt} of {total_fmt}, {elapsed}"
    # Checked after every unit, so that a line is written as soon as it is due.
    return tqdm(items, name, total, file=LogLines(), mininterval=0, miniters=1, delay=LOG_SECONDS, bar_format=words)


class LogLines(io.TextIOBase):
    """A file for bars that go to a log: writes one of the drawn lines to stderr every `LOG_SECONDS`."""

    def __init__(self, wanted: str = " of "):
        """`wanted`: what a bar's text contains; other text is dropped."""
        self._wanted, self._last = wanted, time.monotonic()

    def write(self, text: str) -> int:
        """Takes a bar as tqdm draws it, from a carriage return on."""
        line = text.strip()
        if self._wanted in line and time.monotonic() - self._last >= LOG_SECONDS:
            self._last = time.monotonic()
            print(line.splitlines()[-1], file=self._terminal, flush=True)
        return len(text)

    @property
    def _terminal(self):
        # While lm-eval runs, stderr is this file.
        return sys.__stderr__ if sys.stderr is self else sys.stderr


def hide_foreign_bars():
    """Switch off the bars of transformers and datasets, which are also drawn in log files."""
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()


def curves(path: Path, x: list[int], panels: dict[str, dict[str, list[tuple[float, float | None]]]], x_label: str):
    """Panels side by side: title -> name of a curve -> (value, its error or None) at each x, on a logarithmic scale.

    Up to four curves that coincide are all visible: each has a smaller ring than the one below it.
    """
    figure = _figure(width=6.5 * len(panels))
    for axes, (title, series) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for (name, points), style in zip(series.items(), cycle(STYLES), strict=False):
            values, errors = zip(*points, strict=True)
            bars = [math.nan if error is None else error for error in errors]
            axes.errorbar(x, values, bars, capsize=3, elinewidth=1, label=name, **style)
        axes.set_xscale("log", base=2)
        axes.set_xticks(x, [f"{value:,}" for value in x], rotation=45)
        axes.set(xlabel=x_label, title=title)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=100)


@dataclass(frozen=True)
class Panel:
    """One heat map: its values by row, the range of its colours, and matplotlib's name of them."""

    title: str
    values: list[list[float]]
    limits: tuple[float, float] = (0.0, 1.0)
    colours: str = "viridis"


def heat_maps(
    path: Path, panels: list[Panel], rows: list[str], columns: list[str], labels: tuple[str, str], title: str = ""
):
    """Panels side by side, every cell with its number; `labels` of the columns' and the rows' axis."""
    figure = _figure(width=2 + len(panels) * max(4.5, 0.9 * len(columns)))
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        low, high = panel.limits
        image = axes.imshow(panel.values, cmap=panel.colours, vmin=low, vmax=high, aspect="auto")
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(rows)), rows)
        axes.set(xlabel=labels[0], ylabel=labels[1], title=panel.title)
        for i, row in enumerate(panel.values):
            for j, value in enumerate(row):
                red, green, blue, _ = image.to_rgba(value)
                # The brightness that an eye sees.
                is_dark = 0.3 * red + 0.6 * green + 0.1 * blue < 0.5
                axes.text(j, i, f"{value:.2f}", ha="center", va="center", color="white" if is_dark else "black")
        figure.colorbar(image, ax=axes)
    figure.suptitle(title)
    figure.savefig(path, dpi=100)


def _figure(width: float):
    from matplotlib.figure import Figure

    return Figure(figsize=(width, 5), layout="constrained")
