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
from torch import Tensor

from .backends import FAST
from .chunks import SlotPlan, TokenPlan, convolution_spans, plan_again, plan_slots
from .opaque import call, named_tuple, register
from .sparse_branches import SparseInputs, SparseKeys, SparseSizes, compress, make_qkv, read_sparse


class SparseState(NamedTuple):
    """Keys and values of a text. R is a multiple of the block size; slots after the last token are never read."""

    # after rotation [B, H, R, D]
    slot_keys: Tensor
    slot_values: Tensor
    # by block [B, H, R / block, block / stride, D]
    compressed_keys: Tensor
    compressed_values: Tensor
    # first slot of the row's current document [B]
    first: Tensor
    # last inputs of the convolutions of q, k and v, side by side [B, K - 1, (H G + 2 H) D]
    conv_tail: Tensor


class Selection(NamedTuple):
    """What `SparseStatistics.add` takes, by slots or by tokens."""

    # weights of the branches [B, S, heads, 3]
    gates: Tensor
    # selected blocks [B, H, S, X], -1 for none
    blocks: Tensor
    # block of each query [B, S], -1 for padding and empty slots
    own_block: Tensor


class CallSlots(NamedTuple):
    """Where the slots of a call lie in the text."""

    # slot of the text of the call's first one: of all rows, or [B]
    base: int | Tensor
    # slot of the text of each of the call's slots [B or 1, S]
    at: Tensor
    # whether a slot holds a token [B, S], and first slot of its document [B, S]; `None` if all rows have read the same
    # number of tokens of one document
    valid: Tensor | None
    first: Tensor | None
    # first slot of the row's current document after the call [B]
    first_after: Tensor
    # slots that the text has room for: R
    size: int
    # whether the call may write into the tensors of the state before it
    overwrites: bool


def read_text(
    inputs: SparseInputs,
    state: SparseState | None,
    blocks: SlotPlan,
    sizes: SparseSizes,
    choose: Callable | None,
    need_state: bool,
    selects: bool = False,
) -> tuple[Tensor, SparseState | None, Selection | None]:
    """What the tokens of a call read [B, T, heads D], the state after the call, and the selection of the slots.

    Args:
        inputs: by token, but for `cos` and `sin`.
        state: state after the previous call, or `None` at a text's start.
        blocks: slots of the call's tokens; documents begin at multiples of a block.
        choose: gives for queries and the first slot the fast function that reads, if there is one; `None` for the
            plain path.
        need_state: whether to return the state.
        selects: whether to return the selection.
    """
    slots = _call_slots(inputs, state, blocks, sizes.block)
    raw = blocks.to_slots(inputs.raw)
    gates = blocks.to_slots(inputs.gates)
    inputs = inputs._replace(raw=raw, gates=gates)
    is_plain = choose is None
    query, key, value, tail = _text_qkv(inputs, state, blocks, sizes, is_plain)
    text = _extended(inputs, key, value, state, slots)
    after = None
    if need_state:
        after = _state_after(text, slots, tail, blocks.after.columns, sizes)
    reads, selected = _read(query, gates, text, slots, sizes, choose)
    # [B, S, heads D]
    output = reads.flatten(1, 2).transpose(1, 2).flatten(2)
    output = blocks.to_tokens(output)
    if not selects:
        return output, after, None
    own_block = slots.at // sizes.block
    own_block = own_block.expand(len(output), -1)
    if blocks.valid is not None:
        own_block = torch.where(blocks.valid, own_block, -1)
    return output, after, Selection(gates, selected, own_block)


def _call_slots(inputs: SparseInputs, state: SparseState | None, blocks: SlotPlan, block: int) -> CallSlots:
    """Where a call's slots lie in the text; documents begin at multiples of `block`."""
    rows, tokens, _ = inputs.raw.shape
    device = inputs.raw.device
    valid = blocks.valid
    if state is None:
        first_before = torch.zeros(rows, dtype=torch.long, device=device)
        size_before = 0
        overwrites = False
    else:
        first_before = state.first
        size_before = state.slot_keys.shape[2]
        columns_before = blocks.after.columns - tokens
        overwrites = _may_overwrite(state, columns_before)
    if valid is None:
        base = blocks.seen_before
    elif state is None:
        base = 0
    else:
        base = _first_slot(first_before, blocks, block)

    length = tokens if valid is None else valid.shape[1]
    steps = torch.arange(length, device=device)
    if isinstance(base, int):
        at = (base + steps)[None]
        end = base + length
    else:
        at = base[:, None] + steps
        # in a graph, a cache of fixed length has room for all tokens
        end = size_before if torch.compiler.is_compiling() else int(at.max()) + 1
    first = None
    first_after = first_before
    if valid is not None:
        first = at - blocks.position
        first_after = _first_after(at, blocks, first_before)
    return CallSlots(
        base=base,
        at=at,
        valid=valid,
        first=first,
        first_after=first_after,
        size=max(size_before, _round_up(end, block)),
        overwrites=overwrites,
    )


def _first_slot(first: Tensor, blocks: SlotPlan, block: int) -> Tensor:
    """Slot of the text [B] of a call's first slot; `first` is that of the document before the call [B]."""
    following = first + blocks.seen_before
    if blocks.offset is not None:
        return following - blocks.offset
    # a single token
    valid = blocks.valid[:, 0]
    position = blocks.position[:, 0]
    begins_document = valid & (position == 0)
    return torch.where(begins_document, _round_up(following, block), following)


def _first_after(at: Tensor, blocks: SlotPlan, first_before: Tensor) -> Tensor:
    """First slot of each row's document after a call [B], whose slots are `at` [B, S]; padding alone changes none."""
    last = torch.where(blocks.valid, at, -1).amax(1)
    first_of_last = last + 1 - blocks.after.seen
    return torch.where(last >= 0, first_of_last, first_before)


def _round_up(number, step: int):
    """The least multiple of `step` that is not below a number or the numbers of a tensor."""
    return -(-number // step) * step


def _may_overwrite(state: SparseState, columns: int | Tensor) -> bool:
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


def _text_qkv(
    inputs: SparseInputs, state: SparseState | None, blocks: SlotPlan, sizes: SparseSizes, is_plain: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result of `make_qkv` for all slots of a call."""
    raw = inputs.raw
    rows, length, channels = raw.shape
    tail_size = len(inputs.conv_weights) - 1
    if state is None:
        tail = raw.new_zeros(rows, tail_size, channels)
    else:
        tail = state.conv_tail.to(raw.dtype)
    make_in_tiles = FAST.get("sparse_qkv")
    if make_in_tiles is not None and length > 1 and not is_plain:
        return make_in_tiles(inputs, tail, blocks, sizes)
    (span,) = convolution_spans(blocks, length, tail_size, length)
    return make_qkv(inputs, tail, span, sizes)


def _read(
    query: Tensor,
    gates: Tensor,
    text: SparseKeys,
    slots: CallSlots,
    sizes: SparseSizes,
    choose: Callable | None,
) -> tuple[Tensor, Tensor]:
    """The results of `read_sparse` in float32 or float64, for weights of the branches [B, S, heads, 3]."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    query = query.to(dtype)
    text = SparseKeys(*(part.to(dtype) for part in text))
    # [B, S, heads, 3] to [B, H, G, S, 3]
    key_heads = query.shape[1]
    by_head = gates.to(dtype).transpose(1, 2)
    gates = by_head.unflatten(1, (key_heads, -1))
    # a tracer takes the plain path, which has no loop whose length depends on the selection
    if choose is not None and isinstance(slots.base, int) and query.shape[3] > 1:
        read_fast = choose(query, slots.base)
        if read_fast is not None:
            return read_fast(query, gates, text, slots.base, slots.first, sizes)
    at = slots.at.expand(len(query), -1)
    first = torch.zeros_like(at) if slots.first is None else slots.first
    return read_sparse(query, gates, text, at, first, sizes)


def _extended(
    inputs: SparseInputs, key: Tensor, value: Tensor, state: SparseState | None, slots: CallSlots
) -> SparseKeys:
    """Keys and values of the text, of which those of the call are `key` and `value` [B, H, S, D]."""
    if state is None:
        keys = _padded(key, slots)
        values = _padded(value, slots)
        compressed_keys = compress(keys, inputs.key_weights)
        compressed_values = compress(values, inputs.value_weights)
    else:
        keys = _written(state.slot_keys, key, slots)
        values = _written(state.slot_values, value, slots)
        compressed_keys = _compressed(state.compressed_keys, keys, inputs.key_weights, slots)
        compressed_values = _compressed(state.compressed_values, values, inputs.value_weights, slots)
    return SparseKeys(keys, values, compressed_keys, compressed_values)


def _padded(new: Tensor, slots: CallSlots) -> Tensor:
    """A text [B, H, R, D] that begins with a call's slots [B, H, S, D]; 0 in slots without a token."""
    if slots.valid is not None:
        new = new * slots.valid[:, None, :, None]
    missing = slots.size - new.shape[2]
    return F.pad(new, (0, 0, 0, missing)) if missing else new


def _written(before: Tensor, new: Tensor, slots: CallSlots) -> Tensor:
    """A text [B, H, R, D]: the slots `before` a call, with the call's [B, H, S, D] written into them."""
    text = _with_room(before, slots.size, slots.overwrites)
    new = new.to(before.dtype)
    if isinstance(slots.base, int):
        stop = slots.base + new.shape[2]
        text[:, :, slots.base : stop] = new
        return text
    index = _index(slots.at, like=new)
    is_token = slots.valid[:, None, :, None]
    new = torch.where(is_token, new, text.gather(2, index))
    # the gradient of `gather` reads what it gathered from
    if text.requires_grad:
        return text.scatter(2, index, new)
    return text.scatter_(2, index, new)


def _compressed(before: Tensor, text: Tensor, weight: Tensor, slots: CallSlots) -> Tensor:
    """A text's compressed slots [B, H, R / stride, D]; only those of a call's slots are computed.

    Args:
        before: compressed slots before the call [B, H, R / block, block / stride, D].
        text: all slots after it [B, H, R, D].
        weight: [H, stride, D].
    """
    stride = weight.shape[1]
    length = slots.at.shape[1]
    compressed = before.flatten(2, 3)
    compressed = _with_room(compressed, slots.size // stride, slots.overwrites)
    first = slots.base // stride
    if isinstance(first, int):
        stop = _strides(slots.base + length, stride)
        changed = text[:, :, first * stride : stop * stride]
        compressed[:, :, first:stop] = compress(changed, weight)
        return compressed
    number = _strides(length, stride)
    first = first[:, None]
    slots_of_strides = torch.arange(number * stride, device=text.device)
    strides = first + slots_of_strides[:number]
    changed_slots = first * stride + slots_of_strides
    changed = text.gather(2, _index(changed_slots, like=text))
    new = compress(changed, weight)
    return compressed.scatter_(2, _index(strides, like=text), new)


def _strides(slots: int, stride: int) -> int:
    """Strides that the first `slots` slots touch."""
    return _round_up(slots, stride) // stride


def _with_room(before: Tensor, size: int, overwrites: bool) -> Tensor:
    """A copy of `before` with `size` slots, or `before` itself if it may be overwritten and has that size."""
    missing = size - before.shape[2]
    if missing:
        return F.pad(before, (0, 0, 0, missing))
    return before if overwrites else before.clone()


def _index(slots: Tensor, like: Tensor) -> Tensor:
    """Slots [B, S] as an index into slots like [B, H, R, D]."""
    _, heads, _, width = like.shape
    index = slots[:, None, :, None]
    return index.expand(-1, heads, -1, width)


def _state_after(
    text: SparseKeys, slots: CallSlots, tail: Tensor, columns: int | Tensor, sizes: SparseSizes
) -> SparseState:
    """The state after a call, up to which `columns` columns were read."""
    text.keys.written_columns = columns
    strides = sizes.block // sizes.stride
    return SparseState(
        slot_keys=text.keys,
        slot_values=text.values,
        compressed_keys=text.compressed_keys.unflatten(2, (-1, strides)),
        compressed_values=text.compressed_values.unflatten(2, (-1, strides)),
        first=slots.first_after,
        conv_tail=tail,
    )


def read_tokens(
    inputs: SparseInputs,
    state: SparseState | None,
    blocks: TokenPlan,
    sizes: SparseSizes,
    is_plain: bool,
    need_state: bool,
    selects: bool,
) -> tuple[Tensor, SparseState | None, Selection | None]:
    """`read_text` in the order of the tokens.

    The state holds each row's last document alone, which begins at slot 0: that many slots are known beforehand.
    """
    columns = blocks.after.columns
    # a cache of fixed length has room for all tokens
    if isinstance(columns, int):
        size = _round_up(columns, sizes.block)
    else:
        size = state.slot_keys.shape[2]
    tensors = inputs._asdict() | blocks.tensors()
    if state is not None:
        tensors |= state._asdict()
    *whole_sizes, epsilon = sizes
    numbers = _Numbers(blocks.columns(), size, int(is_plain), int(need_state), int(selects))
    output, *results = call("sparse_attention", tensors, [*numbers, *whole_sizes], str(epsilon))
    selection = None
    if selects:
        *results, selected, own_block = results
        selection = Selection(inputs.gates, selected, own_block)
    after = SparseState(*results) if need_state else None
    return output, after, selection


class _Numbers(NamedTuple):
    """Numbers that the operator takes, in front of those of `SparseSizes`."""

    # tokens that all rows have read, or 0 (see `TokenPlan.columns`), and slots of the state after the call
    columns: int
    size: int
    # 0 or 1
    is_plain: int
    need_state: int
    selects: int

    @classmethod
    def split(cls, numbers: Sequence[int], epsilon: str) -> tuple["_Numbers", SparseSizes]:
        """These numbers, and the sizes behind them."""
        number = len(cls._fields)
        return cls(*numbers[:number]), SparseSizes(*numbers[number:], float(epsilon))


def _run(tensors: dict[str, Tensor], numbers: Sequence[int], epsilon: str) -> list[Tensor]:
    of_call, sizes = _Numbers.split(numbers, epsilon)
    inputs = named_tuple(SparseInputs, tensors)
    state = named_tuple(SparseState, tensors)
    plan = partial(plan_slots, sizes.block)
    shape = inputs.raw.shape[:2]
    blocks = plan_again(plan, tensors, shape, of_call.columns, has_past=state is not None)
    cos = blocks.to_slots(inputs.cos)
    sin = blocks.to_slots(inputs.sin)
    inputs = inputs._replace(cos=cos, sin=sin)
    choose = None if of_call.is_plain else _fast_reads
    need_state = bool(of_call.need_state)
    selects = bool(of_call.selects)
    output, after, selection = read_text(inputs, state, blocks, sizes, choose, need_state, selects)
    results = [output]
    if need_state:
        results += _last_document(after, of_call.size, sizes.block)
    if selects:
        results += _by_token(selection, blocks, sizes.top_k, tensors.get("padding"))
    return results


def _fast_reads(query: Tensor, base: int) -> Callable | None:
    return FAST.get("sparse_reads")


def _last_document(state: SparseState, size: int, block: int) -> SparseState:
    """A copy of the state with `size` slots, in which each row's document begins at slot 0."""
    first = state.first
    first_block = first // block
    blocks = size // block
    return SparseState(
        slot_keys=_from_first(state.slot_keys, first, size),
        slot_values=_from_first(state.slot_values, first, size),
        compressed_keys=_from_first(state.compressed_keys, first_block, blocks),
        compressed_values=_from_first(state.compressed_values, first_block, blocks),
        first=torch.zeros_like(first),
        conv_tail=state.conv_tail,
    )


def _from_first(part: Tensor, first: Tensor, number: int) -> Tensor:
    """`number` slots or blocks of [B, H, R, ...] from each row's `first` one on; the last one again at the end."""
    index = first[:, None] + torch.arange(number, device=part.device)
    index = index.clamp(max=part.shape[2] - 1)
    ones = (1,) * (part.ndim - 3)
    index = index.view(-1, 1, number, *ones)
    return torch.take_along_dim(part, index, dim=2)


def _by_token(selection: Selection, blocks: SlotPlan, top_k: int, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    """Selected blocks [B, H, T, top_k] and own blocks [B, T] of tokens, from those of slots."""
    # [B, S, H, X]
    selected = selection.blocks.transpose(1, 2)
    selected = blocks.to_tokens(selected).transpose(1, 2)
    missing = top_k - selected.shape[-1]
    selected = F.pad(selected, (0, missing), value=-1)
    own_block = blocks.to_tokens(selection.own_block)
    if padding is not None:
        own_block = torch.where(padding.bool(), own_block, -1)
    return selected, own_block


def _shapes(tensors: dict[str, Tensor], numbers: Sequence[int], epsilon: str) -> list[Tensor]:
    of_call, sizes = _Numbers.split(numbers, epsilon)
    inputs = named_tuple(SparseInputs, tensors)
    state = named_tuple(SparseState, tensors)
    size = of_call.size
    rows, length, channels = inputs.raw.shape
    width = inputs.query_norm.shape[-1]
    empty = inputs.raw.new_empty
    key_dtype = torch.promote_types(inputs.raw.dtype, inputs.cos.dtype)
    output_dtype = torch.promote_types(key_dtype, torch.float32)
    results = [empty(rows, length, sizes.heads * width, dtype=output_dtype)]
    if of_call.need_state:
        value_dtype = inputs.raw.dtype
        if state is not None:
            key_dtype = state.slot_keys.dtype
            value_dtype = state.slot_values.dtype
        blocks = size // sizes.block
        strides_of_block = sizes.block // sizes.stride
        tail_size = len(inputs.conv_weights) - 1
        slots = rows, sizes.key_heads, size, width
        strides = rows, sizes.key_heads, blocks, strides_of_block, width
        results += SparseState(
            slot_keys=empty(slots, dtype=key_dtype),
            slot_values=empty(slots, dtype=value_dtype),
            compressed_keys=empty(strides, dtype=key_dtype),
            compressed_values=empty(strides, dtype=value_dtype),
            first=empty(rows, dtype=torch.long),
            conv_tail=empty(rows, tail_size, channels),
        )
    if of_call.selects:
        results.append(empty(rows, sizes.key_heads, length, sizes.top_k, dtype=torch.long))
        results.append(empty(rows, length, dtype=torch.long))
    return results


register("sparse_attention", _run, _shapes)
