"""Pictures of `metrics.jsonl`: `python -m hope_hf.training.watch.plot DIR [DIR ...]`, several in one `loss.png`."""

import os
import sys
from functools import partial
from pathlib import Path

from hope_hf.cli.flags import Checked
from hope_hf.cli.parser import Parser
from hope_hf.cli.process import complain
from hope_hf.cli.program import program
from hope_hf.cli.results import as_label, draw_or_warn

from .memory_plot import draw_memory, require_memories
from .tracking import METRICS_FILE, curve, read_metrics

PANELS = (
    ("loss (nats per token)", ("train/loss", "eval/loss")),
    ("learning rate", ("train/learning_rate",)),
    ("gradient norm", ("train/grad_norm",)),
    ("tokens per second", ("train/tokens_per_second",)),
)


def draw_curves(folders: list[str | Path], target: str | Path) -> None:
    """Draw the curves of the runs in `folders` over tokens into `target`; needs matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True).flat
    runs = [(as_label(Path(folder).resolve().name), read_metrics(folder)) for folder in folders]
    for axis, (title, names) in zip(axes, PANELS, strict=True):
        for index, (run, rows) in enumerate(runs):
            for name in names:
                points = curve(rows, name)
                # A line of one point would be invisible.
                style = "o--" if name.startswith("eval") else "-" if len(points) > 1 else "o"
                label = f"{run} {name.split('/')[0]}" if len(names) > 1 else run
                if points:
                    axis.plot(*zip(*points, strict=True), style, label=label, color=f"C{index}", markersize=4)
        axis.set(title=title, xlabel="tokens")
        axis.tick_params(labelbottom=True)
        axis.grid(alpha=0.3)
    # Else a few percent of noise would fill the panel.
    figure.axes[-1].set_ylim(bottom=0)
    figure.axes[0].xaxis.set_major_formatter(EngFormatter(sep=""))
    if figure.axes[0].has_data():
        figure.axes[0].legend()
    figure.savefig(target, dpi=120)


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

    Returns 0, 1 where the picture failed, or 2 after a mistake of the user.
    """
    try:
        args = make_parser().parse_args(argv)
        folders = args.dir
        for folder in folders:
            if not os.path.isfile(os.path.join(folder, METRICS_FILE)):
                raise ValueError(f"{folder} holds no {METRICS_FILE}: name the --output_dir of a run.")
            read_metrics(folder)
        if args.memory and len(folders) > 1:
            raise ValueError("--memory draws one run: name one folder.")
        if args.memory:
            require_memories(folders[0])
    except ValueError as error:
        return complain(error, 2)
    draw = partial(draw_memory, folders[0]) if args.memory else partial(draw_curves, folders)
    place = Path(folders[0]) if len(folders) == 1 else Path()
    picture = draw_or_warn(draw, place / ("memory.png" if args.memory else "loss.png"))
    if picture is None:
        return 1
    print(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
