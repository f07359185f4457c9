"""Losses of every token of a text, with the state carried or in independent windows."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from hope_hf import CACHE_NAME, HopeCache
from hope_hf.common.models import is_hope
from hope_hf.common.progress import progress

from .flags import Arguments
from .result import Number, Row, mean_and_stderr
from .subject import Subject

# Tokens of one forward pass over a long text: bounds the memory that logits take.
PIECE = 1024
# Standard errors are computed from means over this many neighbouring tokens: single tokens are not independent.
BLOCK = 256
Item = TypeVar("Item")


class Scores(NamedTuple):
    """Scores of every token but the first, on the CPU."""

    losses: Tensor
    """Negative log-likelihood in nats, float32."""
    guesses: Tensor
    """The token with the largest logit, int64."""

    def part(self, row: int, start: int, stop: int) -> "Scores":
        """The scores [stop - start] of a row of a batch [B, T], from `start` up to `stop`."""
        span = slice(start, stop)
        return Scores(self.losses[row, span], self.guesses[row, span])


def memory_states(cache: HopeCache) -> list[Tensor]:
    """All floating-point state of a cache's memories, batch first; counts of tokens are left out."""
    states = []
    for layer in cache.memory_layers:
        states += filter(torch.is_floating_point, layer.named_tensors().values())
    return states


def repeat_rows(cache, times: int):
    """A cache with every row of the given one repeated, which stays; all its rows have learned the same."""
    levels = getattr(cache, "levels", None)
    if levels is None:
        repeated = copy.deepcopy(cache)
        repeated.batch_repeat_interleave(times)
        return repeated
    repeated = copy.copy(cache).rollback(cache.snapshot())
    repeated.reset_levels()
    repeated.batch_repeat_interleave(times)
    # one row's differences for all: a copy for each would be larger than the model
    rows = len(levels.tokens) * times
    repeated.levels = levels.map(partial(_first_row_for_all, rows=rows))
    return repeated


def _first_row_for_all(state: Tensor, rows: int) -> Tensor:
    """The first row of a state [B, ...] as every row of a view [rows, ...]."""
    return state[:1].expand(rows, *state.shape[1:])


def read_on(model: PreTrainedModel, input_ids: Tensor, cache, **options) -> tuple[Tensor, object]:
    """The logits [B, T, vocab_size] of tokens [B, T] that follow those of a cache, and the cache after them.

    Args:
        cache: it may be changed; None makes a new one.
        options: of the model's `forward`.
    """
    input_ids = input_ids.to(model.device)
    outputs = model(input_ids=input_ids, use_cache=True, **{CACHE_NAME: cache}, **options)
    return outputs.logits, outputs[CACHE_NAME]


@torch.no_grad()
def carried_scores(
    model: PreTrainedModel,
    input_ids: Tensor,
    after_piece: Callable[[int, object], None] | None = None,
    edges: list[int] = (),
    begins_with: HopeCache | None = None,
) -> Scores:
    """Scores [B, T-1], each token given all tokens before it. No token is read twice.

    Args:
        input_ids: [B, T]; each row begins a document. It may be padded on the right: since models are causal, padding
            changes no score before it, and needs no mask. Its own scores are undefined.
        after_piece: called with the number of tokens read and the cache, after every forward pass.
        edges: numbers of tokens at which a forward pass must end, besides the multiples of `PIECE`.
        begins_with: a HOPE's cache of one row, which every row begins with; it stays as it is.
    """
    inputs = input_ids[:, :-1]
    targets = input_ids[:, 1:]
    length = inputs.shape[1]
    # Models with other kinds of state may not read several tokens after their first call.
    if not is_hope(model.config) and getattr(model, "_is_stateful", False):
        logits = model(input_ids=inputs.to(model.device)).logits
        if after_piece:
            after_piece(length, None)
        return score(logits, targets)
    cache = None
    if begins_with is not None:
        cache = repeat_rows(begins_with, len(inputs))
    scores = []
    ends = piece_ends(length, edges)
    for start, end in pairwise([0, *ends]):
        piece = slice(start, end)
        logits, cache = read_on(model, inputs[:, piece], cache)
        if after_piece:
            after_piece(end, cache)
        scores_of_piece = score(logits, targets[:, piece])
        scores.append(scores_of_piece)
    return joined_scores(scores, dim=1)


def piece_ends(length: int, edges: list[int]) -> list[int]:
    """The ends of the forward passes over a text: every multiple of `PIECE`, the edges inside it, and its length."""
    edges_inside = [edge for edge in edges if edge < length]
    return sorted({*range(PIECE, length, PIECE), *edges_inside, length})


def joined_scores(scores: Sequence[Scores], dim: int = 0) -> Scores:
    """The scores one after another along a dimension."""
    losses, guesses = zip(*scores, strict=True)
    return Scores(torch.cat(losses, dim), torch.cat(guesses, dim))


@torch.no_grad()
def window_scores(model: PreTrainedModel, input_ids: Tensor, window: int, stride: int, batch_size: int) -> Scores:
    """Scores [T-1], each token given at most `window - 1` before it; `input_ids` [T].

    Windows of `window` tokens begin every `stride` tokens and are read alone; a token is scored in the first window
    that holds it, so every token but those of the first window has at least `window - stride` before it.
    """
    if not 0 < stride < window:
        raise ValueError(f"a stride of {stride} tokens does not fit windows of {window}")
    rows = [input_ids[:window]]
    # The last window holds the last token.
    stop = len(input_ids) - window + stride
    for start in range(stride, stop, stride):
        rows.append(input_ids[start : start + window])
    scores = []
    first_scored = 0
    for batch in in_batches(rows, batch_size):
        padded = pad_sequence(batch, batch_first=True)
        # Causal: padding on the right changes no score, so no mask is needed.
        logits = model(input_ids=padded.to(model.device)).logits
        scores_of_batch = score(logits[:, :-1], padded[:, 1:])
        for index, row in enumerate(batch):
            scores_of_window = scores_of_batch.part(index, first_scored, len(row) - 1)
            scores.append(scores_of_window)
            # What the window before has in common with the next one is scored.
            first_scored = window - stride - 1
    return joined_scores(scores)


def score(logits: Tensor, targets: Tensor) -> Scores:
    """Scores [B, T] from logits [B, T, vocab_size] and targets [B, T]."""
    flat_targets = targets.flatten().to(logits.device)
    flat_logits = logits.float().flatten(0, 1)
    losses = F.cross_entropy(flat_logits, flat_targets, reduction="none")
    guesses = logits.argmax(-1)
    return Scores(losses.view(targets.shape).cpu(), guesses.cpu())


def document_scores(
    args: Arguments, subject: Subject, documents: list[Tensor], name: str, begins_with: HopeCache | None = None
) -> list[Scores]:
    """Scores of every token but the first of each document, read by itself; `name` is shown beside the bar.

    `begins_with`: a cache that every document goes on from, if none has more tokens than the model's positions.
    """
    longest = subject.longest_input or math.inf
    lengths = list(map(len, documents))
    # Sorted by length: less padding.
    by_length = sorted(range(len(documents)), key=lengths.__getitem__)
    scores: dict[int, Scores] = {}
    batches = in_batches(by_length, args.rows)
    for numbers in progress(batches, name):
        last = numbers[-1]
        if lengths[last] > longest:
            for number in numbers:
                document = documents[number]
                scores[number] = window_scores(subject.model, document, longest, longest // 2, args.rows)
            continue
        documents_of_batch = [documents[number] for number in numbers]
        padded = pad_sequence(documents_of_batch, batch_first=True)
        scores_of_batch = carried_scores(subject.model, padded, begins_with=begins_with)
        for row, number in enumerate(numbers):
            scores[number] = scores_of_batch.part(row, 0, lengths[number] - 1)
    return list(map(scores.get, range(len(documents))))


def document_losses(
    args: Arguments, subject: Subject, documents: list[Tensor], name: str, begins_with: HopeCache | None = None
) -> Tensor:
    """The losses of `document_scores`, one document after another, [tokens]."""
    scores = document_scores(args, subject, documents, name, begins_with)
    return joined_scores(scores).losses


def in_batches(items: Sequence[Item], rows: int) -> list[Sequence[Item]]:
    """At most `rows` items at a time, in their order."""
    return [items[start : start + rows] for start in range(0, len(items), rows)]


def batches_of_one_length(items: Iterable[Item], length: Callable[[Item], int], rows: int) -> Iterator[list[Item]]:
    """At most `rows` items of one length at a time, so that nothing is padded; shorter ones first."""
    by_length: dict[int, list[Item]] = {}
    for item in items:
        of_one_length = by_length.setdefault(length(item), [])
        of_one_length.append(item)
    for _, of_one_length in sorted(by_length.items()):
        yield from in_batches(of_one_length, rows)


def mean_of_blocks(losses: Tensor) -> Number:
    """Mean loss and the standard error of means over blocks of neighbours; [T] or [n, T]."""
    losses = losses.double()
    means = []
    for row in torch.atleast_2d(losses):
        means += map(torch.mean, row.split(BLOCK))
    _, stderr = mean_and_stderr(list(map(float, means)))
    return Number(float(losses.mean()), stderr)


def bits_per_byte(loss: float, stderr: float | None, tokens_per_byte: float) -> Row:
    """Bits per byte from a mean loss in nats per token, and their standard error."""
    factor = tokens_per_byte / math.log(2)
    return {"bits_per_byte": loss * factor, "bits_per_byte_stderr": stderr and stderr * factor}
