"""The three branches of native sparse attention (arXiv 2502.11089), query by query in plain operations.

A query at slot t of a document that begins at slot f attends by softmax attention to

    compressed   the compressed keys of all strides of the document that end at or before t
    selected     the keys at or before t of the selected blocks: the document's first, the query's own, the one before
                 it, and those with the largest compressed attention, summed over the query heads of a key head
    window       the last keys, its own included

This is the plain path, which gathers the keys of every query; generation uses it. `hope_hf.fast` has one for many
queries. `make_qkv` makes queries, keys and values from the outputs of linear maps.

Axes: B row, H head of keys, G query heads that share it, N query, S slot of the call, R slot of keys, D head width, Z
compressed key (R / stride), Y block (R / block), X selected block, C channel (q, k and v side by side), K kernel size.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from .chunks import ChunkSpan
from .layers import convolve

# Queries per step: each gathers copies of all keys and values that it reads.
_AT_ONCE = 16


class SparseSizes(NamedTuple):
    """The fields `sparse_*` of `HopeConfig`, in slots and blocks."""

    block: int
    stride: int
    top_k: int
    window: int


class SparseKeys(NamedTuple):
    """Keys and values, and the compressed ones."""

    # [B, H, R, D]
    keys: torch.Tensor
    values: torch.Tensor
    # [B, H, Z, D]
    compressed_keys: torch.Tensor
    compressed_values: torch.Tensor


def masked_softmax(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Softmax over the entries of the last axis where `mask` is true, 0 elsewhere and in rows without such entries."""
    lowest = torch.finfo(scores.dtype).min
    return scores.masked_fill(~mask, lowest).softmax(-1).masked_fill(~mask, 0.0)


def block_scores(attention: torch.Tensor, at: torch.Tensor, first: torch.Tensor, sizes: SparseSizes) -> torch.Tensor:
    """Scores of blocks for selection [B, H, N, Y]: largest for forced blocks, -inf for blocks that a query cannot see.

    Args:
        attention: compressed attention of each query, summed over the heads that share a key [B, H, N, Z].
        at, first: slot of the query, and of its document's first token [B or 1, N].
    """
    scores = attention.unflatten(-1, (-1, sizes.block // sizes.stride)).sum(-1)
    block = torch.arange(scores.shape[-1], device=scores.device)
    own, begin = (slot[:, None, :, None] // sizes.block for slot in (at, first))
    for rank, forced in enumerate((own - 1, begin, own), start=1):
        # larger than attention, whose sum is at most the number of heads
        scores = torch.where(block == forced, float(rank) * scores.new_tensor(1e6), scores)
    return scores.masked_fill((block < begin) | (block > own), float("-inf"))


def select_blocks(attention, at, first, sizes: SparseSizes) -> torch.Tensor:
    """Selected blocks of each query [B, H, N, X], -1 for none; see `block_scores` for the arguments."""
    scores = block_scores(attention, at, first, sizes)
    best = scores.topk(min(sizes.top_k, scores.shape[-1]), dim=-1)
    return best.indices.masked_fill(best.values == float("-inf"), -1)


def read_compressed(queries, held: SparseKeys, at, first, stride: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Reads [B, H, G, N, D], and the attention summed over the heads that share a key [B, H, N, Z]."""
    begin = torch.arange(held.compressed_keys.shape[2], device=at.device) * stride
    mask = (begin >= first[..., None]) & (begin + stride <= at[..., None] + 1)
    scores = queries @ held.compressed_keys.unsqueeze(2).mT
    attention = masked_softmax(scores, mask[:, None, None])
    return attention @ held.compressed_values.unsqueeze(2), attention.detach().sum(2)


def read_slots(queries, held: SparseKeys, slots: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Reads [B, H, G, N, D] of the given slots [B, H, N, M] where `mask` is true."""
    width = queries.shape[-1]
    index = slots.flatten(2).unsqueeze(-1).expand(-1, -1, -1, width)
    keys, values = (part.gather(2, index).unflatten(2, slots.shape[2:]) for part in (held.keys, held.values))
    # [B, H, N, G, D]: each query has keys of its own
    scores = queries.transpose(2, 3) @ keys.mT
    return (masked_softmax(scores, mask.unsqueeze(3)) @ values).transpose(2, 3)


def read_sparse(
    queries: torch.Tensor,
    gates: torch.Tensor,
    held: SparseKeys,
    at: torch.Tensor,
    first: torch.Tensor,
    sizes: SparseSizes,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the branches' reads times their gates [B, H, G, N, D], and the selected blocks [B, H, N, X].

    Args:
        queries: scaled [B, H, G, N, D].
        gates: weights of the compressed, selected and window branch [B, H, G, N, 3].
        at, first: slot of each query, and of its document's first token [B, N].
    """
    device, heads = at.device, held.keys.shape[1]
    reads, blocks = [], []
    for start in range(0, queries.shape[3], _AT_ONCE):
        cut = slice(start, start + _AT_ONCE)
        query, slot, begin = queries[:, :, :, cut], at[:, cut], first[:, cut]
        compressed, attention = read_compressed(query, held, slot, begin, sizes.stride)
        chosen = select_blocks(attention, slot, begin, sizes)
        inside = chosen[..., None] * sizes.block + torch.arange(sizes.block, device=device)
        mask = (chosen[..., None] >= 0) & (inside <= slot[:, None, :, None, None])
        selected = read_slots(query, held, inside.clamp(min=0).flatten(3), mask.flatten(3))
        near = slot[..., None] + torch.arange(1 - sizes.window, 1, device=device)
        mask = (near >= begin[..., None])[:, None].expand(-1, heads, -1, -1)
        window = read_slots(query, held, near.clamp(min=0)[:, None].expand(-1, heads, -1, -1), mask)
        branches = torch.stack([compressed, selected, window], dim=-1)
        reads.append((branches @ gates[:, :, :, cut].unsqueeze(-1)).squeeze(-1))
        blocks.append(chosen)
    return torch.cat(reads, dim=3), torch.cat(blocks, dim=2)


class QkvWeights(NamedTuple):
    """Kernel weights of the convolutions, and factors of the normalised queries and keys."""

    # the oldest token's first [K, 1, 1, C]
    conv_weights: torch.Tensor
    # [D]
    query_norm: torch.Tensor
    key_norm: torch.Tensor


class QkvSizes(NamedTuple):
    """Numbers of query heads and key heads, and the epsilon of the norms."""

    heads: int
    key_heads: int
    epsilon: float

    @property
    def split(self) -> list[int]:
        """Numbers of heads of queries, keys and values."""
        return [self.heads, self.key_heads, self.key_heads]


def make_qkv(
    raw: torch.Tensor,
    tail: torch.Tensor,
    weights: QkvWeights,
    angles: tuple[torch.Tensor, torch.Tensor],
    span: ChunkSpan,
    sizes: QkvSizes,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [B, H, G, S, D], keys and values [B, H, S, D] of a span, and the tail for the next span.

    Args:
        raw: output of the linear maps [B, S, C].
        tail: last inputs of the convolutions before the span [B, K - 1, C].
        angles: cosines and sines of the slots' positions [B or 1, S, D].
    """
    mixed, tail = convolve(raw, tail, weights.conv_weights, span)
    width = weights.query_norm.shape[-1]
    heads = mixed.unflatten(-1, (-1, width)).transpose(1, 2)
    query, key, value = heads.split(sizes.split, dim=1)
    query, key = (
        F.rms_norm(part, (width,), weight, sizes.epsilon)
        for part, weight in ((query, weights.query_norm), (key, weights.key_norm))
    )
    query, key = apply_rotary_pos_emb(query, key, *angles)
    return query.unflatten(1, (sizes.key_heads, -1)), key, value, tail
