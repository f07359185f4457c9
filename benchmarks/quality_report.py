"""The tables of benchmarks/quality.py, in Markdown. Missing runs are marked."""

import statistics
from collections.abc import Callable

from benchmarks.quality_models import FROZEN, HOPE, LLAMA, LLAMA_CONV, MODELS, RECURRENT_PEERS, build
from benchmarks.quality_plan import FIRST_SEED, Job, Matrix, best_rates, best_recurrent_peer, job_at_best_rates, search
from benchmarks.quality_results import losses as losses_of

MISSING = "missing"


def report(matrix: Matrix, rows: dict[Job, dict]) -> str:
    """All tables of the sizes and texts of `matrix`, for all models, also those not asked for."""
    parts = []
    for size in matrix.sizes:
        parts += [
            _values(matrix, rows, size, "eval_loss", "validation loss, nats per token", 4),
            _values(matrix, rows, size, "bits_per_byte", "bits per byte", 4),
            _ratios(matrix, rows, size),
        ]
    commits = sorted({f"{row['commit']}{' with changes' if row.get('modified') else ''}" for row in rows.values()})
    if commits:
        parts.append(f"Commits: {', '.join(commits)}.")
    return "\n\n".join(parts)


def by_seed(matrix: Matrix, rows: dict[Job, dict], size: str, text: str, model: str) -> dict[int, dict]:
    """The rows that count for a model on a text: those at its best learning rate, by seed."""
    losses = losses_of(rows)
    seeds = (FIRST_SEED, *matrix.sizes[size].more_seeds)
    jobs = {seed: job_at_best_rates(matrix, size, text, model, seed, losses) for seed in seeds}
    return {seed: rows[job] for seed, job in jobs.items() if job in rows}


def ratios(matrix: Matrix, rows: dict[Job, dict], size: str, text: str, model: str) -> list[float | None]:
    """HOPE's validation loss over a model's, for every seed that both have; None if one of them diverged."""
    own, other = (by_seed(matrix, rows, size, text, name) for name in (HOPE, model))
    pairs = [(own[seed]["eval_loss"], other[seed]["eval_loss"]) for seed in own if seed in other]
    return [None if None in pair else pair[0] / pair[1] for pair in pairs]


def _values(matrix: Matrix, rows: dict[Job, dict], size: str, key: str, title: str, digits: int) -> str:
    shape, losses = matrix.sizes[size], losses_of(rows)
    tokens = shape.max_train_steps * shape.tokens_per_step

    def line(model: str) -> list[str]:
        rates = best_rates(matrix, size, model, losses)
        _, over = search(matrix, size, model, losses)
        shown = MISSING if rates is None else f"{rates}{'' if over else ' (the search goes on)'}"
        cells = [[row[key] for row in by_seed(matrix, rows, size, text, model).values()] for text in matrix.texts]
        return [model, f"{build(model, shape).parameters:,}", shown, *(_cell(cell, digits) for cell in cells)]

    head = ["model", "parameters", "learning rate", *matrix.texts]
    return f"{size}, {tokens:,} tokens: {title}\n\n{_table(head, map(line, MODELS))}"


def _ratios(matrix: Matrix, rows: dict[Job, dict], size: str) -> str:
    losses = losses_of(rows)

    def line(text: str) -> list[str]:
        peer = best_recurrent_peer(matrix, size, text, losses)
        cells = [_cell(ratios(matrix, rows, size, text, model), 4) for model in (FROZEN, LLAMA, LLAMA_CONV)]
        best = f"{_cell(ratios(matrix, rows, size, text, peer), 4)}, {peer}" if peer else MISSING
        return [text, *cells, best, _verdict(lambda model: ratios(matrix, rows, size, text, model))]

    head = ["text", "HOPE / frozen", "HOPE / llama", "HOPE / llama_conv", "HOPE / best recurrent peer", "lower"]
    note = (
        "Ratios of validation losses, over the seeds that both models have. Lower: than its frozen twin, Llama "
        "and every recurrent peer."
    )
    return f"{size}: {note}\n\n{_table(head, map(line, matrix.texts))}"


def _verdict(ratios_to: Callable[[str], list[float | None]]) -> str:
    means = []
    for model in (FROZEN, LLAMA, *RECURRENT_PEERS):
        finite = [value for value in ratios_to(model) if value is not None]
        means.append(statistics.mean(finite) if finite else None)
    if any(mean is not None and mean >= 1 for mean in means):
        return "no"
    return MISSING if None in means else "yes"


def _cell(values: list[float | None], digits: int) -> str:
    """Mean and standard deviation over seeds, and their number."""
    finite = [value for value in values if value is not None]
    if not finite:
        return "diverged" if values else MISSING
    text = f"{statistics.mean(finite):.{digits}f}"
    if len(finite) > 1:
        text += f" ± {statistics.stdev(finite):.{digits}f} ({len(finite)} seeds)"
    return text + (f", {len(values) - len(finite)} diverged" if len(finite) < len(values) else "")


def _table(head: list[str], lines) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *lines])
