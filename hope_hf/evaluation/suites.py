"""The table of suites: each one declares what it offers. A new suite is a file and a line here."""

from dataclasses import replace

from .continual.class_incremental import class_incremental
from .continual.in_use import continual
from .flags import LM_EVAL, Arguments, names
from .memory import memory
from .needle.retrieval import needle, passkey
from .perplexity import perplexity
from .recall.suite import recall
from .sample import sample
from .zero_shot import zero_shot

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
