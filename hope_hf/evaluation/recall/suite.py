"""The suite `recall`: facts that a text states, asked for after it was read in several ways."""

import copy
import time
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from hope_hf import HopeCache, frozen_memories, join_passages
from hope_hf.common.models import is_hope
from hope_hf.data import plain_ids

from ..display import curves, progress
from ..flags import Arguments, chosen_tasks, parse_lengths
from ..held_out import held_out_documents
from ..result import CannotRun, Row, SuiteResult, mean_and_stderr, put, summary_row
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
        row: Row = {"n": len(self.right)}
        put(row, "greedy", mean_and_stderr(self.greedy))
        put(row, "right", mean_and_stderr(self.right))
        put(row, "tie", mean_and_stderr(self.ties))
        return row


@dataclass
class Search:
    """What searches found: a value for each fact."""

    found: list[float]
    tokens: list[float]
    milliseconds: list[float]

    def row(self) -> Row:
        """Means; the time is a median, since the first search builds the index."""
        row: Row = {"n": len(self.found)}
        put(row, "found", mean_and_stderr(self.found))
        row["tokens_read_again"] = sum(self.tokens) / len(self.tokens)
        row["milliseconds"] = median(self.milliseconds)
        return row


class Measurement:
    """Tables of the suite while they grow."""

    def __init__(self):
        self.losses: dict[tuple[int, str], list[float]] = defaultdict(list)
        self.tallies: dict[tuple[int, str, str], Tally] = defaultdict(lambda: Tally([], [], []))
        self.searches: dict[tuple[int, str], Search] = defaultdict(lambda: Search([], [], []))

    def answer_rows(self) -> list[Row]:
        """A row for every length, reading and form."""
        rows = []
        for (length, reading, form), tally in self.tallies.items():
            rows.append({"length": length, "reading": reading, "form": form, **tally.row()})
        return rows

    def search_rows(self) -> list[Row]:
        """A row for every length and form."""
        rows = []
        for (length, form), search in self.searches.items():
            rows.append({"length": length, "form": form, **search.row()})
        return rows

    def loss_rows(self) -> list[Row]:
        """A row for every length and reading."""
        rows = []
        for (length, reading), losses in self.losses.items():
            row: Row = {"length": length, "reading": reading, "n": len(losses)}
            put(row, "loss", mean_and_stderr(losses))
            rows.append(row)
        return rows


def recall(args: Arguments, subject: Subject) -> SuiteResult:
    """Made-up facts between the paragraphs of a text, asked for at its end; `--tasks` names the ways of reading.

    Raises ValueError for lengths that the facts, the text or the model's positions do not allow.
    """
    if not is_hope(subject.model.config):
        kind = subject.model.config.model_type
        raise CannotRun(f"--suite recall measures what a HOPE has read, and the model is a {kind}: leave it out.")
    lengths = parse_lengths(args.lengths or DEFAULT_LENGTHS)
    subject.require_positions(lengths[-1])
    documents = held_out_documents(args)
    novel = "\n\n".join(documents.texts)
    seeds = range(args.seed, args.seed + args.texts_per_length)
    # lengths that cannot be are refused before anything is measured
    texts = []
    for length, seed in product(lengths, seeds):
        texts.append((length, _text(subject, novel, length, seed)))
    measurement = Measurement()
    readings = _readings(subject, chosen_tasks(args, "recall", READINGS))
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
    plain = [name for name in chosen if name in (READ, RECALL)]
    readings = [Reading(READ, model, plain)] if plain else []
    if FROZEN in chosen and subject.has_memory:
        readings.append(Reading(FROZEN, model, [FROZEN]))
    if LEARN in chosen and subject.learns:
        readings.append(Reading(LEARN, model, [LEARN]))
    if FULL in chosen and "window_attention" in model.config.layer_types:
        readings.append(Reading(FULL, _with_full_attention(model), [FULL]))
    if not readings:
        raise CannotRun(f"--tasks {','.join(chosen)}: the model cannot read so: choose {READ} or {RECALL}.")
    return readings


def _with_full_attention(model: PreTrainedModel) -> PreTrainedModel:
    """The model without windows; it shares the weights."""
    config = copy.deepcopy(model.config)
    config.layer_types = ["full_attention" if kind == "window_attention" else kind for kind in config.layer_types]
    config.sliding_window = None
    return type(model).from_pretrained(None, config=config, state_dict=model.state_dict()).eval()


def _fits(reading: Reading, length: int) -> bool:
    """Whether the reading's model has positions for a text and its questions."""
    bound = reading.model.config.longest_text
    return bound is None or length + _PIECE <= bound


@torch.no_grad()
def _measure(measurement: Measurement, subject: Subject, reading: Reading, length: int, text: TextWithFacts) -> None:
    """Read a text, and ask for its facts."""
    cache = HopeCache(reading.model.config)
    frozen = frozen_memories(reading.model) if reading.name == FROZEN else nullcontext()
    with frozen:
        loss = _read(reading, cache, text.ids)
        measurement.losses[length, reading.name].append(loss)
        for asked, form, facts in product(reading.asked, FORMS, text.facts_by_kind()):
            prompts = []
            for fact in facts:
                prompt = FORMS[form](fact)
                if asked == RECALL:
                    search = measurement.searches[length, form]
                    prompt = _passages(subject, cache, search, fact, form) + prompt
                prompts.append(prompt)
            answers = [fact.answer for fact in facts]
            measured = answers_of(reading.model, subject.tokenizer, cache, prompts, answers)
            measurement.tallies[length, asked, form].add(measured)


def _read(reading: Reading, cache: HopeCache, ids: list[int]) -> float:
    """Mean loss of the tokens of a text in nats, while the cache reads it."""
    device = reading.model.device
    options = {"learn": True} if reading.name == LEARN else {}
    losses = []
    last: Tensor | None = None
    for piece in torch.tensor([ids]).split(_PIECE, dim=1):
        piece = piece.to(device)
        logits = reading.model(piece, cache=cache, **options).logits[0].float()
        if last is not None:
            losses.append(cross_entropy(last, piece[0, :1], reduction="none"))
        losses.append(cross_entropy(logits[:-1], piece[0, 1:], reduction="none"))
        last = logits[-1:].clone()
    return float(torch.cat(losses).double().mean())


def _passages(subject: Subject, cache: HopeCache, search: Search, fact: Fact, form: str) -> str:
    """The passages that a question finds, as they are read before it."""
    start = time.perf_counter()
    passages = cache.recall(getattr(fact, form), subject.tokenizer)
    search.milliseconds.append(1000 * (time.perf_counter() - start))
    # a prompt begins with an empty line
    context = f"\n\n{join_passages(passages).rstrip()}" if passages else ""
    context_ids = plain_ids(subject.tokenizer, context)
    search.tokens.append(len(context_ids))
    is_found = any(statement in context for statement in fact.statements)
    search.found.append(float(is_found))
    return context


def _result(measurement: Measurement, lengths: list[int]) -> SuiteResult:
    answers = measurement.answer_rows()
    tables = {
        f"Answers (chance of `right`: {1 / FACTS_OF_A_KIND:g})": answers,
        "Passages read again": measurement.search_rows(),
        "Loss of the text, nats per token": measurement.loss_rows(),
    }
    summary = []
    for row in answers:
        if row["length"] == lengths[-1] and row["form"] == "cloze":
            title = f"{row['reading']}: answers that greedy decoding spells, {row['length']:,} tokens"
            summary.append(summary_row(title, row["greedy"], row["greedy_stderr"], 0.0))
    return SuiteResult(tables, {"recall.png": partial(_draw, answers, lengths)}, summary=summary)


def _draw(answers: list[Row], lengths: list[int], path: Path) -> None:
    """Answers that greedy decoding spells and ties over the length, a curve for each reading."""
    panels = {}
    for title, column in (("clozes spelled, share", "greedy"), ("tie of answer and subject, nats", "tie")):
        series = defaultdict(lambda: dict.fromkeys(lengths, (None, None)))
        for row in answers:
            if row["form"] == "cloze":
                series[row["reading"]][row["length"]] = row[column], row[f"{column}_stderr"]
        panels[title] = {name: list(points.values()) for name, points in series.items()}
    curves(path, lengths, panels, "length of the text, tokens")
