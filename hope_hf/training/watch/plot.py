"""Pictures of `metrics.jsonl`: `python -m hope_hf.training.watch.plot DIR [DIR ...]`, several in one `loss.png`."""

import os
import sys
import warnings
from pathlib import Path

from hope_hf.cli.bounds import Checked
from hope_hf.cli.parser import Parser
from hope_hf.cli.process import complain
from hope_hf.cli.program import program

from .memory_plot import draw_memory
from .tracking import METRICS_FILE, read_metrics

PANELS = (
    ("loss (nats per token)", ("train/loss", "eval/loss")),
    ("learning rate", ("train/learning_rate",)),
    ("gradient norm", ("train/grad_norm",)),
    ("tokens per second", ("train/tokens_per_second",)),
)


def plot(folders: list[str | Path], target: str | Path) -> Path | None:
    """Draw the curves of the runs in `folders` over tokens into `target`; None, and a warning, without matplotlib."""
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
    # Else a few percent of noise would fill the panel.
    figure.axes[-1].set_ylim(bottom=0)
    figure.axes[0].xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.axes[0].legend()
    figure.savefig(target, dpi=120)
    return Path(target)


def make_parser() -> Parser:
    """All flags."""
    parser = Parser((), prog="python -m hope_hf.training.watch.plot", description=__doc__, allow_abbrev=False)
    parser.add_argument("dir", metavar="DIR", nargs="+", action=Checked, help="the --output_dir of a run")
    drawn = "draw memories, sparse attention and levels of one run into memory.png"
    parser.add_argument("--memory", action="store_true", help=drawn)
    return parser


@program
def main(argv: list[str]) -> int:
    """Draw each folder's own loss.png, or for several folders one comparison in the working directory.

    Returns 0, or 2 after a mistake of the user.
    """
    try:
        args = make_parser().parse_args(argv)
        folders = args.dir
        for folder in folders:
            if not os.path.isfile(os.path.join(folder, METRICS_FILE)):
                raise ValueError(f"{folder} holds no {METRICS_FILE}: name the --output_dir of a run.")
        if args.memory:
            return _draw_memory(folders)
        target = Path(folders[0]) / "loss.png" if len(folders) == 1 else Path("loss.png")
        if plot(folders, target):
            print(target)
    except ValueError as error:
        return complain(error, 2)
    except OSError as error:
        return complain(f"{error.filename} cannot be read or written: {error.strerror}.", 2)
    return 0


def _draw_memory(folders: list[str]) -> int:
    if len(folders) > 1:
        raise ValueError("--memory draws one run: name one folder.")
    try:
        print(draw_memory(folders[0], Path(folders[0]) / "memory.png"))
    except ImportError:
        raise ValueError("--memory needs matplotlib: pip install 'hope_hf[plot]'.") from None
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
