"""The branches of `sparse_branches` for many queries, with gradients written by hand.

No tensor grows with the square of the text. The compressed and the window branch take tiles of neighbouring queries.
The selected branch loops over blocks of keys and gathers the queries that selected the block, which are far smaller
than the keys of each query; a running maximum combines a query's blocks, as in flash attention (arXiv 2307.08691).
All are ordinary matrix products. The heads of a query lie side by side, so that a query is contiguous in memory.

`make_qkv_tiled` makes queries, keys and values in time tiles that fit a CPU's cache. It saves only its inputs: the
backward pass computes the rest again, which is cheap.

Axes: B row, H head of keys, S query, G query heads that share it, R slot of keys, D head width, n queries of a tile, m
keys of a tile, C channel (q, k and v side by side), K kernel size.
"""

import math
from collections.abc import Callable, Iterator
from functools import wraps
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from transformers.models.llama.modeling_llama import rotate_half

from ..model.chunks import ChunkSpan, SlotPlan, convolution_spans
from ..model.layers import tail_after, with_tail
from ..model.sparse_branches import QkvSizes, QkvWeights, SparseKeys, SparseSizes, select_blocks
from .convolution import convolution_gradients, convolve_padded

# slots per tile in which queries, keys and values are made
_TIME_TILE = 512
# queries per tile, and most queries that are gathered at once: all queries read a document's first block
_QUERY_TILE, _GATHERED = 128, 1024
_LOG2_E = math.log2(math.e)


def read_sparse_fused(
    queries: torch.Tensor,
    gates: torch.Tensor,
    held: SparseKeys,
    base: int,
    first: torch.Tensor | None,
    sizes: SparseSizes,
    selected_by: Callable | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sparse_branches.read_sparse` for queries in neighbouring slots.

    Args:
        queries: scaled [B, H, G, S, D].
        gates: weights of the compressed, selected and window branch [B, H, G, S, 3].
        base: slot of the first query, in all rows.
        first: slot of the first token of each query's document [B, S]; `None` if all documents begin at slot 0.
        selected_by: function of the selected branch; `read_selected` unless given.
    """
    # the heads of a query side by side
    queries, gates = queries.transpose(2, 3).contiguous(), gates.transpose(2, 3)
    # whole blocks of queries
    length, front = queries.shape[2], base % sizes.block
    back, base = -(front + length) % sizes.block, base - front
    if front or back:
        queries, gates = (F.pad(part, (0, 0, 0, 0, front, back)) for part in (queries, gates))
    if first is not None:
        first = F.pad(first, (front, back), value=base)
    compressed, selected, window = gates.split(1, dim=-1)
    # Chained so that all branches accumulate into one gradient.
    reads, chosen, queries = _Compressed.apply(
        queries, held.compressed_keys, held.compressed_values, compressed, base, first, sizes
    )
    read, *qkv = (selected_by or read_selected)(queries, held.keys, held.values, selected, chosen, base, sizes.block)
    reads.add_(read)
    # frees a tensor of the size of the queries
    del read
    reads.add_(_Window.apply(*qkv, window, base, first, sizes.window))
    inside = slice(front, front + length)
    return reads[:, :, inside].transpose(2, 3), chosen[:, :, inside]


class _QueryTile(NamedTuple):
    """Neighbouring queries, and the range of keys that they read."""

    queries: slice
    keys: slice
    # added to the scores of columns: 0, or -inf for keys that a query cannot see [1 or B, 1, n, 1, columns]
    hidden: list[tuple[slice, torch.Tensor]]
    # 0 for queries that see no key of the tile, else 1 [1 or B, 1, n, 1, 1]; None if every query sees one
    sees: torch.Tensor | None = None


def _tile(
    cut: slice, keys: slice, columns: list[slice], visible: Callable, like: torch.Tensor, may_see_nothing: bool
) -> _QueryTile:
    """A tile in which all queries see all keys outside `columns`; `visible` gives the mask [..., n, m] inside."""
    hidden, sees = [], None
    for part in columns:
        seen = visible(part)[:, None, :, None]
        if may_see_nothing:
            sees = seen.any(-1, keepdim=True)
            seen, sees = seen | ~sees, sees.to(like.dtype)
        mask = torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, float("-inf"))
        hidden.append((slice(part.start - keys.start, part.stop - keys.start), mask))
    return _QueryTile(cut, keys, hidden, sees)


def _attention(query: torch.Tensor, key: torch.Tensor, tile: _QueryTile) -> torch.Tensor:
    """Softmax attention [B, H, n G, m] of queries [B, H, n, G, D]; 0 for queries that see no key."""
    scores = query.flatten(2, 3) @ key.mT
    by_head = scores.unflatten(2, query.shape[2:4])
    for columns, mask in tile.hidden:
        by_head[..., columns] += mask
    attention = scores.softmax(-1)
    if tile.sees is not None:
        attention.unflatten(2, query.shape[2:4]).mul_(tile.sees)
    return attention


def without_autocast(backward: Callable) -> Callable:
    """Wrap a backward pass, which may start within autocast and would then round its products."""

    @wraps(backward)
    def run(ctx, grad, *others):
        with torch.autocast(grad.device.type, enabled=False):
            return backward(ctx, grad, *others)

    return run


def _queries_of_tiles(queries: torch.Tensor, base: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """The range of queries of every tile, and their slots [n, 1]."""
    for start in range(0, queries.shape[2], _QUERY_TILE):
        stop = min(start + _QUERY_TILE, queries.shape[2])
        yield slice(start, stop), torch.arange(base + start, base + stop, device=queries.device)[:, None]


def _window_tiles(queries, base: int, first, window: int) -> Iterator[_QueryTile]:
    # Tiles inside a text share their mask.
    last, hidden = None, None
    for cut, at in _queries_of_tiles(queries, base):
        start, stop = base + cut.start, base + cut.stop
        low = max(0, start - window + 1)

        def visible(part: slice, at=at, cut=cut) -> torch.Tensor:
            near = torch.arange(part.start, part.stop, device=at.device)
            seen = ((near <= at) & (near > at - window))[None]
            return seen if first is None else seen & (near >= first[:, cut, None])

        columns = [slice(low, stop)]
        if first is None and low and stop - window < start:
            # all queries of the tile see the keys between these columns
            columns = [slice(low, stop - window), slice(start, stop)]
            if last == stop - start:
                yield _QueryTile(cut, slice(low, stop), hidden)
                continue
        tile = _tile(cut, slice(low, stop), columns, visible, queries, may_see_nothing=False)
        if len(columns) == 2:
            last, hidden = stop - start, tile.hidden
        yield tile


def _compressed_tiles(queries, base: int, first, stride: int) -> Iterator[_QueryTile]:
    for cut, at in _queries_of_tiles(queries, base):
        high = (base + cut.stop) // stride

        def visible(part: slice, at=at, cut=cut) -> torch.Tensor:
            begin = torch.arange(part.start, part.stop, device=at.device) * stride
            seen = (begin + stride <= at + 1)[None]
            return seen if first is None else seen & (begin >= first[:, cut, None])

        seen_by_all = 0 if first is not None else (base + cut.start + 1) // stride
        columns = slice(seen_by_all, high)
        yield _tile(cut, slice(0, high), [columns], visible, queries, may_see_nothing=not seen_by_all)


class _Tiled(torch.autograd.Function):
    """A branch whose queries each read one range of keys: its reads times their gate [B, H, S, G, D].

    `ctx.tiles(queries, first)` gives the tiles of the forward pass.
    """

    @staticmethod
    def gradients(ctx, grad, grad_queries: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Gradients of queries, keys, values and gates.

        The gradient of the queries is added in place to `grad_queries`, which comes from the later branches.
        """
        queries, keys, values, gates, first = ctx.saved_tensors
        grad_keys, grad_values, grad_gates = map(torch.zeros_like, (keys, values, gates))
        grad_queries = torch.zeros_like(queries) if grad_queries is None else grad_queries
        for tile in ctx.tiles(queries, first):
            query, gate, part = (of[:, :, tile.queries] for of in (queries, gates, grad))
            key, value, rows = keys[:, :, tile.keys], values[:, :, tile.keys], part.flatten(2, 3)
            attention = _attention(query, key, tile)
            grad_scores = rows @ value.mT
            # the read times its gradient: also the gradient of the gate
            row_dot = torch.linalg.vecdot(attention, grad_scores).unsqueeze(-1)
            grad_gates[:, :, tile.queries] = row_dot.unflatten(2, query.shape[2:4])
            attention.mul_(gate.flatten(2, 3))
            grad_values[:, :, tile.keys] += attention.mT @ rows
            grad_scores.sub_(row_dot).mul_(attention)
            grad_keys[:, :, tile.keys] += grad_scores.mT @ query.flatten(2, 3)
            grad_queries[:, :, tile.queries] += (grad_scores @ key).unflatten(2, query.shape[2:4])
        return grad_queries, grad_keys, grad_values, grad_gates


class _Window(_Tiled):
    @staticmethod
    def forward(ctx, queries, keys, values, gates, base, first, window):
        reads = torch.empty_like(queries)
        for tile in _window_tiles(queries, base, first, window):
            query, cut = queries[:, :, tile.queries], tile.queries
            read = _attention(query, keys[:, :, tile.keys], tile) @ values[:, :, tile.keys]
            reads[:, :, cut] = read.unflatten(2, query.shape[2:4]).mul_(gates[:, :, cut])
        ctx.tiles = lambda queries, first: _window_tiles(queries, base, first, window)
        ctx.save_for_backward(queries, keys, values, gates, first)
        return reads

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx, grad):
        return *_Tiled.gradients(ctx, grad), None, None, None


class _Compressed(_Tiled):
    """Reads, the blocks that their attention selects [B, H, S, X], and the queries for the next branch."""

    @staticmethod
    def forward(ctx, queries, keys, values, gates, base, first, sizes):
        reads = torch.empty_like(queries)
        batch, heads, length, _, _ = queries.shape
        blocks = (base + length) // sizes.block
        chosen = torch.full((batch, heads, length, min(sizes.top_k, blocks)), -1, device=queries.device)
        for tile in _compressed_tiles(queries, base, first, sizes.stride):
            query, cut = queries[:, :, tile.queries], tile.queries
            attention = _attention(query, keys[:, :, tile.keys], tile)
            read = (attention @ values[:, :, tile.keys]).unflatten(2, query.shape[2:4])
            reads[:, :, cut] = read.mul_(gates[:, :, cut])
            at = torch.arange(base + cut.start, base + cut.stop, device=queries.device)[None]
            begin = torch.zeros_like(at) if first is None else first[:, cut]
            # padded to the end of the tile's last block
            summed = attention.unflatten(2, query.shape[2:4]).sum(3)
            more = -(-(base + cut.stop) // sizes.block) * (sizes.block // sizes.stride) - summed.shape[-1]
            best = select_blocks(F.pad(summed, (0, more)), at, begin, sizes)
            chosen[:, :, cut, : best.shape[-1]] = best
        ctx.tiles = lambda queries, first: _compressed_tiles(queries, base, first, sizes.stride)
        ctx.save_for_backward(queries, keys, values, gates, first)
        ctx.mark_non_differentiable(chosen)
        return reads, chosen, queries

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx, grad, _, grad_queries):
        return *_Tiled.gradients(ctx, grad, grad_queries), None, None, None


class _KeyBlock(NamedTuple):
    """One block of keys and the queries that selected it, in one row and head."""

    head: int
    keys: slice
    queries: torch.Tensor
    # true for keys after the query, among the first n queries [n, m]; None if no query is in the block
    hidden: torch.Tensor | None


def _key_blocks(chosen: torch.Tensor, base: int, block: int) -> list[_KeyBlock]:
    """All blocks of keys that queries selected, from `chosen` [B, H, S, X] (-1 for none)."""
    batch, heads, length, number = chosen.shape
    blocks = (base + length) // block
    # -1 becomes one more block, which is left out below
    ordered, place = torch.where(chosen < 0, blocks, chosen).view(batch * heads, -1).sort(dim=1, stable=True)
    ordered += torch.arange(batch * heads, device=chosen.device)[:, None] * (blocks + 1)
    counts = ordered.view(-1).bincount(minlength=batch * heads * (blocks + 1)).tolist()
    inside = torch.arange(block, device=chosen.device)
    hidden = inside[:, None] < inside
    key_blocks = []
    for at, queries in enumerate((place // number).view(-1).split(counts)):
        head, y = divmod(at, blocks + 1)
        if y == blocks:
            continue
        for index, part in enumerate(queries.split(max(_GATHERED, block)) if len(queries) else ()):
            # Every query selects its own block, and the queries of the block itself come first.
            is_own = not index and y * block >= base
            key_blocks.append(_KeyBlock(head, slice(y * block, (y + 1) * block), part, hidden if is_own else None))
    return key_blocks


class _Selected(torch.autograd.Function):
    """Reads of the blocks `chosen` times their gate [B, H, S, G, D]; queries, keys and values for the next branch.

    Exponentials are powers of two, which torch computes three times as fast.
    """

    @staticmethod
    def scores(
        rows: list[torch.Tensor], keys: list[torch.Tensor], key_block: _KeyBlock
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [n G, D], the heads of a query side by side, and their scores [n G, m] in base two."""
        key = keys[key_block.head][key_block.keys]
        query = rows[key_block.head].index_select(0, key_block.queries).view(-1, key.shape[1])
        scores = torch.addmm(query.new_zeros(()), query, key.mT, beta=0, alpha=_LOG2_E)
        if key_block.hidden is not None:
            own = scores.view(len(key_block.queries), -1, key.shape[0])[: len(key_block.hidden)]
            own.masked_fill_(key_block.hidden[:, None], float("-inf"))
        return query, scores

    @staticmethod
    def forward(ctx, queries, keys, values, gates, chosen, base, block):
        reads = torch.zeros_like(queries)
        # largest score so far [..., 0], and sum of powers so far [..., 1]
        sums = queries.new_zeros(*queries.shape[:-1], 2)
        sums[..., 0] = float("-inf")
        key_blocks = _key_blocks(chosen, base, block)
        rows_of, reads_of, sums_of = map(_rows_by_head, (queries, reads, sums))
        keys_of, values_of = _by_head(keys), _by_head(values)
        for key_block in key_blocks:
            query, scores = _Selected.scores(rows_of, keys_of, key_block)
            read, part = (of[key_block.head].index_select(0, key_block.queries) for of in (reads_of, sums_of))
            before, count = part.view(-1, 2).split(1, dim=-1)
            after = torch.maximum(before, scores.amax(-1, keepdim=True))
            scores.sub_(after).exp2_()
            rescale = (before - after).exp2_()
            read.view(query.shape).mul_(rescale).addmm_(scores, values_of[key_block.head][key_block.keys])
            count.mul_(rescale).add_(scores.sum(-1, keepdim=True))
            before.copy_(after)
            for of, new in ((reads_of, read), (sums_of, part)):
                of[key_block.head].index_copy_(0, key_block.queries, new)
        top, total = sums.split(1, dim=-1)
        reads.div_(total)
        ctx.key_blocks, ctx.sums = key_blocks, top + total.log2()
        ctx.save_for_backward(queries, keys, values, gates, reads)
        return reads * gates, queries, keys, values

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx, grad, grad_queries, grad_keys, grad_values):
        queries, keys, values, gates, reads = ctx.saved_tensors
        # the read times its gradient: also the gradient of the gate
        row_dot = torch.empty_like(gates)
        for whole, *both in zip(*(part.split(_QUERY_TILE, dim=2) for part in (row_dot, grad, reads)), strict=True):
            whole[..., 0] = torch.linalg.vecdot(*both)
        # three numbers per query and head, gathered together
        facts = torch.cat([ctx.sums, row_dot, gates], dim=-1)
        # the next branch's gradients are added to in place
        rows_of, grad_of, facts_of, grad_rows_of = map(_rows_by_head, (queries, grad, facts, grad_queries))
        keys_of, values_of, grad_keys_of, grad_values_of = map(_by_head, (keys, values, grad_keys, grad_values))
        for key_block in ctx.key_blocks:
            head, keys_of_block = key_block.head, key_block.keys
            query, attention = _Selected.scores(rows_of, keys_of, key_block)
            part, known = (of[head].index_select(0, key_block.queries) for of in (grad_of, facts_of))
            part, (total, read, gate) = part.view(query.shape), known.view(-1, 3).split(1, dim=-1)
            attention.sub_(total).exp2_().mul_(gate)
            grad_values_of[head][keys_of_block].addmm_(attention.mT, part)
            grad_scores = (part @ values_of[head][keys_of_block].mT).sub_(read).mul_(attention)
            grad_keys_of[head][keys_of_block].addmm_(grad_scores.mT, query)
            grad_rows = (grad_scores @ keys_of[head][keys_of_block]).view(len(key_block.queries), -1)
            grad_rows_of[head].index_add_(0, key_block.queries, grad_rows)
        return grad_queries, grad_keys, grad_values, row_dot, None, None, None


def read_selected(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    gates: torch.Tensor,
    chosen: torch.Tensor,
    base: int,
    block: int,
) -> tuple[torch.Tensor, ...]:
    """Reads of the blocks `chosen` [B, H, S, X] (-1 for none) times their gate [B, H, S, G, D].

    Also returns queries, keys and values, through which the gradients of the next branch arrive. Queries and keys are
    whole blocks; the first query's slot is `base`. Each query selects its own block.
    """
    return _Selected.apply(queries, keys, values, gates, chosen, base, block)


def _by_head(part: torch.Tensor) -> list[torch.Tensor]:
    """Views of [B, H, ...] by row and head."""
    return [head for row in part for head in row]


def _rows_by_head(part: torch.Tensor) -> list[torch.Tensor]:
    """Views [S, G D] of contiguous [B, H, S, G, D], the form that torch gathers fastest."""
    return _by_head(part.view(*part.shape[:3], -1))


def make_qkv_tiled(raw, tail, weights: QkvWeights, angles, slots: SlotPlan, sizes: QkvSizes) -> tuple:
    """`make_qkv` of all spans of a call, in place and with gradients by hand; the tail is that of the last span."""
    tail_size = len(weights.conv_weights) - 1
    size = _TIME_TILE
    if slots.offset is not None:
        # the first tile holds the first token of every row, behind as many empty slots as a block has
        size = max(size, int(slots.offset.max()) + 1)
    spans = convolution_spans(slots, raw.shape[1], tail_size, size)
    return _Qkv.apply(raw, tail, *weights, *angles, spans, sizes)


class _Qkv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, raw, tail, conv_weights, query_norm, key_norm, cos, sin, spans, sizes):
        (rows, length, _), width = raw.shape, query_norm.shape[-1]
        dtype = torch.promote_types(raw.dtype, cos.dtype)
        # the heads of a query side by side
        shape = (rows, sizes.key_heads, sizes.heads // sizes.key_heads, length, width)
        query = torch.empty_permuted(shape, (0, 1, 3, 2, 4), dtype=dtype, device=raw.device)
        key, value = (raw.new_empty(rows, sizes.key_heads, length, width, dtype=kind) for kind in (dtype, raw.dtype))
        weights, tails = (conv_weights, query_norm, key_norm), []
        exact, *norms = _exact(weights)
        for span in spans:
            # cloned, since the tail is a view of the padded inputs
            tails.append(tail.clone())
            padded, mixed, angles = _mixed(raw, tail, exact, width, (cos, sin), span)
            tail = tail_after(padded, tail, span).to(raw.dtype)
            parts = mixed.split(sizes.split, 2)
            for part, norm in zip(parts[:2], norms, strict=True):
                part.mul_(_inverse(part, sizes.epsilon)).mul_(norm)
                turned = rotate_half(part).mul_(angles[1])
                part.mul_(angles[0]).add_(turned)
            cut, by_head = slice(span.start, span.stop), [part.transpose(1, 2) for part in parts]
            query[..., cut, :] = by_head[0].unflatten(1, (sizes.key_heads, -1))
            key[:, :, cut], value[:, :, cut] = by_head[1:]
        ctx.save_for_backward(raw, *weights, cos, sin, *tails)
        ctx.spans, ctx.sizes = spans, sizes
        return query, key, value, tail.clone()

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx, grad_query, grad_key, grad_value, grad_tail):
        # unpacked once, since a recomputed block provides the saved tensors once
        raw, conv_weights, query_norm, key_norm, cos, sin, *tails = ctx.saved_tensors
        weights, width, sizes = (conv_weights, query_norm, key_norm), query_norm.shape[-1], ctx.sizes
        conv_weights, *norms = _exact(weights)
        grad_raw = torch.empty_like(raw)
        grad_conv_weights, *grad_norms = totals = [torch.zeros_like(weight) for weight in (conv_weights, *norms)]
        for span, tail in zip(reversed(ctx.spans), reversed(tails), strict=True):
            cut = slice(span.start, span.stop)
            padded, mixed, (cosine, sine) = _mixed(raw, tail, conv_weights, width, (cos, sin), span)
            given = (grad_query[..., cut, :].flatten(1, 2), grad_key[:, :, cut], grad_value[:, :, cut])
            grad_mixed = torch.cat([part.transpose(1, 2).to(conv_weights.dtype) for part in given], dim=2)
            # without values, which are neither normalised nor rotated
            parts = zip(grad_mixed.split(sizes.split, 2), mixed.split(sizes.split, 2), norms, grad_norms, strict=False)
            for grad, part, norm, total in parts:
                turned = rotate_half(grad * sine)
                grad.mul_(cosine).sub_(turned)
                inverse = _inverse(part, sizes.epsilon)
                direction = part.mul_(inverse)
                total.add_((grad * direction).sum_to_size(norm.shape))
                grad.mul_(norm)
                row_dot = torch.linalg.vecdot(grad, direction).div_(width).unsqueeze(-1)
                grad.addcmul_(direction, row_dot, value=-1).mul_(inverse)
            grad_raw[:, cut], grad_tail = convolution_gradients(
                grad_mixed.flatten(2), grad_tail.to(conv_weights.dtype), padded, conv_weights, grad_conv_weights, span
            )
        grads = (total.to(weight.dtype) for total, weight in zip(totals, weights, strict=True))
        return grad_raw, grad_tail.to(raw.dtype), *grads, None, None, None, None


def _exact(weights: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Weights in float32, or float64 in a float64 model: the dtype in which tiles are computed."""
    return [weight.to(torch.promote_types(weight.dtype, torch.float32)) for weight in weights]


def _mixed(raw, tail, conv_weights, width: int, angles, span: ChunkSpan) -> tuple:
    """A tile's padded inputs, heads after the convolutions [B, n, heads, D], and angles [B or 1, n, 1, D]."""
    cut = slice(span.start, span.stop)
    padded = with_tail(raw[:, cut], tail, span).to(conv_weights.dtype)
    mixed = torch.empty_like(padded[:, tail.shape[1] :])
    convolve_padded([padded], [conv_weights], span, [mixed])
    return padded, mixed.unflatten(-1, (-1, width)), [part[:, cut, None].to(conv_weights.dtype) for part in angles]


def _inverse(heads: torch.Tensor, epsilon: float) -> torch.Tensor:
    """One over the root mean square of heads [..., D]: [..., 1]."""
    return torch.linalg.vecdot(heads, heads).div_(heads.shape[-1]).add_(epsilon).rsqrt_().unsqueeze(-1)
