"""`memory.png`: what the rows `memory/<layer>/...` and `level/<level>/...` of one run say, over tokens."""

from pathlib import Path

from .tracking import read_metrics

# Title, and the keys behind `memory/<layer>/`: solid, then dashed.
LAYER_PANELS = (
    ("step size of writes (eta)", ("learning_rate_mean",)),
    ("share kept by a token (alpha)", ("retention_mean",)),
    ("surprise before (-), after (--) writes", ("surprise_before", "surprise_after")),
    ("state: change over the identity", ("state_norm_ratio",)),
    ("gradient into the initial states", ("initial_state_grad_norm",)),
)
STYLES = ("-", "--")
# Shown on a logarithmic axis: they span decades.
LOGARITHMIC = {"initial_state_grad_norm"}


def draw_memory(folder: str | Path, target: str | Path) -> Path:
    """Draw the run's memories and levels into `target`.

    Raises ValueError where its rows hold neither, ImportError without matplotlib.
    """
    from matplotlib.cm import viridis
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    rows = read_metrics(folder)
    layers, levels = _indices(rows, "memory"), _indices(rows, "level")
    if not layers and not levels:
        raise ValueError(f"{folder} has no rows of memories or levels: name a run of a HOPE.")
    figure = Figure(figsize=(13, 7), layout="constrained")
    axes = list(figure.subplots(2, 3, sharex=True).flat)
    for axis, (title, keys) in zip(axes, LAYER_PANELS, strict=False):
        for index, layer in enumerate(layers):
            color = viridis(index / max(1, len(layers) - 1) * 0.9)
            for key, style in zip(keys, STYLES, strict=False):
                label = f"layer {layer}" if style == "-" else None
                axis.plot(*_points(rows, f"memory/{layer}/{key}"), style, color=color, label=label)
        axis.set(title=title, yscale="log" if LOGARITHMIC & {*keys} else "linear")
    for level in levels:
        # Narrower and narrower: levels of one period lie on one line.
        width = 1.5 * (len(levels) - level)
        axes[-1].plot(*_points(rows, f"level/{level}/updates"), label=f"level {level}", color=f"C{level}", lw=width)
    axes[-1].set(title="updates of the levels")
    for axis in axes:
        axis.set(xlabel="tokens")
        axis.tick_params(labelbottom=True)
        axis.grid(alpha=0.3)
    axes[0].xaxis.set_major_formatter(EngFormatter(sep=""))
    for axis in (axes[0], axes[-1]):
        if axis.has_data():
            axis.legend(fontsize="small", ncols=2)
    figure.savefig(target, dpi=120)
    return Path(target)


def _indices(rows: list[dict], kind: str) -> list[int]:
    return sorted({int(key.split("/")[1]) for row in rows for key in row if key.startswith(f"{kind}/")})


def _points(rows: list[dict], key: str) -> tuple[list, list]:
    points = [(row["tokens"], row[key]) for row in rows if row.get(key) is not None]
    return [x for x, _ in points], [y for _, y in points]
