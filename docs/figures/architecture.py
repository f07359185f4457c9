"""Draws docs/figures/architecture.png: a block, the scan of its mixer, the clocks that its levels may have.

    python docs/figures/architecture.py

Needs matplotlib (`pip install -e '.[plot]'`).
"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

# A card of its own colour is legible on light and on dark pages.
CARD, INK, FAINT = "#fbfaf7", "#22272e", "#8a9099"
PLAIN, MIXER, MEMORY = "#e9ebee", "#cfe1f5", "#fbd9a5"
LEVELS = ("#b4dfbe", "#7dc48f", "#4aa567")


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str, color: str, **text_options):
    """A rounded box with centred text; coordinates in inches, of the lower left corner."""
    style = "round,pad=0,rounding_size=0.08"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=color, edgecolor=INK, linewidth=1))
    options = {"fontsize": 10, "color": INK, "linespacing": 1.35, **text_options}
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", **options)


def arrow(axes: Axes, *points: tuple[float, float], color: str = INK, width: float = 1.3):
    """A line through the points that ends in an arrow head."""
    for start, end in zip(points[:-2], points[1:-1], strict=True):
        axes.plot(*zip(start, end, strict=True), color=color, linewidth=width, solid_capstyle="round")
    style = {"arrowstyle": "-|>", "mutation_scale": 11, "shrinkA": 0, "shrinkB": 0}
    axes.add_patch(FancyArrowPatch(points[-2], points[-1], color=color, linewidth=width, **style))


def title(axes: Axes, x: float, y: float, text: str, below: str):
    axes.text(x, y, text, fontsize=12.5, fontweight="bold", color=INK, va="baseline")
    axes.text(x, y - 0.25, below, fontsize=9.5, color="#565d66", va="baseline")


def plus(axes: Axes, x: float, y: float):
    axes.plot(x, y, "o", markersize=15, markerfacecolor=CARD, markeredgecolor=INK, markeredgewidth=1)
    axes.text(x, y - 0.01, "+", fontsize=13, ha="center", va="center", color=INK)


def draw_block(axes: Axes):
    """Bottom to top: the mixer, then the level, each behind a norm and beside a residual connection."""
    title(axes, 0.35, 7.0, "One block", "Repeated for every layer.")
    middle, left, width, bypass = 1.75, 0.75, 2.0, 3.15
    parts = [("self-modifying Titans\n(the sequence mixer)", MIXER, 1.7)]
    parts += [("level: an MLP\n(an option: several\nin a chain)", LEVELS[0], 1.5)]
    axes.text(middle, 0.4, "hidden states of the tokens", fontsize=9.5, ha="center", va="center", color=INK)
    bottom = 0.54
    for text, color, height in parts:
        top = bottom + 0.64 + height
        axes.plot((middle, middle), (bottom, top + 0.17), color=INK, linewidth=1.3, zorder=0)
        arrow(axes, (middle, bottom), (middle, bottom + 0.32))
        box(axes, left, bottom + 0.32, width, 0.26, "norm", PLAIN, fontsize=9)
        box(axes, left, bottom + 0.64, width, height, text, color, fontweight="bold" if color == MIXER else "normal")
        branch, junction = bottom + 0.12, top + 0.17
        arrow(axes, (middle, branch), (bypass, branch), (bypass, junction), (middle + 0.13, junction))
        plus(axes, middle, junction)
        bottom = junction + 0.12
    arrow(axes, (middle, bottom), (middle, bottom + 0.22))


def draw_scan(axes: Axes):
    """Left to right: chunks of a text. Two rows of memories, both written token by token."""
    below = "Each head of each sequence has memories of its own. Writing is gradient descent inside the forward pass."
    title(axes, 4.1, 7.0, "Inside the mixer: a scan over chunks of the text", below)
    lefts, width = (5.0, 7.08, 9.16), 1.64
    rows = (("makers", "of keys, values\n(an option)", 5.05), ("content", "stores them,\nis read", 3.65))
    for name, what, y in rows:
        axes.text(4.1, y + 0.3, name, fontsize=10.5, fontweight="bold", color=INK, va="center")
        axes.text(4.1, y - 0.05, what, fontsize=8.5, color="#565d66", va="center", linespacing=1.2)
    for index, left in enumerate(lefts):
        box(axes, left, 6.0, width, 0.36, f"chunk {index + 1}: 64 tokens", PLAIN, fontsize=9)
        # No memory makes the query.
        arrow(axes, (left + 0.2, 6.0), (left + 0.2, 4.0), color=FAINT)
        axes.text(left + 0.1, 4.38, "$q$", fontsize=11, color=INK, va="center", ha="right")
        inner = left + 0.45
        middle = inner + (width - 0.45) / 2
        arrow(axes, (middle, 6.0), (middle, 5.5))
        axes.text(middle + 0.1, 5.74, "$x$", fontsize=11, color=INK, va="center")
        box(axes, inner, 4.85, width - 0.45, 0.65, "$M_k$, $M_v$", MEMORY, fontsize=13)
        arrow(axes, (middle, 4.85), (middle, 4.0))
        axes.text(middle + 0.1, 4.42, "$k,\\ v$", fontsize=11, color=INK, va="center")
        box(axes, left, 3.35, width, 0.65, "$M$", MEMORY, fontsize=13)
        arrow(axes, (left + width / 2, 3.35), (left + width / 2, 2.9))
        axes.text(left + width / 2 + 0.1, 3.1, "$M(q)$", fontsize=11, color=INK, va="center")
        for y, shift in ((5.17, 0.45), (3.67, 0.0)):
            end = lefts[index + 1] + shift if index + 1 < len(lefts) else left + width + 0.42
            arrow(axes, (left + width, y), (end, y), color="#c9740a", width=2.2)
    for y in (5.28, 3.78):
        axes.text(6.86, y, "write", fontsize=9, color="#a35c00", ha="center")


def draw_clocks(axes: Axes):
    """Each level's updates over the tokens of the training."""
    below = "A tick is an update of that level. One level, the default, is updated at every optimizer step."
    title(axes, 4.1, 2.25, "Across training: several levels may have clocks of their own", below)
    start, end = 5.75, 10.8
    for index, (color, period) in enumerate(zip(LEVELS, (1, 4, 16), strict=True)):
        y = 1.6 - 0.42 * index
        axes.text(4.1, y, f"level {index}", fontsize=10, color=INK, va="center")
        axes.text(4.75, y, f"every {period} M", fontsize=9, color="#565d66", va="center")
        axes.plot((start, end), (y, y), color="#d5d8dc", linewidth=1.5, zorder=1)
        for tick in range(period, 33, period):
            x = start + (end - start) * tick / 32
            axes.plot((x, x), (y - 0.12, y + 0.12), color=color, linewidth=3.2, solid_capstyle="round", zorder=2)
    for tokens in (0, 16, 32):
        x = start + (end - start) * tokens / 32
        axes.text(x, 0.38, f"{tokens} M tokens" if tokens else "0", fontsize=9, color="#565d66", ha="center")


def main():
    figure = Figure(figsize=(11.6, 7.5), facecolor="none")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 11.6), ylim=(0, 7.5))
    axes.set_axis_off()
    style = "round,pad=0,rounding_size=0.2"
    axes.add_patch(FancyBboxPatch((0.05, 0.05), 11.5, 7.4, boxstyle=style, facecolor=CARD, edgecolor=FAINT))
    axes.plot((3.65, 3.65), (0.35, 7.15), color="#dcdfe3", linewidth=1.2)
    draw_block(axes)
    draw_scan(axes)
    draw_clocks(axes)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=150)


if __name__ == "__main__":
    main()
