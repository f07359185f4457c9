"""The branches of `sparse_branches` for a whole text: tiles of queries and blocks of keys, gradients by hand.

Nothing of the size of the text's square is built. Compressed and window branch take tiles of neighbouring queries. The
selected branch goes block of keys by block of keys and gathers the queries that have selected it, which are far
smaller than what each of them reads; a query's blocks are added up under a running maximum, as in flash attention
(arXiv 2307.08691). All are ordinary products of matrices.

Axes: B row, H head of keys, G query heads that share it, S query, R slot of keys, D head width, n queries of a tile, m
keys of a tile.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .sparse_branches import SparseKeys, SparseSizes, select_blocks

# queries of a tile
_TILE = 128


def read_sparse_fused(
    queries: torch.Tensor, held: SparseKeys, base: int, first: torch.Tensor | None, sizes: SparseSizes
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sparse_branches.read_sparse` of queries in neighbouring slots.

    Args:
        queries: scaled [B, H, G, S, D].
        base: slot of the first query, in all rows.
        first: slot of the first token of each query's document [B, S]; `None` where all begin at slot 0.
    """
    # whole blocks of queries
    length, front = queries.shape[3], base % sizes.block
    back = -(front + length) % sizes.block
    queries, base = F.pad(queries, (0, 0, front, back)), base - front
    if first is not None:
        first = F.pad(first, (front, back), value=base)
    compressed, chosen = _Compressed.apply(queries, held.compressed_keys, held.compressed_values, base, first, sizes)
    selected = _Selected.apply(queries, held.keys, held.values, chosen, base, sizes.block)
    window = _Window.apply(queries, held.keys, held.values, base, first, sizes.window)
    inside = slice(front, front + length)
    return torch.stack([read[:, :, :, inside] for read in (compressed, selected, window)]), chosen[:, :, inside]


def _attention(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the last axis, in place, and the logarithm of its sum; rows of -inf alone give 0."""
    top = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
    total = scores.sub_(top).exp_().sum(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).tiny)
    return scores.div_(total), top.add_(total.log())


def _score_gradient(attention, grad, values, delta) -> torch.Tensor:
    """Of the scores behind `attention @ values`; `delta` is the sum of each read times its gradient."""
    return (grad @ values.mT).sub_(delta).mul_(attention)


def _tiles(queries: torch.Tensor, base: int) -> Iterator[tuple[slice, int, int]]:
    """Queries of a tile, and the slots of its first and behind its last."""
    for start in range(0, queries.shape[3], _TILE):
        stop = min(start + _TILE, queries.shape[3])
        yield slice(start, stop), base + start, base + stop


class _Tiled(torch.autograd.Function):
    """A branch of which every query reads within one range of keys: reads [B, H, G, S, D]."""

    @classmethod
    def scores(cls, queries, keys, mask) -> torch.Tensor:
        """Scores [B, H, G, n, m]; -inf where `mask` [B or 1, n, m] is false."""
        product = (queries.flatten(2, 3) @ keys.mT).unflatten(2, queries.shape[2:4])
        return product.masked_fill_(~mask[:, None, None], float("-inf"))

    @staticmethod
    def gradients(saved, grad, ranges) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of queries, keys and values."""
        queries, keys, values, reads, sums = saved
        grad_queries, grad_keys, grad_values = (torch.zeros_like(part) for part in (queries, keys, values))
        delta = (grad * reads).sum(-1, keepdim=True)
        for cut, near, mask in ranges:
            if near.start == near.stop:
                continue
            query, key, value, part = queries[:, :, :, cut], keys[:, :, near], values[:, :, near], grad[:, :, :, cut]
            attention = _Tiled.scores(query, key, mask).sub_(sums[:, :, :, cut]).exp_().flatten(2, 3)
            rows = part.flatten(2, 3)
            grad_values[:, :, near] += attention.mT @ rows
            grad_scores = _score_gradient(attention, rows, value, delta[:, :, :, cut].flatten(2, 3))
            grad_keys[:, :, near] += grad_scores.mT @ query.flatten(2, 3)
            grad_queries[:, :, :, cut] = (grad_scores @ key).unflatten(2, query.shape[2:4])
        return grad_queries, grad_keys, grad_values


def _window_ranges(queries, base: int, first, window: int):
    """Of each tile of queries: the keys it reads, and which of them each query sees [B or 1, n, m]."""
    for cut, start, stop in _tiles(queries, base):
        low = max(0, start - window + 1)
        at = torch.arange(start, stop, device=queries.device)[:, None]
        near = torch.arange(low, stop, device=queries.device)
        mask = ((near <= at) & (near > at - window))[None]
        if first is not None:
            mask = mask & (near >= first[:, cut, None])
        yield cut, slice(low, stop), mask


def _compressed_ranges(queries, base: int, first, sizes: SparseSizes, whole: bool = False):
    """As `_window_ranges`, of compressed keys; if `whole`, to the end of the tile's last block."""
    per_block = sizes.block // sizes.stride
    for cut, start, stop in _tiles(queries, base):
        high = -(-stop // sizes.block) * per_block if whole else stop // sizes.stride
        at = torch.arange(start, stop, device=queries.device)[:, None]
        begin = torch.arange(high, device=queries.device) * sizes.stride
        mask = (begin + sizes.stride <= at + 1)[None]
        if first is not None:
            mask = mask & (begin >= first[:, cut, None])
        yield cut, slice(0, high), mask


class _Window(_Tiled):
    @staticmethod
    def forward(ctx, queries, keys, values, base, first, window):
        reads, sums = torch.empty_like(queries), queries.new_empty(*queries.shape[:4], 1)
        for cut, near, mask in _window_ranges(queries, base, first, window):
            attention, total = _attention(_Tiled.scores(queries[:, :, :, cut], keys[:, :, near], mask))
            sums[:, :, :, cut] = total
            reads[:, :, :, cut] = (attention.flatten(2, 3) @ values[:, :, near]).unflatten(2, total.shape[2:4])
        ctx.base, ctx.window = base, window
        ctx.save_for_backward(queries, keys, values, reads, sums, first)
        return reads

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        *saved, first = ctx.saved_tensors
        ranges = _window_ranges(saved[0], ctx.base, first, ctx.window)
        return *_Tiled.gradients(saved, grad.contiguous(), ranges), None, None, None


class _Compressed(_Tiled):
    """Also the blocks that the attention selects [B, H, S, X]."""

    @staticmethod
    def forward(ctx, queries, keys, values, base, first, sizes):
        reads, sums = torch.empty_like(queries), queries.new_empty(*queries.shape[:4], 1)
        batch, heads, _, length, _ = queries.shape
        blocks = (base + length) // sizes.block
        chosen = torch.full((batch, heads, length, min(sizes.top_k, blocks)), -1, device=queries.device)
        for cut, near, mask in _compressed_ranges(queries, base, first, sizes, whole=True):
            attention, total = _attention(_Tiled.scores(queries[:, :, :, cut], keys[:, :, near], mask))
            sums[:, :, :, cut] = total
            reads[:, :, :, cut] = (attention.flatten(2, 3) @ values[:, :, near]).unflatten(2, total.shape[2:4])
            at = torch.arange(base + cut.start, base + cut.stop, device=queries.device)[None]
            begin = torch.zeros_like(at) if first is None else first[:, cut]
            best = select_blocks(attention.sum(2), at, begin, sizes)
            chosen[:, :, cut, : best.shape[-1]] = best
        ctx.base, ctx.sizes = base, sizes
        ctx.save_for_backward(queries, keys, values, reads, sums, first)
        ctx.mark_non_differentiable(chosen)
        return reads, chosen

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        *saved, first = ctx.saved_tensors
        ranges = _compressed_ranges(saved[0], ctx.base, first, ctx.sizes)
        return *_Tiled.gradients(saved, grad.contiguous(), ranges), None, None, None


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
        # a query's heads lie side by side: one row is gathered for all
        rows = queries.transpose(2, 3).contiguous()
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
        rows = rows.view(batch * heads, length, group, width)
        keys_of, values_of = keys.flatten(0, 1), values.flatten(0, 1)
        for head, near, index in _visits(queries_of, counts, blocks, block):
            query = rows[head].index_select(0, index).view(-1, width)
            scores = query @ keys_of[head, near].mT
            before = top[head].index_select(0, index).view(-1, 1)
            after = torch.maximum(before, scores.amax(-1, keepdim=True))
            scores.sub_(after).exp_()
            left = before.sub_(after).exp_()
            read = reads[head].index_select(0, index).view(-1, width).mul_(left).addmm_(scores, values_of[head, near])
            count = total[head].index_select(0, index).view(-1, 1).mul_(left).add_(scores.sum(-1, keepdim=True))
            for whole, part in ((reads, read), (top, after), (total, count)):
                whole[head].index_copy_(0, index, part.view(len(index), group, -1))
        reads.div_(total)
        ctx.sums = top.add_(total.log_())
        ctx.base, ctx.block, ctx.counts = base, block, counts
        ctx.save_for_backward(rows, keys, values, reads, queries_of)
        return reads.view(batch, heads, length, group, width).transpose(2, 3)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        rows, keys, values, reads, queries_of = ctx.saved_tensors
        sums, base, block = ctx.sums, ctx.base, ctx.block
        batch, heads = keys.shape[:2]
        _, length, group, width = rows.shape
        grad = grad.transpose(2, 3).contiguous().view(rows.shape)
        delta = (grad * reads).sum(-1, keepdim=True)
        grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
        near = slice(base, base + length)

        # of every query's own block [B, H, Y, block * G, ...]
        def by_block(part: torch.Tensor) -> torch.Tensor:
            return part.view(batch, heads, -1, block * group, part.shape[-1])

        value = values[:, :, near].unflatten(2, (-1, block))
        attention = _own_scores(rows.view(batch, heads, length, group, width), keys, base, block)
        attention.sub_(by_block(sums)).exp_()
        grad_values[:, :, near] = (attention.mT @ by_block(grad)).flatten(2, 3)
        grad_scores = _score_gradient(attention, by_block(grad), value, by_block(delta))
        grad_keys[:, :, near] = (grad_scores.mT @ by_block(rows)).flatten(2, 3)
        grad_rows = (grad_scores @ keys[:, :, near].unflatten(2, (-1, block))).view(rows.shape)
        keys_of, values_of = keys.flatten(0, 1), values.flatten(0, 1)
        grad_keys_of, grad_values_of = grad_keys.flatten(0, 1), grad_values.flatten(0, 1)
        for head, near, index in _visits(queries_of, ctx.counts, (base + length) // block, block):
            query, part = (of[head].index_select(0, index).view(-1, width) for of in (rows, grad))
            total, along = (of[head].index_select(0, index).view(-1, 1) for of in (sums, delta))
            key, value = keys_of[head, near], values_of[head, near]
            attention = (query @ key.mT).sub_(total).exp_()
            grad_values_of[head, near].addmm_(attention.mT, part)
            grad_scores = _score_gradient(attention, part, value, along)
            grad_keys_of[head, near].addmm_(grad_scores.mT, query)
            grad_rows[head].index_add_(0, index, (grad_scores @ key).view(len(index), group, width))
        grad_queries = grad_rows.view(batch, heads, length, group, width).transpose(2, 3)
        return grad_queries, grad_keys, grad_values, None, None, None


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
