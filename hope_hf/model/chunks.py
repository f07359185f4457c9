"""The chunk of every token, counted in real tokens of a row since its document began.

The paper's rule takes errors, and memories that project are read, at the weights of the chunk's start: there a token's
chunk is part of the model. Under the delta rule without projections (the default) chunks change only rounding. A chunk
must not depend on how a text is cut into calls, on padding, or on the documents that share a row. Rows without padding
and documents are sliced as they are: slot t holds token t. All other rows are laid out in *slots*: every document
starts at a multiple of the chunk size, and padding has no slot. With chunks of 4, a row of padding and the documents a
and b is laid out so:

    token of the call     0    1    2    3    4    5            slot              0   1   2   3 | 4   5   6   7
    what it is            pad  a_0  a_1  b_0  b_1  b_2          token_of_slot     1   2   .   . | 3   4   5   .
    slot_of_token         .    0    1    4    5    6            valid             1   1   0   0 | 1   1   1   0

The bar separates two chunks, of which each is a `ChunkSpan`. The next call may go on with b_3 and b_4. Then `offset`
is 3, for the slots of b_0 to b_2, which the cache's states stand for: b_3 takes slot 3, closes a chunk, and b_4 takes
slot 4. A single token that goes on is in slot 0; S is 1, and at most `valid` and `position` are given: neither without
padding, documents or unequal counts.

Read `plan_chunks` first, and what it calls. `TokenPlan` and `plan_again` are for compiled graphs, `Sequences` is for
kernels.

Axes: B sequence in batch, T token of the call, S slot (a multiple of the chunk size, but for a single token), C slot
of a span, b sequences times heads, K kernel size of the convolution.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers.configuration_utils import PreTrainedConfig

from .backends import is_compiled


class ChunkSpan(NamedTuple):
    """Consecutive slots of one chunk. The last four fields are `None` when all rows share chunk boundaries.

    The padded input of a span is the tail's K - 1 tokens, then the span's C slots.
    """

    start: int
    stop: int
    # whether the chunk ends with this span: bool, or bool [b, 1, 1]
    closes: Tensor | bool
    # whether the span goes on with the document before it; memories begin anew where it does not [b, 1, 1]
    continues: Tensor | None = None
    # whether the token 1 to K - 1 slots earlier belongs to the same document, farthest first [K - 1, b, C, 1]
    inside: Tensor | None = None
    # indices of the padded input to which the tail of earlier calls goes [b, K - 1, 1]; only in the first span
    tail_in: Tensor | None = None
    # indices of the padded input that are the tail for the next span [b, K - 1, 1]
    tail_out: Tensor | None = None


class Past(NamedTuple):
    """Counts of the tokens that earlier calls have read."""

    # columns, padding included
    columns: int
    # whether every row has read one document of that many real tokens
    is_uniform: bool
    # real tokens of each row's current document [B]
    seen: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> "Past":
        """Counts with `function` applied to the tensor [B]."""
        # torch 2.11 cannot return from a graph what `_replace` makes
        return Past(self.columns, self.is_uniform, function(self.seen))


@dataclass
class SlotPlan:
    """The slots of one call's tokens; the optional tensors are `None` where slot t holds token t.

    A token that goes on alone has at most `valid` and `position`.
    """

    # counts after the call, the next call's `past`
    after: Past
    # real tokens of the row's document before the call: one number for all rows, or [B]
    seen_before: int | Tensor
    # whether a slot holds a token [B, S]
    valid: Tensor | None = None
    # position of the slot's token in its document [B, S]
    position: Tensor | None = None
    # empty slots at the call's start, which stand for the tokens of the chunk that earlier calls wrote [B]
    offset: Tensor | None = None
    # index of each slot's token [B, S], and of each token's slot [B, T]; entries of padding tokens are arbitrary
    token_of_slot: Tensor | None = None
    slot_of_token: Tensor | None = None
    # whether memories neither write the tokens nor forget
    is_frozen: bool = False

    @classmethod
    def of(cls, slots: "SlotPlan", **others) -> "SlotPlan":
        """The plan of these slots, with the fields that its class adds."""
        # field by field: the tracer of torch 2.11 breaks its graph at `**vars(slots)`
        return cls(
            after=slots.after,
            seen_before=slots.seen_before,
            valid=slots.valid,
            position=slots.position,
            offset=slots.offset,
            token_of_slot=slots.token_of_slot,
            slot_of_token=slots.slot_of_token,
            **others,
        )

    def to(self, device: torch.device, **_) -> "SlotPlan":
        """The plan on a device: the hooks of a `device_map` move the arguments of every block by this method.

        There is one plan for each device, so that what a plan has computed serves all blocks there.
        """
        device = torch.device(device)
        if self.after.seen.device == device:
            return self
        copies = self.__dict__.setdefault("_copies", {})
        if device not in copies:
            moved = {}
            for field in fields(self):
                value = getattr(self, field.name)
                moved[field.name] = tree_map_only(Tensor, lambda tensor: tensor.to(device), value)
            copies[device] = type(self)(**moved)
        return copies[device]

    def to_slots(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [B, S, ...]."""
        return x if self.token_of_slot is None else _gather(x, self.token_of_slot)

    def to_tokens(self, x: Tensor) -> Tensor:
        """[B, S, ...] -> [B, T, ...]."""
        return x if self.slot_of_token is None else _gather(x, self.slot_of_token)

    def positions(self) -> Tensor:
        """`position`, or the same for all rows [1, S]."""
        if self.position is not None:
            return self.position
        device = self.after.seen.device
        positions = torch.arange(self.seen_before, self.after.columns, device=device)
        return positions[None]


@dataclass(kw_only=True)
class ChunkPlan(SlotPlan):
    """The slots of one call's tokens, and their division into chunks."""

    # in the order of the text; tensors repeat each row for every memory head
    spans: list[ChunkSpan]

    @cached_property
    def sequences(self) -> "Sequences | None":
        """The documents of the call's rows, for kernels; `None` if every row continues or begins one document."""
        return None if self.valid is None else _sequences_of(self)


@dataclass(kw_only=True)
class TokenPlan(SlotPlan):
    """The tokens of a call in a compiled graph, whose slots and chunks are made while it runs (`opaque`).

    Until then slot t holds token t; `position` is [B, T], and `None` if all rows go on with one document.
    """

    # the arguments of `plan_slots`
    counts_before: Past | None
    padding_mask: Tensor | None
    position_ids: Tensor | None

    @property
    def has_equal_counts(self) -> bool:
        """Whether all rows go on after the same number of tokens."""
        return self.counts_before is not None and self.counts_before.is_uniform

    def tensors(self) -> dict[str, Tensor | None]:
        """The tensors of the arguments, by name."""
        counts = self.counts_before
        seen = None
        if counts is not None and not counts.is_uniform:
            seen = counts.seen
        return {"seen": seen, "padding": self.padding_mask, "position_ids": self.position_ids}

    def columns(self) -> int:
        """Tokens that all rows have read, or 0 if their counts differ."""
        return self.counts_before.columns if self.has_equal_counts else 0


def plan_chunks(
    config: PreTrainedConfig, shape: tuple[int, int], device: torch.device, past: Past | None = None, **options
) -> ChunkPlan | TokenPlan:
    """The slots and chunk spans of one call; see `plan_slots` for the arguments."""
    chunk = config.memory_chunk_size
    slots = plan_slots(chunk, shape, device, past, **options)
    if isinstance(slots, TokenPlan):
        return slots
    if slots.valid is None:
        spans = _plain_spans(shape[1], chunk, slots.seen_before)
    else:
        spans = _ragged_spans(chunk, config.conv_kernel_size - 1, config.num_memory_heads, slots)
    return ChunkPlan.of(slots, spans=spans)


def plan_slots(
    chunk: int,
    shape: tuple[int, int],
    device: torch.device,
    past: Past | None = None,
    padding_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    grows: bool = False,
) -> SlotPlan | TokenPlan:
    """The slots of one call's tokens; a `TokenPlan` in a compiled graph, which branches on no value.

    Args:
        chunk: chunk size; documents begin at its multiples.
        shape: (B, T) of the call.
        past: counts of earlier calls, or `None` at a text's start.
        padding_mask: [B, T], 0 for padding, or `None` without padding.
        position_ids: [B or 1, T]; a token at position 0 begins a document. An exported graph ignores them and reads
            one document per row.
        grows: whether the states grow with the text, so that a graph makes the slots of a single token, too.
    """
    length = shape[1]
    # Eager: the next four are False, and `rows` is `None` without padding and later documents.
    # A compiled graph must not branch on values: document starts and padding stay tensors, and a graph for a single
    # token serves rows with and without equal counts.
    is_graph_of_token = length == 1 and past is not None and is_compiled()
    is_growing_token = grows and past is not None and isinstance(past.columns, int)
    makes_slots_later = is_compiled() and (length > 1 or is_growing_token)
    needs_tensors = is_graph_of_token or makes_slots_later
    begins = None
    if position_ids is not None and needs_tensors:
        begins = (position_ids == 0).expand(shape)
    elif position_ids is not None and not torch.compiler.is_compiling():
        begins = _later_documents(position_ids, shape, past)
    is_one_document = padding_mask is None and begins is None
    columns_before = 0 if past is None else past.columns
    columns = columns_before + length
    # the counts' flag is read last: a tracer guards on what it reads
    if not is_graph_of_token and is_one_document and (past is None or past.is_uniform):
        rows = None
        seen_after = torch.full(shape[:1], columns, device=device)
        after = Past(columns, True, seen_after)
        slots = SlotPlan(after, columns_before)
    else:
        rows = _count_tokens(shape, device, past, padding_mask, begins)
        after = Past(columns, False, rows.seen_after)
        slots = SlotPlan(after, rows.seen, position=rows.position)
    if makes_slots_later:
        return TokenPlan.of(
            slots,
            counts_before=past._replace(is_uniform=False) if is_graph_of_token else past,
            padding_mask=padding_mask,
            position_ids=position_ids,
        )
    if rows is None:
        return slots
    if length == 1:
        slots.valid = rows.valid
        return slots
    return _lay_out(rows, after, chunk)


def _later_documents(position_ids: Tensor, shape: tuple[int, int], past: Past | None) -> Tensor | None:
    """Whether a document begins with each token [B, T]; `None` if at most the text itself begins."""
    begins = (position_ids == 0).expand(shape)
    # the first token of a fresh row always begins a document
    later = begins[:, 1:] if past is None else begins
    return begins if bool(later.any()) else None


class _Rows(NamedTuple):
    """Counts of the real tokens of a call with documents, padding or unequal counts."""

    # whether a token is real, and whether a document begins with it [B, T]
    valid: Tensor
    begins: Tensor
    # real tokens of the call in the row before the token, and before its document's first token (-1: an earlier call
    # began it) [B, T]
    rank: Tensor
    first: Tensor
    # of the token in its document [B, T]
    position: Tensor
    # real tokens of each row's current document before and after the call [B]
    seen: Tensor
    seen_after: Tensor


def _count_tokens(
    shape: tuple[int, int], device: torch.device, past: Past | None, padding_mask: Tensor | None, begins: Tensor | None
) -> _Rows:
    """The counts of a call; see `plan_slots`. `begins` [B, T]: whether a document begins with a token."""
    batch_size, length = shape
    if padding_mask is None:
        valid = torch.ones(shape, dtype=torch.bool, device=device)
    else:
        valid = padding_mask.bool()
    begins = torch.zeros_like(valid) if begins is None else begins & valid
    if past is None:
        seen = torch.zeros(batch_size, dtype=torch.long, device=device)
    else:
        # copied, since a cache of fixed length overwrites its counts during the call
        seen = past.seen.clone()
    rank = valid.long().cumsum(1) - 1
    first = torch.where(begins, rank, -1).cummax(1).values
    position_of_current = rank + seen[:, None]
    position = torch.where(first >= 0, rank - first, position_of_current)
    # the row's last real token, or -1
    column = torch.arange(length, device=device)
    last_column = torch.where(valid, column, -1).amax(1)
    existing_column = last_column.clamp(min=0).unsqueeze(1)
    last_position = position.gather(1, existing_column).squeeze(1)
    seen_after = torch.where(last_column >= 0, last_position + 1, seen)
    return _Rows(valid, begins, rank, first, position, seen, seen_after)


def _lay_out(rows: _Rows, after: Past, chunk: int) -> SlotPlan:
    """The plan of a call with these counts."""
    offset = rows.seen % chunk
    slot_of_token = _slots(rows, offset, chunk)
    token_of_slot, is_filled = _tokens_of_slots(slot_of_token, rows.valid, chunk)
    position = rows.position.gather(1, token_of_slot)
    return SlotPlan(
        after,
        rows.seen,
        valid=is_filled,
        position=torch.where(is_filled, position, 0),
        offset=offset,
        token_of_slot=token_of_slot,
        slot_of_token=torch.where(rows.valid, slot_of_token, 0),
    )


def _slots(rows: _Rows, offset: Tensor, chunk: int) -> Tensor:
    """Slot of each token [B, T]; `offset` [B] is the number of slots that tokens of earlier calls take.

    A token's slot is its index in its document, after all chunks that earlier documents of the row fill.
    """
    rank = rows.rank
    first = rows.first
    # The tokens before the call's first document go on with one whose earlier tokens take `offset` slots.
    index_without_document = rank + offset[:, None]
    index_in_document = torch.where(first >= 0, rank - first, index_without_document)
    # at each document's first token, the size of the document before it, which may end in the middle of a chunk
    first_before = F.pad(first, (1, -1), value=-1)
    size_before = torch.where(first_before >= 0, rank - first_before, index_without_document)
    chunks_filled = -(-size_before // chunk)
    chunks_before = torch.where(rows.begins, chunks_filled, 0).cumsum(1)
    return chunks_before * chunk + index_in_document


def _tokens_of_slots(slots: Tensor, valid: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Index of each slot's token, and whether the slot holds one, both [B, S], from the tokens' `slots` [B, T].

    The number of slots is read from the device once. A compiled or exported graph instead takes the most slots that a
    row of one document can need.
    """
    batch_size, length = slots.shape
    if torch.compiler.is_compiling():
        needed = length + chunk - 1
    else:
        needed = int(torch.where(valid, slots, 0).max()) + 1
    num_slots = -(-needed // chunk) * chunk
    # padding tokens go to one extra slot, which is cut off
    target = torch.where(valid, slots, num_slots)
    tokens = torch.arange(length, device=valid.device).expand(batch_size, -1)
    empty = torch.zeros(batch_size, num_slots + 1, dtype=torch.long, device=valid.device)
    token_of_slot = empty.scatter(1, target, tokens)
    is_filled = empty.bool().scatter(1, target, valid)
    return token_of_slot[:, :-1], is_filled[:, :-1]


def _plain_spans(length: int, chunk: int, seen: int) -> list[ChunkSpan]:
    """Spans of `length` tokens in rows that have all read `seen` tokens of their document."""
    spans = []
    start = 0
    while start < length:
        tokens_in_chunk = (seen + start) % chunk
        stop = min(start + chunk - tokens_in_chunk, length)
        closes = (seen + stop) % chunk == 0
        spans.append(ChunkSpan(start, stop, closes))
        start = stop
    return spans


def _ragged_spans(chunk: int, tail_size: int, heads: int, slots: SlotPlan) -> list[ChunkSpan]:
    """Spans of rows with documents, padding or unequal counts, in which some slots are empty.

    Args:
        chunk: slots per span.
        tail_size: K - 1.
        heads: times that each row is repeated.
    """
    valid = slots.valid
    position = slots.position
    batch_size, num_slots = valid.shape
    device = valid.device
    # Every field is computed for all spans at once, span by span in memory; a span's part of it is a view.
    rows = torch.arange(batch_size, device=device).repeat_interleave(heads)
    starts = range(0, num_slots, chunk)
    first_slot = torch.arange(0, num_slots, chunk, device=device)[:, None]
    last_slot = (first_slot + (chunk - 1)).clamp(max=num_slots - 1)
    ends_chunk = valid & ((position + 1) % chunk == 0)
    begins_document = valid & (position == 0)
    closes = ends_chunk[rows, last_slot]
    closes = closes[..., None, None].unbind()
    continues = ~begins_document[rows, first_slot]
    continues = continues[..., None, None].unbind()
    inside = _inside_document(position[rows], tail_size).split(chunk, dim=2)
    # The K - 1 inputs that end with slot c of a span have the indices c + 1 to c + K - 1 of the padded input.
    first_of_tail = _tokens_until_last(valid, chunk)[:, rows]
    tail = torch.arange(tail_size, device=device)[:, None]
    tail_in = None
    if slots.offset is not None:
        # The call begins with as many empty slots as its row has tokens in an open chunk; the tail goes before its
        # first token.
        offset = slots.offset[rows]
        first_of_tail[0] = torch.where(first_of_tail[0] == 0, offset, first_of_tail[0])
        tail_in = offset[:, None, None] + tail
    tail_out = (first_of_tail[..., None, None] + tail).unbind()
    spans = []
    for index, start in enumerate(starts):
        span = ChunkSpan(
            start,
            stop=min(start + chunk, num_slots),
            closes=closes[index],
            continues=continues[index],
            inside=inside[index],
            tail_in=tail_in if index == 0 else None,
            tail_out=tail_out[index],
        )
        spans.append(span)
    return spans


def _tokens_until_last(valid: Tensor, chunk: int) -> Tensor:
    """Slots of each span up to its last token, 0 without one [spans, B], for slots that are `valid` [B, S]."""
    batch_size, num_slots = valid.shape
    number_in_span = torch.arange(num_slots, device=valid.device) % chunk + 1
    numbers = F.pad(valid * number_in_span, (0, -num_slots % chunk))
    return numbers.view(batch_size, -1, chunk).amax(-1).T


def _inside_document(position: Tensor, tail_size: int) -> Tensor:
    """`ChunkSpan.inside` [K - 1, b, S, 1] for slots at `position` [b, S] of their document."""
    if not tail_size:
        inside = [position.bool()]
    else:
        inside = [position >= steps for steps in range(tail_size, 0, -1)]
    return torch.stack(inside).unsqueeze(-1)


def convolution_spans(slots: SlotPlan, length: int, tail_size: int, size: int) -> list[ChunkSpan]:
    """All `length` slots of a call in spans of `size`, for a convolution of kernel size `tail_size + 1`."""
    if slots.valid is None:
        return _plain_spans(length, size, 0)
    return _ragged_spans(size, tail_size, heads=1, slots=slots)


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """The entries of `x` [B, ..., ...] at indices [B, I] of its second axis."""
    ones = (1,) * (x.ndim - 2)
    index = index.reshape(*index.shape, *ones)
    index = index.expand(-1, -1, *x.shape[2:])
    return x.gather(1, index)


def beside(flag: Tensor, x: Tensor) -> Tensor:
    """A view of one value per row [b, ...] that broadcasts with `x` [b, ...]."""
    ones = (1,) * (x.ndim - 1)
    return flag.view(-1, *ones)


def plan_again(
    plan: Callable, tensors: dict[str, Tensor], shape: tuple[int, int], columns: int, has_past: bool
) -> SlotPlan:
    """What a function of the arguments of `plan_slots` gives for the numbers and tensors of a `TokenPlan`."""
    device = next(iter(tensors.values())).device
    past = None
    if has_past:
        seen = tensors.get("seen")
        is_uniform = seen is None
        if is_uniform:
            seen = torch.full(shape[:1], columns, device=device)
        past = Past(columns, is_uniform, seen)
    padding = tensors.get("padding")
    if padding is not None and bool((padding == 1).all()):
        padding = None
    position_ids = tensors.get("position_ids")
    return plan(shape=shape, device=device, past=past, padding_mask=padding, position_ids=position_ids)


class Sequences(NamedTuple):
    """The N tokens of a call without padding, row after row, in n sequences: the documents of every row."""

    # index of each token among the B T of the call [N]; `None` if no token is padding
    tokens: Tensor | None
    # index of each sequence's first token among the N, then N [n + 1]
    bounds: Tensor
    # row of each sequence, and position of its first token in the document [n]
    row: Tensor
    position: Tensor
    # last sequence of each row, and whether the row has one [B]
    last: Tensor
    has_tokens: Tensor

    def gather(self, x: Tensor) -> Tensor:
        """[B, T, X] -> [1, N, X]."""
        x = x.flatten(0, 1)
        if self.tokens is not None:
            x = x.index_select(0, self.tokens)
        return x.unsqueeze(0)

    def scatter(self, x: Tensor, shape: tuple[int, int]) -> Tensor:
        """[1, N, X] -> [B, T, X] of that `shape`; padding is 0."""
        if self.tokens is not None:
            batch_size, length = shape
            padding = x.new_zeros(batch_size * length, x.shape[-1])
            x = padding.index_copy(0, self.tokens, x[0])
        return x.view(*shape, -1)

    def gather_states(self, state: Tensor, min_age: int | Tensor = 1) -> Tensor:
        """What each sequence [n, ...] takes over from its row [B, ...]: 0 where its document has fewer tokens."""
        is_old_enough = beside(self.position, state) >= min_age
        state_of_row = state.index_select(0, self.row)
        return torch.where(is_old_enough, state_of_row, 0.0)

    def scatter_states(self, after: Tensor, before: Tensor | None) -> Tensor:
        """States of the rows [B, ...] after the call from those of the sequences, `before` in rows without tokens."""
        after = after.index_select(0, self.last)
        has_tokens = beside(self.has_tokens, after)
        if before is None:
            before = 0.0
        return torch.where(has_tokens, after, before)


def _sequences_of(plan: SlotPlan) -> Sequences:
    """The sequences of a plan that has `valid` and `position`."""
    # of every real token, row after row
    row, slot = plan.valid.nonzero(as_tuple=True)
    position = plan.position[row, slot]
    is_other_row = row[1:] != row[:-1]
    is_first_of_row = F.pad(is_other_row, (1, 0), value=True)[: len(row)]
    begins_sequence = (position == 0) | is_first_of_row
    first_token = begins_sequence.nonzero().squeeze(-1)
    if plan.token_of_slot is None:
        # a single token per row
        length = 1
        column = slot
    else:
        length = plan.slot_of_token.shape[1]
        column = plan.token_of_slot[row, slot]
    num_rows = len(plan.valid)
    tokens = None
    if len(row) < num_rows * length:
        tokens = row * length + column
    row_of_sequence = row[first_token]
    all_rows = torch.arange(num_rows, device=row.device)
    last_sequence = torch.searchsorted(row_of_sequence, all_rows, right=True) - 1
    return Sequences(
        tokens=tokens,
        bounds=F.pad(first_token, (0, 1), value=len(row)),
        row=row_of_sequence,
        position=position[first_token],
        last=last_sequence.clamp(min=0),
        has_tokens=plan.valid.any(1),
    )
