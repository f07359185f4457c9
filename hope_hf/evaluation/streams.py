"""Losses of every token of a text, with the state carried or in independent windows."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from hope_hf import CACHE_NAME, HopeCache
from hope_hf.common.models import is_hope

from .display import progress
from .flags import Arguments
from .result import Row, mean_and_stderr
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
        return Scores(self.losses[row, start:stop], self.guesses[row, start:stop])


def memory_states(cache: HopeCache) -> list[Tensor]:
    """All floating-point state of a cache's memories, batch first; counts of tokens are left out."""
    states = []
    for layer in cache.memory_layers:
        states += [tensor for tensor in layer.named_tensors().values() if tensor.is_floating_point()]
    return states


def repeat_rows(cache, times: int):
    """A cache with every row of the given one repeated, which stays; all its rows have learned the same."""
    levels = getattr(cache, "levels", None)
    if levels is None:
        cache = copy.deepcopy(cache)
        cache.batch_repeat_interleave(times)
        return cache
    cache = copy.copy(cache).rollback(cache.snapshot()).reset_levels()
    cache.batch_repeat_interleave(times)
    rows = len(levels.tokens) * times
    # one row's differences for all: a copy for each would be larger than the model
    cache.levels = levels.map(lambda tensor: tensor[:1].expand(rows, *tensor.shape[1:]))
    return cache


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
    length = input_ids.shape[1] - 1
    # Models with other kinds of state may not read several tokens after their first call.
    if not is_hope(model.config) and getattr(model, "_is_stateful", False):
        logits = model(input_ids=input_ids[:, :-1].to(model.device)).logits
        if after_piece:
            after_piece(length, None)
        return score(logits, input_ids[:, 1:])
    # a model makes its own where none is given
    cache = None if begins_with is None else repeat_rows(begins_with, len(input_ids))
    scores = []
    for start, end in pairwise([0, *piece_ends(length, edges)]):
        ids = input_ids[:, start:end].to(model.device)
        outputs = model(input_ids=ids, use_cache=True, **{CACHE_NAME: cache})
        cache = outputs[CACHE_NAME]
        if after_piece:
            after_piece(end, cache)
        targets = input_ids[:, start + 1 : end + 1]
        scores.append(score(outputs.logits, targets))
    return joined_scores(scores, 1)


def piece_ends(length: int, edges: list[int]) -> list[int]:
    """The ends of the forward passes over a text: every multiple of `PIECE`, the edges inside it, and its length."""
    ends = {*range(PIECE, length, PIECE), *edges, length}
    return sorted(end for end in ends if end <= length)


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
    more = math.ceil((len(input_ids) - window) / stride)
    count = 1 + max(0, more)
    rows = [input_ids[start : start + window] for start in range(0, count * stride, stride)]
    scores = []
    for first in range(0, len(rows), batch_size):
        batch = rows[first : first + batch_size]
        padded = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
        # Causal: padding on the right changes no score, so no mask is needed.
        logits = model(input_ids=padded.to(model.device)).logits
        of_batch = score(logits[:, :-1], padded[:, 1:])
        for index, row in enumerate(batch):
            is_first_window = first + index == 0
            start = 0 if is_first_window else window - stride - 1
            scores.append(of_batch.part(index, start, len(row) - 1))
    return joined_scores(scores)


def score(logits: Tensor, targets: Tensor) -> Scores:
    """Scores [B, T] from logits [B, T, vocab_size] and targets [B, T]."""
    flat_targets = targets.flatten().to(logits.device)
    losses = F.cross_entropy(logits.float().flatten(0, 1), flat_targets, reduction="none")
    return Scores(losses.view(targets.shape).cpu(), logits.argmax(-1).cpu())


def document_scores(
    args: Arguments, subject: Subject, documents: list[Tensor], name: str, begins_with: HopeCache | None = None
) -> list[Scores]:
    """Scores of every token but the first of each document, read by itself; `name` is shown beside the bar.

    `begins_with`: a cache that every document goes on from, if none has more tokens than the model's positions.
    """
    longest = subject.longest_input
    # Sorted by length: less padding.
    numbered = sorted(enumerate(documents), key=lambda pair: len(pair[1]))
    scores: dict[int, Scores] = {}
    for start in progress(range(0, len(numbered), args.rows), name):
        numbers, rows = zip(*numbered[start : start + args.rows], strict=True)
        if longest is None or len(rows[-1]) <= longest:
            padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            of_batch = carried_scores(subject.model, padded, begins_with=begins_with)
            for row, (number, document) in enumerate(zip(numbers, rows, strict=True)):
                scores[number] = of_batch.part(row, 0, len(document) - 1)
        else:
            for number, document in zip(numbers, rows, strict=True):
                scores[number] = window_scores(subject.model, document, longest, longest // 2, args.rows)
    return [scores[number] for number in range(len(documents))]


def document_losses(
    args: Arguments, subject: Subject, documents: list[Tensor], name: str, begins_with: HopeCache | None = None
) -> Tensor:
    """The losses of `document_scores`, one document after another, [tokens]."""
    return joined_scores(document_scores(args, subject, documents, name, begins_with)).losses


def batches_of_one_length(items: Iterable[Item], length: Callable[[Item], int], rows: int) -> Iterator[list[Item]]:
    """At most `rows` items of one length at a time, so that nothing is padded; shorter ones first."""
    by_length: dict[int, list[Item]] = {}
    for item in items:
        by_length.setdefault(length(item), []).append(item)
    for _, alike in sorted(by_length.items()):
        for start in range(0, len(alike), rows):
            yield alike[start : start + rows]


def mean_of_blocks(losses: Tensor) -> tuple[float, float | None]:
    """Mean loss and the standard error of means over blocks of neighbours; [T] or [n, T]."""
    blocks = []
    for row in torch.atleast_2d(losses):
        blocks += [float(block.double().mean()) for block in row.split(BLOCK)]
    _, stderr = mean_and_stderr(blocks)
    return float(losses.double().mean()), stderr


def bits_per_byte(loss: float, stderr: float | None, tokens_per_byte: float) -> Row:
    """Bits per byte from a mean loss in nats per token, and their standard error."""
    factor = tokens_per_byte / math.log(2)
    return {"bits_per_byte": loss * factor, "bits_per_byte_stderr": stderr and stderr * factor}
