"""The suites `needle` and `passkey`: every task by length and depth, a table and a picture of each."""

import math
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hope_hf import frozen_memories
from hope_hf.common.progress import progress

from ..display import Panel, heat_maps
from ..flags import Arguments, chosen_tasks, parse_depths, parse_lengths
from ..result import Row, SuiteResult, means, summary_row
from ..streams import batches_of_one_length, carried_scores
from ..subject import Subject, require_finite
from .samples import HAYSTACKS, Sample, make_samples
from .tasks import PASS_KEY_DIGITS, RULER, TASKS, NeedleTask

DEFAULT_LENGTHS = "1k,2k,4k"
PASS_KEY_LENGTHS = "256,512,1k"
# The number of RULER.
NEW_TOKENS = 128


def needle(args: Arguments, subject: Subject) -> SuiteResult:
    """Retrieval after RULER: a row per task, length and depth, and the scores of chance.

    The haystack `text` is read from the text flags. Raises ValueError for lengths that the model's positions, the
    needles or the text do not allow.
    """
    names = chosen_tasks(args, "needle", TASKS if args.tasks else RULER)
    lengths = args.lengths or DEFAULT_LENGTHS
    return _retrieve("needle", args, subject, names, lengths, new_tokens=args.max_new_tokens or NEW_TOKENS)


def passkey(args: Arguments, subject: Subject) -> SuiteResult:
    """The needle task `passkey` alone, in shorter texts."""
    lengths = args.lengths or PASS_KEY_LENGTHS
    # A digit is at least one token, and a space may be one.
    return _retrieve("passkey", args, subject, ["passkey"], lengths, new_tokens=PASS_KEY_DIGITS + 1)


def _retrieve(
    suite: str, args: Arguments, subject: Subject, names: list[str], lengths: str, new_tokens: int
) -> SuiteResult:
    lengths = parse_lengths(lengths)
    depths = parse_depths(args.depths)
    subject.require_positions(lengths[-1])
    seeds = range(args.seed, args.seed + args.texts_per_length)
    haystacks = {}
    descriptions = {}
    for name in names:
        task = TASKS[name]
        if task.haystack not in haystacks:
            make_haystack = HAYSTACKS[task.haystack]
            haystacks[task.haystack] = make_haystack(subject, lengths[-1], args)
        haystack = haystacks[task.haystack]
        # Lengths that are too short or too long are refused before anything is measured.
        for length in (lengths[0], lengths[-1]):
            samples = make_samples(subject, task, haystack, length, 0.0, seeds)
        descriptions[name] = describe(task, samples, subject.model.config.vocab_size)
    tables = {"Tasks, and the scores of chance": list(descriptions.values())}
    pictures = {}
    summary = []
    with progress(None, suite, len(names) * len(lengths) * len(depths)) as bar:
        for name in names:
            task = TASKS[name]
            haystack = haystacks[task.haystack]
            rows = []
            for length, depth in product(lengths, depths):
                samples = make_samples(subject, task, haystack, length, depth, seeds)
                row = measure(subject, task, samples, args.rows, new_tokens)
                loss = torch.tensor(row["loss"])
                require_finite(loss, f"{suite}: the model's losses")
                rows.append({"length": length, "depth": depth, **row})
                bar.update()
            tables[task.title] = rows
            pictures[f"needle_{name}.png"] = partial(draw, name, rows)
            summary += _summary(task, rows, descriptions[name]["chance"])
    return SuiteResult(tables, pictures, summary=summary)


def _summary(task: NeedleTask, rows: list[Row], chance: float) -> list[Row]:
    """The means over all lengths and depths; `chance`: that of uniformly drawn tokens."""
    chances = {"generated": task.chance_generated(chance), "exact": chance}
    summary = []
    for score, chance_of_score in chances.items():
        mean = sum(row[score] for row in rows) / len(rows)
        name = f"{task.name}, {score}, mean of all"
        summary.append(summary_row(name, mean, None, chance_of_score))
    return summary


def describe(task: NeedleTask, samples: list[Sample], vocab_size: int) -> Row:
    """A row that describes a task and gives the scores of a uniform guess.

    chance: the expected `exact` of uniformly drawn tokens; chance_loss: nats per token.
    """
    chances = []
    for sample in samples:
        for span in sample.spans:
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
    lengths = sorted({row["length"] for row in rows})
    depths = sorted({row["depth"] for row in rows})
    by_depth = partial(_by_depth, rows, num_depths=len(depths))
    panels = [
        Panel("generated, share of the values", by_depth("generated").tolist()),
        Panel("teacher-forced, share of the values", by_depth("exact").tolist()),
    ]
    if "frozen" in rows[0]:
        saved = by_depth("frozen") - by_depth("loss")
        largest = max(0.01, float(saved.abs().max()))
        title = "loss saved by the memories, nats per token"
        panels.append(Panel(title, saved.tolist(), limits=(-largest, largest), colours="RdBu"))
    depth_names = list(map("{:g}".format, depths))
    length_names = list(map("{:,}".format, lengths))
    labels = "length, tokens", "depth of the needle (0: first)"
    heat_maps(path, panels, depth_names, length_names, labels, name)


def _by_depth(rows: list[Row], column: str, num_depths: int) -> Tensor:
    """A column as [depths, lengths]: a row is measured for every length, and in it for every depth."""
    numbers = [row[column] for row in rows]
    values = torch.tensor(numbers, dtype=torch.float64)
    return values.view(-1, num_depths).T


def measure(subject: Subject, task: NeedleTask, samples: list[Sample], batch_size: int, new_tokens: int) -> Row:
    """Means over samples, and their standard errors.

    generated: the task's score of `new_tokens` greedy tokens. exact: the share of the expected strings whose every
    token is the likeliest, given all tokens before it. loss: nats per token of these strings. With memories also
    frozen_exact and frozen: the same two with nothing written into the memories.
    """
    columns = {"generated": [], "exact": [], "loss": []}
    if subject.has_memory:
        columns |= {"frozen_exact": [], "frozen": []}
    for batch in batches_of_one_length(samples, Sample.prompt_length, batch_size):
        prompts = torch.tensor([sample.prompt for sample in batch])
        answers = subject.continued(prompts, new_tokens)
        for answer, sample in zip(answers, batch, strict=True):
            score = task.score(answer, sample.values)
            columns["generated"].append(score)
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
    texts = pad_sequence(rows, batch_first=True)
    scores = carried_scores(subject.model, texts)
    exact = []
    losses = []
    for index, sample in enumerate(samples):
        hits = []
        losses_of_values = []
        # A token's scores are one place before it.
        start = sample.prompt_length() - 1
        for span in sample.spans:
            scores_of_value = scores.part(index, start + span.start, start + span.stop)
            value = torch.tensor(sample.answer[span])
            hits.append(torch.equal(scores_of_value.guesses, value))
            losses_of_values.append(scores_of_value.losses)
        exact.append(sum(hits) / len(hits))
        loss = torch.cat(losses_of_values).mean()
        losses.append(float(loss))
    return exact, losses
