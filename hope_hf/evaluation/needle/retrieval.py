"""The suites `needle` and `passkey`: every task by length and depth, a table and a picture of each."""

import math
from functools import partial
from pathlib import Path

import torch

from hope_hf import frozen_memories

from ..display import Panel, by_depth, heat_maps, progress
from ..flags import MODEL, TEXT, Arguments, chosen_tasks, parse_depths, parse_lengths, suite
from ..result import Row, SuiteResult, means, summary_row
from ..streams import carried_scores
from ..subject import Subject, require_finite
from .samples import HAYSTACKS, Sample, make_samples
from .tasks import PASS_KEY_DIGITS, RULER, TASKS, NeedleTask

DEFAULT_LENGTHS, PASS_KEY_LENGTHS = "1k,2k,4k", "256,512,1k"
# The number of RULER.
NEW_TOKENS = 128


@suite(
    *MODEL, *TEXT, "tasks", "lengths", "depths", "samples_per_length", "limit", "batch_size", "max_new_tokens",
    "seed", tasks=TASKS,
)  # fmt: skip
def needle(args: Arguments, subject: Subject) -> SuiteResult:
    """Retrieval after RULER: a row per task, length and depth, and the scores of chance.

    The haystack `text` is read from the text flags. Raises ValueError for lengths that the model's positions, the
    needles or the text do not allow.
    """
    tasks = chosen_tasks(args, "needle", TASKS if args.tasks else RULER)
    new_tokens = args.max_new_tokens or NEW_TOKENS
    return _retrieve("needle", args, subject, tasks, args.lengths or DEFAULT_LENGTHS, new_tokens)


@suite(*MODEL, "lengths", "depths", "samples_per_length", "limit", "batch_size", "seed")
def passkey(args: Arguments, subject: Subject) -> SuiteResult:
    """The needle task `passkey` alone, in shorter texts."""
    # A digit is at least one token, and a space may be one.
    return _retrieve("passkey", args, subject, ["passkey"], args.lengths or PASS_KEY_LENGTHS, PASS_KEY_DIGITS + 1)


def _retrieve(
    suite: str, args: Arguments, subject: Subject, names: list[str], lengths: str, new_tokens: int
) -> SuiteResult:
    tasks = [TASKS[name] for name in names]
    lengths, depths = parse_lengths(lengths), parse_depths(args.depths)
    subject.require_positions(lengths[-1])
    haystacks = {kind: HAYSTACKS[kind](subject, lengths[-1], args) for kind in {task.haystack for task in tasks}}
    seeds = range(args.seed, args.seed + args.texts_per_length)

    def samples(task: NeedleTask, length: int, depth: float):
        return make_samples(subject, task, haystacks[task.haystack], length, depth, seeds)

    # Lengths that are too short or too long are refused before anything is measured.
    for length in (lengths[0], lengths[-1]):
        drawn = [samples(task, length, 0.0) for task in tasks]
    size = subject.model.config.vocab_size
    chances = [describe(task, found, size) for task, found in zip(tasks, drawn, strict=True)]
    tables, pictures, scores = {"Tasks, and the scores of chance": chances}, {}, []
    with progress(None, suite, len(tasks) * len(lengths) * len(depths)) as bar:
        for task, chance in zip(tasks, chances, strict=True):
            rows = []
            for length in lengths:
                for depth in depths:
                    row = measure(subject, task, samples(task, length, depth), args.rows, new_tokens)
                    require_finite(torch.tensor(row["loss"]), f"{suite}: the model's losses")
                    rows.append({"length": length, "depth": depth, **row})
                    bar.update()
            tables[task.title] = rows
            pictures[f"needle_{task.name}.png"] = partial(draw, task.name, rows)
            guessed = {"generated": task.chance_generated(chance["chance"]), "exact": chance["chance"]}
            for name, score in guessed.items():
                mean = sum(row[name] for row in rows) / len(rows)
                scores.append(summary_row(f"{task.name}, {name}, mean of all", mean, None, score))
    return SuiteResult(tables, pictures, summary=scores)


def describe(task: NeedleTask, samples: list, vocab_size: int) -> Row:
    """A row that describes a task and gives the scores of a uniform guess.

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


def measure(subject: Subject, task: NeedleTask, samples: list[Sample], batch_size: int, new_tokens: int) -> Row:
    """Means over samples, and their standard errors.

    generated: the task's score of `new_tokens` greedy tokens. exact: the share of the expected strings whose every
    token is the likeliest, given all tokens before it. loss: nats per token of these strings. With memories also
    frozen_exact and frozen: the same two with nothing written into the memories.
    """
    columns = {name: [] for name in ("generated", "exact", "loss")}
    if subject.has_memory:
        columns |= {"frozen_exact": [], "frozen": []}
    # Prompts of one length are read together, so that nothing is padded.
    for size in sorted({len(sample.prompt) for sample in samples}):
        alike = [sample for sample in samples if len(sample.prompt) == size]
        for start in range(0, len(alike), batch_size):
            batch = alike[start : start + batch_size]
            said = subject.continued(torch.tensor([sample.prompt for sample in batch]), new_tokens)
            columns["generated"] += [task.score(text, sample.values) for text, sample in zip(said, batch, strict=True)]
            exact, losses = teacher_forced(subject, batch)
            columns["exact"] += exact
            columns["loss"] += losses
            if subject.has_memory:
                with frozen_memories(subject.model):
                    exact, losses = teacher_forced(subject, batch)
                columns["frozen_exact"] += exact
                columns["frozen"] += losses
    return means(columns)


def teacher_forced(subject: Subject, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """Per sample: the share of values whose tokens are all the likeliest, and the mean loss of their tokens."""
    rows = [torch.tensor(sample.prompt + sample.answer) for sample in samples]
    # Padding on the right cannot change a row.
    texts = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    scores = carried_scores(subject.model, texts)
    exact, losses = [], []
    for index, sample in enumerate(samples):
        first = len(sample.prompt) - 1
        spans = [slice(first + span.start, first + span.stop) for span in sample.spans]
        right = [
            torch.equal(scores.guesses[index, span], texts[index, span.start + 1 : span.stop + 1]) for span in spans
        ]
        exact.append(sum(right) / len(right))
        losses.append(float(torch.cat([scores.losses[index, span] for span in spans]).mean()))
    return exact, losses
