"""Losses of every token of a text, with the state carried or in independent windows."""

import copy
import math
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

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


class Scores(NamedTuple):
    """Scores of every token but the first, on the CPU."""

    losses: Tensor
    """Negative log-likelihood in nats, float32."""
    guesses: Tensor
    """The token with the largest logit, int64."""


def memory_states(cache: HopeCache) -> list[Tensor]:
    """All floating-point state of a cache's memories, batch first; counts of tokens are left out."""
    tensors = (tensor for layer in cache.memory_layers for tensor in layer.named_tensors().values())
    return [tensor for tensor in tensors if tensor.is_floating_point()]


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
    # a model makes its own where none is given
    cache = None if begins_with is None else repeat_rows(begins_with, len(input_ids))
    # Models with other kinds of state may not read several tokens after their first call.
    in_pieces = is_hope(model.config) or not getattr(model, "_is_stateful", False)
    ends = [length]
    if in_pieces:
        ends = sorted({*range(PIECE, length, PIECE), *(edge for edge in edges if edge < length), length})
    scores = []
    for start, end in pairwise([0, *ends]):
        arguments = {CACHE_NAME: cache, "use_cache": True} if in_pieces else {}
        outputs = model(input_ids=input_ids[:, start:end].to(model.device), **arguments)
        cache = outputs[CACHE_NAME] if in_pieces else None
        if after_piece:
            after_piece(end, cache)
        scores.append(score(outputs.logits, input_ids[:, start + 1 : end + 1]))
    return Scores(*(torch.cat(parts, 1) for parts in zip(*scores, strict=True)))


@torch.no_grad()
def window_scores(model: PreTrainedModel, input_ids: Tensor, window: int, stride: int, batch_size: int) -> Scores:
    """Scores [T-1], each token given at most `window - 1` before it; `input_ids` [T].

    Windows of `window` tokens begin every `stride` tokens and are read alone; a token is scored in the first window
    that holds it, so every token but those of the first window has at least `window - stride` before it.
    """
    if not 0 < stride < window:
        raise ValueError(f"a stride of {stride} tokens does not fit windows of {window}")
    length = len(input_ids)
    count = 1 + max(0, math.ceil((length - window) / stride))
    rows = [input_ids[start : start + window] for start in range(0, count * stride, stride)]
    scores = []
    for first in range(0, len(rows), batch_size):
        batch = rows[first : first + batch_size]
        padded = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
        # Causal: padding on the right changes no score, so no mask is needed.
        found = score(model(input_ids=padded.to(model.device)).logits[:, :-1], padded[:, 1:])
        for index, row in enumerate(batch, first):
            fresh = slice(0 if index == 0 else window - stride - 1, len(row) - 1)
            scores.append(Scores(*(part[index - first, fresh] for part in found)))
    return Scores(*(torch.cat(parts) for parts in zip(*scores, strict=True)))


def score(logits: Tensor, targets: Tensor) -> Scores:
    """Scores [B, T] from logits [B, T, vocab_size] and targets [B, T]."""
    flat = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten().to(logits.device), reduction="none")
    return Scores(flat.view(targets.shape).cpu(), logits.argmax(-1).cpu())


def document_scores(
    args: Arguments, subject: Subject, documents: list[Tensor], name: str, begins_with: HopeCache | None = None
) -> list[Scores]:
    """Scores of every token but the first of each document, read by itself; `name` is shown beside the bar.

    `begins_with`: a cache that every document goes on from, if none has more tokens than the model's positions.
    """
    longest = subject.longest_input
    # Sorted by length: less padding.
    order = sorted(range(len(documents)), key=lambda index: len(documents[index]))
    groups = [order[start : start + args.rows] for start in range(0, len(order), args.rows)]
    found: dict[int, Scores] = {}
    for group in progress(groups, name):
        rows = [documents[index] for index in group]
        if longest is None or len(rows[-1]) <= longest:
            padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            scores = carried_scores(subject.model, padded, begins_with=begins_with)
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
    """Bits per byte from a mean loss in nats per token, and their standard error."""
    factor = tokens_per_byte / math.log(2)
    return {"bits_per_byte": loss * factor, "bits_per_byte_stderr": stderr and stderr * factor}
