"""Scores of a model on samples: by generation, and teacher-forced."""

import torch

from ..result import Row, means
from ..streams import carried_scores, frozen_memories
from ..subject import Subject, require_finite
from .samples import Sample

# As in RULER.
NEW_TOKENS = 128


def measure(subject: Subject, samples: list[Sample], batch_size: int, new_tokens: int) -> Row:
    """Means over samples with prompts of one length, and their standard errors.

    generated: the share of the expected strings in `new_tokens` greedy tokens, in any place and case. exact: the
    share of them whose every token is the likeliest after all before it. loss: nats per token of them. With memories
    also frozen_exact and frozen, the same two with nothing written into the memories.
    """
    columns = {name: [] for name in ("generated", "exact", "loss")}
    if subject.has_memory:
        columns |= {"frozen_exact": [], "frozen": []}
    for start in range(0, len(samples), batch_size):
        batch = samples[start : start + batch_size]
        columns["generated"] += generated(subject, batch, new_tokens)
        exact, losses = teacher_forced(subject, batch)
        columns["exact"] += exact
        columns["loss"] += losses
        if subject.has_memory:
            with frozen_memories(subject.model):
                exact, losses = teacher_forced(subject, batch)
            columns["frozen_exact"] += exact
            columns["frozen"] += losses
    require_finite(torch.tensor(columns["loss"]), "needle: the model's losses")
    return means(columns)


def teacher_forced(subject: Subject, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """Per sample: the share of values whose tokens are all the likeliest, and the mean loss of their tokens."""
    rows = [torch.tensor(sample.prompt + sample.answer) for sample in samples]
    # What follows a row cannot change it.
    texts = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    scores = carried_scores(subject.model, texts, [len(row) for row in rows])
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


def generated(subject: Subject, samples: list[Sample], new_tokens: int) -> list[float]:
    """Per sample: the share of its values in a greedy continuation."""
    said = subject.continued(torch.tensor([sample.prompt for sample in samples]), new_tokens)
    return [share_found(text, sample.values) for text, sample in zip(said, samples, strict=True)]


def share_found(text: str, values: list[str]) -> float:
    """RULER's score of an answer: the share of the expected strings that are in it, whatever their case."""
    return sum(value.lower() in text.lower() for value in values) / len(values)
