"""The equations of native sparse attention (arXiv 2502.11089), query by query in plain operations.

`make_qkv` makes queries, keys and values from the outputs of linear maps. A query at slot t of a document that begins
at slot f then attends by softmax attention to

    compressed   the compressed keys of all strides of the document that end at or before t
    selected     the keys at or before t of the selected blocks: the document's first, the query's own, the one before
                 it, and those with the largest compressed attention, summed over the query heads of a key head
    window       the last keys, its own included

This is the plain path, which gathers the keys of every query; generation uses it. `hope_hf.fast` has one for many
queries, with the same `sees_stride`, `sees_window` and `select_blocks`.

Axes: B row, H head of keys, G query heads that share it, N query, S slot of the call, R slot of keys, D head width, Z
compressed key (R / stride), Y block (R / block), X selected block, C channel (q, k and v side by side), K kernel size.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from .chunks import ChunkSpan
from .layers import convolve

# Queries per step: each gathers copies of all keys and values that it reads.
_AT_ONCE = 16


class SparseSizes(NamedTuple):
    """The fields `sparse_*` of `HopeConfig`, in slots and blocks; numbers of heads, and the epsilon of their norms."""

    block: int
    stride: int
    top_k: int
    window: int
    heads: int
    key_heads: int
    epsilon: float

    @property
    def heads_of_qkv(self) -> list[int]:
        """Numbers of heads of queries, keys and values."""
        return [self.heads, self.key_heads, self.key_heads]


class SparseInputs(NamedTuple):
    """What a call reads of its tokens and of a layer's parameters, by token (T) or by slot (S)."""

    # outputs of the maps of q, k and v, side by side [B, T or S, C]
    raw: Tensor
    # weights of the three branches [B, T or S, heads, 3]
    gates: Tensor
    # cosines and sines of each slot's position in its document [B or 1, S, D]; of tokens for a `TokenPlan`
    cos: Tensor
    sin: Tensor
    # kernel weights of the convolutions, the oldest token's first [K, 1, 1, C]
    conv_weights: Tensor
    # factors of the normalised queries, the scale of attention among them, and of the keys [D]
    query_norm: Tensor
    key_norm: Tensor
    # of the compression [H, stride, D]
    key_weights: Tensor
    value_weights: Tensor


class SparseKeys(NamedTuple):
    """Keys and values of a text, and the compressed ones."""

    # [B, H, R, D]
    keys: Tensor
    values: Tensor
    # [B, H, Z, D]
    compressed_keys: Tensor
    compressed_values: Tensor


def make_qkv(
    inputs: SparseInputs, tail: Tensor, span: ChunkSpan, sizes: SparseSizes
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rotated, scaled queries [B, H, G, S, D], keys and values [B, H, S, D], and the tail for the next span.

    Args:
        inputs: by slot, for all slots of the span.
        tail: last inputs of the convolutions before the span [B, K - 1, C].
    """
    mixed, tail = convolve(inputs.raw, tail, inputs.conv_weights, span)
    width = inputs.query_norm.shape[-1]
    by_head = mixed.unflatten(-1, (-1, width)).transpose(1, 2)
    query, key, value = by_head.split(sizes.heads_of_qkv, dim=1)
    query = F.rms_norm(query, (width,), inputs.query_norm, sizes.epsilon)
    key = F.rms_norm(key, (width,), inputs.key_norm, sizes.epsilon)
    query, key = apply_rotary_pos_emb(query, key, inputs.cos, inputs.sin)
    query = query.unflatten(1, (sizes.key_heads, -1))
    return query, key, value, tail


def compress(slots: Tensor, weight: Tensor) -> Tensor:
    """Slots [B, H, R, D] summed with weights [H, stride, D] to one per stride: [B, H, R / stride, D]."""
    # [B, H, R / stride, stride, D]
    strides = slots.unflatten(2, (-1, weight.shape[1]))
    weight = weight.to(slots.dtype).unsqueeze(1)
    return (strides * weight).sum(3)


def sees_stride(start: Tensor, at: Tensor, first: Tensor | None, stride: int) -> Tensor:
    """Whether a query at slot `at` sees the compressed key of the stride that begins at slot `start`.

    `first` is the first slot of the query's document, `None` if that is 0. All broadcast.
    """
    is_complete = start + stride <= at + 1
    if first is None:
        return is_complete
    return is_complete & (start >= first)


def sees_window(slot: Tensor, at: Tensor, first: Tensor | None, window: int) -> Tensor:
    """Whether the last `window` slots of a query at slot `at` contain `slot`; `first` as in `sees_stride`."""
    is_near = (slot <= at) & (slot > at - window)
    if first is None:
        return is_near
    return is_near & (slot >= first)


def select_blocks(attention: Tensor, at: Tensor, first: Tensor, sizes: SparseSizes) -> Tensor:
    """The blocks that each query selects [B, H, N, X], -1 for none.

    The query's own block comes first, then its document's first one, the one before its own, and those with the
    largest attention. Blocks that the query cannot see are not selected.

    Args:
        attention: compressed attention of each query, summed over the heads that share a key [B, H, N, Z].
        at, first: slot of the query, and of its document's first token [B or 1, N].
    """
    strides = sizes.block // sizes.stride
    # [B, H, N, blocks]
    scores = attention.unflatten(-1, (-1, strides)).sum(-1)
    block = torch.arange(scores.shape[-1], device=scores.device)
    own_block = at[:, None, :, None] // sizes.block
    first_block = first[:, None, :, None] // sizes.block
    # larger than attention, whose sum is at most the number of heads
    scores = scores.masked_fill(block == own_block - 1, 1e6)
    scores = scores.masked_fill(block == first_block, 2e6)
    scores = scores.masked_fill(block == own_block, 3e6)
    is_hidden = (block < first_block) | (block > own_block)
    scores = scores.masked_fill(is_hidden, -torch.inf)
    number = min(sizes.top_k, scores.shape[-1])
    best = scores.topk(number, dim=-1)
    is_none = best.values == -torch.inf
    return best.indices.masked_fill(is_none, -1)


def masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Softmax over the entries of the last axis where `mask` is true, 0 elsewhere and in rows without such entries."""
    is_hidden = ~mask
    lowest = torch.finfo(scores.dtype).min
    attention = scores.masked_fill(is_hidden, lowest).softmax(-1)
    return attention.masked_fill(is_hidden, 0.0)


def read_compressed(
    queries: Tensor, text: SparseKeys, at: Tensor, first: Tensor, stride: int
) -> tuple[Tensor, Tensor]:
    """Reads [B, H, G, N, D], and the attention summed over the heads that share a key [B, H, N, Z]."""
    # the same for all heads that share a key
    keys = text.compressed_keys.unsqueeze(2)
    values = text.compressed_values.unsqueeze(2)
    number = text.compressed_keys.shape[2]
    start = torch.arange(number, device=at.device) * stride
    mask = sees_stride(start, at[..., None], first[..., None], stride)
    scores = queries @ keys.mT
    attention = masked_softmax(scores, mask[:, None, None])
    reads = attention @ values
    return reads, attention.detach().sum(2)


def read_blocks(queries: Tensor, text: SparseKeys, at: Tensor, blocks: Tensor, size: int) -> Tensor:
    """Reads [B, H, G, N, D] of the blocks [B, H, N, X] of that size, -1 for none."""
    blocks = blocks.unsqueeze(-1)
    slots = blocks * size + torch.arange(size, device=at.device)
    is_past = slots <= at[:, None, :, None, None]
    mask = (blocks >= 0) & is_past
    return _read_slots(queries, text, slots.flatten(3), mask.flatten(3))


def read_window(queries: Tensor, text: SparseKeys, at: Tensor, first: Tensor, window: int) -> Tensor:
    """Reads [B, H, G, N, D] of the last `window` slots."""
    at = at.unsqueeze(-1)
    slots = at + torch.arange(1 - window, 1, device=at.device)
    mask = sees_window(slots, at, first.unsqueeze(-1), window)
    # the same for all heads
    shape = -1, text.keys.shape[1], -1, -1
    slots = slots.unsqueeze(1).expand(shape)
    mask = mask.unsqueeze(1).expand(shape)
    return _read_slots(queries, text, slots, mask)


def _read_slots(queries: Tensor, text: SparseKeys, slots: Tensor, mask: Tensor) -> Tensor:
    """Reads [B, H, G, N, D] of each query's slots [B, H, N, M] where `mask` is true."""
    _, _, number, slots_of_query = slots.shape
    index = slots.clamp(min=0).flatten(2).unsqueeze(-1)
    index = index.expand(-1, -1, -1, queries.shape[-1])
    keys = text.keys.gather(2, index)
    values = text.values.gather(2, index)
    # [B, H, N, M, D]
    keys = keys.unflatten(2, (number, slots_of_query))
    values = values.unflatten(2, (number, slots_of_query))
    # [B, H, N, G, D]: each query has keys of its own
    scores = queries.transpose(2, 3) @ keys.mT
    attention = masked_softmax(scores, mask.unsqueeze(3))
    return (attention @ values).transpose(2, 3)


def read_sparse(
    queries: Tensor,
    gates: Tensor,
    text: SparseKeys,
    at: Tensor,
    first: Tensor,
    sizes: SparseSizes,
) -> tuple[Tensor, Tensor]:
    """The sum of the branches' reads times their gates [B, H, G, N, D], and the selected blocks [B, H, N, X].

    Args:
        queries: scaled [B, H, G, N, D].
        gates: weights of the compressed, selected and window branch [B, H, G, N, 3].
        at, first: slot of each query, and of its document's first token [B, N].
    """
    reads, selections = [], []
    for start in range(0, queries.shape[3], _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        query = queries[:, :, :, part]
        query_at = at[:, part]
        query_first = first[:, part]
        compressed, attention = read_compressed(query, text, query_at, query_first, sizes.stride)
        blocks = select_blocks(attention, query_at, query_first, sizes)
        selected = read_blocks(query, text, query_at, blocks, sizes.block)
        window = read_window(query, text, query_at, query_first, sizes.window)
        branches = torch.stack([compressed, selected, window], dim=-1)
        weights = gates[:, :, :, part].unsqueeze(-1)
        reads.append((branches @ weights).squeeze(-1))
        selections.append(blocks)
    return torch.cat(reads, dim=3), torch.cat(selections, dim=2)
