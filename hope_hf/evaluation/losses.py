"""Losses of whole documents, and their mean with its standard error."""

import math

import torch
from torch import Tensor

from .arguments import Arguments
from .display import progress
from .result import Row, mean_and_stderr
from .streams import Scores, carried_scores, window_scores
from .subject import Subject

# Standard errors are those of means over this many neighbouring tokens: single tokens are not independent.
BLOCK = 256


def document_scores(args: Arguments, subject: Subject, documents: list[Tensor], name: str) -> list[Scores]:
    """Scores of every token but the first of each document, read by itself; `name` is shown beside the bar."""
    longest = subject.longest_input
    # Sorted by length: less padding.
    order = sorted(range(len(documents)), key=lambda index: len(documents[index]))
    groups = [order[start : start + args.rows] for start in range(0, len(order), args.rows)]
    found: dict[int, Scores] = {}
    for group in progress(groups, name):
        rows = [documents[index] for index in group]
        if longest is None or len(rows[-1]) <= longest:
            padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            scores = carried_scores(subject.model, padded, [len(row) for row in rows])
            parts = [Scores(*(part[i, : len(row) - 1] for part in scores)) for i, row in enumerate(rows)]
        else:
            parts = [window_scores(subject.model, row, longest, longest // 2, args.rows) for row in rows]
        found |= zip(group, parts, strict=True)
    return [found[index] for index in range(len(documents))]


def mean_of_blocks(losses: Tensor) -> tuple[float, float | None]:
    """Mean loss and the standard error of means over blocks of neighbours; [T] or [n, T]."""
    mean = float(losses.double().mean())
    blocks = [float(part.double().mean()) for row in torch.atleast_2d(losses) for part in row.split(BLOCK)]
    return mean, mean_and_stderr(blocks)[1]


def bits_per_byte(loss: float, stderr: float | None, tokens_per_byte: float) -> Row:
    """From a mean loss in nats per token and its standard error."""
    factor = tokens_per_byte / math.log(2)
    return {"bits_per_byte": loss * factor, "bits_per_byte_stderr": stderr and stderr * factor}
