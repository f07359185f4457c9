"""What attentions with a window share: queries, keys and values with rotary positions, their slots and products.

Axes: B row, T token of the call, S slot of the call (`chunks`), H head of keys, D head width, M keys of a call.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import rotate_half

from .chunks import SlotPlan

if TYPE_CHECKING:
    from .attention import HopeAttention

# cosines and sines of positions [B or 1, 1, T, D]
Angles = tuple[Tensor, Tensor]


class Streams(NamedTuple):
    """What the tokens of a call ask for and offer, after rotation [B, heads, T, D]."""

    # scaled
    queries: Tensor
    # the same at the positions from which they see sinks; `None` if no query sees one
    sink_queries: Tensor | None
    keys: Tensor
    values: Tensor

    def in_slots(self, plan: SlotPlan) -> "Streams":
        """The same in the slots of the call [B, heads, S, D]."""
        return Streams(*(to_slots(plan, stream) for stream in self))


def angles_at(rotary: nn.Module, hidden_states: Tensor, position: Tensor) -> Angles:
    """The angles of positions [B or 1, T], in the dtype of hidden states."""
    cosines, sines = rotary(hidden_states, position_ids=position)
    return cosines.unsqueeze(1), sines.unsqueeze(1)


def make_streams(
    mixer: "HopeAttention",
    hidden_states: Tensor,
    angles: Angles,
    sink_angles: Angles | None,
) -> Streams:
    """What an attention's maps make of hidden states [B, T, hidden_size], at their positions."""
    queries, keys, values = mixer.project(hidden_states)
    # autocast multiplies in the dtype of the maps' outputs, and rotates in float32
    dtype = values.dtype
    queries = queries * mixer.scaling
    turned = rotate_half(queries)
    sink_queries = None
    if sink_angles is not None:
        sink_queries = _rotate(queries, turned, sink_angles).to(dtype)
    queries = _rotate(queries, turned, angles).to(dtype)
    keys = _rotate(keys, rotate_half(keys), angles).to(dtype)
    return Streams(queries, sink_queries, keys, values)


def _rotate(x: Tensor, turned: Tensor, angles: Angles) -> Tensor:
    """Heads [B, H, T, D], of which `turned` is `rotate_half`, at the positions with these angles."""
    cosines, sines = angles
    return torch.addcmul(x * cosines, turned, sines)


def take(x: Tensor, index: slice | Tensor) -> Tensor:
    """[B, H, M, D] at a slice or the indices [M] of all rows, or [B, M] of each."""
    if isinstance(index, slice):
        return x[:, :, index]
    if index.ndim == 1:
        return x.index_select(2, index)
    _, heads, _, width = x.shape
    index = index[:, None, :, None]
    index = index.expand(-1, heads, -1, width)
    return x.gather(2, index)


def bias_of(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores [1 or B, 1, 1, q, k]: -inf where a query does not see a key [1 or B, q, k]."""
    bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    bias = bias.masked_fill(hidden, -torch.inf)
    return bias[:, None, None]


def scores_of(queries: Tensor, keys: Tensor) -> Tensor:
    """Products [B H, heads / H q, k] of queries [B, heads, q, D] with their keys [B, H, k, D].

    The queries of a head of keys are in one product: sdpa for CPUs is several times slower in bfloat16.
    """
    is_single = queries.shape[2] == 1
    keys = keys.flatten(0, 1)
    rows, _, width = keys.shape
    queries = queries.reshape(rows, -1, width)
    if is_single:
        # in bfloat16 a third of the time of the other order
        return torch.bmm(keys, queries.transpose(1, 2)).transpose(1, 2)
    return torch.bmm(queries, keys.transpose(1, 2))


def to_slots(plan: SlotPlan, x: Tensor | None) -> Tensor | None:
    """[B, heads, T, X] -> [B, heads, S, X]; `None` stays `None`."""
    if x is None or plan.token_of_slot is None:
        return x
    by_token = x.transpose(1, 2)
    return plan.to_slots(by_token).transpose(1, 2)


def to_tokens(plan: SlotPlan, x: Tensor) -> Tensor:
    """[B, heads, S, X] -> [B, heads, T, X]."""
    if plan.slot_of_token is None:
        return x
    by_slot = x.transpose(1, 2)
    return plan.to_tokens(by_slot).transpose(1, 2)


def with_token(slots: Tensor, new: Tensor, slot: int | Tensor, valid: Tensor | None) -> Tensor:
    """A copy of a state's slots [B, H, s, X] with a token [B, H, 1, X] in its slot, of all rows or [B].

    Padding, not `valid` [B, 1], leaves the slot as it is.
    """
    if isinstance(slot, int):
        return slots.slice_scatter(new, 2, slot, slot + 1)
    index = slot[:, None, None, None].expand_as(new)
    is_real = valid[:, None, None]
    before = slots.gather(2, index)
    written = torch.where(is_real, new, before)
    return slots.scatter(2, index, written)
