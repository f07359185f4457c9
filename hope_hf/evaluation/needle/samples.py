"""Samples of a task at one length and depth, as tokens."""

import re
import textwrap
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate, chain, cycle, islice
from operator import itemgetter
from random import Random

from ..flags import Arguments
from ..held_out import held_out_documents
from ..subject import Subject
from .tasks import NeedleTask, Wording

# As in RULER, needles without a given depth lie at 40 evenly spaced depths.
DEPTHS = [round(index / 39, 2) for index in range(40)]
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
# A text without sentences, such as code, is cut between words into strings of at most so many characters.
LONGEST_SENTENCE = 400
# Characters read per token needed: enough for every length.
CHARACTERS = 16


Tokens = list[int]


class Haystack:
    """Sentences as lists of tokens, each with the separator before it."""

    def __init__(self, sentences: list[Tokens], source: str, before: str, separator: str):
        """`source`: names a text that is too short in errors. `before`: between the instructions and the text.
        `separator`: before every needle."""
        self._sentences = sentences
        self._source = source
        self.before = before
        self.separator = separator
        self._ends = list(accumulate(map(len, sentences)))

    def around(self, needles: list[Tokens], depths: list[float], room: int) -> Tokens:
        """`room` tokens of the text with the needles before the sentences that begin nearest to their depths.

        `depths` are from 0 (before the first sentence) to 1 (after the last). Raises ValueError if the text has
        fewer tokens.
        """
        enough = bisect_left(self._ends, room) + 1
        tokens = list(chain.from_iterable(self._sentences[:enough]))
        if len(tokens) < room:
            raise ValueError(
                f"--lengths asks for {room:,} tokens around the needles, and the text ({self._source}) has "
                f"{len(tokens):,}: lower it or give a longer text with --validation_file."
            )
        begins = [0, *self._ends[: enough - 1], room]
        hidden = []
        for depth, needle in zip(depths, needles, strict=True):
            hidden.append((_nearest(begins, depth * room), needle))
        hidden.sort(key=itemgetter(0))
        text = []
        start = 0
        for begin, needle in hidden:
            text += tokens[start:begin] + needle
            start = begin
        return text + tokens[start:room]


def _nearest(numbers: list[int], number: float) -> int:
    return min(numbers, key=lambda candidate: abs(candidate - number))


class Filler(Haystack):
    """The same sentences again and again, before the needle and after it, cut at any token."""

    def __init__(self, tokens: Tokens):
        super().__init__([tokens], "", "", "")

    def around(self, needles: list[Tokens], depths: list[float], room: int) -> Tokens:
        """`room` tokens of the filler around a single needle."""
        before = round(room * depths[0])
        after = room - before
        return self._repeated(before) + needles[0] + self._repeated(after)

    def _repeated(self, count: int) -> Tokens:
        """The first tokens of the filler's endless text."""
        endless = cycle(self._sentences[0])
        return list(islice(endless, count))


def filler(subject: Subject, longest: int, args: Arguments | None = None) -> Haystack:
    """The filler of pass keys."""
    return Filler(subject.encode(f"{NOISE} "))


def noise(subject: Subject, longest: int, args: Arguments | None = None) -> Haystack:
    """Five short sentences again and again, for texts of up to `longest` tokens."""
    sentence = subject.encode(f"\n{NOISE}")
    times = longest // len(sentence) + 1
    return Haystack([sentence] * times, "the noise", "", "\n")


def text(subject: Subject, longest: int, args: Arguments) -> Haystack:
    """The held-out documents, or `--validation_file`, one after another, with white space reduced to single spaces."""
    documents = held_out_documents(args)
    sentences = []
    characters = 0
    for sentence in _sentences(documents.texts):
        sentences.append(subject.encode(f" {sentence}"))
        characters += len(sentence)
        if characters > CHARACTERS * longest:
            break
    return Haystack(sentences, documents.source, "\n", " ")


HAYSTACKS = {"filler": filler, "noise": noise, "text": text}


def _sentences(documents: list[str]):
    for document in documents:
        text = " ".join(document.split())
        for sentence in re.split(r"(?<=[.!?])\s+", text):
            yield from textwrap.wrap(sentence, LONGEST_SENTENCE)


@dataclass(frozen=True)
class Sample:
    """A prompt and its answer.

    prompt, answer: token ids.
    spans: the place of each of the `values` in the answer.
    """

    prompt: list[int]
    answer: list[int]
    spans: list[slice]
    values: list[str]

    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)


def make_samples(
    subject: Subject, task: NeedleTask, haystack: Haystack, length: int, depth: float, seeds: range
) -> list[Sample]:
    """A sample per seed; prompt and longest answer together have exactly `length` tokens, start token included.

    All prompts have one length, except in a filler, where prompt and own answer together have `length` tokens.
    `depth` is that of the first needle asked for, where each has a key of its own, and of one of them otherwise; the
    other depths are drawn. Values of one key are expected in the order of the text. Keys, values and the other depths
    depend on task and seed alone. Raises ValueError if the length is too short.
    """
    drafts = []
    longest_answer = 0
    for seed in seeds:
        generator = Random(f"{task.name} {seed}")
        wording = task.word(generator)
        depths = [depth, *generator.sample(DEPTHS, task.needles - 1)]
        if task.values > 1:
            depths.sort()
        drafts.append((wording, depths))
        answer, _ = answer_tokens(subject, wording.answers)
        longest_answer = max(longest_answer, len(answer))
    samples = []
    for wording, depths in drafts:
        answer, spans = answer_tokens(subject, wording.answers)
        reserved = len(answer) if isinstance(haystack, Filler) else longest_answer
        prompt = _prompt(subject, task, wording, haystack, depths, length - reserved)
        samples.append(Sample(prompt, answer, spans, wording.answers))
    return samples


def answer_tokens(subject: Subject, values: list[str]) -> tuple[Tokens, list[slice]]:
    """The tokens of ` a, b, and c`, and the place of each value in them."""
    tokens = []
    spans = []
    for index, value in enumerate(values):
        if index:
            tokens += subject.encode(", and" if index == len(values) - 1 else ",")
        start = len(tokens)
        tokens += subject.encode(f" {value}")
        spans.append(slice(start, len(tokens)))
    return tokens, spans


def _prompt(
    subject: Subject, task: NeedleTask, wording: Wording, haystack: Haystack, depths: list[float], length: int
) -> Tokens:
    """A prompt of exactly `length` tokens."""
    before = [subject.start, *subject.encode(wording.before + haystack.before)]
    question = subject.encode(wording.question)
    needles = [subject.encode(haystack.separator + needle) for needle in wording.needles]
    tokens_of_needles = sum(map(len, needles))
    room = length - len(before) - tokens_of_needles - len(question)
    if room < 0:
        raise ValueError(
            f"--lengths is too short for the needles and the question of {task.name}: give at least {-room:,} tokens "
            "more."
        )
    return before + haystack.around(needles, depths, room) + question
