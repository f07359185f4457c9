"""Which names of `--tasks` belong to which suite: several suites share the flag."""

from collections.abc import Collection

from hope_hf.cli.parser import nearest

from .arguments import Arguments
from .continual.task_list import TASKS as CLASS_TASKS
from .needle.tasks import TASKS as NEEDLE_TASKS
from .parsing import names
from .synthetic.tasks import known_tasks

# Tasks that suites define themselves; every other name is one of lm-eval's.
NAMES = {
    "synthetic": frozenset(known_tasks()), "needle": frozenset(NEEDLE_TASKS),
    "class_incremental": frozenset(CLASS_TASKS),
}


def suites_of(tasks: list[str]) -> list[str]:
    """The suites whose tasks these are; zero_shot of every name that none of the others knows."""
    owners = [next((suite for suite, known in NAMES.items() if name in known), "zero_shot") for name in tasks]
    return list(dict.fromkeys(owners)) or ["zero_shot"]


def own_tasks(args: Arguments, suite: str, known: Collection[str]) -> list[str]:
    """The names in `--tasks` that are among `known`, the suite's own; all of these without the flag.

    Raises ValueError where none is, and for a name that no suite of `--suite` knows; lm-eval's are told by zero_shot.
    """
    if args.tasks is None:
        return list(known)
    asked = names(args.tasks)
    chosen = [name for name in asked if name in known]
    strange = [name for name in asked if name not in known and name not in names_of_others(args, suite)]
    if strange and "zero_shot" not in names(args.suite):
        raise ValueError(f"--tasks {strange[0]} is none of {', '.join(known)}{nearest(strange[0], known)}")
    if not chosen:
        raise ValueError(f"--tasks names no {suite} task: choose among {', '.join(known)}.")
    return chosen


def names_of_others(args: Arguments, suite: str) -> frozenset[str]:
    """The tasks of the other suites in `--suite` that define their own."""
    return frozenset().union(*(NAMES[other] for other in names(args.suite) if other in NAMES and other != suite))
