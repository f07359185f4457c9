"""The table of suites: what each one offers, and where it is. The suites themselves import torch and models.

A new suite is a file, a function here that declares the flags it reads, and its row.
"""

from dataclasses import replace

from .continual.classes import TASKS as CLASS_TASKS
from .flags import LM_EVAL, MODEL, TEXT, Arguments, names, suite
from .needle.tasks import TASKS as NEEDLES
from .recall.readings import READINGS


@suite(*MODEL, *TEXT, "lengths", "samples_per_length", "limit", "batch_size")
def perplexity(args: Arguments, subject):
    from .perplexity import perplexity as measure

    return measure(args, subject)


@suite(*MODEL, "lengths", "depths", "samples_per_length", "limit", "batch_size", "seed")
def passkey(args: Arguments, subject):
    from .needle.retrieval import passkey as measure

    return measure(args, subject)


@suite(
    *MODEL, *TEXT, "tasks", "lengths", "depths", "samples_per_length", "limit", "batch_size", "max_new_tokens",
    "seed", tasks=NEEDLES,
)  # fmt: skip
def needle(args: Arguments, subject):
    from .needle.retrieval import needle as measure

    return measure(args, subject)


@suite(*MODEL, *TEXT, "tasks", "lengths", "samples_per_length", "limit", "seed", tasks=READINGS)
def recall(args: Arguments, subject):
    from .recall.suite import recall as measure

    return measure(args, subject)


@suite(*MODEL, *TEXT, "lengths", "samples_per_length", "limit", "seed", needs_memory=True)
def memory(args: Arguments, subject):
    from .memory import memory as measure

    return measure(args, subject)


@suite(
    *MODEL, "tasks", "num_fewshot", "max_length", "log_samples", "data_dir", "limit", "batch_size",
    in_processes=True, package="lm_eval",
)  # fmt: skip
def zero_shot(args: Arguments, subject):
    from .zero_shot import zero_shot as measure

    return measure(args, subject)


@suite(*MODEL, *TEXT, "segments", "learning_rate", "batch_size", over_checkpoints=True)
def continual(args: Arguments, subject):
    from .continual.in_use import continual as measure

    return measure(args, subject)


@suite(
    *MODEL, "tasks", "num_fewshot", "samples_per_class", "data_dir", "max_train_steps", "learning_rate", "limit",
    "batch_size", "seed", tasks=CLASS_TASKS,
)  # fmt: skip
def class_incremental(args: Arguments, subject):
    from .continual.class_incremental import class_incremental as measure

    return measure(args, subject)


@suite(*MODEL, *TEXT, "prompts", "max_new_tokens", "limit", "seed")
def sample(args: Arguments, subject):
    from .sample import sample as measure

    return measure(args, subject)


SUITES = {
    "perplexity": perplexity,
    "passkey": passkey,
    "needle": needle,
    "recall": recall,
    "memory": memory,
    "zero_shot": zero_shot,
    "continual": continual,
    "class_incremental": class_incremental,
    "sample": sample,
}


def with_own_tasks(args: Arguments, suite: str) -> Arguments:
    """The arguments for one of the suites in `--suite`: `--tasks` without the names that the others define.

    A name that none of them defines is left to zero_shot; if that does not run, every suite refuses the name.
    """
    if args.tasks is None:
        return args
    running = names(args.suite)
    tasks = []
    for task in names(args.tasks):
        owners = [name for name in running if task in SUITES[name].tasks]
        is_left_over = not owners and (suite == LM_EVAL or LM_EVAL not in running)
        if suite in owners or is_left_over:
            tasks.append(task)
    return replace(args, tasks=",".join(tasks))
