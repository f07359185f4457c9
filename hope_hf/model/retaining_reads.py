"""Attention that retains tokens: the state of a document, and what the tokens of a call read.

See `retaining_attention` for blocks, window and sinks.

Axes: B row, T token of the call, S slot of the call (`chunks`), H head of keys, D head width; K block, W window;
M keys of a call: the window before the call, then its slots; N tokens that a layer retains, head after head.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .chunks import TokenPlan, beside, plan_again
from .opaque import Tensors, call, named_tuple, register, seeded
from .retaining_plan import Band, RetainingPlan, Sizes, plan_retaining
from .streams import Streams, bias_of, scores_of, take, to_slots, to_tokens, with_token


class Retained(NamedTuple):
    """Tokens that heads retain: entries [B, N, 2 D], and scores [B, N, 1] in float32 or wider.

    `positions` [B, N] are those in the document, and -1 in slots that are empty.
    """

    entries: Tensor
    scores: Tensor
    positions: Tensor

    def by_head(self, counts: Sequence[int]) -> list["Retained"]:
        """Those of each head, which retains so many."""
        sizes = list(counts)
        return list(map(Retained, *(part.split(sizes, dim=1) for part in self)))


class RetainingState(NamedTuple):
    """What a layer holds of the current document; an entry is a token's key, after rotation, and its value.

    After n tokens, in block b = n // K, slot j of the window holds token b K - W + j; slots from W + n % K on, and
    those of tokens before the document, are never read.
    """

    # entries [B, H, sinks, 2 D]
    sinks: Tensor
    # entries [B, H, W + K, 2 D], scores [B, H, W + K, 1]
    window: Tensor
    window_scores: Tensor
    # see `Retained`
    retained: Tensor
    retained_scores: Tensor
    retained_positions: Tensor


class Entries(NamedTuple):
    """The M keys and values of a call: entries [B, H, M, 2 D], scores [B, H, M, 1]."""

    entries: Tensor
    scores: Tensor

    def take(self, index: slice | Tensor) -> "Entries":
        """Those at an index, see `streams.take`."""
        return Entries(take(self.entries, index), take(self.scores, index))


def _empty_sinks(offered: Entries, sizes: Sizes) -> Tensor:
    """The sinks before a document, for tokens like those of a call."""
    rows, heads, _, width = offered.entries.shape
    return offered.entries.new_zeros(rows, heads, sizes.sinks, width)


def _empty_window(offered: Entries, sizes: Sizes) -> Entries:
    """The window before a document [B, H, W + K, ...]."""
    size = sizes.window + sizes.block
    empty = []
    for part in offered:
        rows, heads, _, width = part.shape
        empty.append(part.new_zeros(rows, heads, size, width))
    return Entries(*empty)


def _none_retained(offered: Entries, counts: Sequence[int]) -> Retained:
    """The retained tokens before a document."""
    rows, _, _, width = offered.entries.shape
    number = sum(counts)
    return Retained(
        entries=offered.entries.new_zeros(rows, number, width),
        scores=offered.scores.new_zeros(rows, number, 1),
        positions=torch.full((rows, number), -1, device=offered.entries.device),
    )


def read_retaining(
    streams: Streams,
    scores: Tensor,
    state: RetainingState | None,
    plan: RetainingPlan,
    sizes: Sizes,
    counts: Sequence[int],
    need_state: bool,
    dropout: float = 0.0,
) -> tuple[Tensor, RetainingState | None]:
    """What the tokens of a call read [B, heads, T, D], and the state after the call if it is needed.

    Args:
        scores: of the tokens [B, H, T, 1].
        state: state before the call, which may have another dtype.
        counts: tokens that each head retains [H].
        dropout: share of the weights that are set to 0.
    """
    streams = streams.in_slots(plan)
    entries = torch.cat([streams.keys, streams.values], dim=-1)
    offered = Entries(entries, to_slots(plan, scores))
    # so that no band copies its queries, and those of sinks again
    queries = streams.queries.contiguous()
    sink_queries = queries
    if streams.sink_queries is not None:
        sink_queries = streams.sink_queries.contiguous()
    keys = _keys_of_call(offered, state, plan, sizes)
    if state is None:
        sinks = _empty_sinks(offered, sizes)
        retained = _none_retained(offered, counts)
    else:
        dtype = entries.dtype
        sinks = state.sinks.to(dtype)
        retained = Retained(state.retained.to(dtype), state.retained_scores, state.retained_positions)
    reads = []
    for band in plan.bands:
        sinks, retained = _begin_block(band, keys, sinks, retained)
        read = _read_band(
            queries=take(queries, band.queries),
            sink_queries=take(sink_queries, band.queries),
            sinks=sinks,
            window=take(keys.entries, band.keys),
            bias=band.bias,
            retained=retained,
            counts=counts,
            dropout=dropout,
        )
        reads.append(read)
        is_last = band is plan.bands[-1]
        if band.ends is not False and (need_state or not is_last):
            retained = _end_block(band, keys, retained, counts)
    reads = torch.cat(reads, dim=2)
    reads = to_tokens(plan, reads)
    if not need_state:
        return reads, None
    window_after = keys if plan.keys_after is None else keys.take(plan.keys_after)
    # a text may be shorter than that
    missing = sizes.sinks - sinks.shape[2]
    sinks = F.pad(sinks, (0, 0, 0, missing))
    return reads, RetainingState(sinks, *window_after, *retained)


def _keys_of_call(offered: Entries, state: RetainingState | None, plan: RetainingPlan, sizes: Sizes) -> Entries:
    """The M keys and values of a call: its own, behind those of the window before it."""
    if state is not None:
        before = Entries(state.window, state.window_scores)
    elif plan.token_slot is not None:
        # a single token of rows with padding
        before = _empty_window(offered, sizes)
    else:
        return offered
    return Entries(
        entries=_behind(before.entries, offered.entries, plan, sizes),
        scores=_behind(before.scores, offered.scores, plan, sizes),
    )


def _behind(window: Tensor, new: Tensor, plan: RetainingPlan, sizes: Sizes) -> Tensor:
    """[B, H, M, X] of a state's window [B, H, W + K, X], and a call's slots [B, H, S, X]."""
    window = window.to(new.dtype)
    if plan.token_slot is not None:
        return with_token(window, new, plan.token_slot, plan.valid)
    if plan.is_earlier is None:
        earlier = plan.seen_before % sizes.block
        filled = slice(sizes.window + earlier)
        return torch.cat([take(window, filled), new], dim=2)
    window, open_block = window.split([sizes.window, sizes.block], dim=2)
    first, others = new.tensor_split([sizes.block], dim=2)
    is_earlier = plan.is_earlier[:, None, :, None]
    first = torch.where(is_earlier, open_block, first)
    return torch.cat([window, first, others], dim=2)


def _begin_block(band: Band, keys: Entries, sinks: Tensor, retained: Retained) -> tuple[Tensor, Retained]:
    """Sinks and retained tokens of a block: where it is its document's first, its own sinks, and none retained."""
    if band.begins is False:
        return sinks, retained
    first = take(keys.entries, band.first_keys)
    if band.begins is True:
        return first, retained
    sinks = torch.where(beside(band.begins, first), first, sinks)
    positions = torch.where(band.begins[:, None], -1, retained.positions)
    return sinks, retained._replace(positions=positions)


def _end_block(band: Band, keys: Entries, retained: Retained, counts: Sequence[int]) -> Retained:
    """The tokens that each head retains after a block: the highest scores among its tokens and those that leave."""
    leaving = keys.take(band.leaving_keys)
    rows = len(leaving.scores)
    leaving_positions = band.leaving_positions.expand(rows, -1)
    after_of_heads = []
    for head, before in enumerate(retained.by_head(counts)):
        candidates = Retained(
            entries=torch.cat([before.entries, leaving.entries[:, head]], dim=1),
            scores=torch.cat([before.scores, leaving.scores[:, head]], dim=1),
            positions=torch.cat([before.positions, leaving_positions], dim=1),
        )
        after = _highest(candidates, counts[head], band.last_given_up)
        after_of_heads.append(after)
    parts = []
    for before, *after in zip(retained, *after_of_heads, strict=True):
        part = torch.cat(after, dim=1)
        if band.ends is not True:
            part = torch.where(beside(band.ends, part), part, before)
        parts.append(part)
    return Retained(*parts)


def _highest(candidates: Retained, count: int, last_given_up: int | Tensor) -> Retained:
    """The `count` candidates with the highest scores; slots are empty where there are fewer."""
    positions = candidates.positions
    positions = torch.where(positions <= last_given_up, -1, positions)
    scores = candidates.scores.squeeze(2).masked_fill(positions < 0, -torch.inf)
    # of two equal scores, as the same words have in the first layer, the older one stays
    order = scores.sort(dim=1, descending=True, stable=True).indices
    chosen = order[:, :count]
    index = chosen.unsqueeze(2)
    return Retained(
        entries=candidates.entries.take_along_dim(index, dim=1),
        scores=candidates.scores.take_along_dim(index, dim=1),
        positions=positions.gather(1, chosen),
    )


def _read_band(
    queries: Tensor,
    sink_queries: Tensor,
    sinks: Tensor,
    window: Tensor,
    bias: Tensor,
    retained: Retained,
    counts: Sequence[int],
    dropout: float,
) -> Tensor:
    """What a band's queries read [B, heads, q, D].

    Args:
        queries, sink_queries: [B, heads, q, D].
        sinks, window: entries that they see [B, H, k, 2 D].
        bias: added to the scores of both, see `Band`.
    """
    rows, key_heads, _, _ = window.shape
    number, width = queries.shape[2:]
    sink_scores = scores_of(sink_queries, sinks[..., :width])
    window_scores = scores_of(queries, window[..., :width])
    scores = torch.cat([sink_scores, window_scores], dim=2)
    # [B, H, heads / H, q, sinks + k]
    scores = scores.unflatten(0, (rows, key_heads)).unflatten(2, (-1, number))
    scores = scores + bias.to(scores.dtype)
    values = torch.cat([sinks, window], dim=2)[..., width:]
    seen = values.shape[2]
    queries = queries.unflatten(1, (key_heads, -1))
    reads = []
    for head, retained_of_head in enumerate(retained.by_head(counts)):
        retained_keys, retained_values = retained_of_head.entries.split(width, dim=2)
        is_empty = retained_of_head.positions < 0
        bias_of_head = bias_of(is_empty[:, None], scores.dtype)[:, 0, 0]
        # [B, heads / H q, keys]
        queries_of_head = queries[:, head].flatten(1, 2)
        scores_of_head = scores[:, head].flatten(1, 2)
        retained_scores = torch.bmm(queries_of_head, retained_keys.mT) + bias_of_head
        weights = torch.cat([scores_of_head, retained_scores], dim=2).softmax(-1)
        if dropout:
            weights = F.dropout(weights, dropout)
        weights, retained_weights = weights.to(values.dtype).tensor_split([seen], dim=2)
        window_reads = torch.bmm(weights, values[:, head])
        read = window_reads + torch.bmm(retained_weights, retained_values)
        reads.append(read.unflatten(1, (-1, number)))
    return torch.cat(reads, dim=1)


def read_in_graph(
    streams: Streams,
    scores: Tensor,
    state: RetainingState | None,
    plan: TokenPlan,
    sizes: Sizes,
    counts: Sequence[int],
    need_state: bool,
    dropout: float,
) -> tuple[Tensor, RetainingState | None]:
    """`read_retaining` as one operator of a compiled graph."""
    tensors = streams._asdict() | {"scores": scores} | plan.tensors()
    if state is not None:
        tensors |= state._asdict()
    if dropout:
        tensors["seed"] = torch.randint(2**62, (), device=scores.device)
    numbers = [plan.columns(), int(need_state), *sizes, *counts]
    reads, *after = call("retaining_attention", tensors, numbers, str(dropout))
    return reads, RetainingState(*after) if need_state else None


def _run(tensors: Tensors, numbers: list[int], dropout: str) -> list[Tensor]:
    """`read_retaining` as one operator of a compiled graph (`opaque`)."""
    columns, need_state, *numbers = numbers
    sizes, counts = _sizes_and_counts(numbers)
    queries = tensors["queries"]
    state = named_tuple(RetainingState, tensors)
    rows, _, length, _ = queries.shape
    make_plan = partial(plan_retaining, sizes, queries.dtype)
    plan = plan_again(make_plan, tensors, (rows, length), columns, has_past=state is not None)
    with seeded(tensors):
        reads, after = read_retaining(
            named_tuple(Streams, tensors),
            tensors["scores"],
            state,
            plan,
            sizes,
            counts,
            need_state=bool(need_state),
            dropout=float(dropout),
        )
    # a state's tensor may be one of the arguments
    return [reads, *map(torch.clone, after or ())]


def _sizes_and_counts(numbers: list[int]) -> tuple[Sizes, list[int]]:
    """The sizes of a layer, and the tokens that each head retains, from the operator's numbers."""
    number_of_sizes = len(Sizes._fields)
    return Sizes(*numbers[:number_of_sizes]), numbers[number_of_sizes:]


def _shapes(tensors: Tensors, numbers: list[int], _) -> list[Tensor]:
    _, need_state, *numbers = numbers
    reads = tensors["values"].new_empty(tensors["queries"].shape)
    if not need_state:
        return [reads]
    sizes, counts = _sizes_and_counts(numbers)
    entries = torch.cat([tensors["keys"], tensors["values"]], dim=-1)
    offered = Entries(entries, tensors["scores"])
    sinks = _empty_sinks(offered, sizes)
    window = _empty_window(offered, sizes)
    return [reads, sinks, *window, *_none_retained(offered, counts)]


register("retaining_attention", _run, _shapes)
