"""`loss.png` from `metrics.jsonl`: `python -m hope_hf.training.watch.plot DIR [DIR ...]`, several in one picture."""

import sys
import warnings
from pathlib import Path

from .tracking import METRICS_FILE, read_metrics

PANELS = (
    ("loss (nats per token)", ("train/loss", "eval/loss")),
    ("learning rate", ("train/learning_rate",)),
    ("gradient norm", ("train/grad_norm",)),
    ("tokens per second", ("train/tokens_per_second",)),
)


def plot(folders: list[str | Path], target: str | Path) -> Path | None:
    """Draw the curves of the runs in `folders` over tokens into `target`; None, and a word, without matplotlib."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter
    except ImportError:
        warnings.warn("No loss.png: matplotlib is not installed (pip install 'hope_hf[plot]').", stacklevel=2)
        return None
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True).flat
    runs = [(Path(folder).resolve().name, read_metrics(folder)) for folder in folders]
    for axis, (title, names) in zip(axes, PANELS, strict=True):
        for index, (run, rows) in enumerate(runs):
            for name in names:
                points = [(row["tokens"], row[name]) for row in rows if row.get(name) is not None]
                style = "o--" if name.startswith("eval") else "-"
                label = f"{run} {name.split('/')[0]}" if len(names) > 1 else run
                if points:
                    axis.plot(*zip(*points, strict=True), style, label=label, color=f"C{index}", markersize=4)
        axis.set(title=title, xlabel="tokens")
        axis.tick_params(labelbottom=True)
        axis.grid(alpha=0.3)
    figure.axes[0].xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.axes[0].legend()
    figure.savefig(target, dpi=120)
    return Path(target)


def main(folders: list[str]) -> int:
    """Draw each folder's own loss.png, or for several folders one comparison in the working directory."""
    missing = [folder for folder in folders if not (Path(folder) / METRICS_FILE).is_file()]
    if not folders or missing:
        wrong = f"{missing[0]} holds no {METRICS_FILE}" if missing else "no folder given"
        print(f"error: {wrong}; usage: python -m hope_hf.training.watch.plot DIR [DIR ...]", file=sys.stderr)
        return 2
    target = Path(folders[0]) / "loss.png" if len(folders) == 1 else Path("loss.png")
    if plot(folders, target):
        print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
