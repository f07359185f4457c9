"""Class-incremental learning: two data sets, each learned in the context, by levels, and by fine-tuning."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hope_hf.common.models import is_hope

from ..display import Panel, heat_maps
from ..flags import Arguments, chosen_tasks
from ..result import UNKNOWN, Number, Row, SuiteResult, mean_and_stderr, put, summary_row
from ..subject import Subject
from .classes import TASKS, Hits, open_groups
from .fine_tuning import BATCH_SIZE, LEARNING_RATE, STEPS, learn_by_fine_tuning
from .in_context import SHOTS, learn_in_context

ROWS = 64


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
    tables = {}
    pictures = {}
    summaries = []
    for name in chosen_tasks(args, "class_incremental", TASKS):
        if TASKS[name][1] == "levels" and not subject.learns:
            if args.tasks is None:
                continue
            raise ValueError(
                f"--tasks {name} needs a model whose config.json has level_learning, such as one that "
                "hope-hf convert writes: leave it out."
            )
        matrix = _learn(args, subject, name)
        tables[name] = rows(matrix)
        pictures[f"class_incremental_{name}.png"] = partial(draw, name, matrix)
        summaries.append(summary(name, matrix))
    scores = []
    for row in summaries:
        accuracy = row["average_accuracy"]
        stderr = row["average_accuracy_stderr"]
        scores.append(summary_row(f"{row['task']}, accuracy", accuracy, stderr, row["chance"]))
    return SuiteResult({"Class-incremental learning": summaries, **tables}, pictures, summary=scores)


def _learn(args: Arguments, subject: Subject, name: str) -> "Matrix":
    """Learn the classes of a task, group after group."""
    data_set, way = TASKS[name]
    groups = open_groups(data_set, Path(args.data_dir), args.seed)
    groups = groups.shuffled(args.seed, args.samples_per_class, args.limit)
    read_at_once = args.given_rows or ROWS
    if way == "fine-tuning":
        hits, controls = learn_by_fine_tuning(
            subject,
            groups,
            steps=args.max_train_steps or STEPS,
            batch_size=args.given_rows or BATCH_SIZE,
            rate=args.learning_rate or LEARNING_RATE,
            rows=read_at_once,
            seed=args.seed,
            name=name,
        )
    else:
        shots = SHOTS if args.num_fewshot is None else args.num_fewshot
        hits, controls = learn_in_context(
            subject, groups, shots, rows=read_at_once, seed=args.seed, name=name, learn=way == "levels"
        )
    return Matrix(groups.names, list(map(len, groups.classes)), hits, controls)


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
    columns = [*matrix.groups, "average"]
    names = []
    values = []
    for row in rows(matrix):
        names.append(row["after"])
        shown = []
        for column in columns:
            value = row[column]
            shown.append(math.nan if value is None else value)
        values.append(shown)
    panel = Panel("accuracy among the classes met so far", values)
    heat_maps(path, [panel], names, columns, ("group tested", "after group"), name)


def average(hits: Hits) -> Number:
    """Mean of the groups' accuracies, and its standard error."""
    accuracies, errors = zip(*map(mean_and_stderr, hits), strict=True)
    stderr = None
    if None not in errors:
        stderr = math.hypot(*errors) / len(errors)
    return Number(sum(accuracies) / len(accuracies), stderr)


def forgetting(matrix: Matrix) -> float:
    """Mean over all groups but the last: the best accuracy before the end minus the accuracy at the end."""
    last = len(matrix.groups) - 1
    losses = []
    for group in range(last):
        best = max(matrix.accuracy(after, group) for after in range(group, last))
        losses.append(best - matrix.accuracy(last, group))
    return sum(losses) / last


def backward_transfer(matrix: Matrix) -> float:
    """Mean over all groups but the last: the accuracy at the end minus the accuracy right after the group."""
    last = len(matrix.groups) - 1
    gains = 0.0
    for group in range(last):
        gains += matrix.accuracy(last, group) - matrix.accuracy(group, group)
    return gains / last


def rows(matrix: Matrix) -> list[Row]:
    """A row after every group and one for each control: chance, the accuracy of each group, and their mean."""
    table = []
    classes = 0
    for name, hits, more_classes in zip(matrix.groups, matrix.hits, matrix.classes, strict=True):
        classes += more_classes
        table.append(_row(matrix, name, hits, classes))
    for name, hits in matrix.controls.items():
        table.append(_row(matrix, name, hits, classes))
    return table


def _row(matrix: Matrix, name: str, hits: Hits, classes: int) -> Row:
    count = sum(map(len, hits))
    row = {"after": name, "n": count, "chance": 1 / classes, **dict.fromkeys(matrix.groups)}
    for group, hits_of_group in zip(matrix.groups, hits, strict=False):
        row[group], _ = mean_and_stderr(hits_of_group)
    put(row, "average", average(hits))
    return row


def summary(name: str, matrix: Matrix) -> Row:
    """One row for a task."""
    hits = matrix.hits[-1]
    row = {"task": name, "n": sum(map(len, hits)), "chance": 1 / sum(matrix.classes)}
    put(row, "average_accuracy", average(hits))
    row["forgetting"] = forgetting(matrix)
    row["backward_transfer"] = backward_transfer(matrix)
    for control in ("joint", "frozen"):
        hits = matrix.controls.get(control)
        put(row, control, average(hits) if hits else UNKNOWN)
    return row
