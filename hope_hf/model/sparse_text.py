"""Sparse attention over a text, from the outputs of linear maps to what its tokens read.

`read_text` makes queries and the keys of the text so far, and reads. `read_tokens` is the same as one operator of a
compiled graph (`opaque`): slots, blocks and their number depend on the text, and are made while the graph runs.

Axes: B row, T token of the call, S slot of the call, R slot of the text, H head of keys, G query heads that share it,
D head width, X selected block, C channel (q, k and v side by side), K kernel size.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .backends import FAST
from .chunks import SlotPlan, TokenPlan, convolution_spans, plan_again, plan_slots
from .opaque import call, named_tuple, register
from .sparse_branches import QkvSizes, QkvWeights, SparseKeys, SparseSizes, make_qkv, read_sparse


class SparseInputs(NamedTuple):
    """What a call reads of its tokens and of a layer's parameters."""

    # outputs of the maps of q, k and v, side by side [B, T, C]
    raw: torch.Tensor
    # weights of the three branches [B, T, heads, 3]
    gates: torch.Tensor
    # cosines and sines of each slot's position in its document [B or 1, S, D]; of tokens for a `TokenPlan`
    cos: torch.Tensor
    sin: torch.Tensor
    # the fields of `QkvWeights`
    conv_weights: torch.Tensor
    query_norm: torch.Tensor
    key_norm: torch.Tensor
    # of the compression [H, stride, D]
    key_weights: torch.Tensor
    value_weights: torch.Tensor


class SparseState(NamedTuple):
    """Keys and values of a text. R is a multiple of the block size; slots after the last token are never read."""

    # after rotation [B, H, R, D]
    slot_keys: torch.Tensor
    slot_values: torch.Tensor
    # by block [B, H, R / block, block / stride, D]
    compressed_keys: torch.Tensor
    compressed_values: torch.Tensor
    # first slot of the row's current document [B]
    first: torch.Tensor
    # last inputs of the convolutions of q, k and v, side by side [B, K - 1, (H G + 2 H) D]
    conv_tail: torch.Tensor


# what `SparseStatistics.add` takes, by slots or by tokens
Selection = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def read_text(
    inputs: SparseInputs,
    state: SparseState | None,
    blocks: SlotPlan,
    sizes: SparseSizes,
    qkv_sizes: QkvSizes,
    choose: Callable | None,
    need_state: bool,
    selects: bool = False,
) -> tuple[torch.Tensor, SparseState | None, Selection | None]:
    """What the tokens of a call read [B, T, heads D], the state after the call, and the selection of the slots.

    Args:
        state: state after the previous call, or `None` at a text's start.
        blocks: slots of the call's tokens; documents begin at multiples of a block.
        choose: gives for queries and the first slot the fast function that reads, if there is one; `None` for the
            plain path.
        need_state: whether to return the state.
        selects: whether to return the selection.
    """
    query, key, value, tail = text_qkv(inputs, state, blocks, qkv_sizes, choose is None)
    gates = blocks.to_slots(inputs.gates)
    held, after, base, first = _remember(key, value, tail, inputs, state, blocks, sizes.block, need_state)
    dtype = torch.promote_types(query.dtype, torch.float32)
    # [B, H, G, S, 3]
    weights = gates.to(dtype).transpose(1, 2).unflatten(1, (key.shape[1], -1))
    query, held = query.to(dtype), SparseKeys(*(part.to(dtype) for part in held))
    at = torch.arange(query.shape[3], device=query.device)
    at = (at + base if isinstance(base, int) else at + base[:, None]).expand(len(query), -1)
    # a tracer takes the plain path, which has no loop whose length depends on the selection
    read = None
    if choose is not None and isinstance(base, int) and query.shape[3] > 1:
        read = choose(query, base)
    if read is not None:
        reads, chosen = read(query, weights, held, base, first, sizes)
    else:
        first = torch.zeros_like(at) if first is None else first
        reads, chosen = read_sparse(query, weights, held, at, first, sizes)
    output = blocks.to_tokens(reads.flatten(1, 2).transpose(1, 2).flatten(2))
    if not selects:
        return output, after, None
    own = at // sizes.block
    own = own if blocks.valid is None else torch.where(blocks.valid, own, -1)
    return output, after, (gates, chosen, own)


def text_qkv(inputs: SparseInputs, state: SparseState | None, blocks: SlotPlan, sizes: QkvSizes, plain: bool) -> tuple:
    """Rotated, scaled queries [B, H, G, S, D], keys and values [B, H, S, D], and the convolutions' tail."""
    raw, angles, weights = blocks.to_slots(inputs.raw), inputs[2:4], QkvWeights(*inputs[4:7])
    length, tail_size = raw.shape[1], len(weights.conv_weights) - 1
    tail = raw.new_zeros(len(raw), tail_size, raw.shape[2]) if state is None else state.conv_tail.to(raw.dtype)
    make_in_tiles = None if plain or length == 1 else FAST.get("sparse_qkv")
    if make_in_tiles is not None:
        return make_in_tiles(raw, tail, weights, angles, blocks, sizes)
    (span,) = convolution_spans(blocks, length, tail_size, length)
    return make_qkv(raw, tail, weights, angles, span, sizes)


def _remember(
    key, value, tail, inputs: SparseInputs, state: SparseState | None, blocks: SlotPlan, block: int, need_state: bool
) -> tuple[SparseKeys, SparseState | None, int | torch.Tensor, torch.Tensor | None]:
    """Keys and values of the text so far, the new state, the call's first slot, and documents' first slots [B, S].

    The call's first slot is an `int` if all rows share it, else [B].
    """
    length, stride = key.shape[2], inputs.key_weights.shape[1]
    rows = torch.arange(len(key), device=key.device)
    begin = rows.new_zeros(len(key)) if state is None else state.first
    if blocks.valid is None:
        # all rows have read the same number of tokens of one document
        base, first, end = blocks.before, None, blocks.before + length
    else:
        if length == 1:
            # a document begins at a block
            begins = blocks.position[:, 0] == 0
            base = begin + blocks.before
            base = torch.where(begins & blocks.valid[:, 0], -(-base // block) * block, base)
        else:
            base = begin + blocks.before - blocks.offset
        at = base[:, None] + torch.arange(length, device=key.device)
        first = at - blocks.position
        last = torch.where(blocks.valid, at, -1).amax(1)
        begin = torch.where(last >= 0, last + 1 - blocks.past.seen, begin)
        if state is None:
            base, end = 0, length
        elif torch.compiler.is_compiling():
            # a cache of fixed length has room for all tokens
            end = state.slot_keys.shape[2]
        else:
            end = int(at.max()) + 1
    room = -(-end // block) * block
    old, overwrites = (None,) * 4, False
    if state is not None:
        overwrites = _is_first(state, blocks.past.columns - inputs.raw.shape[1])
        room = max(room, state.slot_keys.shape[2])
        old = *state[:2], *(part.flatten(2, 3) for part in state[2:4])
    placed = [
        _placed(new, before, base, room, blocks, overwrites) for new, before in zip((key, value), old[:2], strict=True)
    ]
    compressed = [
        _compressed(slots, weight, before, base, length, overwrites)
        for slots, weight, before in zip(placed, (inputs.key_weights, inputs.value_weights), old[2:], strict=True)
    ]
    after = None
    if need_state:
        by_block = (part.unflatten(2, (-1, block // stride)) for part in compressed)
        after = SparseState(*placed, *by_block, begin, tail)
        after.slot_keys.written_columns = blocks.past.columns
    return SparseKeys(*placed, *compressed), after, base, first


def _is_first(state: SparseState, columns: int | torch.Tensor) -> bool:
    """Whether a call that continues after `columns` columns may write into the tensors of the state.

    It may unless a longer continuation was written into them: after a rollback the tensors hold more columns than were
    read, and the call copies them.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not isinstance(columns, int):
        return False
    # tensors made in inference mode cannot be written outside of it
    if state.slot_keys.is_inference() and not torch.is_inference_mode_enabled():
        return False
    return getattr(state.slot_keys, "written_columns", None) == columns


def _room(before: torch.Tensor, size: int, overwrites: bool) -> torch.Tensor:
    """A copy of `before` with `size` slots, or `before` itself if it may be overwritten and has that size."""
    more = size - before.shape[2]
    return F.pad(before, (0, 0, 0, more)) if more else before if overwrites else before.clone()


def _placed(new, before, base: int | torch.Tensor, room: int, blocks: SlotPlan, overwrites: bool) -> torch.Tensor:
    """Slots [B, H, room, D] of the text, with a call's slots [B, H, S, D] written from slot `base` on."""
    length = new.shape[2]
    if blocks.valid is not None:
        new = new * blocks.valid[:, None, :, None]
    if before is None:
        return F.pad(new, (0, 0, 0, room - length)) if room > length else new
    placed, new = _room(before, room, overwrites), new.to(before.dtype)
    if isinstance(base, int):
        placed[:, :, base : base + length] = new
        return placed
    at = base[:, None] + torch.arange(length, device=new.device)
    index = at[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3])
    new = torch.where(blocks.valid[:, None, :, None], new, placed.gather(2, index))
    # the gradient of `gather` reads what it gathered from
    return placed.scatter(2, index, new) if placed.requires_grad else placed.scatter_(2, index, new)


def _compressed(slots, weight, before, base: int | torch.Tensor, length: int, overwrites: bool) -> torch.Tensor:
    """Compressed slots [B, H, R / stride, D] of the text, with those of a call's strides recomputed."""
    if before is None:
        return compress(slots, weight)
    stride = weight.shape[1]
    placed = _room(before, slots.shape[2] // stride, overwrites)
    if isinstance(base, int):
        cut = slice(base // stride, -(-(base + length) // stride))
        placed[:, :, cut] = compress(slots[:, :, cut.start * stride : cut.stop * stride], weight)
        return placed
    start, number = base // stride, -(-length // stride)
    tokens = start[:, None] * stride + torch.arange(number * stride, device=slots.device)
    shape = (-1, slots.shape[1], -1, slots.shape[3])
    new = compress(slots.gather(2, tokens[:, None, :, None].expand(shape)), weight)
    index = start[:, None] + torch.arange(number, device=slots.device)
    return placed.scatter_(2, index[:, None, :, None].expand(shape), new)


def compress(slots: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Slots [B, H, R, D] summed with weights [H, stride, D] to one per stride: [B, H, R / stride, D]."""
    return (slots.unflatten(2, (-1, weight.shape[1])) * weight.to(slots.dtype).unsqueeze(1)).sum(3)


def read_tokens(
    inputs: SparseInputs,
    state: SparseState | None,
    blocks: TokenPlan,
    sizes: SparseSizes,
    qkv_sizes: QkvSizes,
    plain: bool,
    need_state: bool,
    selects: bool,
) -> tuple[torch.Tensor, SparseState | None, Selection | None]:
    """`read_text` in the order of the tokens.

    The state holds each row's last document alone, which begins at slot 0: that many slots are known beforehand.
    """
    columns = blocks.past.columns
    # a cache of fixed length has room for all tokens
    room = -(-columns // sizes.block) * sizes.block if isinstance(columns, int) else state.slot_keys.shape[2]
    tensors = inputs._asdict() | ({} if state is None else state._asdict()) | blocks.tensors()
    heads, key_heads, epsilon = qkv_sizes
    numbers = [blocks.columns(), room, int(plain), int(need_state), int(selects), *sizes, heads, key_heads]
    output, *rest = call("sparse_attention", tensors, numbers, str(epsilon))
    selection = (inputs.gates, rest.pop(-2), rest.pop()) if selects else None
    return output, SparseState(*rest) if need_state else None, selection


def _parts(tensors: dict[str, torch.Tensor], numbers: Sequence[int], epsilon: str) -> tuple:
    """The arguments of `read_text` before and after `blocks`."""
    inputs, state = (named_tuple(kind, tensors) for kind in (SparseInputs, SparseState))
    *sizes, heads, key_heads = numbers[5:]
    return inputs, state, SparseSizes(*sizes), QkvSizes(heads, key_heads, float(epsilon))


def _run(tensors: dict[str, torch.Tensor], numbers: Sequence[int], epsilon: str) -> list[torch.Tensor]:
    columns, room, plain, *needs = numbers[:5]
    inputs, state, sizes, of_qkv = _parts(tensors, numbers, epsilon)
    plan = partial(plan_slots, sizes.block)
    blocks = plan_again(plan, tensors, inputs.raw.shape[:2], columns, state is not None)
    angles = {name: blocks.to_slots(getattr(inputs, name)) for name in ("cos", "sin")}
    choose = None if plain else lambda *_: FAST.get("sparse_reads")
    output, after, selection = read_text(inputs._replace(**angles), state, blocks, sizes, of_qkv, choose, *needs)
    results = [output]
    if after is not None:
        results += _last_document(after, room, sizes)
    if selection is not None:
        chosen, own = (blocks.to_tokens(part) for part in (selection[1].transpose(1, 2), selection[2]))
        if "padding" in tensors:
            own = torch.where(tensors["padding"].bool(), own, -1)
        results += [F.pad(chosen.transpose(1, 2), (0, sizes.top_k - chosen.shape[-1]), value=-1), own]
    return results


def _last_document(state: SparseState, room: int, sizes: SparseSizes) -> SparseState:
    """A copy of the state with `room` slots, in which each row's document begins at slot 0."""

    def moved(held: torch.Tensor, first: torch.Tensor, number: int) -> torch.Tensor:
        index = (first[:, None] + torch.arange(number, device=held.device)).clamp(max=held.shape[2] - 1)
        return torch.take_along_dim(held, index.view(len(index), 1, number, *(1,) * (held.ndim - 3)), dim=2)

    slots = (moved(part, state.first, room) for part in state[:2])
    compressed = (moved(part, state.first // sizes.block, room // sizes.block) for part in state[2:4])
    return SparseState(*slots, *compressed, torch.zeros_like(state.first), state.conv_tail)


def _shapes(tensors: dict[str, torch.Tensor], numbers: Sequence[int], epsilon: str) -> list[torch.Tensor]:
    _, room, _, need_state, selects = numbers[:5]
    inputs, state, sizes, of_qkv = _parts(tensors, numbers, epsilon)
    raw, (heads, width) = inputs.raw, (of_qkv.key_heads, inputs.query_norm.shape[-1])
    rows, length, channels = raw.shape
    dtype = torch.promote_types(raw.dtype, inputs.cos.dtype)
    output = torch.promote_types(dtype, torch.float32)
    results = [raw.new_empty(rows, length, of_qkv.heads * width, dtype=output)]
    if need_state:
        # keys and values, in the dtypes of the state if there is one
        kinds = (dtype, raw.dtype) if state is None else [part.dtype for part in state[:2]]
        for shape in ((room,), (room // sizes.block, sizes.block // sizes.stride)):
            results += [raw.new_empty(rows, heads, *shape, width, dtype=kind) for kind in kinds]
        tail = raw.new_empty(rows, len(inputs.conv_weights) - 1, channels)
        results += [raw.new_empty(rows, dtype=torch.long), tail]
    if selects:
        shapes = (rows, heads, length, sizes.top_k), (rows, length)
        results += [raw.new_empty(shape, dtype=torch.long) for shape in shapes]
    return results


register("sparse_attention", _run, _shapes)
