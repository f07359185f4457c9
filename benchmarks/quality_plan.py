"""Which runs benchmarks/quality.py still has to do, as pure functions of what is known.

Every model's best learning rate is found once per size, on the search text at seed 1: of three, and then of half the
lowest or twice the highest while that end is the best. At that rate it is trained on the other texts at seed 1. Where
a size has more seeds, HOPE, its frozen twin and, text by text, the better of the recurrent peers are trained on them,
too.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.quality_models import FROZEN, HOPE, RECURRENT_PEERS, Size

FIRST_SEED = 1


@dataclass(frozen=True)
class Job:
    """One training run."""

    size: str
    text: str
    model: str
    learning_rate: float
    seed: int

    def __str__(self) -> str:
        return f"{self.size} {self.text} {self.model}, learning rate {self.learning_rate:g}, seed {self.seed}"


Losses = Mapping[Job, float]
"""Validation loss of each finished run in nats per token; infinite where it diverged."""


@dataclass(frozen=True)
class Matrix:
    """What is asked for."""

    sizes: Mapping[str, Size]
    texts: tuple[str, ...]
    models: tuple[str, ...]
    search_text: str


Plan = Callable[[Matrix, Losses], list[Job]]
"""Runs of a matrix that can start now and are not in the losses, in the order in which they should."""


def search(matrix: Matrix, size: str, model: str, losses: Losses) -> tuple[list[float], bool]:
    """The learning rates of a model's search as far as `losses` tell, ascending, and whether it is over."""

    def loss(rate: float) -> float | None:
        return losses.get(Job(size, matrix.search_text, model, rate, FIRST_SEED))

    rates = sorted(matrix.sizes[size].learning_rates)
    while None not in (measured := [loss(rate) for rate in rates]):
        best = measured.index(min(measured))
        if len(rates) == 1 or math.isinf(measured[best]) or 0 < best < len(rates) - 1:
            return rates, True
        rates = [rates[0] / 2, *rates] if best == 0 else [*rates, 2 * rates[-1]]
    return rates, False


def best_rate(matrix: Matrix, size: str, model: str, losses: Losses) -> float | None:
    """The learning rate with the lowest loss on the search text; None until the first three are measured there."""
    rates, _ = search(matrix, size, model, losses)
    searched = {rate: losses.get(Job(size, matrix.search_text, model, rate, FIRST_SEED)) for rate in rates}
    measured = {rate: loss for rate, loss in searched.items() if loss is not None}
    first = matrix.sizes[size].learning_rates
    return min(measured, key=measured.get) if measured.keys() >= set(first) else None


def job_at_best_rate(matrix: Matrix, size: str, text: str, model: str, seed: int, losses: Losses) -> Job | None:
    """The run that counts in the comparison; None until three learning rates of the model are measured."""
    rate = best_rate(matrix, size, model, losses)
    return None if rate is None else Job(size, text, model, rate, seed)


def best_recurrent_peer(matrix: Matrix, size: str, text: str, losses: Losses) -> str | None:
    """The recurrent peer with the lower loss on this text at the first seed; None until all are measured."""
    measured = {}
    for model in RECURRENT_PEERS:
        measured[model] = losses.get(job_at_best_rate(matrix, size, text, model, FIRST_SEED, losses))
    return None if None in measured.values() else min(measured, key=measured.get)


def ready_jobs(matrix: Matrix, losses: Losses) -> list[Job]:
    """Runs that can start now and are not in `losses`, in the order in which they should."""
    jobs = [job for size in matrix.sizes for job in _wanted(matrix, size, losses)]
    return [job for job in dict.fromkeys(jobs) if job is not None and job not in losses]


def rows_at(learning_rates: Sequence[float], seeds: Sequence[int]) -> Plan:
    """A plan of all rows of a matrix at these learning rates and seeds, whatever the searches say.

    Seed by seed, so that every row is seen once before any is seen twice.
    """

    def jobs(matrix: Matrix, losses: Losses) -> list[Job]:
        rows = itertools.product(seeds, matrix.sizes, matrix.texts, matrix.models, learning_rates)
        named = (Job(*row, seed) for seed, *row in rows)
        return [job for job in dict.fromkeys(named) if job not in losses]

    return jobs


def _wanted(matrix: Matrix, size: str, losses: Losses) -> Iterable[Job | None]:
    searched = {model: search(matrix, size, model, losses) for model in matrix.models}
    for model, (rates, _) in searched.items():
        for rate in rates:
            yield Job(size, matrix.search_text, model, rate, FIRST_SEED)
    done = [model for model, (_, over) in searched.items() if over]
    for text in matrix.texts:
        for model in done:
            yield job_at_best_rate(matrix, size, text, model, FIRST_SEED, losses)
    for text in matrix.texts:
        for seed in matrix.sizes[size].more_seeds:
            for model in (HOPE, FROZEN, best_recurrent_peer(matrix, size, text, losses)):
                if model in done:
                    yield job_at_best_rate(matrix, size, text, model, seed, losses)


def outline(matrix: Matrix, losses: Losses, plan: Plan) -> list[tuple[Job, bool]]:
    """All runs that `plan` has left, and whether each is known already.

    The others wait for results: their learning rate, or which recurrent peer is the better one, is a guess (the middle
    rate, the first peer; a search does not go on).
    """
    known, pretended, left = set(plan(matrix, losses)), dict(losses), []
    while ready := plan(matrix, pretended):
        for job in ready:
            left.append((job, job in known))
            rates = matrix.sizes[job.size].learning_rates
            distance = (
                abs(rates.index(job.learning_rate) - len(rates) // 2) if job.learning_rate in rates else math.inf
            )
            order = RECURRENT_PEERS.index(job.model) if job.model in RECURRENT_PEERS else 0
            pretended[job] = distance + order / 10
    return left
