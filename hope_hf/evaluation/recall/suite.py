"""The suite `recall`: facts that a text states, asked for after it was read in several ways."""

import copy
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from hope_hf import HopeCache, frozen_memories, join_passages
from hope_hf.common.models import is_hope
from hope_hf.common.progress import progress
from hope_hf.common.weights import with_layers_of
from hope_hf.data import plain_ids

from ..display import curves
from ..flags import Arguments, chosen_tasks, parse_lengths
from ..held_out import held_out_documents
from ..result import UNKNOWN, CannotRun, Number, Row, SuiteResult, means, summary_row
from ..subject import Subject
from .answers import FORMS, Answers, answers_of
from .facts import Fact, TextWithFacts, text_with_facts
from .kinds import FACTS_OF_A_KIND
from .readings import FROZEN, FULL, LEARN, READ, READINGS, RECALL

DEFAULT_LENGTHS = "4k"
# Tokens of a call that reads.
_PIECE = 512


@dataclass(frozen=True)
class Reading:
    """A way of reading a text."""

    name: str
    model: PreTrainedModel
    # the readings whose questions are asked after it: RECALL reads as READ does
    asked: list[str]


@dataclass
class Tally:
    """What was measured for one length, reading and form of asking: a value for each fact."""

    right: list[float]
    greedy: list[float]
    ties: list[float]

    def add(self, answers: Answers) -> None:
        """Add the facts of a kind."""
        self.right += answers.right().double().tolist()
        self.greedy += answers.greedy.double().tolist()
        self.ties += answers.ties().double().tolist()

    def row(self) -> Row:
        """Means, and their standard errors."""
        return means({"greedy": self.greedy, "right": self.right, "tie": self.ties})


@dataclass
class Search:
    """What searches found: a value for each fact."""

    found: list[float]
    tokens: list[int]
    milliseconds: list[float]

    def row(self) -> Row:
        """Means; the time is a median, since the first search builds the index."""
        row = means({"found": self.found})
        row["tokens_read_again"] = fmean(self.tokens)
        row["milliseconds"] = median(self.milliseconds)
        return row


class Measurement:
    """What was measured so far."""

    def __init__(self):
        # a loss for each text, by length and reading
        self.losses = defaultdict(list)
        # by length, reading and form of asking
        self.tallies = defaultdict(lambda: Tally([], [], []))
        # by length and form of asking
        self.searches = defaultdict(lambda: Search([], [], []))


def recall(args: Arguments, subject: Subject) -> SuiteResult:
    """Made-up facts between the paragraphs of a text, asked for at its end; `--tasks` names the ways of reading.

    Raises ValueError for lengths that the facts, the text or the model's positions do not allow.
    """
    config = subject.model.config
    if not is_hope(config):
        kind = config.model_type
        raise CannotRun(f"--suite recall measures what a HOPE has read, and the model is a {kind}: leave it out.")
    lengths = parse_lengths(args.lengths or DEFAULT_LENGTHS)
    subject.require_positions(lengths[-1])
    documents = held_out_documents(args)
    novel = "\n\n".join(documents.texts)
    seeds = range(args.seed, args.seed + args.texts_per_length)
    texts = []
    # lengths that cannot be are refused before anything is measured
    for length, seed in product(lengths, seeds):
        text = _text(subject, novel, length, seed)
        texts.append((length, text))
    chosen = chosen_tasks(args, "recall", READINGS)
    readings = _readings(subject, chosen)
    measurement = Measurement()
    with progress(None, "recall", len(texts) * len(readings)) as bar:
        for (length, text), reading in product(texts, readings):
            if _fits(reading, length):
                _measure(measurement, subject, reading, length, text)
            bar.update()
    return _result(measurement, lengths)


def _text(subject: Subject, text: str, length: int, seed: int) -> TextWithFacts:
    try:
        return text_with_facts(subject.tokenizer, text, length, seed)
    except ValueError as error:
        raise ValueError(f"--lengths asks for {length:,} tokens: {error}.") from None


def _readings(subject: Subject, chosen: list[str]) -> list[Reading]:
    """The chosen ways in which the subject can read.

    Raises CannotRun if it can read in none of them.
    """
    model = subject.model
    can_read = {
        FROZEN: subject.has_memory,
        LEARN: subject.learns,
        FULL: model.config.has_window,
    }
    readings = []
    asked_after_reading = [name for name in chosen if name in (READ, RECALL)]
    if asked_after_reading:
        readings.append(Reading(READ, model, asked_after_reading))
    for name, is_possible in can_read.items():
        if is_possible and name in chosen:
            reader = _with_full_attention(model) if name == FULL else model
            readings.append(Reading(name, reader, [name]))
    if not readings:
        tasks = ",".join(chosen)
        raise CannotRun(f"--tasks {tasks}: the model cannot read so: choose {READ} or {RECALL}.")
    return readings


def _with_full_attention(model: PreTrainedModel) -> PreTrainedModel:
    """The model without windows; it shares the weights."""
    config = copy.deepcopy(model.config)
    for index, kind in enumerate(config.layer_types):
        if kind in ("window_attention", "retaining_attention"):
            config.layer_types[index] = "full_attention"
    config.sliding_window = config.retained_tokens = None
    return with_layers_of(config, model)


def _fits(reading: Reading, length: int) -> bool:
    """Whether the reading's model has positions for a text and its questions."""
    bound = reading.model.config.longest_text
    return bound is None or length + _PIECE <= bound


@torch.no_grad()
def _measure(measurement: Measurement, subject: Subject, reading: Reading, length: int, text: TextWithFacts) -> None:
    """Read a text, and ask for its facts."""
    model = reading.model
    cache = HopeCache(model.config)
    frozen = frozen_memories(model) if reading.name == FROZEN else nullcontext()
    with frozen:
        loss = _read(reading, cache, text.ids)
        losses = measurement.losses[length, reading.name]
        losses.append(loss)
        kinds = text.facts_by_kind()
        for asked, form, facts in product(reading.asked, FORMS, kinds):
            answers = [fact.answer for fact in facts]
            prompts = list(map(FORMS[form], facts))
            if asked == RECALL:
                search = measurement.searches[length, form]
                for index, fact in enumerate(facts):
                    question = getattr(fact, form)
                    passages = _passages(subject, cache, search, question, fact)
                    prompts[index] = passages + prompts[index]
            measured = answers_of(model, subject.tokenizer, cache, prompts, answers)
            tally = measurement.tallies[length, asked, form]
            tally.add(measured)


def _read(reading: Reading, cache: HopeCache, ids: list[int]) -> float:
    """Mean loss of the tokens of a text in nats, while the cache reads it."""
    model = reading.model
    options = {"learn": True} if reading.name == LEARN else {}
    losses = []
    before: Tensor | None = None
    tokens = torch.tensor(ids, device=model.device)
    for targets in tokens.split(_PIECE):
        output = model(targets[None], cache=cache, **options)
        logits = output.logits[0].float()
        if before is not None:
            first = cross_entropy(before, targets[:1], reduction="none")
            losses.append(first)
        later = cross_entropy(logits[:-1], targets[1:], reduction="none")
        losses.append(later)
        before = logits[-1:].clone()
    mean = torch.cat(losses).double().mean()
    return float(mean)


def _passages(subject: Subject, cache: HopeCache, search: Search, question: str, fact: Fact) -> str:
    """The passages that a question for a fact finds, as they are read before it."""
    start = time.perf_counter()
    passages = cache.recall(question, subject.tokenizer)
    seconds = time.perf_counter() - start
    search.milliseconds.append(1000 * seconds)
    context = join_passages(passages).rstrip()
    if passages:
        # as every prompt begins
        context = f"\n\n{context}"
    context_ids = plain_ids(subject.tokenizer, context)
    search.tokens.append(len(context_ids))
    is_found = any(statement in context for statement in fact.statements)
    search.found.append(float(is_found))
    return context


def _result(measurement: Measurement, lengths: list[int]) -> SuiteResult:
    answers = _rows(measurement.tallies, ("length", "reading", "form"), Tally.row)
    tables = {
        f"Answers (chance of `right`: {1 / FACTS_OF_A_KIND:g})": answers,
        "Passages read again": _rows(measurement.searches, ("length", "form"), Search.row),
        "Loss of the text, nats per token": _rows(measurement.losses, ("length", "reading"), _loss_row),
    }
    clozes = [row for row in answers if row["form"] == "cloze"]
    summary = []
    for row in clozes:
        if row["length"] == lengths[-1]:
            title = f"{row['reading']}: answers that greedy decoding spells, {lengths[-1]:,} tokens"
            number = summary_row(title, row["greedy"], row["greedy_stderr"], 0.0)
            summary.append(number)
    pictures = {"recall.png": partial(_draw, clozes, lengths)}
    return SuiteResult(tables, pictures, summary=summary)


def _rows(table: dict[tuple, object], names: tuple[str, ...], summarised: Callable[..., Row]) -> list[Row]:
    """A row for every key: its parts by these names, and what was measured for it."""
    rows = []
    for key, measured in table.items():
        labels = dict(zip(names, key, strict=True))
        rows.append(labels | summarised(measured))
    return rows


def _loss_row(losses: list[float]) -> Row:
    return means({"loss": losses})


def _draw(clozes: list[Row], lengths: list[int], path: Path) -> None:
    """Answers that greedy decoding spells and ties over the length, a curve for each reading."""
    columns = {
        "clozes spelled, share": "greedy",
        "tie of answer and subject, nats": "tie",
    }
    panels = {}
    for title, column in columns.items():
        series = defaultdict(lambda: [UNKNOWN] * len(lengths))
        for row in clozes:
            place = lengths.index(row["length"])
            value = Number(row[column], row[f"{column}_stderr"])
            series[row["reading"]][place] = value
        panels[title] = series
    curves(path, lengths, panels, "length of the text, tokens")
