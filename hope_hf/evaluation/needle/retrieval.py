"""The suites `needle` and `passkey`: every task by length and depth, a table and a picture of each."""

import math
from functools import partial
from itertools import chain, product
from operator import itemgetter
from pathlib import Path

import torch

from hope_hf import frozen_memories

from ..display import Panel, heat_maps, progress
from ..flags import MODEL, TEXT, Arguments, chosen_tasks, parse_depths, parse_lengths, suite
from ..result import Row, SuiteResult, means, summary_row
from ..streams import batches_of_one_length, carried_scores
from ..subject import Subject, require_finite
from .samples import HAYSTACKS, Sample, make_samples
from .tasks import PASS_KEY_DIGITS, RULER, TASKS, NeedleTask

DEFAULT_LENGTHS = "1k,2k,4k"
PASS_KEY_LENGTHS = "256,512,1k"
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
    lengths = parse_lengths(lengths)
    depths = parse_depths(args.depths)
    subject.require_positions(lengths[-1])
    haystacks = {}
    for task in tasks:
        if task.haystack not in haystacks:
            haystacks[task.haystack] = HAYSTACKS[task.haystack](subject, lengths[-1], args)
    seeds = range(args.seed, args.seed + args.texts_per_length)

    def samples(task: NeedleTask, length: int, depth: float) -> list[Sample]:
        return make_samples(subject, task, haystacks[task.haystack], length, depth, seeds)

    vocab_size = subject.model.config.vocab_size
    # Lengths that are too short or too long are refused before anything is measured.
    for task in tasks:
        samples(task, lengths[0], 0.0)
    descriptions = [describe(task, samples(task, lengths[-1], 0.0), vocab_size) for task in tasks]
    tables = {"Tasks, and the scores of chance": descriptions}
    pictures = {}
    scores = []
    with progress(None, suite, len(tasks) * len(lengths) * len(depths)) as bar:
        for task, description in zip(tasks, descriptions, strict=True):
            rows = []
            for length, depth in product(lengths, depths):
                row = measure(subject, task, samples(task, length, depth), args.rows, new_tokens)
                require_finite(torch.tensor(row["loss"]), f"{suite}: the model's losses")
                rows.append({"length": length, "depth": depth, **row})
                bar.update()
            tables[task.title] = rows
            pictures[f"needle_{task.name}.png"] = partial(draw, task.name, rows)
            chance = description["chance"]
            for name, guessed in (("generated", task.chance_generated(chance)), ("exact", chance)):
                mean = sum(map(itemgetter(name), rows)) / len(rows)
                scores.append(summary_row(f"{task.name}, {name}, mean of all", mean, None, guessed))
    return SuiteResult(tables, pictures, summary=scores)


def describe(task: NeedleTask, samples: list, vocab_size: int) -> Row:
    """A row that describes a task and gives the scores of a uniform guess.

    chance: the expected `exact` of uniformly drawn tokens; chance_loss: nats per token.
    """
    chances = []
    for span in chain.from_iterable(sample.spans for sample in samples):
        tokens = span.stop - span.start
        chances.append(vocab_size ** -float(tokens))
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
    lengths = sorted(set(map(itemgetter("length"), rows)))
    depths = sorted(set(map(itemgetter("depth"), rows)))
    # A row is measured for every length, and in it for every depth.
    shape = len(lengths), len(depths)
    generated = torch.tensor(list(map(itemgetter("generated"), rows)), dtype=torch.float64).view(shape)
    exact = torch.tensor(list(map(itemgetter("exact"), rows)), dtype=torch.float64).view(shape)
    panels = [
        Panel("generated, share of the values", generated.T.tolist()),
        Panel("teacher-forced, share of the values", exact.T.tolist()),
    ]
    if "frozen" in rows[0]:
        saved = torch.tensor([row["frozen"] - row["loss"] for row in rows], dtype=torch.float64).view(shape)
        largest = max(0.01, float(saved.abs().max()))
        title = "loss saved by the memories, nats per token"
        panels.append(Panel(title, saved.T.tolist(), (-largest, largest), "RdBu"))
    depth_names = list(map("{:g}".format, depths))
    length_names = list(map("{:,}".format, lengths))
    heat_maps(path, panels, depth_names, length_names, ("length, tokens", "depth of the needle (0: first)"), name)


def measure(subject: Subject, task: NeedleTask, samples: list[Sample], batch_size: int, new_tokens: int) -> Row:
    """Means over samples, and their standard errors.

    generated: the task's score of `new_tokens` greedy tokens. exact: the share of the expected strings whose every
    token is the likeliest, given all tokens before it. loss: nats per token of these strings. With memories also
    frozen_exact and frozen: the same two with nothing written into the memories.
    """
    columns = {"generated": [], "exact": [], "loss": []}
    if subject.has_memory:
        columns |= {"frozen_exact": [], "frozen": []}
    for batch in batches_of_one_length(samples, lambda sample: len(sample.prompt), batch_size):
        prompts = torch.tensor([sample.prompt for sample in batch])
        answers = subject.continued(prompts, new_tokens)
        for answer, sample in zip(answers, batch, strict=True):
            columns["generated"].append(task.score(answer, sample.values))
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
    exact = []
    losses = []
    for index, sample in enumerate(samples):
        hits = []
        losses_of_values = []
        for span in sample.spans:
            start = len(sample.prompt) + span.start
            stop = len(sample.prompt) + span.stop
            # a token's scores are one place before it
            of_value = scores.part(index, start - 1, stop - 1)
            hits.append(torch.equal(of_value.guesses, texts[index, start:stop]))
            losses_of_values.append(of_value.losses)
        exact.append(sum(hits) / len(hits))
        losses.append(float(torch.cat(losses_of_values).mean()))
    return exact, losses
