"""All tasks by name, and what small models that are trained on one of them score."""

import time

import torch

from hope_hf.common.flags import ModelArguments
from hope_hf.common.results import Row
from hope_hf.evaluation.result import mean_and_stderr

from .associative_recall import associative_recall
from .formal_languages import formal_languages
from .mad import mad
from .model import describe, small_model
from .state_tracking import state_tracking
from .task import Task, chance
from .training import TEST_STREAM, fixed_samples, score_samples, train


def known_tasks(lengths: list[int] | None = None) -> dict[str, Task]:
    """All tasks by name; `lengths` are the longest words of the formal languages' bins; other tasks ignore them."""
    return formal_languages(lengths) | associative_recall() | mad() | state_tracking()


def measure(
    task: Task,
    architecture: ModelArguments,
    seed: int,
    num_seeds: int = 1,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> list[Row]:
    """Train `num_seeds` models on a task, with `seed` and those after it, and test them: a row per bin.

    `accuracy` is the mean of `task.score` over models and samples, and `best` that of the best model.
    `accuracy_stderr` is over the samples of one model, or over the models if there are several. `n` counts samples,
    `steps` and `seconds` (training and test) are means over the models. Every model is tested on the same samples,
    which `seed` draws. Raises Diverged for training that diverges, ValueError for scores that are not finite.
    """
    samples = fixed_samples(task, seed + TEST_STREAM, task.samples)
    scores = {name: [] for name in task.bins}
    steps = []
    start = time.perf_counter()
    for model_seed in range(seed, seed + num_seeds):
        model = small_model(architecture, task.vocab_size, model_seed, dtype)
        trained = train(task, model, model_seed, torch.device(device))
        steps.append(trained.steps)
        for name in task.bins:
            scored = score_samples(task, trained.module, samples[name], task.batch_size, torch.device(device))
            scores[name].append(scored.tolist())
    seconds = (time.perf_counter() - start) / num_seeds
    parameters = sum(p.numel() for p in trained.module.parameters())
    rows = []
    for name in task.bins:
        means = [mean_and_stderr(values)[0] for values in scores[name]]
        accuracy, stderr = mean_and_stderr(means if num_seeds > 1 else scores[name][0])
        rows.append(
            {
                "task": task.name,
                "model": describe(architecture),
                "length": name,
                "accuracy": accuracy,
                "accuracy_stderr": stderr,
                "best": max(means),
                "chance": chance(samples[name], task.vocab_size),
                "n": len(samples[name]) * num_seeds,
                "steps": round(sum(steps) / len(steps)),
                "parameters": parameters,
                "seconds": round(seconds, 3),
            }
        )
    return rows
