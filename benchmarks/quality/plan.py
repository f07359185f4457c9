"""The runs that benchmarks/quality.py still has to do, as pure functions of the known losses.

Every model's best learning rate is found once per size, on the search text at seed 1. The search begins with three
rates; while the lowest (highest) is the best, it tries half (twice) that rate. If vectors (norms, biases,
convolutions) have their own rates, the search uses the middle one of these; it then finds the vectors' best rate in
the same way, at the best rate of matrices. At its best rates, including rows named by `--learning_rates`, a model is
trained on the other texts at seed 1. If a size has more seeds, HOPE, HOPE with frozen memories and the best recurrent
peer of each text are trained with them, too.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.quality.models import FROZEN, HOPE, RECURRENT_PEERS, Size

FIRST_SEED = 1


class Rates(NamedTuple):
    """Learning rates of matrices, and of vectors (None: the same)."""

    matrices: float
    vectors: float | None = None

    def __str__(self) -> str:
        return f"{self.matrices:g}" + ("" if self.vectors is None else f", vectors {self.vectors:g}")


@dataclass(frozen=True)
class Job:
    """One training run."""

    size: str
    text: str
    model: str
    rates: Rates
    seed: int

    def __str__(self) -> str:
        return f"{self.size} {self.text} {self.model}, learning rate {self.rates}, seed {self.seed}"


Losses = Mapping[Job, float]
"""Validation loss of each finished run in nats per token; infinite where it diverged."""


@dataclass(frozen=True)
class Matrix:
    """The sizes, texts and models that are compared."""

    sizes: Mapping[str, Size]
    texts: tuple[str, ...]
    models: tuple[str, ...]
    search_text: str


Plan = Callable[[Matrix, Losses], list[Job]]
"""Runs of a matrix that can start now and are not in the losses, in order."""


def widen(rates: Iterable[float | None], loss: Callable[[float | None], float | None]) -> tuple[list, bool]:
    """The rates of a search as far as `loss` is known, ascending, and whether it is over.

    While the lowest (highest) rate is the best, half (twice) that rate follows.
    """
    rates = sorted(rates)
    while None not in (measured := [loss(rate) for rate in rates]):
        best = measured.index(min(measured))
        if len(rates) == 1 or math.isinf(measured[best]) or 0 < best < len(rates) - 1:
            return rates, True
        rates = [rates[0] / 2, *rates] if best == 0 else [*rates, 2 * rates[-1]]
    return rates, False


def search(matrix: Matrix, size: str, model: str, losses: Losses) -> tuple[list[Rates], bool]:
    """The rates of a model's search as far as `losses` are known, and whether it is over."""
    shape = matrix.sizes[size]
    middle = shape.vector_learning_rates[len(shape.vector_learning_rates) // 2]

    def loss(rates: Rates) -> float | None:
        return losses.get(Job(size, matrix.search_text, model, rates, FIRST_SEED))

    matrices, over = widen(shape.learning_rates, lambda rate: loss(Rates(rate, middle)))
    tried = [Rates(rate, middle) for rate in matrices]
    if not over:
        return tried, False
    best = min(tried, key=loss).matrices
    vectors, over = widen(shape.vector_learning_rates, lambda rate: loss(Rates(best, rate)))
    return [*tried, *(Rates(best, rate) for rate in vectors if rate != middle)], over


def best_rates(matrix: Matrix, size: str, model: str, losses: Losses) -> Rates | None:
    """The rates with the lowest loss on the search text, of the search and of rows named by flags.

    None until as many rates of matrices are measured there as the search begins with.
    """
    run = (size, matrix.search_text, model, FIRST_SEED)
    measured = {job.rates: loss for job, loss in losses.items() if (job.size, job.text, job.model, job.seed) == run}
    enough = len({rates.matrices for rates in measured}) >= len(matrix.sizes[size].learning_rates)
    return min(measured, key=measured.get) if enough else None


def job_at_best_rates(matrix: Matrix, size: str, text: str, model: str, seed: int, losses: Losses) -> Job | None:
    """The run that counts in the comparison; None until three learning rates of the model are measured."""
    rates = best_rates(matrix, size, model, losses)
    return None if rates is None else Job(size, text, model, rates, seed)


def best_recurrent_peer(matrix: Matrix, size: str, text: str, losses: Losses) -> str | None:
    """The recurrent peer with the lower loss on this text at the first seed; None until all are measured."""
    measured = {}
    for model in RECURRENT_PEERS:
        measured[model] = losses.get(job_at_best_rates(matrix, size, text, model, FIRST_SEED, losses))
    return None if None in measured.values() else min(measured, key=measured.get)


def ready_jobs(matrix: Matrix, losses: Losses) -> list[Job]:
    """Runs that can start now and are not in `losses`, in order."""
    jobs = [job for size in matrix.sizes for job in _wanted(matrix, size, losses)]
    return [job for job in dict.fromkeys(jobs) if job is not None and job not in losses]


def rows_at(learning_rates: Sequence[float], seeds: Sequence[int]) -> Plan:
    """A plan of all rows of a matrix at these rates of matrices, all rates of vectors and these seeds.

    The order is seed by seed, so that every row has one run before any has two.
    """

    def jobs(matrix: Matrix, losses: Losses) -> list[Job]:
        rows = itertools.product(seeds, matrix.sizes, matrix.texts, matrix.models, learning_rates)
        named = (
            Job(size, text, model, Rates(rate, vectors), seed)
            for seed, size, text, model, rate in rows
            for vectors in matrix.sizes[size].vector_learning_rates
        )
        return [job for job in dict.fromkeys(named) if job not in losses]

    return jobs


def _wanted(matrix: Matrix, size: str, losses: Losses) -> Iterable[Job | None]:
    searched = {model: search(matrix, size, model, losses) for model in matrix.models}
    for model, (tried, _) in searched.items():
        for rates in tried:
            yield Job(size, matrix.search_text, model, rates, FIRST_SEED)
    done = [model for model, (_, over) in searched.items() if over]
    for text in matrix.texts:
        for model in done:
            yield job_at_best_rates(matrix, size, text, model, FIRST_SEED, losses)
    for text in matrix.texts:
        for seed in matrix.sizes[size].more_seeds:
            for model in (HOPE, FROZEN, best_recurrent_peer(matrix, size, text, losses)):
                if model in done:
                    yield job_at_best_rates(matrix, size, text, model, seed, losses)
