"""The suite: every task by length and depth, a table and a picture of each."""

import math
from functools import partial
from pathlib import Path

from ..arguments import MODEL, TEXT, Arguments, reads
from ..display import Panel, by_depth, heat_maps, progress
from ..parsing import parse_depths, parse_lengths
from ..result import Row, SuiteResult, summary_row
from ..subject import Subject
from ..task_names import own_tasks
from . import haystack
from .samples import make_samples
from .scoring import NEW_TOKENS, measure
from .tasks import TASKS, NeedleTask

DEFAULT_LENGTHS = "1k,2k,4k"


@reads(
    *MODEL, *TEXT, "tasks", "lengths", "depths", "samples_per_length", "limit", "batch_size", "max_new_tokens",
    "seed",
)  # fmt: skip
def needle(args: Arguments, subject: Subject) -> SuiteResult:
    """Retrieval after RULER: a row per task, length and depth, and the scores of chance.

    The haystack of `text` is what the text flags name. Raises ValueError for lengths that the model's positions, the
    needles or the text do not allow.
    """
    tasks = [TASKS[name] for name in own_tasks(args, "needle", TASKS)]
    lengths, depths = parse_lengths(args.lengths or DEFAULT_LENGTHS), parse_depths(args.depths)
    subject.require_positions(lengths[-1])
    makers = {"noise": haystack.noise, "text": partial(haystack.text, args)}
    haystacks = {kind: makers[kind](subject, lengths[-1]) for kind in {task.haystack for task in tasks}}
    new_tokens = args.max_new_tokens or NEW_TOKENS
    seeds = range(args.seed, args.seed + args.texts_per_length)

    def samples(task: NeedleTask, length: int, depth: float):
        return make_samples(subject, task, haystacks[task.haystack], length, depth, seeds)

    # Lengths that do not serve are refused before anything is measured.
    for length in (lengths[0], lengths[-1]):
        drawn = {task.name: samples(task, length, 0.0) for task in tasks}
    size = subject.model.config.vocab_size
    tables = {"Tasks, and the scores of chance": [describe(task, drawn[task.name], size) for task in tasks]}
    (chances,) = tables.values()
    pictures, found = {}, []
    with progress(None, "needle", len(tasks) * len(lengths) * len(depths)) as bar:
        for task in tasks:
            rows = []
            for length in lengths:
                for depth in depths:
                    row = measure(subject, samples(task, length, depth), args.rows, new_tokens)
                    rows.append({"length": length, "depth": depth, **row})
                    bar.update()
            tables[task.name] = rows
            pictures[f"needle_{task.name}.png"] = partial(draw, task.name, rows)
            chance = next(row["chance"] for row in chances if row["task"] == task.name)
            for name in ("generated", "exact"):
                mean = sum(row[name] for row in rows) / len(rows)
                found.append(summary_row(f"{task.name}, {name}, mean of all", mean, None, chance))
    return SuiteResult(tables, pictures, summary=found)


def describe(task: NeedleTask, samples: list, vocab_size: int) -> Row:
    """What is hidden and asked for, and what one scores who says every token of the vocabulary alike.

    chance: the expected `exact` of uniformly drawn tokens; chance_loss: nats per token.
    """
    chances = [vocab_size ** -float(span.stop - span.start) for sample in samples for span in sample.spans]
    return {
        "task": task.name,
        "haystack": task.haystack,
        "value": task.kind,
        "keys": task.keys,
        "values_per_key": task.values,
        "keys_asked_for": task.queries,
        "chance": sum(chances) / len(chances),
        "chance_loss": math.log(vocab_size),
    }


def draw(name: str, rows: list[Row], path: Path):
    """Heat maps over length and depth: generated, teacher-forced, and the gain over frozen memories."""
    cells, names = by_depth(rows)

    def grid(value) -> list[list[float]]:
        return [[value(row) for row in line] for line in cells]

    panels = [
        Panel("generated, share of the values", grid(lambda row: row["generated"])),
        Panel("teacher-forced, share of the values", grid(lambda row: row["exact"])),
    ]
    if "frozen" in rows[0]:
        gains = grid(lambda row: row["frozen"] - row["loss"])
        largest = max(0.01, *(abs(gain) for row in gains for gain in row))
        panels.append(Panel("loss saved by the memories, nats per token", gains, (-largest, largest), "RdBu"))
    heat_maps(path, panels, *names, ("length, tokens", "depth of the needle (0: first)"), name)
