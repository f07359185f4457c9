"""The branches of `sparse_branches` for a whole text: tiles of queries and blocks of keys, gradients by hand.

Nothing of the size of the text's square is built. Compressed and window branch take tiles of neighbouring queries. The
selected branch goes block of keys by block of keys and gathers the queries that have selected it, which are far
smaller than what each of them reads; a query's blocks are added up under a running maximum, as in flash attention
(arXiv 2307.08691). All are ordinary products of matrices.

Axes: B row, H head of keys, G query heads that share it, S query, R slot of keys, D head width, n queries of a tile, m
keys of a tile.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .sparse_branches import Reads, SparseKeys, SparseSizes, select_blocks

# queries of a tile
_TILE = 128


def read_sparse_fused(
    queries: torch.Tensor, held: SparseKeys, base: int, first: torch.Tensor | None, sizes: SparseSizes
) -> tuple[Reads, torch.Tensor]:
    """`sparse_branches.read_sparse` of queries in neighbouring slots.

    Args:
        queries: scaled [B, H, G, S, D].
        base: slot of the first query, in all rows.
        first: slot of the first token of each query's document [B, S]; `None` where all begin at slot 0.
    """
    # whole blocks of queries
    length, front = queries.shape[3], base % sizes.block
    back, base = -(front + length) % sizes.block, base - front
    if front or back:
        queries = F.pad(queries, (0, 0, front, back))
    if first is not None:
        first = F.pad(first, (front, back), value=base)
    compressed, chosen = _Compressed.apply(queries, held.compressed_keys, held.compressed_values, base, first, sizes)
    selected = _Selected.apply(queries, held.keys, held.values, chosen, base, sizes.block)
    window = _Window.apply(queries, held.keys, held.values, base, first, sizes.window)
    inside = slice(front, front + length)
    return tuple(read[:, :, :, inside] for read in (compressed, selected, window)), chosen[:, :, inside]


class _Tile(NamedTuple):
    """Neighbouring queries and the range of keys that they read."""

    queries: slice
    keys: slice
    # what is added to scores: 0, or -inf for keys that a query does not see [1 or B, 1, 1, n, columns]
    hidden: list[tuple[slice, torch.Tensor]]
    # 0 for queries that see none of the keys [1 or B, 1, 1, n, 1], where there may be any
    sees: torch.Tensor | None = None


def _tile(cut: slice, keys: slice, columns: list[slice], visible: Callable, like: torch.Tensor, dark: bool) -> _Tile:
    """A tile of which all keys but those in `columns` are seen by all queries; `visible` tells of [..., n, m]."""
    hidden, sees = [], None
    for part in columns:
        seen = visible(part)[:, None, None]
        if dark:
            sees = seen.any(-1, keepdim=True)
            seen, sees = seen | ~sees, sees.to(like.dtype)
        mask = torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, float("-inf"))
        hidden.append((slice(part.start - keys.start, part.stop - keys.start), mask))
    return _Tile(cut, keys, hidden, sees)


def _attention(query: torch.Tensor, key: torch.Tensor, tile: _Tile) -> torch.Tensor:
    """Softmax attention [B, H, G n, m] of queries [B, H, G, n, D]; 0 for those that see nothing."""
    scores = query.flatten(2, 3) @ key.mT
    by_head = scores.unflatten(2, query.shape[2:4])
    for columns, mask in tile.hidden:
        by_head[..., columns] += mask
    attention = scores.softmax(-1)
    if tile.sees is not None:
        attention.unflatten(2, query.shape[2:4]).mul_(tile.sees)
    return attention


def _score_gradient(attention, grad, values, delta) -> torch.Tensor:
    """Of the scores behind `attention @ values`; `delta` is the sum of each read times its gradient."""
    return (grad @ values.mT).sub_(delta).mul_(attention)


def _queries_of_tiles(queries: torch.Tensor, base: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Queries of every tile, and their slots [n, 1]."""
    for start in range(0, queries.shape[3], _TILE):
        stop = min(start + _TILE, queries.shape[3])
        yield slice(start, stop), torch.arange(base + start, base + stop, device=queries.device)[:, None]


def _window_tiles(queries, base: int, first, window: int) -> Iterator[_Tile]:
    for cut, at in _queries_of_tiles(queries, base):
        start, stop = base + cut.start, base + cut.stop
        low = max(0, start - window + 1)

        def visible(part: slice, at=at, cut=cut) -> torch.Tensor:
            near = torch.arange(part.start, part.stop, device=at.device)
            seen = ((near <= at) & (near > at - window))[None]
            return seen if first is None else seen & (near >= first[:, cut, None])

        columns = [slice(low, stop)]
        if first is None and low and stop - window < start:
            # between lie those that all queries of the tile see
            columns = [slice(low, stop - window), slice(start, stop)]
        yield _tile(cut, slice(low, stop), columns, visible, queries, dark=False)


def _compressed_tiles(queries, base: int, first, stride: int) -> Iterator[_Tile]:
    for cut, at in _queries_of_tiles(queries, base):
        high = (base + cut.stop) // stride

        def visible(part: slice, at=at, cut=cut) -> torch.Tensor:
            begin = torch.arange(part.start, part.stop, device=at.device) * stride
            seen = (begin + stride <= at + 1)[None]
            return seen if first is None else seen & (begin >= first[:, cut, None])

        seen_by_all = 0 if first is not None else (base + cut.start + 1) // stride
        columns = slice(seen_by_all, high)
        yield _tile(cut, slice(0, high), [columns], visible, queries, dark=not seen_by_all)


class _Tiled(torch.autograd.Function):
    """A branch of which every query reads within one range of keys: reads [B, H, G, S, D]."""

    @staticmethod
    def gradients(ctx, grad, tiles: Callable) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of queries, keys and values; `tiles` of the queries and of where documents begin."""
        queries, keys, values, reads, first = ctx.saved_tensors
        grad_queries, grad_keys, grad_values = (torch.zeros_like(part) for part in (queries, keys, values))
        delta = torch.linalg.vecdot(grad, reads).unsqueeze(-1)
        for tile in tiles(queries, first):
            query, part = queries[:, :, :, tile.queries], grad[:, :, :, tile.queries].flatten(2, 3)
            key, value = keys[:, :, tile.keys], values[:, :, tile.keys]
            attention = _attention(query, key, tile)
            grad_values[:, :, tile.keys] += attention.mT @ part
            grad_scores = _score_gradient(attention, part, value, delta[:, :, :, tile.queries].flatten(2, 3))
            grad_keys[:, :, tile.keys] += grad_scores.mT @ query.flatten(2, 3)
            grad_queries[:, :, :, tile.queries] = (grad_scores @ key).unflatten(2, query.shape[2:4])
        return grad_queries, grad_keys, grad_values


class _Window(_Tiled):
    @staticmethod
    def forward(ctx, queries, keys, values, base, first, window):
        reads = torch.empty_like(queries)
        for tile in _window_tiles(queries, base, first, window):
            query = queries[:, :, :, tile.queries]
            read = _attention(query, keys[:, :, tile.keys], tile) @ values[:, :, tile.keys]
            reads[:, :, :, tile.queries] = read.unflatten(2, query.shape[2:4])
        ctx.tiles = lambda queries, first: _window_tiles(queries, base, first, window)
        ctx.save_for_backward(queries, keys, values, reads, first)
        return reads

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return *_Tiled.gradients(ctx, grad, ctx.tiles), None, None, None


class _Compressed(_Tiled):
    """Also the blocks that the attention selects [B, H, S, X]."""

    @staticmethod
    def forward(ctx, queries, keys, values, base, first, sizes):
        reads = torch.empty_like(queries)
        batch, heads, _, length, _ = queries.shape
        blocks = (base + length) // sizes.block
        chosen = torch.full((batch, heads, length, min(sizes.top_k, blocks)), -1, device=queries.device)
        for tile in _compressed_tiles(queries, base, first, sizes.stride):
            query, cut = queries[:, :, :, tile.queries], tile.queries
            attention = _attention(query, keys[:, :, tile.keys], tile)
            reads[:, :, :, cut] = (attention @ values[:, :, tile.keys]).unflatten(2, query.shape[2:4])
            at = torch.arange(base + cut.start, base + cut.stop, device=queries.device)[None]
            begin = torch.zeros_like(at) if first is None else first[:, cut]
            # to the end of the tile's last block
            summed = attention.unflatten(2, query.shape[2:4]).sum(2)
            more = -(-(base + cut.stop) // sizes.block) * (sizes.block // sizes.stride) - summed.shape[-1]
            best = select_blocks(F.pad(summed, (0, more)), at, begin, sizes)
            chosen[:, :, cut, : best.shape[-1]] = best
        ctx.tiles = lambda queries, first: _compressed_tiles(queries, base, first, sizes.stride)
        ctx.save_for_backward(queries, keys, values, reads, first)
        ctx.mark_non_differentiable(chosen)
        return reads, chosen

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        return *_Tiled.gradients(ctx, grad, ctx.tiles), None, None, None


def _selecting(chosen: torch.Tensor, own: torch.Tensor, blocks: int) -> tuple[torch.Tensor, list[int]]:
    """Queries that have selected a block, ordered by row, head and block, and how many each block has.

    What is no block, or the query's own, counts as block `blocks`.

    Args:
        chosen: [B, H, S, X], -1 for none.
        own: block of each query [S].
    """
    batch, heads, _, number = chosen.shape
    others = torch.where((chosen < 0) | (chosen == own[:, None]), blocks, chosen).view(batch * heads, -1)
    ordered, place = others.sort(dim=1, stable=True)
    ordered += torch.arange(batch * heads, device=chosen.device)[:, None] * (blocks + 1)
    counts = ordered.view(-1).bincount(minlength=batch * heads * (blocks + 1))
    return (place // number).view(-1), counts.tolist()


class _Selected(torch.autograd.Function):
    """Reads [B, H, G, S, D] of the blocks `chosen`; queries and keys are whole blocks."""

    @staticmethod
    def forward(ctx, queries, keys, values, chosen, base, block):
        # a query's heads are gathered together
        rows = queries.transpose(2, 3)
        batch, heads, length, group, width = rows.shape
        blocks, own = (base + length) // block, torch.arange(base, base + length, device=rows.device) // block
        # The sums begin with every query's own block, the only one of which it must not see all.
        scores = _own_scores(rows, keys, base, block)
        top = scores.amax(-1, keepdim=True)
        scores.sub_(top).exp_()
        near = slice(base, base + length)
        reads = scores @ values[:, :, near].unflatten(2, (-1, block))
        total = scores.sum(-1, keepdim=True)
        reads, top, total = (
            part.unflatten(3, (block, group)).view(batch * heads, length, group, -1) for part in (reads, top, total)
        )
        queries_of, counts = _selecting(chosen, own, blocks)
        rows_of, keys_of, values_of = (_by_head(part) for part in (rows, keys, values))
        for head, near, index in _visits(queries_of, counts, blocks, block):
            query = rows_of[head].index_select(0, index).view(-1, width)
            scores = query @ keys_of[head][near].mT
            before = top[head].index_select(0, index).view(-1, 1)
            after = torch.maximum(before, scores.amax(-1, keepdim=True))
            scores.sub_(after).exp_()
            left = before.sub_(after).exp_()
            read = reads[head].index_select(0, index).view(-1, width).mul_(left).addmm_(scores, values_of[head][near])
            count = total[head].index_select(0, index).view(-1, 1).mul_(left).add_(scores.sum(-1, keepdim=True))
            for whole, part in ((reads, read), (top, after), (total, count)):
                whole[head].index_copy_(0, index, part.view(len(index), group, -1))
        reads.div_(total)
        ctx.sums = top.add_(total.log_())
        ctx.base, ctx.block, ctx.counts = base, block, counts
        ctx.save_for_backward(queries, keys, values, reads, queries_of)
        return reads.view(batch, heads, length, group, width).transpose(2, 3)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        queries, keys, values, reads, queries_of = ctx.saved_tensors
        sums, base, block = ctx.sums, ctx.base, ctx.block
        rows = queries.transpose(2, 3)
        batch, heads, length, group, width = rows.shape
        grad = grad.transpose(2, 3)
        delta = torch.linalg.vecdot(grad, reads.view(rows.shape)).view(batch * heads, length, group, 1)
        grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
        near = slice(base, base + length)

        # of every query's own block [B, H, Y, block * G, ...]
        def by_block(part: torch.Tensor) -> torch.Tensor:
            return part.reshape(batch, heads, -1, block * group, part.shape[-1])

        value = values[:, :, near].unflatten(2, (-1, block))
        attention = _own_scores(rows, keys, base, block)
        attention.sub_(by_block(sums)).exp_()
        grad_values[:, :, near] = (attention.mT @ by_block(grad)).flatten(2, 3)
        grad_scores = _score_gradient(attention, by_block(grad), value, by_block(delta))
        grad_keys[:, :, near] = (grad_scores.mT @ by_block(rows)).flatten(2, 3)
        grad_rows = (grad_scores @ keys[:, :, near].unflatten(2, (-1, block))).view(rows.shape)
        del attention, grad_scores
        rows_of, grad_of, grad_rows_of = (_by_head(part) for part in (rows, grad, grad_rows))
        keys_of, values_of, grad_keys_of, grad_values_of = map(_by_head, (keys, values, grad_keys, grad_values))
        for head, near, index in _visits(queries_of, ctx.counts, (base + length) // block, block):
            query, part = (of[head].index_select(0, index).view(-1, width) for of in (rows_of, grad_of))
            total, along = (of[head].index_select(0, index).view(-1, 1) for of in (sums, delta))
            key, value = keys_of[head][near], values_of[head][near]
            attention = (query @ key.mT).sub_(total).exp_()
            grad_values_of[head][near].addmm_(attention.mT, part)
            grad_scores = _score_gradient(attention, part, value, along)
            grad_keys_of[head][near].addmm_(grad_scores.mT, query)
            grad_rows_of[head].index_add_(0, index, (grad_scores @ key).view(len(index), group, width))
        return grad_rows.transpose(2, 3), grad_keys, grad_values, None, None, None


def _by_head(part: torch.Tensor) -> list[torch.Tensor]:
    """Views of [B, H, ...], row after row, wherever they lie."""
    return [head for row in part for head in row]


def _own_scores(rows: torch.Tensor, keys: torch.Tensor, base: int, block: int) -> torch.Tensor:
    """Scores [B, H, Y, block * G, block] of queries [B, H, S, G, D] with keys of their block, up to their own."""
    length, group = rows.shape[2:4]
    key = keys[:, :, base : base + length].unflatten(2, (-1, block))
    scores = rows.reshape(*rows.shape[:2], -1, block * group, rows.shape[-1]) @ key.mT
    inside = torch.arange(block, device=rows.device)
    hidden = (inside[:, None] < inside).repeat_interleave(group, dim=0)
    return scores.masked_fill_(hidden, float("-inf"))


def _visits(queries_of: torch.Tensor, counts: list[int], blocks: int, block: int):
    """Row and head, slots of a block, and the queries that have selected it (`_selecting`)."""
    for visit, index in enumerate(queries_of.split(counts)):
        head, place = divmod(visit, blocks + 1)
        if len(index) and place < blocks:
            yield head, slice(place * block, (place + 1) * block), index
