"""The bands of a call's tokens in attention with a window: what each token sees and leaves behind.

Axes: B row, T token of the call, S slot of the call (`chunks`; padding has no slot, and documents follow each other);
K sinks, W window; M keys of a call: of earlier calls, then of its own slots.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig

from .chunks import Past, SlotPlan, TokenPlan, plan_slots
from .streams import Angles, angles_at, bias_of

# Queries that are computed together: more of them compute more scores that no query sees, fewer take more operations.
BAND = 128


class WindowSizes(NamedTuple):
    """Numbers of tokens: sinks, and the window."""

    sinks: int
    window: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "WindowSizes":
        """The sizes of a configuration."""
        return cls(config.attention_sinks, config.sliding_window)

    @property
    def slots(self) -> int:
        """Slots of the state."""
        return self.sinks + self.window

    def slot(self, token: int | Tensor) -> int | Tensor:
        """The state's slot of a document's token or tokens, see `window_attention.WindowState`."""
        ring = self.sinks + (token - self.sinks) % self.window
        if isinstance(token, Tensor):
            return torch.where(token < self.sinks, token, ring)
        return token if token < self.sinks else ring


class Band(NamedTuple):
    """Consecutive queries of a call, and the keys that they see."""

    # slots of the call
    queries: slice
    # of the M keys: the same sinks for all rows or [B, k]; `None` if no query sees one
    sinks: slice | Tensor | None
    # of the M keys
    window_keys: slice
    # added to scores of sinks, then of the window [1 or B, 1, 1, q, keys]: -inf where a query does not see a key;
    # `None` if all see all
    bias: Tensor | None


@dataclass(kw_only=True)
class WindowPlan(SlotPlan):
    """The slots of one call's tokens, and what they see and leave behind; the same for all layers.

    A single token that goes on is written into the state, whose slots are then the M keys.
    """

    bands: tuple[Band, ...] = ()
    # the single token's slot in the state, of all rows or [B]
    token_slot: int | Tensor | None = None
    # slots of the state that are the call's first keys [M - S] or [B, M - S]; `None` at a text's start
    recalled_slots: Tensor | None = None
    # the key that goes into each slot of the state [K + W] or [B, K + W]; `None` if they stay where they are
    keys_after: Tensor | None = None


def plan_window(
    sizes: WindowSizes,
    dtype: torch.dtype,
    shape: tuple[int, int],
    device: torch.device,
    past: Past | None = None,
    **options,
) -> WindowPlan | TokenPlan:
    """The plan of one call, for hidden states of a dtype; see `plan_slots` for the other arguments."""
    slots = plan_slots(1, shape, device, past, **options)
    if isinstance(slots, TokenPlan):
        return slots
    plan = WindowPlan.of(slots)
    # a row's first tokens may be padding
    position = slots.positions().clamp(min=0)
    goes_on = past is not None
    if goes_on and position.shape[1] == 1:
        _plan_token(plan, position, sizes, dtype)
    else:
        _plan_text(plan, position, sizes, dtype, goes_on)
    return plan


def _plan_token(plan: WindowPlan, position: Tensor, sizes: WindowSizes, dtype: torch.dtype) -> None:
    """One token at `position` [B or 1, 1] that goes on with a state."""
    sink_slots = slice(sizes.sinks) if sizes.sinks else None
    window_slots = slice(sizes.sinks, sizes.slots)
    bias = None
    if plan.valid is not None:
        plan.token_slot = sizes.slot(position[:, 0])
        slot = torch.arange(sizes.slots, device=position.device)
        is_empty = slot > position
        bias = bias_of(is_empty[:, None], dtype)
    else:
        plan.token_slot = sizes.slot(plan.seen_before)
        if plan.seen_before < sizes.slots:
            # the window reaches the sinks
            filled = plan.seen_before + 1
            sink_slots = None
            window_slots = slice(filled)
    band = Band(slice(0, 1), sink_slots, window_slots, bias)
    plan.bands = (band,)


class _EarlierKeys(NamedTuple):
    """The first keys of a call: the sinks of earlier calls, then their last tokens, one after the other.

    Example: 2 sinks, a window of 4, 10 tokens read before. Keys 0 and 1 are tokens 0 and 1, keys 2 to 5 are tokens 6
    to 9, and slot s of the call is key 6 + s. Token 11 would lie in slot 11 - 10 = 1 and is key 7; token 1 would lie
    in slot -9 and is a sink, key 1.
    """

    sinks: int
    window: int

    def index(self, token: Tensor, first_slot: int | Tensor) -> Tensor:
        """The key of a token of a document that begins in slot `first_slot`, negative if an earlier call began it."""
        slot = first_slot + token
        is_earlier_sink = (token < self.sinks) & (slot < 0)
        key = slot + self.sinks + self.window
        return torch.where(is_earlier_sink, token, key)


def _plan_text(
    plan: WindowPlan, position: Tensor, sizes: WindowSizes, dtype: torch.dtype, goes_on: bool
) -> None:
    """Any other call, whose slots are at `position` [B or 1, S] of their documents."""
    if plan.valid is None:
        before = most_before = plan.seen_before
        after = before + position.shape[1]
        first_slot = -before
    else:
        before = plan.seen_before[:, None]
        # any number of tokens, unless the text begins
        most_before = sizes.slots if goes_on else 0
        # of each row's last document
        after = plan.after.seen[:, None]
        first_slot = plan.valid.sum(1, keepdim=True) - after
    earlier = _EarlierKeys(
        sinks=min(most_before, sizes.sinks),
        window=min(most_before, sizes.window),
    )
    device = position.device
    if most_before:
        window_tokens = before + torch.arange(-earlier.window, 0, device=device)
        window_slots = sizes.slot(window_tokens.clamp(min=0))
        sink_slots = torch.arange(earlier.sinks, device=device)
        sink_slots = sink_slots.expand(*window_slots.shape[:-1], -1)
        plan.recalled_slots = torch.cat([sink_slots, window_slots], dim=-1)
    bands = _plan_bands(plan, position, sizes, dtype, earlier, most_before)
    plan.bands = tuple(bands)
    slot = torch.arange(sizes.slots, device=device)
    # of two tokens with the same slot, the later one stays
    last_token = after - 1
    last_of_slot = last_token - (last_token - slot) % sizes.window
    token = torch.where(slot < sizes.sinks, slot, last_of_slot)
    key = earlier.index(token, first_slot)
    plan.keys_after = torch.where(slot < after, key, 0)


def _plan_bands(
    plan: WindowPlan,
    position: Tensor,
    sizes: WindowSizes,
    dtype: torch.dtype,
    earlier: _EarlierKeys,
    most_before: int,
) -> list[Band]:
    """The bands of a call after at most `most_before` tokens of its documents; see `_plan_text`."""
    sinks, window = sizes
    length = position.shape[1]
    device = position.device
    is_uniform = plan.valid is None
    # A query that sees sinks outside of its window is the `window`-th token of its document or a later one: with bands
    # of at most that many queries, all of a band see the sinks of one document, which contains the band's first slot.
    band_size = BAND if is_uniform else min(BAND, window)
    most_sinks = min(sinks, most_before + length)
    sink = torch.arange(most_sinks, device=device)
    has_sinks_in_front = is_uniform and (most_before == 0 or most_before >= sinks)
    first_own_key = earlier.sinks + earlier.window
    bands = []
    biases = {}
    for start in range(0, length, band_size):
        stop = min(start + band_size, length)
        first = max(start - (window - 1), -earlier.window)
        sees_sinks = sinks > 0 and most_before + stop > window
        sink_keys = None
        if sees_sinks and has_sinks_in_front:
            sink_keys = slice(sinks)
        elif sees_sinks:
            if is_uniform:
                first_slot = -most_before
            else:
                first_slot = start - position[:, start, None]
            sink_keys = earlier.index(sink, first_slot)
            # the last sinks of a short document do not exist
            sink_keys = sink_keys.clamp(max=first_own_key + stop - 1)
        # in the middle of a text, bands have the same bias
        sees_all_sinks = is_uniform and most_before + start >= sizes.slots - 1
        distance_to_sinks = None if sees_all_sinks else start
        layout = stop - start, start - first, distance_to_sinks
        if layout not in biases:
            visible_sink = sink if sees_sinks else None
            query_position = position[:, start:stop, None]
            hidden = _hidden_keys(query_position, start, first, window, visible_sink)
            biases[layout] = bias_of(hidden, dtype)
        window_keys = slice(first_own_key + first, first_own_key + stop)
        band = Band(slice(start, stop), sink_keys, window_keys, biases[layout])
        bands.append(band)
    return bands


def _hidden_keys(
    position: Tensor,
    start: int,
    first: int,
    window: int,
    sink: Tensor | None,
) -> Tensor:
    """Whether the queries of a band do not see its keys [B or 1, q, keys], the sinks' first.

    Args:
        position: of the queries in their documents [B or 1, q, 1].
        start, first: slot of the first query, and of the first key.
        sink: number of each sink; `None` if no query sees one.
    """
    stop = start + position.shape[1]
    query = torch.arange(start, stop, device=position.device)
    key = torch.arange(first, stop, device=position.device)
    distance = query[:, None] - key
    farthest = position.clamp(max=window - 1)
    hidden = (distance < 0) | (distance > farthest)
    if sink is None:
        return hidden
    is_in_window = position - sink < window
    return torch.cat([is_in_window, hidden], dim=2)


def window_angles(
    config: PreTrainedConfig,
    rotary: nn.Module,
    hidden_states: Tensor,
    plan: WindowPlan | TokenPlan,
) -> tuple[Angles, Angles | None]:
    """Angles of the tokens' positions in their documents, and of queries that read sinks (`None` if none does)."""
    position = plan.to_tokens(plan.positions()).clamp(min=0)
    angles = angles_at(rotary, hidden_states, position)
    # a graph serves all lengths; a band that sees sinks is followed by others that do
    sees_sinks = isinstance(plan, TokenPlan) or plan.bands[-1].sinks is not None
    if not (config.attention_sinks and sees_sinks):
        return angles, None
    # Sinks stay at the distance that they have when the window is first full, as in StreamingLLM: beyond the trained
    # length their own positions cost nats (docs/log).
    capped = position.clamp(max=WindowSizes.of(config).slots - 1)
    return angles, angles_at(rotary, hidden_states, capped)
