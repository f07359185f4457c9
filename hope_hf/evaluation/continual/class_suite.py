"""The suite of class-incremental learning: two data sets, each in the context and by fine-tuning."""

import math
from functools import partial
from pathlib import Path

from hope_hf.cli.models import is_hope

from ..arguments import MODEL, Arguments, reads
from ..display import Panel, heat_maps
from ..result import SuiteResult, summary_row
from ..subject import Subject
from ..task_names import own_tasks
from .classes import open_groups
from .fine_tuning import BATCH_SIZE, LEARNING_RATE, STEPS, learn_by_fine_tuning
from .in_context import SHOTS, learn_in_context
from .matrix import Matrix, rows, summary
from .task_list import TASKS

ROWS = 64


@reads(
    *MODEL, "tasks", "num_fewshot", "samples_per_class", "data_dir", "max_train_steps", "learning_rate", "limit",
    "batch_size", "seed",
)  # fmt: skip
def class_incremental(args: Arguments, subject: Subject) -> SuiteResult:
    """Accuracy among the classes met so far, after each group of classes: a matrix for each of `--tasks`.

    Labels are chosen by their probability after the sentence. Raises ValueError without the data sets' files, and for
    a model that cannot go on from a cache.
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
    for name in own_tasks(args, "class_incremental", TASKS):
        data_set, way = TASKS[name]
        groups = open_groups(data_set, Path(args.data_dir), args.seed)
        groups = groups.shuffled(args.seed, args.samples_per_class, args.limit)
        read_at_once = args.given_rows or ROWS
        if way == "in-context":
            shots = SHOTS if args.num_fewshot is None else args.num_fewshot
            matrix = learn_in_context(subject, groups, shots, read_at_once, args.seed, name)
        else:
            steps, size = args.max_train_steps or STEPS, args.given_rows or BATCH_SIZE
            rate = args.learning_rate or LEARNING_RATE
            matrix = learn_by_fine_tuning(subject, groups, steps, size, rate, read_at_once, args.seed, name)
        tables[name] = rows(matrix)
        pictures[f"class_incremental_{name}.png"] = partial(draw, name, matrix)
        summaries.append(summary(name, matrix))
    found = [
        summary_row(f"{row['task']}, accuracy", row["average_accuracy"], row["average_accuracy_stderr"], row["chance"])
        for row in summaries
    ]
    return SuiteResult({"Class-incremental learning": summaries, **tables}, pictures, summary=found)


def draw(name: str, matrix: Matrix, path: Path):
    """R[i][j] and the controls below it, with the mean of each row at its end."""
    table = rows(matrix)
    columns = [*matrix.groups, "average"]
    values = [[math.nan if row[column] is None else row[column] for column in columns] for row in table]
    panel = Panel("accuracy among the classes met so far", values)
    heat_maps(path, [panel], [row["after"] for row in table], columns, ("group tested", "after group"), name)
