"""Bars of the settings' memory, by category, with a line for each GPU."""

from .gpus import GIB
from .verdict import Setting, Verdict


def draw(rows: list[Setting], verdicts: list[Verdict], path: str) -> None:
    """Write the picture; ValueError where matplotlib is missing or the file cannot be written."""
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
    axes.set_ylabel("GiB per process, by arithmetic")
    axes.tick_params(axis="x", rotation=30)
    axes.legend(fontsize="small", bbox_to_anchor=(1, 1), loc="upper left")
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise ValueError(f"--plot {path} cannot be written: {error.strerror}.") from None
