"""Table and picture of the rows that `speed.py` measures (there: what a row holds)."""

import statistics
from pathlib import Path

from hope_hf.common.results import architecture, plain_number

MEASURES = {
    "step": "s", "speed": "tokens/s", "mfu": "%", "prefill": "s", "token": "ms", "cache": "MiB", "peak": "MiB",
}  # fmt: skip
TITLES = {
    "step": "training step", "speed": "speed of training", "mfu": "share of the peak FLOPs", "prefill": "prefill",
    "token": "generated token", "cache": "cache", "peak": "peak memory of a step",
}  # fmt: skip


def table(rows: list[dict], ranges: bool = False) -> str:
    """Medians, in brackets the first model's over this one's; with `ranges` also the ratio's range over the rounds."""
    models = list(dict.fromkeys(row["model"] for row in rows if "values" in row))
    # of repeated measurements, the last one
    found = {(row["model"], row["tokens"], row["measure"]): row["values"] for row in rows if "values" in row}
    lines = [f"| measure | tokens | {' | '.join(models)} |", "|---" * (len(models) + 2) + "|"]
    for measure, unit in MEASURES.items():
        for tokens in sorted({row["tokens"] for row in rows if row["measure"] == measure}):
            own, cells = found.get((models[0], tokens, measure)), []
            for model in models:
                values = found.get((model, tokens, measure))
                cells.append("" if values is None else number(statistics.median(values)))
                if own and values and model != models[0] and statistics.median(values):
                    each = [mine / other for mine, other in zip(own, values, strict=False)]
                    spread = f"; {min(each):.2f} to {max(each):.2f}" if ranges and len(each) > 1 else ""
                    cells[-1] += f" ({statistics.median(own) / statistics.median(values):.2f}{spread})"
            lines.append(f"| {measure}, {unit} | {tokens:,} | {' | '.join(cells)} |")
    notes = {f"{row['model']}, {row['tokens']:,} tokens: {row['note']}": None for row in rows if "note" in row}
    return "\n".join([*lines, *([""] if notes else []), *notes])


def number(value: float) -> str:
    """The value with three digits, or with all digits before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def report(rows: list[dict], picture: Path) -> None:
    """Print a table and draw a picture for every device and preset among the rows."""
    places = dict.fromkeys((row.get("device"), row.get("preset")) for row in rows)
    for device, preset in places:
        own = [row for row in rows if (row.get("device"), row.get("preset")) == (device, preset)]
        print(f"\n{device or 'CPU'}{f', preset {preset}' if preset else ''}\n\n{table(own, ranges=True)}")
        draw(own, picture.with_stem("-".join([picture.stem, *([preset] if preset else [])])))


def draw(rows: list[dict], picture: Path) -> None:
    """Draw the medians by length, one panel per measure."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):
        """Chooses the ticks to label as its parent does, and writes them without powers of ten."""

        def _num_to_string(self, value, low, high):
            return plain_number(value)

    measures = [measure for measure in MEASURES if any(row["measure"] == measure for row in rows)]
    if not measures:
        return
    figure = Figure(figsize=(3.7 * min(3, len(measures) + 1), 3.2 * (len(measures) // 3 + 1)), layout="constrained")
    panels = list(figure.subplots(len(measures) // 3 + 1, min(3, len(measures) + 1), squeeze=False).flat)
    models = list(dict.fromkeys(row["model"] for row in rows))
    for axes, measure in zip(panels, measures, strict=False):
        for model in models:
            of_model = (row for row in rows if (row["model"], row["measure"]) == (model, measure))
            points = {row["tokens"]: statistics.median(row["values"]) for row in of_model}
            width, label = 2.5 if model == models[0] else 1.2, architecture(model)
            axes.plot(sorted(points), [points[n] for n in sorted(points)], "o-", ms=3, label=label, linewidth=width)
        axes.set_xscale("log", base=2)
        axes.set(yscale="log", title=TITLES[measure], ylabel=MEASURES[measure], xlabel="tokens of the text")
        axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:g}" if tokens < 1024 else f"{tokens / 1024:g}K")
        axes.yaxis.set_major_formatter(Plain())
        axes.yaxis.set_minor_formatter(Plain(minor_thresholds=(1.5, 0.5)))
        axes.grid(alpha=0.3)
    for unused in panels[len(measures) :]:
        unused.axis("off")
    panels[-1].legend(*panels[0].get_legend_handles_labels(), loc="center", frameon=False)
    first, *others = map(architecture, models)
    figure.suptitle(f"{first} beside {', '.join(others)}" if others else first)
    figure.savefig(picture, dpi=110)
    print(f"\n{picture}")
