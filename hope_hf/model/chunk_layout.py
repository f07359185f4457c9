"""Which token goes to which chunk: counts of real tokens of a row since its document began.

A memory takes its errors at the weights of the chunk's start, so the chunk a token falls in is part of the model. It
must not depend on how a text was cut into calls, on padding, or on the documents that share a row. Rows without
padding and documents are cut by plain slices; all others are laid out anew in *slots*, in which every document starts
at a multiple of the chunk and padding is left out.

Axes: B sequence in batch, T token of the call, S slot (a multiple of the chunk), P piece.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .configuration_hope import HopeConfig
from .memory_scan import ScanPiece
from .text_digest import extend_digest


class Past(NamedTuple):
    """What earlier calls have read of the rows."""

    # columns, padding included
    columns: int
    # whether all rows have read that many real tokens of one document
    is_uniform: bool
    # real tokens of the row's current document [B]
    seen: torch.Tensor
    # digest of the row's tokens [B] (`text_digest`)
    digest: torch.Tensor

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Past":
        """`function(tensor)` in place of the tensors [B]."""
        return self._replace(seen=function(self.seen), digest=function(self.digest))


@dataclass
class ChunkLayout:
    """The pieces in which one call's tokens are written: parts of chunks, in order.

    Without padding and documents the tensors are `None`, a slot is a token, and `closes` holds Python booleans.
    """

    # (start, stop) in slots of each piece
    pieces: list[tuple[int, int]]
    # whether the chunk ends with the piece: the weights then become the next chunk's start, per piece bool or [B] bool
    closes: list
    # token that fills each slot [B, S]; padding slots hold any
    token_of_slot: torch.Tensor | None = None
    # slot of each token [B, T]; padding tokens hold any
    slot_of_token: torch.Tensor | None = None
    # slots that hold a token [B, S]
    valid: torch.Tensor | None = None
    # tokens of the document before the slot's own [B, S]
    position: torch.Tensor | None = None
    # rows in which a document begins with the piece, per piece [B] bool
    resets: list | None = None
    # slots left empty in the first piece, by the tokens of the chunk that earlier calls wrote [B]
    offset: torch.Tensor | None = None
    # slots of the piece up to its last token, per piece [B]; `offset` (or 0) where it has none
    ends: list | None = None

    def scan_pieces(self, heads: int, reach: int) -> list[ScanPiece]:
        """The pieces as a scan of `heads` heads and convolutions that reach `reach` tokens back sees them."""
        if self.valid is None:
            return [ScanPiece(*piece, closes) for piece, closes in zip(self.pieces, self.closes, strict=True)]

        def per_head(rows: torch.Tensor) -> torch.Tensor:
            return rows.repeat_interleave(heads, dim=0)

        around = torch.arange(reach, device=self.valid.device)
        position = per_head(self.position)
        # a tap that reaches back beyond the document's first token reads nothing
        inside = torch.stack([position >= back for back in range(reach, 0, -1)] or [position.bool()]).unsqueeze(-1)
        return [
            ScanPiece(
                start,
                stop,
                per_head(closes)[:, None, None],
                ~per_head(resets)[:, None, None],
                inside[:, :, start:stop],
                # the piece begins with empty slots: the tail goes right before its first token
                per_head(self.offset[:, None] + around)[..., None] if start == 0 and self.offset is not None else None,
                per_head(ends[:, None] + around)[..., None],
            )
            for (start, stop), closes, resets, ends in zip(
                self.pieces, self.closes, self.resets, self.ends, strict=True
            )
        ]

    def to_slots(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, ...] -> [B, S, ...]."""
        return x if self.token_of_slot is None else _gather(x, self.token_of_slot)

    def to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, ...] -> [B, T, ...]."""
        return x if self.slot_of_token is None else _gather(x, self.slot_of_token)


def _gather(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.gather(1, index.reshape(*index.shape, *(1,) * (x.ndim - 2)).expand(-1, -1, *x.shape[2:]))


def plain_layout(length: int, chunk: int, seen: int) -> ChunkLayout:
    """Layout of `length` tokens in rows that have all read `seen` tokens of their document."""
    pieces, start = [], 0
    while start < length:
        stop = min(start + chunk - (seen + start) % chunk, length)
        pieces.append((start, stop))
        start = stop
    return ChunkLayout(pieces, [(seen + stop) % chunk == 0 for _, stop in pieces])


@dataclass
class TokenPositions:
    """The position of each token of a call in its document."""

    # real tokens [B, T]
    valid: torch.Tensor
    # real tokens that begin a document [B, T]
    begins: torch.Tensor
    # real tokens of the row's current document in earlier calls [B]
    seen: torch.Tensor

    def __post_init__(self):
        self.rank = self.valid.long().cumsum(1) - 1
        # rank of the first token of the token's document, -1 for the document that earlier calls began
        self.first = torch.where(self.begins, self.rank, -1).cummax(1).values
        self.position = torch.where(self.first >= 0, self.rank - self.first, self.rank + self.seen[:, None])

    def seen_after(self) -> torch.Tensor:
        """Real tokens of the row's then current document after the call [B]."""
        any_valid = self.valid.any(1)
        last = torch.where(self.valid, torch.arange(self.valid.shape[1], device=self.valid.device), -1).amax(1)
        return torch.where(any_valid, self.position.gather(1, last.clamp(min=0)[:, None])[:, 0] + 1, self.seen)


def ragged_layout(positions: TokenPositions, chunk: int) -> ChunkLayout:
    """Layout of rows with padding, documents or unequal history. One host synchronisation: the number of slots.

    A compiled or exported graph has none: it takes as many slots as a row of one document can need.
    """
    valid, begins, seen = positions.valid, positions.begins, positions.seen
    batch_size, length = valid.shape
    offset = seen % chunk
    if length == 1:
        closes = ((positions.position[:, 0] + 1) % chunk == 0) & valid[:, 0]
        return ChunkLayout(
            [(0, 1)], [closes], valid=valid, position=positions.position, resets=[begins[:, 0]],
            ends=[valid[:, 0].long()],
        )  # fmt: skip
    # At a document's first token: the chunks its predecessor fills. Before the first document of the call the row
    # continues one from earlier calls, whose tokens occupy `offset` slots of the first chunk.
    previous = torch.nn.functional.pad(positions.first, (1, 0), value=-1)[:, :-1]
    filled = torch.where(previous >= 0, positions.rank - previous, positions.rank + offset[:, None])
    chunks_before = torch.where(begins, -(-filled // chunk), 0).cumsum(1)
    within = torch.where(positions.first >= 0, positions.position, positions.rank + offset[:, None])
    slot_of_token = chunks_before * chunk + within
    if torch.compiler.is_compiling():
        slots_needed = length + chunk - 1
    else:
        slots_needed = int(torch.where(valid, slot_of_token, 0).max()) + 1
    num_slots = -(-slots_needed // chunk) * chunk
    # padding tokens go to one slot too many, which is cut off
    target = torch.where(valid, slot_of_token, num_slots)
    filler = torch.zeros(batch_size, num_slots + 1, dtype=torch.long, device=valid.device)
    token_of_slot = filler.scatter(1, target, torch.arange(length, device=valid.device).expand(batch_size, -1))
    position = filler.scatter(1, target, positions.position)[:, :-1]
    slot_valid = filler.bool().scatter(1, target, valid)[:, :-1]
    starts = range(0, num_slots, chunk)
    last = torch.arange(1, chunk + 1, device=valid.device)
    ends = [(slot_valid[:, start : start + chunk] * last).amax(1) for start in starts]
    ends[0] = torch.where(ends[0] == 0, offset, ends[0])
    return ChunkLayout(
        pieces=[(start, start + chunk) for start in starts],
        closes=[slot_valid[:, start + chunk - 1] for start in starts],
        token_of_slot=token_of_slot[:, :-1],
        slot_of_token=torch.where(valid, slot_of_token, 0),
        valid=slot_valid,
        position=position,
        resets=[slot_valid[:, start] & (position[:, start] == 0) for start in starts],
        offset=offset,
        ends=ends,
    )


@dataclass
class ChunkPlan:
    """One call's tokens in their chunks."""

    layout: ChunkLayout
    # of the layout, for the mixers' heads
    pieces: list[ScanPiece]
    # after the call
    past: Past


def plan_chunks(
    config: HopeConfig,
    shape: tuple[int, int],
    device: torch.device,
    past: Past | None = None,
    padding_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    input_ids: torch.Tensor | None = None,
    keeps_digest: bool = False,
) -> ChunkPlan:
    """Lay out the tokens of one call.

    Args:
        shape: (B, T) of the call.
        past: what earlier calls have read, or `None` at a text's start.
        padding_mask: [B, T], 0 for padding, or `None` where there is none.
        position_ids: [B or 1, T]; a token at position 0 begins a document. Unused in an exported graph, which reads
            one document a row; a compiled graph takes them for single tokens only.
        input_ids: [B, T], or `None` for a text of embeddings; for the digest alone.
        keeps_digest: whether there is a cache to keep the digest in.
    """
    batch_size, length = shape
    chunk = config.memory_chunk_size
    digest = torch.zeros(batch_size, dtype=torch.long, device=device)
    if keeps_digest:
        digest = extend_digest(digest + 1 if past is None else past.digest, input_ids)
    begins = None
    # One graph serves every token of a compiled generation: what it is, tensors tell.
    is_exporting = torch.compiler.is_exporting()
    any_token = torch.compiler.is_compiling() and not is_exporting and length == 1 and past is not None
    if position_ids is not None and not is_exporting:
        begins = (position_ids == 0).expand(shape)
        # a fresh row begins a document anyway
        later = begins[:, 1:] if past is None else begins
        begins = begins if any_token or bool(later.any()) else None
    columns = length if past is None else past.columns + length
    is_uniform = (past is None or past.is_uniform) and not any_token and padding_mask is None and begins is None
    if is_uniform:
        layout = plain_layout(length, chunk, columns - length)
        seen_after = torch.full((batch_size,), columns, device=device)
    else:
        everything = torch.ones(shape, dtype=torch.bool, device=device)
        valid = everything if padding_mask is None else padding_mask.bool()
        begins = ~everything if begins is None else begins & valid
        seen = torch.zeros(batch_size, dtype=torch.long, device=device) if past is None else past.seen
        positions = TokenPositions(valid, begins, seen)
        layout, seen_after = ragged_layout(positions, chunk), positions.seen_after()
    pieces = layout.scan_pieces(config.num_memory_heads, config.conv_kernel_size - 1)
    return ChunkPlan(layout, pieces, Past(columns, is_uniform, seen_after, digest))
