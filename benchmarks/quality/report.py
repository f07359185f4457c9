"""The tables of benchmarks/quality.py, in Markdown. Missing runs are marked."""

import statistics
from collections.abc import Iterable

from benchmarks.quality.models import FROZEN, HOPE, LLAMA, LLAMA_CONV, MODELS, RECURRENT_PEERS, build
from benchmarks.quality.plan import (
    FIRST_SEED,
    Job,
    Matrix,
    Rates,
    best_rates,
    best_recurrent_peer,
    job_at_best_rates,
    search,
)
from benchmarks.quality.results import losses as losses_of

MISSING = "missing"


def report(matrix: Matrix, rows: dict[Job, dict]) -> str:
    """All tables of the sizes and texts of `matrix`, for all models, even those that no flag names."""
    parts = [table for size in matrix.sizes for table in (_losses(matrix, rows, size), _ratios(matrix, rows, size))]
    commits = sorted({f"{row['commit']}{' with changes' if row.get('modified') else ''}" for row in rows.values()})
    if commits:
        parts.append(f"Commits: {', '.join(commits)}.")
    return "\n\n".join(parts)


def differences(matrix: Matrix, rows: dict[Job, dict]) -> str:
    """The table of an ablation: each variant's loss, its difference from HOPE by seed, and its time relative to HOPE.

    The seed changes the loss, and a variant with other parameters has other initial values: a difference below the
    spread over seeds is not significant.
    """
    ((name, size),) = matrix.sizes.items()
    lines = []
    for rate in size.learning_rates:
        by_seed = {
            model: {
                seed: rows[job]
                for seed in size.more_seeds
                if (job := Job(name, matrix.search_text, model, Rates(rate), seed)) in rows
            }
            for model in matrix.models
        }
        for model, own in by_seed.items():
            pairs = [(row, by_seed[HOPE][seed]) for seed, row in own.items() if seed in by_seed[HOPE]]
            losses = [(row["eval_loss"], hope["eval_loss"]) for row, hope in pairs]
            lines.append([
                model,
                f"{build(model, size).parameters:,}",
                f"{rate:g}",
                cell([row["eval_loss"] for row in own.values()]),
                cell([None if None in pair else pair[0] - pair[1] for pair in losses], "+.4f"),
                cell([row["seconds"] / hope["seconds"] for row, hope in pairs], ".2f"),
            ])  # fmt: skip
    return _table(["model", "parameters", "learning rate", "loss", "minus HOPE", "time / HOPE"], lines)


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


def cell(values: Iterable[float | None], form: str = ".4f") -> str:
    """Mean and standard deviation over seeds, and their number; None is a training that diverged."""
    values = list(values)
    finite = [value for value in values if value is not None]
    if not finite:
        return "diverged" if values else MISSING
    text = f"{statistics.mean(finite):{form}}"
    if len(finite) > 1:
        text += f" ± {statistics.stdev(finite):{form.lstrip('+')}} ({len(finite)} seeds)"
    return text + (f", {len(values) - len(finite)} diverged" if len(finite) < len(values) else "")


def _losses(matrix: Matrix, rows: dict[Job, dict], size: str) -> str:
    shape, losses = matrix.sizes[size], losses_of(rows)
    tokens = shape.max_train_steps * shape.tokens_per_step
    lines = []
    for model in MODELS:
        rates = best_rates(matrix, size, model, losses)
        _, over = search(matrix, size, model, losses)
        shown = MISSING if rates is None else f"{rates}{'' if over else ' (the search goes on)'}"
        found = [by_seed(matrix, rows, size, text, model).values() for text in matrix.texts]
        cells = [cell(row["eval_loss"] for row in of_text) for of_text in found]
        lines.append([model, f"{build(model, shape).parameters:,}", shown, *cells])
    head = ["model", "parameters", "learning rate", *matrix.texts]
    return f"{size}, {tokens:,} tokens: validation loss, nats per token\n\n{_table(head, lines)}"


def _ratios(matrix: Matrix, rows: dict[Job, dict], size: str) -> str:
    losses, lines = losses_of(rows), []
    for text in matrix.texts:
        of = {model: ratios(matrix, rows, size, text, model) for model in MODELS}
        peer = best_recurrent_peer(matrix, size, text, losses)
        best = f"{cell(of[peer])}, {peer}" if peer else MISSING
        finite = [[value for value in of[model] if value is not None] for model in (FROZEN, LLAMA, *RECURRENT_PEERS)]
        lower = "no" if any(values and statistics.mean(values) >= 1 for values in finite) else "yes"
        lower = MISSING if lower == "yes" and [] in finite else lower
        lines.append([text, *(cell(of[model]) for model in (FROZEN, LLAMA, LLAMA_CONV)), best, lower])
    head = ["text", "HOPE / frozen", "HOPE / llama", "HOPE / llama_conv", "HOPE / best recurrent peer", "lower"]
    note = (
        "Ratios of validation losses, over the seeds that both models have. Lower: than its frozen twin, Llama "
        "and every recurrent peer."
    )
    return f"{size}: {note}\n\n{_table(head, lines)}"


def _table(head: list[str], lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *lines])
