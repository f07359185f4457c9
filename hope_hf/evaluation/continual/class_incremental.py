"""Class-incremental learning: two data sets, each learned in the context, by levels, and by fine-tuning."""

import math
from dataclasses import dataclass
from functools import partial
from math import hypot
from pathlib import Path

from hope_hf.common.models import is_hope

from ..display import Panel, heat_maps
from ..flags import MODEL, Arguments, chosen_tasks, suite
from ..result import Row, SuiteResult, mean_and_stderr, summary_row
from ..subject import Subject
from .classes import DATA_SETS, Hits, open_groups
from .fine_tuning import BATCH_SIZE, LEARNING_RATE, STEPS, learn_by_fine_tuning
from .in_context import SHOTS, learn_in_context

ROWS = 64
# Name of a task -> (data set, how its classes are learned).
WAYS = ("in-context", "levels", "fine-tuning")
TASKS = {f"{data_set}-{way}": (data_set, way) for data_set in DATA_SETS for way in WAYS}


@suite(
    *MODEL, "tasks", "num_fewshot", "samples_per_class", "data_dir", "max_train_steps", "learning_rate", "limit",
    "batch_size", "seed", tasks=TASKS,
)  # fmt: skip
def class_incremental(args: Arguments, subject: Subject) -> SuiteResult:
    """Accuracy among the classes met so far, after each group of classes: a matrix for each of `--tasks`.

    Labels are chosen by their probability after the sentence. Without `--tasks`, tasks `levels` are left
    out for a model without `level_learning`. Raises ValueError without the data sets' files, and for a model that
    cannot continue from a cache.
    """
    if args.data_dir is None:
        raise ValueError(
            "--suite class_incremental needs --data_dir: a folder with clinc150_full.json and clinc150_domains.json, "
            "banking77_train.csv and banking77_test.csv."
        )
    if getattr(subject.model, "_is_stateful", False) and not is_hope(subject.model.config):
        raise ValueError(
            f"--suite class_incremental reads several tokens after a cache, which {subject.model.config.model_type} "
            "cannot: leave it out."
        )
    tables, pictures, summaries = {}, {}, []
    for name in chosen_tasks(args, "class_incremental", TASKS):
        data_set, way = TASKS[name]
        if way == "levels" and not subject.learns:
            if args.tasks is None:
                continue
            raise ValueError(
                f"--tasks {name} needs a model whose config.json has level_learning, such as one that "
                "hope-hf convert writes: leave it out."
            )
        groups = open_groups(data_set, Path(args.data_dir), args.seed)
        groups = groups.shuffled(args.seed, args.samples_per_class, args.limit)
        read_at_once = args.given_rows or ROWS
        if way != "fine-tuning":
            shots = SHOTS if args.num_fewshot is None else args.num_fewshot
            found = learn_in_context(subject, groups, shots, read_at_once, args.seed, name, way == "levels")
        else:
            steps, size = args.max_train_steps or STEPS, args.given_rows or BATCH_SIZE
            rate = args.learning_rate or LEARNING_RATE
            found = learn_by_fine_tuning(subject, groups, steps, size, rate, read_at_once, args.seed, name)
        matrix = Matrix(groups.names, [len(one) for one in groups.classes], *found)
        tables[name] = rows(matrix)
        pictures[f"class_incremental_{name}.png"] = partial(draw, name, matrix)
        summaries.append(summary(name, matrix))
    scores = [
        summary_row(f"{row['task']}, accuracy", row["average_accuracy"], row["average_accuracy_stderr"], row["chance"])
        for row in summaries
    ]
    return SuiteResult({"Class-incremental learning": summaries, **tables}, pictures, summary=scores)


@dataclass(frozen=True)
class Matrix:
    """Which answers were right after each group: the matrix R[i][j].

    hits: those of group j <= i after group i, among the classes of groups 0 to i. controls: name -> hits per group.
    """

    groups: list[str]
    classes: list[int]
    hits: list[Hits]
    controls: dict[str, Hits]

    def accuracy(self, i: int, j: int) -> float:
        """R[i][j]."""
        return mean_and_stderr(self.hits[i][j])[0]


def draw(name: str, matrix: Matrix, path: Path):
    """R[i][j] and the controls below it, with the mean of each row at its end."""
    table = rows(matrix)
    columns = [*matrix.groups, "average"]
    values = [[math.nan if row[column] is None else row[column] for column in columns] for row in table]
    panel = Panel("accuracy among the classes met so far", values)
    heat_maps(path, [panel], [row["after"] for row in table], columns, ("group tested", "after group"), name)


def average(hits: Hits) -> tuple[float, float | None]:
    """Mean of the groups' accuracies, and its standard error."""
    means, errors = zip(*map(mean_and_stderr, hits), strict=True)
    return sum(means) / len(means), None if None in errors else hypot(*errors) / len(errors)


def forgetting(matrix: Matrix) -> float:
    """Mean over all groups but the last: the best accuracy before the end minus the accuracy at the end."""
    last = len(matrix.groups) - 1
    losses = [max(matrix.accuracy(i, j) for i in range(j, last)) - matrix.accuracy(last, j) for j in range(last)]
    return sum(losses) / last


def backward_transfer(matrix: Matrix) -> float:
    """Mean over all groups but the last: the accuracy at the end minus the accuracy right after the group."""
    last = len(matrix.groups) - 1
    return sum(matrix.accuracy(last, j) - matrix.accuracy(j, j) for j in range(last)) / last


def rows(matrix: Matrix) -> list[Row]:
    """A row after every group and one for each control: chance, the accuracy of each group, and their mean."""
    seen = [sum(matrix.classes[: index + 1]) for index in range(len(matrix.groups))]
    lines = [(name, hits, count) for name, hits, count in zip(matrix.groups, matrix.hits, seen, strict=True)]
    lines += [(name, hits, seen[-1]) for name, hits in matrix.controls.items()]
    found = []
    for name, hits, count in lines:
        means = [mean_and_stderr(one)[0] for one in hits] + [None] * (len(matrix.groups) - len(hits))
        mean, error = average(hits)
        found.append(
            {
                "after": name,
                "n": sum(map(len, hits)),
                "chance": 1 / count,
                **dict(zip(matrix.groups, means, strict=True)),
                "average": mean,
                "average_stderr": error,
            }
        )
    return found


def summary(name: str, matrix: Matrix) -> Row:
    """One row for a task."""
    mean, error = average(matrix.hits[-1])
    row = {
        "task": name,
        "n": sum(map(len, matrix.hits[-1])),
        "chance": 1 / sum(matrix.classes),
        "average_accuracy": mean,
        "average_accuracy_stderr": error,
        "forgetting": forgetting(matrix),
        "backward_transfer": backward_transfer(matrix),
    }
    for control in ("joint", "frozen"):
        found = matrix.controls.get(control)
        row[control], row[f"{control}_stderr"] = average(found) if found else (None, None)
    return row
