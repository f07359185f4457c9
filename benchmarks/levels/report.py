"""The table and the picture of the rows that benchmarks/levels.py wrote."""

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


def table(rows: list[dict]) -> str:
    """A line for each measure: what was found, and the case of the program that measures it."""
    by_case: dict[str, Found] = {}
    for row in rows:
        name = " ".join(str(row[field]) for field in ("what", "of", "shots") if field in row)
        by_case.setdefault(row["case"], {})[name] = row
    lines = ["| measure | found | case |", "| --- | --- | --- |"]
    for case, write in WRITERS.items():
        if case in by_case:
            lines += [f"| {measure} | {found} | `{case}` |" for measure, found in write(by_case[case])]
    return "\n".join(lines)


def _novel(found: Found) -> list[tuple[str, str]]:
    lines, frozen = [], found[FROZEN]
    for name in (LEARNING, EVERYWHERE):
        own = found[name]
        lines += [
            (f"{name}: loss of {own['tokens']:,} tokens", change(own, frozen, "loss")),
            (f"{name}: last quarter", change(own, frozen, "last_quarter")),
            (f"{name}: CPU time over reading", f"{own['cpu_seconds'] / frozen['cpu_seconds']:.2f}"),
            (f"{name}: MB learned by a sequence", f"{own['learned_mb']:.1f}"),
        ]
    return lines


def _original(found: Found) -> list[tuple[str, str]]:
    return _beside(f"{ORIGINAL}, {FROZEN}", found)


def _widths(found: Found) -> list[tuple[str, str]]:
    return _beside(f"window of {WIDTHS[0]}, {FROZEN}", found)


def _beside(name: str, found: Found) -> list[tuple[str, str]]:
    """A line for each reading: its losses and its time over those of the reading `name` of the same text."""
    lines = []
    for row in found.values():
        first = found[f"{name} {row['of']}"]
        loss, last_quarter = change(row, first, "loss"), change(row, first, "last_quarter")
        seconds = f"{row['cpu_seconds'] / first['cpu_seconds']:.2f}"
        measure = f"{row['of']}, {row['tokens']:,} tokens, {row['what']}"
        lines.append((measure, f"{loss}; last quarter {last_quarter}; CPU time {seconds}"))
    return lines


def _long(found: Found) -> list[tuple[str, str]]:
    frozen, own = found[FROZEN], found[LEARNING]
    sizes = own["process_mb"]
    drift = f"{frozen['beyond_8k'] - frozen['before_8k']:+.3f}"
    return [
        (f"{own['tokens']:,} tokens: loss beyond 8K", change(own, frozen, "beyond_8k")),
        ("the same, frozen: loss beyond 8K less the loss before", drift),
        ("the same: MB of the process, first to last", f"{sizes[0]:,} to {sizes[-1]:,}"),
    ]


def _book(found: Found) -> list[tuple[str, str]]:
    (row,) = found.values()
    sizes = row["process_mb"]
    first_time, last_time = row["milliseconds"]
    first_ratio, last_ratio = row["over_passage"]
    measure = f"{row['tokens']:,} tokens of a book: CPU ms a token, first to last fifth"
    return [
        (measure, f"{first_time:.2f} to {last_time:.2f}"),
        ("the same over a passage that is read in turn", f"{first_ratio:.3f} to {last_ratio:.3f}"),
        ("the same: MB of the process, first to last", f"{sizes[0]:,} to {sizes[-1]:,}"),
    ]


def _segments(found: Found) -> list[tuple[str, str]]:
    frozen, own = found[FROZEN], found[LEARNING]
    lines = [(f"segment {name}", change(own["segments"], frozen["segments"], name)) for name in own["segments"]]
    for name, row in found.items():
        (last,) = list(row["segments"].values())[-1:]
        forgotten = row["first_after_all"] - row["first_after_itself"]
        words = f"{row['first_after_itself']:.4f} to {row['first_after_all']:.4f} ({forgotten:+.4f}); last {last:.4f}"
        lines.append((f"first segment again, {name}", words))
    return lines


def _dynamic(found: Found) -> list[tuple[str, str]]:
    lines = []
    for name, row in found.items():
        cost = row["cpu_seconds"] / found[FROZEN]["cpu_seconds"]
        words = f"{row['loss']:.4f}, last quarter {row['last_quarter']:.4f}, CPU time {cost:.1f}"
        lines.append((f"{row['tokens']:,} tokens, {name}", words))
    return lines


def _hostile(found: Found) -> list[tuple[str, str]]:
    return [(f"after {name}: clean text over frozen", f"{100 * row['above']:+.2f} %") for name, row in found.items()]


def _saved(found: Found) -> list[tuple[str, str]]:
    return [
        (f"saved as {name}, read on in a new process", f"{row['difference']:+.4f}; {row['file_mb']:.1f} MB")
        for name, row in found.items()
        if "difference" in row
    ]


def _classes(found: Found) -> list[tuple[str, str]]:
    lines = []
    for row in found.values():
        shots = f", {row['shots']} examples a class" if "shots" in row else ""
        ends = f"first group {100 * row['first_group']:.0f}, last {100 * row['last_group']:.0f} %"
        words = f"{100 * row['accuracy']:.0f} % right ({ends})"
        lines.append((f"15 intents, {row['what']}{shots}", words))
    return lines


def _own(found: Found) -> list[tuple[str, str]]:
    lines = []
    for row in found.values():
        if "of" not in row:
            lines.append(("own HOPE: rate found on validation text", f"{row['rate']:g}"))
        elif row["what"] in (FROZEN_MEMORIES, LIVE_MEMORIES):
            lines.append((f"own HOPE, {row['of']}, {row['what']}", f"{row['loss']:.4f}"))
        else:
            live = found[f"{LIVE_MEMORIES} {row['of']}"]
            lines.append((f"own HOPE, {row['of']}, {row['what']}", change(row, live, "loss")))
    return lines


def _window(found: Found) -> list[tuple[str, str]]:
    lines = []
    for name, row in found.items():
        far, near, sizes = row["through"], row["anew"], row["process_mb"]
        beyond = f"{far:.4f}, and {near:.4f} where it begins anew every 8K ({far - near:+.4f})"
        lines.append((f"{name}, {row['tokens']:,} tokens: loss beyond 8K", beyond))
        lines.append(("the same: MB of the process, first to last", f"{sizes[0]:,} to {sizes[-1]:,}"))
    return lines


WRITERS = {
    "novel": _novel, "original": _original, "long": _long, "book": _book, "segments": _segments, "dynamic": _dynamic,
    "hostile": _hostile, "saved": _saved, "classes": _classes, "own": _own, "window": _window,
    "widths": _widths,
}  # fmt: skip


def change(own: dict, other: dict, name: str) -> str:
    """Both losses, and how much the first is above the second in per cent."""
    return f"{other[name]:.4f} to {own[name]:.4f} ({100 * (own[name] / other[name] - 1):+.2f} %)"


def draw(rows: list[dict], picture: Path) -> None:
    """Loss by position in the novel of the case `original`, and below it each reading's distance to the original."""
    from matplotlib.figure import Figure

    found = {row["what"]: row for row in rows if row["case"] == "original"}
    if not found:
        raise ValueError("--picture: the results file has no row of the case original: measure it first.")
    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    losses, distances = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    original = smooth(found[f"{ORIGINAL}, {FROZEN}"]["by_piece"])
    for name, (color, style, label) in LINES.items():
        row = found[name]
        values = smooth(row["by_piece"])
        ends = torch.arange(SMOOTHED, SMOOTHED + len(values)) * row["piece"] / 1000
        losses.plot(ends, values, style, color=color, label=label)
        distances.plot(ends, 100 * (values / original - 1), style, color=color)
    losses.set(ylabel="loss, nats per token")
    losses.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    distances.set(ylabel="over the original, %", xlabel="position in the novel, thousand tokens")
    for axes in (losses, distances):
        axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=130)
    print(picture)


def smooth(values: list[float]) -> torch.Tensor:
    """Means over SMOOTHED neighbouring pieces."""
    return torch.tensor(values).unfold(0, min(SMOOTHED, len(values)), 1).mean(-1)
