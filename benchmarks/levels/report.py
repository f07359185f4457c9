"""The table and the picture of the rows that benchmarks/levels.py wrote."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.levels.cases import EVERYWHERE, ORIGINAL, WINDOW
from benchmarks.levels.reading import FROZEN, LEARNING
from benchmarks.levels.small import FROZEN_MEMORIES, LIVE_MEMORIES
from benchmarks.levels.windows import WIDTHS

# Pieces of which the picture draws the mean.
SMOOTHED = 4

# Color, style and label of the picture's lines.
LINES = {
    f"{ORIGINAL}, {FROZEN}": ("0.45", "-", "the original: full attention"),
    f"{ORIGINAL}, {LEARNING}": ("C0", "-", "full attention, learning"),
    f"{WINDOW}, {FROZEN}": ("0.45", "--", "window"),
    f"{WINDOW}, {LEARNING}": ("C1", "--", "window, learning"),
}

Found = dict[str, dict]
"""The rows of a case, by what they measure."""
Lines = Iterator[tuple[str, str]]
"""What was measured, and what was found."""


def table(rows: list[dict]) -> str:
    """A line for each measure: what was found, and the case of the program that measures it."""
    by_case: dict[str, Found] = defaultdict(dict)
    for row in rows:
        labels = [row[field] for field in ("what", "of", "shots") if field in row]
        name = " ".join(map(str, labels))
        by_case[row["case"]][name] = row
    lines = ["| measure | found | case |", "| --- | --- | --- |"]
    for case, write in WRITERS.items():
        if case in by_case:
            for measure, found in write(by_case[case]):
                lines.append(f"| {measure} | {found} | `{case}` |")
    return "\n".join(lines)


def _novel(found: Found) -> Lines:
    frozen = found[FROZEN]
    for name in (LEARNING, EVERYWHERE):
        row = found[name]
        yield "{what}: loss of {tokens:,} tokens".format_map(row), change(row, frozen, "loss")
        yield f"{name}: last quarter", change(row, frozen, "last_quarter")
        yield f"{name}: CPU time over reading", f"{times(row, frozen):.2f}"
        yield f"{name}: MB learned by a sequence", "{learned_mb:.1f}".format_map(row)


def _original(found: Found) -> Lines:
    return _beside(f"{ORIGINAL}, {FROZEN}", found)


def _widths(found: Found) -> Lines:
    return _beside(f"window of {WIDTHS[0]}, {FROZEN}", found)


def _beside(name: str, found: Found) -> Lines:
    """A line for each reading: its losses and its time over those of the reading `name` of the same text."""
    for row in found.values():
        first = found[f"{name} {row['of']}"]
        loss = change(row, first, "loss")
        last_quarter = change(row, first, "last_quarter")
        words = f"{loss}; last quarter {last_quarter}; CPU time {times(row, first):.2f}"
        yield "{of}, {tokens:,} tokens, {what}".format_map(row), words


def _long(found: Found) -> Lines:
    frozen, row = found[FROZEN], found[LEARNING]
    drift = frozen["beyond_8k"] - frozen["before_8k"]
    yield "{tokens:,} tokens: loss beyond 8K".format_map(row), change(row, frozen, "beyond_8k")
    yield "the same, frozen: loss beyond 8K less the loss before", f"{drift:+.3f}"
    yield process(row)


def _book(found: Found) -> Lines:
    (row,) = found.values()
    measure = "{tokens:,} tokens of a book: CPU ms a token, first to last fifth"
    yield measure.format_map(row), "{:.2f} to {:.2f}".format(*row["milliseconds"])
    yield "the same over a passage that is read in turn", "{:.3f} to {:.3f}".format(*row["over_passage"])
    yield process(row)


def _segments(found: Found) -> Lines:
    frozen, learning = found[FROZEN]["segments"], found[LEARNING]["segments"]
    for segment in learning:
        yield f"segment {segment}", change(learning, frozen, segment)
    for name, row in found.items():
        *_, last = row["segments"].values()
        forgotten = row["first_after_all"] - row["first_after_itself"]
        words = "{first_after_itself:.4f} to {first_after_all:.4f}".format_map(row)
        yield f"first segment again, {name}", f"{words} ({forgotten:+.4f}); last {last:.4f}"


def _dynamic(found: Found) -> Lines:
    for row in found.values():
        words = "{loss:.4f}, last quarter {last_quarter:.4f}".format_map(row)
        cost = times(row, found[FROZEN])
        yield "{tokens:,} tokens, {what}".format_map(row), f"{words}, CPU time {cost:.1f}"


def _hostile(found: Found) -> Lines:
    for name, row in found.items():
        percent = 100 * row["above"]
        yield f"after {name}: clean text over frozen", f"{percent:+.2f} %"


def _saved(found: Found) -> Lines:
    for name, row in found.items():
        if "difference" in row:
            words = "{difference:+.4f}; {file_mb:.1f} MB".format_map(row)
            yield f"saved as {name}, read on in a new process", words


def _classes(found: Found) -> Lines:
    for row in found.values():
        measure = "15 intents, {what}"
        if "shots" in row:
            measure += ", {shots} examples a class"
        shares = [100 * row[name] for name in ("accuracy", "first_group", "last_group")]
        words = "{:.0f} % right (first group {:.0f}, last {:.0f} %)".format(*shares)
        yield measure.format_map(row), words


def _own(found: Found) -> Lines:
    for row in found.values():
        if "of" not in row:
            yield "own HOPE: rate found on validation text", "{rate:g}".format_map(row)
            continue
        measure = "own HOPE, {of}, {what}".format_map(row)
        if row["what"] in (FROZEN_MEMORIES, LIVE_MEMORIES):
            yield measure, "{loss:.4f}".format_map(row)
        else:
            live = found[f"{LIVE_MEMORIES} {row['of']}"]
            yield measure, change(row, live, "loss")


def _window(found: Found) -> Lines:
    for row in found.values():
        difference = row["through"] - row["anew"]
        words = "{through:.4f}, and {anew:.4f} where it begins anew every 8K".format_map(row)
        yield "{what}, {tokens:,} tokens: loss beyond 8K".format_map(row), f"{words} ({difference:+.4f})"
        yield process(row)


WRITERS: dict[str, Callable[[Found], Lines]] = {
    "novel": _novel,
    "original": _original,
    "long": _long,
    "book": _book,
    "segments": _segments,
    "dynamic": _dynamic,
    "hostile": _hostile,
    "saved": _saved,
    "classes": _classes,
    "own": _own,
    "window": _window,
    "widths": _widths,
}


def change(row: dict, other: dict, name: str) -> str:
    """Both losses, and how much the first is above the second in per cent."""
    loss, of_other = row[name], other[name]
    percent = 100 * (loss / of_other - 1)
    return f"{of_other:.4f} to {loss:.4f} ({percent:+.2f} %)"


def times(row: dict, other: dict) -> float:
    """CPU time of a reading over that of another one."""
    return row["cpu_seconds"] / other["cpu_seconds"]


def process(row: dict) -> tuple[str, str]:
    """The line of the memory of the process."""
    sizes = row["process_mb"]
    return "the same: MB of the process, first to last", f"{sizes[0]:,} to {sizes[-1]:,}"


def draw(rows: list[dict], picture: Path) -> None:
    """Loss by position in the novel of the case `original`, and below it each reading's distance to the original."""
    from matplotlib.figure import Figure

    found = {row["what"]: row for row in rows if row["case"] == "original"}
    if not found:
        raise ValueError("--picture: the results file has no row of the case original: measure it first.")
    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    losses, distances = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    row_of_original = found[f"{ORIGINAL}, {FROZEN}"]
    original = smooth(row_of_original["by_piece"])
    for name, (color, style, label) in LINES.items():
        row = found[name]
        values = smooth(row["by_piece"])
        pieces = torch.arange(SMOOTHED, SMOOTHED + len(values))
        thousands = pieces * row["piece"] / 1000
        percent = 100 * (values / original - 1)
        losses.plot(thousands, values, style, color=color, label=label)
        distances.plot(thousands, percent, style, color=color)
    losses.set(ylabel="loss, nats per token")
    losses.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    distances.set(ylabel="over the original, %", xlabel="position in the novel, thousand tokens")
    for axes in (losses, distances):
        axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=130)
    print(picture)


def smooth(values: list[float]) -> torch.Tensor:
    """Means over SMOOTHED neighbouring pieces."""
    size = min(SMOOTHED, len(values))
    windows = torch.tensor(values).unfold(0, size, 1)
    return windows.mean(-1)
