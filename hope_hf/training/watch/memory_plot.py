"""`memory.png`: what the rows `memory/<layer>/...`, `sparse/<layer>/...` and `level/<level>/...` of one run say."""

from pathlib import Path

from .tracking import curve, read_metrics

# Title, and the keys behind `memory/<layer>/`: solid, then dashed.
LAYER_PANELS = (
    ("step size of writes (eta)", ("learning_rate_mean",)),
    ("share kept by a token (alpha)", ("retention_mean",)),
    ("surprise before (-), after (--) writes", ("surprise_before", "surprise_after")),
    ("state: change over the identity", ("state_norm_ratio",)),
    ("gradient into the initial states", ("initial_state_grad_norm",)),
)
# Drawn where a layer has sparse attention.
SPARSE_PANELS = (
    ("sparse gates: entropy (-), collapsed (--)", ("gate_entropy_mean", "gate_collapse_fraction")),
    ("tokens back to a block: median (-), 95 % (--)", ("selected_distance_median", "selected_distance_p95")),
)
KINDS = ("memory", "sparse", "level")
SHARES = ("share_compressed", "share_selected", "share_window")
STYLES = ("-", "--")
# Shown on a logarithmic axis: they span decades.
LOGARITHMIC = {"initial_state_grad_norm"}


def require_memories(folder: str | Path) -> None:
    """Raise ValueError where the run's rows hold nothing to draw."""
    rows = read_metrics(folder)
    if not any(_indices(rows, kind) for kind in KINDS):
        raise ValueError(f"{folder} has no rows of memories or levels: name a run of a HOPE.")


def draw_memory(folder: str | Path, target: str | Path) -> None:
    """Draw the run's memories, sparse attention and levels, over tokens, into `target`; needs matplotlib."""
    from matplotlib.cm import viridis
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    rows = read_metrics(folder)
    layers, sparse, levels = (_indices(rows, kind) for kind in KINDS)
    panels = [("memory", layers, *panel) for panel in LAYER_PANELS]
    panels += [("sparse", sparse, *panel) for panel in SPARSE_PANELS] if sparse else []
    figure = Figure(figsize=(13, 10.5 if sparse else 7), layout="constrained")
    axes = list(figure.subplots(3 if sparse else 2, 3, sharex=True).flat)
    for axis, (kind, numbers, title, keys) in zip(axes, panels, strict=False):
        for index, layer in enumerate(numbers):
            color = viridis(index / max(1, len(numbers) - 1) * 0.9)
            for key, style in zip(keys, STYLES, strict=False):
                label = f"layer {layer}" if style == "-" else None
                _draw(axis, rows, f"{kind}/{layer}/{key}", linestyle=style, color=color, label=label)
        axis.set(title=title, yscale="log" if LOGARITHMIC & {*keys} else "linear")
    if sparse:
        for share in SHARES:
            _draw(axes[-2], rows, f"sparse/all/{share}", label=share.removeprefix("share_"))
        axes[-2].set(title="sparse attention: shares of the branches", ylim=(0, 1))
    for level in levels:
        # Narrower and narrower: levels of one period lie on one line.
        width = 1.5 * (len(levels) - level)
        _draw(axes[-1], rows, f"level/{level}/updates", label=f"level {level}", color=f"C{level}", lw=width)
    axes[-1].set(title="updates of the levels")
    for axis in axes:
        axis.set(xlabel="tokens")
        axis.tick_params(labelbottom=True)
        axis.grid(alpha=0.3)
    axes[0].xaxis.set_major_formatter(EngFormatter(sep=""))
    for axis in (axes[0], *axes[len(LAYER_PANELS) :]):
        if axis.has_data():
            axis.legend(fontsize="small", ncols=2)
    figure.savefig(target, dpi=120)


def _indices(rows: list[dict], kind: str) -> list[int]:
    names = {key.split("/")[1] for row in rows for key in row if key.startswith(f"{kind}/")}
    return sorted(int(name) for name in names if name.isdecimal())


def _draw(axis, rows: list[dict], key: str, **options) -> None:
    points = curve(rows, key)
    # A line of one point would be invisible.
    marker = "o" if len(points) == 1 else None
    axis.plot([x for x, _ in points], [y for _, y in points], marker=marker, **options)
