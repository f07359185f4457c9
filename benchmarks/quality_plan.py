"""Which runs benchmarks/quality.py still has to do, as pure functions of what is known.

Every model's best learning rate is found once per size, on the search text at seed 1. At that rate it is trained on
the other texts at seed 1. Where a size has more seeds, HOPE, its frozen twin and, text by text, the better of the
recurrent peers are trained on them, too.
"""

from collections.abc import Iterable, Mapping
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


def best_rate(matrix: Matrix, size: str, model: str, losses: Losses) -> float | None:
    """The learning rate with the lowest loss on the search text; None until all of them are measured there."""
    rates = matrix.sizes[size].learning_rates
    searched = {rate: losses.get(Job(size, matrix.search_text, model, rate, FIRST_SEED)) for rate in rates}
    return None if None in searched.values() else min(rates, key=lambda rate: searched[rate])


def job_at_best_rate(matrix: Matrix, size: str, text: str, model: str, seed: int, losses: Losses) -> Job | None:
    """The run that counts in the comparison; None until the model's learning rate is known."""
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


def _wanted(matrix: Matrix, size: str, losses: Losses) -> Iterable[Job | None]:
    for model in matrix.models:
        for rate in matrix.sizes[size].learning_rates:
            yield Job(size, matrix.search_text, model, rate, FIRST_SEED)
    for text in matrix.texts:
        for model in matrix.models:
            yield job_at_best_rate(matrix, size, text, model, FIRST_SEED, losses)
    for text in matrix.texts:
        for seed in matrix.sizes[size].more_seeds:
            for model in (HOPE, FROZEN, best_recurrent_peer(matrix, size, text, losses)):
                if model in matrix.models:
                    yield job_at_best_rate(matrix, size, text, model, seed, losses)


def outline(matrix: Matrix, losses: Losses) -> list[tuple[Job, bool]]:
    """All runs that are left, and whether each is known already.

    The others wait for results: their learning rate, or which recurrent peer is the better one, is a guess (the middle
    rate, the first peer).
    """
    known, pretended, left = set(ready_jobs(matrix, losses)), dict(losses), []
    while ready := ready_jobs(matrix, pretended):
        for job in ready:
            left.append((job, job in known))
            rates = matrix.sizes[job.size].learning_rates
            distance = abs(rates.index(job.learning_rate) - len(rates) // 2) if job.learning_rate in rates else 0
            order = RECURRENT_PEERS.index(job.model) if job.model in RECURRENT_PEERS else 0
            pretended[job] = distance + order / 10
    return left
