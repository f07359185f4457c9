"""Synthetic tasks: small models are trained from scratch and tested on unseen samples.

Within minutes this shows whether an architecture can learn to remember, count and copy, which a language model's loss
does not.
"""

import time

import torch

from hope_hf.common.process import choose_device

from ..flags import Arguments, chosen_tasks, parse_lengths, suite
from ..result import Row, SuiteResult, mean_and_stderr, summary_row
from .associative_recall import associative_recall
from .formal_languages import formal_languages
from .mad import mad
from .model import describe, small_model
from .state_tracking import state_tracking
from .task import Task, chance
from .training import TEST_STREAM, fixed_samples, score_samples, train


def known_tasks(lengths: list[int] | None = None) -> dict[str, Task]:
    """All tasks by name; `lengths` are the longest words of the formal languages' bins; other tasks ignore them."""
    return {**formal_languages(lengths), **associative_recall(), **mad(), **state_tracking()}


@suite(
    "tasks", "lengths", "max_train_steps", "learning_rate", "ema_decay", "num_seeds", "limit", "batch_size",
    "seed", "model_type", "config_name", "config_overrides",
    "dtype", "trust_remote_code", "attn_implementation", tasks=known_tasks(), loads_model=False,
)  # fmt: skip
def synthetic(args: Arguments, subject=None) -> SuiteResult:
    """Train `--num_seeds` models per task and test them: a row per task and bin.

    `accuracy` is the mean of `task.score` over models and samples, and `best` that of the best model.
    `accuracy_stderr` is over the samples of one model, or over the models if there are several. `n` counts samples,
    `steps` and `seconds` (training and test) are means over the models. Every model of a task is tested on the same
    samples, which `--seed` draws. Raises ValueError for tasks that do not exist and for training that diverges. The
    suite ignores `subject`.
    """
    device = choose_device(args.device)
    rows = [row for task in asked_tasks(args) for row in measure(task, args, device)]
    found = [
        summary_row(f"{row['task']}, {row['length']}", row["accuracy"], row["accuracy_stderr"], row["chance"])
        for row in rows
    ]
    return SuiteResult({"Synthetic tasks": rows}, summary=found)


def asked_tasks(args: Arguments) -> list[Task]:
    """The tasks of `--tasks` with the user's settings; ValueError for unknown ones."""
    tasks = known_tasks(parse_lengths(args.lengths) if args.lengths else None)
    return [
        tasks[name].with_settings(
            max_train_steps=args.max_train_steps,
            learning_rate=args.learning_rate,
            ema_decay=args.ema_decay,
            batch_size=args.given_rows,
            samples=min(args.limit, tasks[name].samples) if args.limit else None,
        )
        for name in chosen_tasks(args, "synthetic", tasks)
    ]


def measure(task: Task, args: Arguments, device: torch.device) -> list[Row]:
    """Train and test the models of one task; a row per bin."""
    samples = fixed_samples(task, args.seed + TEST_STREAM, task.samples)
    scores = {name: [] for name in task.bins}
    steps = []
    start = time.perf_counter()
    for seed in range(args.seed, args.seed + args.num_seeds):
        model = small_model(args, task.vocab_size, seed)
        trained = train(task, model, seed, device)
        steps.append(trained.steps)
        for name in task.bins:
            scores[name].append(score_samples(task, trained.module, samples[name], task.batch_size, device).tolist())
    seconds = (time.perf_counter() - start) / args.num_seeds
    parameters = sum(p.numel() for p in trained.module.parameters())
    rows = []
    for name in task.bins:
        means = [mean_and_stderr(values)[0] for values in scores[name]]
        accuracy, stderr = mean_and_stderr(means if args.num_seeds > 1 else scores[name][0])
        rows.append(
            {
                "task": task.name,
                "model": describe(args),
                "length": name,
                "accuracy": accuracy,
                "accuracy_stderr": stderr,
                "best": max(means),
                "chance": chance(samples[name], task.vocab_size),
                "n": len(samples[name]) * args.num_seeds,
                "steps": round(sum(steps) / len(steps)),
                "parameters": parameters,
                "seconds": round(seconds, 3),
            }
        )
    return rows
