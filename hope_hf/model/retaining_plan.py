"""The blocks of a call's tokens in attention that retains tokens: what each token sees and leaves behind.

See `retaining_attention` for blocks, window and sinks.

Axes: B row, T token of the call, S slot of the call (`chunks`); K block, W window; M keys of a call: the window before
the call, then its slots.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig

from .attention import rotary_reach
from .chunks import Past, SlotPlan, TokenPlan, plan_slots
from .streams import Angles, angles_at, bias_of


class Sizes(NamedTuple):
    """Numbers of tokens: sinks, window, block, and the distance at which a token is given up."""

    sinks: int
    window: int
    block: int
    reach: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "Sizes":
        """The sizes of a configuration."""
        reach = rotary_reach(config) or config.max_position_embeddings
        return cls(
            sinks=config.attention_sinks,
            window=config.sliding_window,
            block=config.retained_block_size,
            reach=min(reach, config.max_position_embeddings),
        )


class Band(NamedTuple):
    """The queries of a call in one block, and what they see."""

    # slots of the call
    queries: slice
    # of the M keys: those of the window and of the block
    keys: slice
    # of the M keys: the block's first ones, which are sinks if the block is the document's first
    first_keys: slice
    # added to scores of sinks, then of keys [1 or B, 1, 1, q, sinks + k]: -inf where a query does not see one
    bias: Tensor
    # whether the block is its document's first, of all rows or [B]
    begins: bool | Tensor
    # whether the block ends with these queries, of all rows or [B]
    ends: bool | Tensor
    # of the M keys: the tokens that leave the window when the block ends, and the position of each [1 or B, k]
    leaving_keys: slice
    leaving_positions: Tensor
    # a token that is not after this one is given up when the block ends, of all rows or [B, 1]: the last query of the
    # next block would be `reach` or more tokens away
    last_given_up: int | Tensor


@dataclass(kw_only=True)
class RetainingPlan(SlotPlan):
    """The slots of one call's tokens, and what they see and leave behind; the same for all layers.

    A single token that goes on is written into the state's window, whose slots are then the M keys.
    """

    bands: tuple[Band, ...] = ()
    # the single token's slot in the state's window, of all rows or [B]
    token_slot: int | Tensor | None = None
    # slots of the call's first block that stand for tokens of earlier calls: whether a slot does [B, K]
    is_earlier: Tensor | None = None
    # the key that goes into each slot of the window [W + K] or [B, W + K]; `None` if they stay where they are
    keys_after: Tensor | None = None


def plan_retaining(
    sizes: Sizes,
    dtype: torch.dtype,
    shape: tuple[int, int],
    device: torch.device,
    past: Past | None = None,
    **options,
) -> RetainingPlan | TokenPlan:
    """The plan of one call, for hidden states of a dtype; see `plan_slots` for the other arguments."""
    slots = plan_slots(sizes.block, shape, device, past, **options)
    if isinstance(slots, TokenPlan):
        return slots
    plan = RetainingPlan.of(slots)
    goes_on = past is not None
    if plan.valid is None:
        _plan_uniform(plan, sizes, dtype, shape[1], goes_on)
    elif shape[1] == 1:
        _plan_token(plan, sizes, dtype)
    else:
        _plan_slots(plan, sizes, dtype, goes_on)
    return plan


def _plan_uniform(
    plan: RetainingPlan,
    sizes: Sizes,
    dtype: torch.dtype,
    length: int,
    goes_on: bool,
) -> None:
    """All rows go on with a document of `plan.seen_before` tokens, or begin one."""
    block = sizes.block
    device = plan.after.seen.device
    window = sizes.window if goes_on else 0
    # tokens of the first block before the call
    earlier = plan.seen_before % block
    bands = []
    start = 0
    while start < length:
        start_position = plan.seen_before + start
        tokens_in_block = start_position % block
        first = start_position - tokens_in_block
        stop = min(start + block - tokens_in_block, length)
        stop_position = plan.seen_before + stop
        position = torch.arange(start_position, stop_position, device=device)[None]
        # the key of the block's first token
        first_key = window + first - (plan.seen_before - earlier)
        band = _make_band(
            sizes,
            dtype,
            queries=slice(start, stop),
            first_key=first_key,
            stop_key=window + earlier + stop,
            slot=position - first,
            position=position,
            first=first,
            begins=first == 0,
            ends=stop_position == first + block,
        )
        bands.append(band)
        start = stop
    plan.bands = tuple(bands)
    last = bands[-1]
    if goes_on and length == 1:
        plan.token_slot = sizes.window + earlier
        if not last.ends:
            return
    # the key of the first token of the block after the call
    first_key = last.first_keys.start + (block if last.ends else 0)
    slot = torch.arange(sizes.window + block, device=device)
    key = first_key - sizes.window + slot
    plan.keys_after = key.clamp(min=0, max=last.keys.stop - 1)


def _plan_token(plan: RetainingPlan, sizes: Sizes, dtype: torch.dtype) -> None:
    """A single token of each row goes on with a document of its own length, begins one, or is padding."""
    block = sizes.block
    # [B, 1]; a row's first tokens may be padding
    position = plan.position.clamp(min=0)
    slot = position % block
    first = position - slot
    is_real = plan.valid[:, 0]
    ends = is_real & (slot[:, 0] == block - 1)
    begins = is_real & (first[:, 0] == 0)
    size = sizes.window + block
    plan.token_slot = sizes.window + slot[:, 0]
    band = _make_band(
        sizes,
        dtype,
        queries=slice(0, 1),
        first_key=sizes.window,
        stop_key=size,
        slot=slot,
        position=position,
        first=first,
        begins=begins,
        ends=ends,
    )
    # a graph must not branch on values
    if not torch.compiler.is_compiling() and not bool(ends.any()):
        band = band._replace(ends=False)
    else:
        key = torch.arange(size, device=position.device)
        moved = torch.where(ends[:, None], key + block, key)
        plan.keys_after = moved.clamp(max=size - 1)
    plan.bands = (band,)


def _plan_slots(plan: RetainingPlan, sizes: Sizes, dtype: torch.dtype, goes_on: bool) -> None:
    """Rows with documents, padding or unequal counts, whose documents begin at multiples of a block."""
    block = sizes.block
    window = sizes.window if goes_on else 0
    rows, length = plan.valid.shape
    device = plan.valid.device
    slot = torch.arange(block, device=device)[None]
    if goes_on:
        plan.is_earlier = slot < plan.offset[:, None]
    # position of each block's first token [B, blocks]
    position_of_first = plan.position - torch.arange(length, device=device) % block
    position_of_first = torch.where(plan.valid, position_of_first, 0)
    first_of_block = position_of_first.unflatten(1, (-1, block)).amax(2)
    valid_of_block = plan.valid.unflatten(1, (-1, block))
    has_tokens = valid_of_block.any(2)
    bands = []
    for index in range(length // block):
        start = index * block
        first = first_of_block[:, index, None]
        queries = slice(start, start + block)
        band = _make_band(
            sizes,
            dtype,
            queries=queries,
            first_key=window + start,
            stop_key=window + start + block,
            slot=slot,
            position=plan.position[:, queries],
            first=first,
            begins=has_tokens[:, index] & (first[:, 0] == 0),
            ends=valid_of_block[:, index, -1],
        )
        bands.append(band)
    plan.bands = tuple(bands)
    # the block after each row's last token
    number = torch.arange(length // block, device=device)
    last = torch.where(has_tokens, number, 0).amax(1)
    ends_last = valid_of_block[torch.arange(rows, device=device), last, -1]
    first_key = window + (last + ends_last.long()) * block
    window_slot = torch.arange(sizes.window + block, device=device)
    key = first_key[:, None] - sizes.window + window_slot
    plan.keys_after = key.clamp(min=0, max=window + length - 1)


def _make_band(
    sizes: Sizes,
    dtype: torch.dtype,
    queries: slice,
    first_key: int,
    stop_key: int,
    slot: Tensor,
    position: Tensor,
    first: int | Tensor,
    begins: bool | Tensor,
    ends: bool | Tensor,
) -> Band:
    """The band of some queries.

    Args:
        first_key, stop_key: of the M keys: the block's first one, and the one after the queries' last.
        slot: of the queries in their block [1 or B, q].
        position: of the queries in their documents [1 or B, q].
        first: position of the block's first token, of all rows or [B, 1].
    """
    device = position.device
    start_key = max(0, first_key - sizes.window)
    first_keys = slice(first_key, min(first_key + sizes.sinks, stop_key))
    # the sinks of an earlier block are all there
    sinks = sizes.sinks
    if isinstance(first, int) and first == 0:
        sinks = first_keys.stop - first_keys.start
    sink = torch.arange(sinks, device=device)
    key = torch.arange(start_key, stop_key, device=device) - first_key
    distance = slot[..., None] - key
    # sinks are seen as such; a slot without a token sees itself
    tokens_behind_sinks = (position - sizes.sinks)[..., None]
    farthest = tokens_behind_sinks.clamp(min=-1 if sizes.sinks else 0)
    hidden = (distance < 0) | (distance > farthest)
    hidden_sinks = sink > position[..., None]
    bias = bias_of(torch.cat([hidden_sinks, hidden], dim=2), dtype)
    next_window = first_key - sizes.window + sizes.block
    leaving_keys = slice(start_key, max(start_key, next_window))
    leaving = torch.arange(leaving_keys.start, leaving_keys.stop, device=device) - first_key
    leaving_positions = first + leaving[None]
    return Band(
        queries=queries,
        keys=slice(start_key, stop_key),
        first_keys=first_keys,
        bias=bias,
        begins=begins,
        ends=ends,
        leaving_keys=leaving_keys,
        leaving_positions=torch.where(leaving_positions < sizes.sinks, -1, leaving_positions),
        last_given_up=first + (2 * sizes.block - 1 - sizes.reach),
    )


def retaining_angles(
    config: PreTrainedConfig,
    rotary: nn.Module,
    hidden_states: Tensor,
    plan: RetainingPlan | TokenPlan,
) -> tuple[Angles, Angles | None]:
    """Angles of the tokens' positions in their documents, and of queries that read sinks, if others than these."""
    position = plan.to_tokens(plan.positions()).clamp(min=0)
    angles = angles_at(rotary, hidden_states, position)
    farthest = Sizes.of(config).reach - 1
    columns = plan.after.columns
    if not config.attention_sinks or (isinstance(columns, int) and columns <= farthest):
        return angles, None
    # beyond the positions that the model knows, sinks stay at the last of them
    return angles, angles_at(rotary, hidden_states, position.clamp(max=farthest))
