"""The branches of `sparse_branches` for many queries, with gradients written by hand.

No tensor grows with the square of the text. The compressed and the window branch take tiles of neighbouring queries.
The selected branch loops over blocks of keys and gathers the queries that selected the block, which are far smaller
than the keys of each query; a running maximum combines a query's blocks, as in flash attention (arXiv 2307.08691).
All are ordinary matrix products. The heads of a query lie side by side, so that a query is contiguous in memory.

Axes: B row, H head of keys, S query, G query heads that share it, R slot of keys, D head width, X selected block, n
queries of a tile or of a block of keys, m keys of either.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..model.backends import once_differentiable
from ..model.sparse_branches import SparseKeys, SparseSizes, sees_stride, sees_window, select_blocks
from .sparse_qkv import without_autocast

# queries per tile
_QUERY_TILE = 128
# most queries that are gathered at once: all queries read a document's first block
_GATHERED = 1024
_LOG2_E = math.log2(math.e)


def read_sparse_fused(
    queries: Tensor,
    gates: Tensor,
    text: SparseKeys,
    base: int,
    first: Tensor | None,
    sizes: SparseSizes,
    selected_by: Callable | None = None,
) -> tuple[Tensor, Tensor]:
    """`sparse_branches.read_sparse` for queries in neighbouring slots.

    Args:
        queries: scaled [B, H, G, S, D].
        gates: weights of the compressed, selected and window branch [B, H, G, S, 3].
        base: slot of the first query, in all rows.
        first: slot of the first token of each query's document [B, S]; `None` if all documents begin at slot 0.
        selected_by: function of the selected branch; `read_selected` unless given.
    """
    # the heads of a query side by side
    queries = queries.transpose(2, 3).contiguous()
    gates = gates.transpose(2, 3)
    # whole blocks of queries
    length = queries.shape[2]
    front = base % sizes.block
    base -= front
    back = -(front + length) % sizes.block
    if front or back:
        padding = 0, 0, 0, 0, front, back
        queries = F.pad(queries, padding)
        gates = F.pad(gates, padding)
    if first is not None:
        first = F.pad(first, (front, back), value=base)
    compressed_gate, selected_gate, window_gate = gates.split(1, dim=-1)
    batch, heads, whole_length = queries.shape[:3]
    blocks_of_text = (base + whole_length) // sizes.block
    shape = batch, heads, whole_length, min(sizes.top_k, blocks_of_text)
    blocks = torch.full(shape, -1, device=queries.device)
    # Each branch also returns its queries: chained, all branches accumulate into one gradient.
    tiles = _CompressedTiles(base, first, sizes)
    reads, queries = _Tiled.apply(
        queries, text.compressed_keys, text.compressed_values, compressed_gate, tiles, blocks
    )
    read_blocks = selected_by or read_selected
    selected, queries, keys, values = read_blocks(
        queries, text.keys, text.values, selected_gate, blocks, base, sizes.block
    )
    reads.add_(selected)
    # frees a tensor of the size of the queries
    del selected
    tiles = _WindowTiles(base, first, sizes)
    window, _ = _Tiled.apply(queries, keys, values, window_gate, tiles, None)
    reads.add_(window)
    inside = slice(front, front + length)
    reads = reads[:, :, inside]
    return reads.transpose(2, 3), blocks[:, :, inside]


# A range of a tile's keys, and what is added to the queries' scores of these: 0, or -inf for keys that a query cannot
# see [1 or B, 1, n, 1, keys].
Bias = tuple[slice, Tensor]


class _QueryTile(NamedTuple):
    """Neighbouring queries, and the range of keys that they read."""

    queries: slice
    keys: slice
    # of the keys that not all queries see
    biases: list[Bias]
    # 0 for queries that see no key of the tile, else 1 [1 or B, 1, n, 1, 1]; None if every query sees one
    sees_key: Tensor | None = None


@dataclass
class _Tiles:
    """The tiles of a branch for queries in neighbouring slots."""

    # slot of the first query
    base: int
    # first slot of the document of each query [B, S]; None if all documents begin at slot 0
    first: Tensor | None
    sizes: SparseSizes

    # whether every query sees a key
    all_see_keys = False

    def of(self, queries: Tensor) -> Iterator[_QueryTile]:
        """The tiles of queries [B, H, S, G, D]."""
        length = queries.shape[2]
        # by number of queries: tiles inside of a text share their biases
        biases_inside: dict[int, list[Bias]] = {}
        for start in range(0, length, _QUERY_TILE):
            stop = min(start + _QUERY_TILE, length)
            part = slice(start, stop)
            yield self.tile(part, queries, biases_inside)

    def tile(self, part: slice, queries: Tensor, biases_inside: dict[int, list[Bias]]) -> _QueryTile:
        """The tile of a range of queries."""
        start = self.base + part.start
        stop = self.base + part.stop
        number = stop - start
        keys, masked = self.ranges(start, stop)
        is_inside = len(masked) > 1
        if is_inside and number in biases_inside:
            return _QueryTile(part, keys, biases_inside[number])
        at = torch.arange(start, stop, device=queries.device)
        at = at[None, :, None]
        first = None if self.first is None else self.first[:, part, None]
        biases = []
        sees_key = None
        for some in masked:
            index = torch.arange(some.start, some.stop, device=queries.device)
            visible = self.visible(index, at, first)
            if some == keys and not self.all_see_keys:
                sees_key = visible.any(-1, keepdim=True)
                visible = visible | ~sees_key
                sees_key = sees_key[:, None, :, None].to(queries.dtype)
            columns = slice(some.start - keys.start, some.stop - keys.start)
            bias = _bias(visible, queries.dtype)
            biases.append((columns, bias))
        if is_inside:
            biases_inside[number] = biases
        return _QueryTile(part, keys, biases, sees_key)


class _WindowTiles(_Tiles):
    all_see_keys = True

    def ranges(self, start: int, stop: int) -> tuple[slice, list[slice]]:
        """The keys that queries in slots `start` to `stop` read, and those of them that not all queries see."""
        first_key = start - self.sizes.window + 1
        last_start = stop - self.sizes.window
        keys = slice(max(0, first_key), stop)
        if self.first is None and first_key > 0 and last_start < start:
            before = slice(first_key, last_start)
            own = slice(start, stop)
            return keys, [before, own]
        return keys, [keys]

    def visible(self, slot: Tensor, at: Tensor, first: Tensor | None) -> Tensor:
        """Whether queries [n] see keys [m]: [1 or B, n, m]."""
        return sees_window(slot, at, first, self.sizes.window)


class _CompressedTiles(_Tiles):
    def ranges(self, start: int, stop: int) -> tuple[slice, list[slice]]:
        """As in `_WindowTiles`; keys are strides."""
        stride = self.sizes.stride
        end = stop // stride
        seen_by_all = 0
        if self.first is None:
            seen_by_all = (start + 1) // stride
        return slice(0, end), [slice(seen_by_all, end)]

    def visible(self, index: Tensor, at: Tensor, first: Tensor | None) -> Tensor:
        """Whether queries [n] see the keys of strides [m]: [1 or B, n, m]."""
        stride = self.sizes.stride
        return sees_stride(index * stride, at, first, stride)

    def select(self, part: slice, attention: Tensor) -> Tensor:
        """The blocks that a range of queries selects [B, H, n, X], by its attention [B, H, n, G, m]."""
        start = self.base + part.start
        stop = self.base + part.stop
        sizes = self.sizes
        at = torch.arange(start, stop, device=attention.device)[None]
        if self.first is None:
            first = torch.zeros_like(at)
        else:
            first = self.first[:, part]
        # up to the end of the tile's last block
        blocks = -(-stop // sizes.block)
        strides_of_block = sizes.block // sizes.stride
        missing = blocks * strides_of_block - attention.shape[-1]
        of_key_head = attention.sum(3)
        of_key_head = F.pad(of_key_head, (0, missing))
        return select_blocks(of_key_head, at, first, sizes)


def _bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a query sees a key, else -inf [1 or B, 1, n, 1, m]; from [1 or B, n, m]."""
    bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    bias.masked_fill_(~visible, -torch.inf)
    return bias[:, None, :, None]


def _attention(query: Tensor, key: Tensor, tile: _QueryTile) -> Tensor:
    """Softmax attention [B, H, n, G, m] of queries [B, H, n, G, D]; 0 for queries that see no key."""
    scores = query.flatten(2, 3) @ key.mT
    scores = scores.unflatten(2, query.shape[2:4])
    for columns, bias in tile.biases:
        scores[..., columns] += bias
    attention = scores.softmax(-1)
    return attention if tile.sees_key is None else attention.mul_(tile.sees_key)


class _Tiled(torch.autograd.Function):
    """A branch whose queries each read one range of keys: its reads times their gate [B, H, S, G, D], and its queries.

    Takes queries [B, H, S, G, D], keys and values [B, H, m, D], gates [B, H, S, G, 1], the branch's tiles, and None or
    a tensor [B, H, S, X] into which it writes the blocks that the queries select, where there are any.
    """

    @staticmethod
    def forward(ctx, queries, keys, values, gates, tiles, blocks):
        reads = torch.empty_like(queries)
        for tile in tiles.of(queries):
            part = tile.queries
            query = queries[:, :, part]
            key = keys[:, :, tile.keys]
            value = values[:, :, tile.keys]
            attention = _attention(query, key, tile)
            read = attention.flatten(2, 3) @ value
            read = read.view(query.shape)
            reads[:, :, part] = read.mul_(gates[:, :, part])
            if blocks is not None:
                selected = tiles.select(part, attention)
                blocks[:, :, part, : selected.shape[-1]] = selected
        ctx.tiles = tiles
        ctx.save_for_backward(queries, keys, values, gates)
        return reads, queries

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx, grad, grad_queries):
        queries, keys, values, gates = ctx.saved_tensors
        grad_keys = torch.zeros_like(keys)
        grad_values = torch.zeros_like(values)
        grad_gates = torch.zeros_like(gates)
        for tile in ctx.tiles.of(queries):
            part = tile.queries
            query = queries[:, :, part]
            key = keys[:, :, tile.keys]
            value = values[:, :, tile.keys]
            rows = query.flatten(2, 3)
            grad_rows = grad[:, :, part].flatten(2, 3)
            attention = _attention(query, key, tile).flatten(2, 3)
            grad_scores = grad_rows @ value.mT
            # the read times its gradient: also the gradient of the gate
            row_dot = torch.linalg.vecdot(attention, grad_scores).unsqueeze(-1)
            gate = gates[:, :, part]
            grad_gates[:, :, part] = row_dot.view(gate.shape)
            attention.mul_(gate.flatten(2, 3))
            grad_values[:, :, tile.keys] += attention.mT @ grad_rows
            grad_scores.sub_(row_dot).mul_(attention)
            grad_keys[:, :, tile.keys] += grad_scores.mT @ rows
            # the gradients of the branches after this one are in it
            grad_query = grad_scores @ key
            grad_queries[:, :, part] += grad_query.view(query.shape)
        return grad_queries, grad_keys, grad_values, grad_gates, None, None


class _KeyBlock(NamedTuple):
    """One block of keys and queries that selected it, in one row and head."""

    # index among the B H heads of all rows
    head: int
    keys: slice
    queries: Tensor
    # true for keys after the query, among the first n queries [n, 1, m]; None if no query is in the block
    hidden: Tensor | None


def _key_blocks(blocks: Tensor, base: int, size: int) -> list[_KeyBlock]:
    """All blocks of `size` keys that queries selected, from `blocks` [B, H, S, X] (-1 for none)."""
    length, number = blocks.shape[2:]
    # -1 becomes one more block, which is left out below
    last = (base + length) // size
    bins = last + 1
    selected = torch.where(blocks < 0, last, blocks)
    selected = selected.flatten(0, 1).flatten(1)
    ordered, order = selected.sort(dim=1, stable=True)
    heads = torch.arange(len(selected), device=blocks.device)
    ordered += heads[:, None] * bins
    counts = ordered.view(-1).bincount(minlength=len(heads) * bins)
    queries_of_blocks = (order // number).view(-1).split(counts.tolist())
    inside = torch.arange(size, device=blocks.device)
    is_later = inside[:, None] < inside
    hidden = is_later[:, None]
    most_gathered = max(_GATHERED, size)
    key_blocks = []
    for index, queries in enumerate(queries_of_blocks):
        head, block = divmod(index, bins)
        if block == last or not len(queries):
            continue
        keys = slice(block * size, (block + 1) * size)
        # Every query selects its own block, and the queries of the block itself come first.
        hidden_of_first = hidden if keys.start >= base else None
        for part in queries.split(most_gathered):
            key_blocks.append(_KeyBlock(head, keys, part, hidden_of_first))
            hidden_of_first = None
    return key_blocks


def _by_head(x: Tensor) -> list[Tensor]:
    """Views of [B, H, ...] by row and head."""
    return [head for row in x for head in row]


def _rows_by_head(x: Tensor) -> list[Tensor]:
    """Views [S, G D] of contiguous [B, H, S, G, D], the form that torch gathers fastest."""
    batch, heads, length = x.shape[:3]
    return _by_head(x.view(batch, heads, length, -1))


class _Selected(torch.autograd.Function):
    """Reads of the selected blocks times their gate [B, H, S, G, D]; queries, keys and values for the next branch.

    Exponentials are powers of two, which torch computes three times as fast.
    """

    @staticmethod
    def scores(queries: Tensor, key: Tensor, index: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        """Queries [n G, D], the heads of a query side by side, and their scores for keys [m, D] in base two [n G, m].

        `queries` are all of the head [S, G D], of which those of `index` [n] are read.
        """
        query = queries.index_select(0, index)
        query = query.view(-1, key.shape[1])
        unused = query.new_zeros(())
        scores = torch.addmm(unused, query, key.mT, beta=0, alpha=_LOG2_E)
        if hidden is not None:
            by_query = scores.view(len(index), -1, len(key))
            by_query[: len(hidden)].masked_fill_(hidden, -torch.inf)
        return query, scores

    @staticmethod
    def forward(ctx, queries, keys, values, gates, blocks, base, size):
        reads = torch.zeros_like(queries)
        # over the blocks so far: largest score [..., 0], and sum of powers [..., 1]
        sums = queries.new_zeros(*queries.shape[:-1], 2)
        sums[..., 0] = -torch.inf
        key_blocks = _key_blocks(blocks, base, size)
        queries_of = _rows_by_head(queries)
        reads_of = _rows_by_head(reads)
        sums_of = _rows_by_head(sums)
        keys_of = _by_head(keys)
        values_of = _by_head(values)
        for head, block, index, hidden in key_blocks:
            key = keys_of[head][block]
            value = values_of[head][block]
            query, scores = _Selected.scores(queries_of[head], key, index, hidden)
            # of these queries, over the blocks so far
            read = reads_of[head].index_select(0, index)
            sums_of_block = sums_of[head].index_select(0, index)
            largest, total = sums_of_block.view(-1, 2).split(1, dim=-1)
            new_largest = torch.maximum(largest, scores.amax(-1, keepdim=True))
            powers = scores.sub_(new_largest).exp2_()
            rescale = (largest - new_largest).exp2_()
            read.view(query.shape).mul_(rescale).addmm_(powers, value)
            total.mul_(rescale)
            total.add_(powers.sum(-1, keepdim=True))
            largest.copy_(new_largest)
            reads_of[head].index_copy_(0, index, read)
            sums_of[head].index_copy_(0, index, sums_of_block)
        largest, total = sums.split(1, dim=-1)
        reads.div_(total)
        ctx.key_blocks = key_blocks
        ctx.log_sums = largest + total.log2()
        ctx.save_for_backward(queries, keys, values, gates, reads)
        return reads * gates, queries, keys, values

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx, grad, grad_queries, grad_keys, grad_values):
        queries, keys, values, gates, reads = ctx.saved_tensors
        # the read times its gradient: also the gradient of the gate
        row_dot = torch.empty_like(gates)
        for start in range(0, queries.shape[2], _QUERY_TILE):
            part = slice(start, start + _QUERY_TILE)
            grad_of_tile = grad[:, :, part]
            reads_of_tile = reads[:, :, part]
            row_dot[:, :, part, :, 0] = torch.linalg.vecdot(grad_of_tile, reads_of_tile)
        # three numbers per query and head, gathered together
        numbers = torch.cat([ctx.log_sums, row_dot, gates], dim=-1)
        queries_of = _rows_by_head(queries)
        grad_of = _rows_by_head(grad)
        numbers_of = _rows_by_head(numbers)
        keys_of = _by_head(keys)
        values_of = _by_head(values)
        # the gradients of the branches after this one are in these, and are added to in place
        grad_queries_of = _rows_by_head(grad_queries)
        grad_keys_of = _by_head(grad_keys)
        grad_values_of = _by_head(grad_values)
        for head, block, index, hidden in ctx.key_blocks:
            key = keys_of[head][block]
            value = values_of[head][block]
            query, scores = _Selected.scores(queries_of[head], key, index, hidden)
            grad_read = grad_of[head].index_select(0, index)
            grad_read = grad_read.view(query.shape)
            numbers_of_block = numbers_of[head].index_select(0, index)
            log_sum, dot, gate = numbers_of_block.view(-1, 3).split(1, dim=-1)
            attention = scores.sub_(log_sum).exp2_().mul_(gate)
            grad_scores = grad_read @ value.mT
            grad_scores.sub_(dot).mul_(attention)
            grad_values_of[head][block].addmm_(attention.mT, grad_read)
            grad_keys_of[head][block].addmm_(grad_scores.mT, query)
            grad_query = grad_scores @ key
            grad_query = grad_query.view(len(index), -1)
            grad_queries_of[head].index_add_(0, index, grad_query)
        return grad_queries, grad_keys, grad_values, row_dot, None, None, None


def read_selected(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    gates: Tensor,
    blocks: Tensor,
    base: int,
    size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reads of the selected blocks [B, H, S, X] (-1 for none) of that size, times their gate [B, H, S, G, D].

    Also returns queries, keys and values, through which the gradients of the next branch arrive. Queries and keys are
    whole blocks; the first query's slot is `base`. Each query selects its own block.
    """
    return _Selected.apply(queries, keys, values, gates, blocks, base, size)
