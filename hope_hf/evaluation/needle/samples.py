"""Samples of a task at one length and depth, as tokens."""

from dataclasses import dataclass
from random import Random

from ..subject import Subject
from .haystack import Haystack
from .tasks import NeedleTask, Wording

# As in RULER: needles without a depth of their own lie at 40 evenly spaced ones.
DEPTHS = [round(100 * index / 39) / 100 for index in range(40)]


@dataclass(frozen=True)
class Sample:
    """A prompt and its answer.

    prompt, answer: token ids; all samples of one length have prompts of one length.
    spans: where each of the `values` stands in the answer.
    """

    prompt: list[int]
    answer: list[int]
    spans: list[slice]
    values: list[str]


def make_samples(
    subject: Subject, task: NeedleTask, haystack: Haystack, length: int, depth: float, seeds: range
) -> list[Sample]:
    """A sample per seed; prompt and longest answer have exactly `length` tokens together, the start token counted.

    `depth` is that of the first needle asked for, where each has a key of its own, and of one of them otherwise; the
    other depths are drawn. Values of one key are expected in the order of the text. Keys, values and the other depths
    depend on task and seed alone. Raises ValueError where the length is too short.
    """
    drawn = []
    for seed in seeds:
        generator = Random(f"{task.name} {seed}")
        wording = task.word(generator)
        depths = [depth, *generator.sample(DEPTHS, task.needles - 1)]
        if task.values > 1:
            depths.sort()
        drawn.append((wording, depths, answer_tokens(subject, wording.answers)))
    reserved = max(len(answer) for _, _, (answer, _) in drawn)
    samples = []
    for wording, depths, (answer, spans) in drawn:
        prompt = _prompt(subject, task, wording, haystack, depths, length - reserved)
        samples.append(Sample(prompt, answer, spans, wording.answers))
    return samples


def answer_tokens(subject: Subject, values: list[str]) -> tuple[list[int], list[slice]]:
    """The tokens of ` a, b, and c`, and where each value stands in them."""
    tokens, spans = [], []
    for index, value in enumerate(values):
        if index:
            tokens += subject.encode(", and" if index == len(values) - 1 else ",")
        start = len(tokens)
        tokens += subject.encode(f" {value}")
        spans.append(slice(start, len(tokens)))
    return tokens, spans


def _prompt(
    subject: Subject, task: NeedleTask, wording: Wording, haystack: Haystack, depths: list[float], length: int
) -> list[int]:
    """A prompt of exactly `length` tokens."""
    before, separator = (wording.before, "\n") if task.haystack == "noise" else (f"{wording.before}\n", " ")
    before, question = subject.encode(before), subject.encode(wording.question)
    needles = [subject.encode(separator + needle) for needle in wording.needles]
    room = length - 1 - len(before) - sum(map(len, needles)) - len(question)
    if room < 0:
        raise ValueError(
            f"--lengths is too short for the needles and the question of {task.name}: give at least {-room:,} tokens "
            "more."
        )
    return [subject.start, *before, *haystack.around(needles, depths, room), *question]
