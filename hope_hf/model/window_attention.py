"""Softmax attention to the last tokens and to a document's first ones, with a state of constant size.

A query sees the last `sliding_window` tokens, its own included, and the first `attention_sinks` tokens of its document
("sinks", arXiv 2309.17453). A long call is computed in bands of queries: each sees the keys of its window and the
sinks, so that time and memory grow in proportion to the text.

Axes: B row, T token of the call, S slot of the call (`chunks`; padding has no slot, and documents follow each other),
H head of keys, G query heads that share it, D head width; K sinks, W window.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.llama.modeling_llama import rotate_half

from .attention import HopeAttention
from .chunks import Past, SlotPlan, TokenPlan, plan_again, plan_slots
from .opaque import call, named_tuple, register
from .rotary import rotary_reach

# Queries that are computed together: more of them compute more scores that no query sees, fewer take more operations.
_BAND = 128


class WindowState(NamedTuple):
    """Keys, after rotation, and values of the current document [B, H, K + W, D].

    Token t of the document lies in slot t if it is a sink (t < K), else in slot K + (t - K) % W, which token t - W had
    before. After n tokens the first n slots are filled; the other ones are never read.
    """

    ring_keys: torch.Tensor
    ring_values: torch.Tensor


class Band(NamedTuple):
    """Consecutive queries of a call, and the keys that they see, as indices into what the call holds."""

    start: int
    stop: int
    # sinks, the same for all rows or [B, k]; `None` if no query sees one
    sinks: slice | torch.Tensor | None
    # keys of the window
    window_keys: slice
    # added to the scores [1 or B, 1, 1, stop - start, keys], the sinks' first: -inf where a query does not see a key;
    # `None` if all see all
    bias: torch.Tensor | None


@dataclass(kw_only=True)
class WindowPlan(SlotPlan):
    """The slots of one call's tokens, and what they see and leave behind; the same for all layers.

    A single token that goes on is written into the state, and sees it. Any other call holds sinks and window of the
    calls before, then its own slots.
    """

    bands: tuple[Band, ...] = ()
    # the single token's slot in the state, of all rows or [B]
    slot: int | torch.Tensor | None = None
    # slots of the state that the call holds [M] or [B, M], or `None` at a text's start
    recalled: torch.Tensor | None = None
    # what of the call's goes into each slot of the state [K + W] or [B, K + W]
    kept: torch.Tensor | None = None


def plan_window(
    sinks: int,
    window: int,
    dtype: torch.dtype,
    shape: tuple[int, int],
    device: torch.device,
    past: Past | None = None,
    *options,
    **named_options,
) -> WindowPlan | TokenPlan:
    """The plan of one call, for hidden states of a dtype; see `plan_slots` for the other arguments."""
    slots = plan_slots(1, shape, device, past, *options, **named_options)
    if isinstance(slots, TokenPlan):
        return slots
    # a row's first tokens may be padding
    position, goes_on = slots.positions().clamp(min=0), past is not None
    layout = slots.past, slots.before, slots.valid, slots.position, slots.offset
    plan = WindowPlan(*layout, slots.token_of_slot, slots.slot_of_token)
    if position.shape[1] == 1 and goes_on:
        _plan_token(plan, position, sinks, window, dtype)
    elif slots.valid is None:
        _plan_text(plan, position, sinks, window, dtype)
    else:
        _plan_rows(plan, position, sinks, window, goes_on, dtype)
    return plan


def window_positions(
    config: PreTrainedConfig, rotary: nn.Module, hidden_states: torch.Tensor, plan: WindowPlan | TokenPlan
) -> tuple[torch.Tensor, ...]:
    """Cosines and sines [B or 1, 1, T, D] of the tokens' positions in their documents.

    The same of queries that read sinks follow, unless none does.
    """
    sinks, position = config.attention_sinks, plan.to_tokens(plan.positions()).clamp(min=0)
    places = [position]
    # a graph serves all lengths
    if sinks and (isinstance(plan, TokenPlan) or any(band.sinks is not None for band in plan.bands)):
        # Sinks stay at the distance that they have when the window is first full, as in StreamingLLM: beyond the
        # trained length their own positions cost nats (docs/log).
        places.append(position.clamp(max=sinks + config.sliding_window - 1))
    return tuple(part.unsqueeze(1) for place in places for part in rotary(hidden_states, position_ids=place))


def _slot(token, sinks: int, window: int):
    """The state's slot of a document's tokens: a number or a tensor."""
    ring = sinks + (token - sinks) % window
    if isinstance(token, torch.Tensor):
        return torch.where(token < sinks, token, ring)
    return token if token < sinks else ring


def _tokens_of_slots(
    after: int | torch.Tensor, sinks: int, window: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last of a document's first `after` tokens in each of the state's slots, and whether there is one."""
    slot = torch.arange(sinks + window, device=device)
    return torch.where(slot < sinks, slot, after - 1 - (after - 1 - slot) % window), slot < after


def _bias(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`Band.bias` from whether a query does not see a key [1 or B, queries, keys]."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill(hidden, -torch.inf)[:, None, None]


def _plan_token(plan: WindowPlan, position: torch.Tensor, sinks: int, window: int, dtype: torch.dtype) -> None:
    """One token [B or 1, 1] that goes on with a state."""
    size = sinks + window
    if plan.valid is None:
        plan.slot = _slot(plan.before, sinks, window)
        sees_sinks = sinks > 0 and plan.before >= size
        window_keys = slice(sinks if sees_sinks else 0, min(plan.before + 1, size))
        plan.bands = (Band(0, 1, slice(sinks) if sees_sinks else None, window_keys, None),)
    else:
        plan.slot = _slot(position[:, 0], sinks, window)
        hidden = torch.arange(size, device=position.device) > position
        bias = _bias(hidden[:, None], dtype)
        plan.bands = (Band(0, 1, slice(sinks) if sinks else None, slice(sinks, size), bias),)


def _plan_text(plan: WindowPlan, position: torch.Tensor, sinks: int, window: int, dtype: torch.dtype) -> None:
    """Rows that all go on with one document, at `position` [1, S].

    Keys are the sinks that earlier calls have read (`sinks_held`), then the window's tokens (`window_held`), then the
    call's. A token is at its index in the document plus `offset`, a sink of earlier calls at its index. Example: 2
    sinks, a window of 4, 10 tokens read before: keys 0 and 1 are tokens 0 and 1, keys 2 to 5 are tokens 6 to 9, the
    call's first token is key 6, and `offset` is 2 + 4 - 10 = -4.
    """
    before, length, device = plan.before, position.shape[1], position.device
    after = before + length
    sinks_held, window_held = min(before, sinks), min(before, window)
    offset = sinks_held + window_held - before
    if before:
        tokens = torch.cat(
            [torch.arange(sinks_held, device=device), torch.arange(before - window_held, before, device=device)]
        )
        plan.recalled = _slot(tokens, sinks, window)
    at = torch.arange(min(sinks, after), device=device)
    # they are next to each other unless this call reads a part of them
    held_sinks = torch.where(at < before, at, at + offset) if 0 < before < sinks else slice(sinks)
    bands, biases = [], {}
    for start in range(0, length, _BAND):
        stop = min(start + _BAND, length)
        first = max(start - (window - 1), -window_held)
        sees_sinks = sinks > 0 and before + stop > window
        all_sinks = before + start - sinks >= window - 1
        shape = stop - start, start - first, sees_sinks, all_sinks or before + start
        if shape not in biases:
            query = torch.arange(start, stop, device=device)[:, None]
            distance = query - torch.arange(first, stop, device=device)
            hidden = (distance < 0) | (distance >= window)
            if sees_sinks:
                hidden = torch.cat([before + query - at < window, hidden], dim=1)
            biases[shape] = _bias(hidden[None], dtype)
        window_keys = slice(sinks_held + window_held + first, sinks_held + window_held + stop)
        bands.append(Band(start, stop, held_sinks if sees_sinks else None, window_keys, biases[shape]))
    plan.bands = tuple(bands)
    token, is_filled = _tokens_of_slots(after, sinks, window, device)
    held = torch.where(token < sinks_held, token, token + offset)
    plan.kept = torch.where(is_filled, held, 0)


def _plan_rows(
    plan: WindowPlan, position: torch.Tensor, sinks: int, window: int, goes_on: bool, dtype: torch.dtype
) -> None:
    """Rows with documents, padding or unequal counts, whose slots are at `position` [B, S] of their documents."""
    seen, length, device = plan.before[:, None], position.shape[1], position.device
    sinks_held, window_held = (sinks, window) if goes_on else (0, 0)
    if goes_on:
        at = torch.arange(sinks, device=device).expand(len(seen), -1)
        last = (seen + torch.arange(-window, 0, device=device)).clamp(min=0)
        plan.recalled = torch.cat([at, _slot(last, sinks, window)], dim=1)
    position, at = position[:, :, None], torch.arange(sinks, device=device)
    bands = []
    # A query that sees sinks outside of its window is the `window`-th token of its document or a later one: with bands
    # of at most that many queries, all of a band see the sinks of one document, which contains the band's first slot.
    size = min(_BAND, window)
    for start in range(0, length, size):
        stop = min(start + size, length)
        first = max(start - (window - 1), -window_held)
        query = torch.arange(start, stop, device=device)[:, None]
        distance = query - torch.arange(first, stop, device=device)
        farthest = position[:, start:stop].clamp(max=window - 1)
        hidden = (distance < 0) | (distance > farthest)
        held = None
        if sinks and (goes_on or stop > window):
            hidden = torch.cat([position[:, start:stop] - at < window, hidden], dim=2)
            # the document's first slot, negative if an earlier call read it
            slot = start - position[:, start] + at
            held = torch.where(slot < 0, at if goes_on else 0, slot + sinks_held + window_held).clamp(
                max=sinks_held + window_held + stop - 1
            )
        window_keys = slice(sinks_held + window_held + first, sinks_held + window_held + stop)
        bands.append(Band(start, stop, held, window_keys, _bias(hidden, dtype)))
    plan.bands = tuple(bands)
    # tokens of the row's last document, and the slot of its first token in the call
    after = plan.past.seen[:, None]
    origin = plan.valid.sum(1, keepdim=True) - after
    token, is_filled = _tokens_of_slots(after, sinks, window, device)
    held = torch.where((token < sinks) & (origin + token < 0), token, origin + token + sinks_held + window_held)
    plan.kept = torch.where(is_filled, held, 0)


def _take(x: torch.Tensor, index: slice | torch.Tensor) -> torch.Tensor:
    """[B, H, M, D] at a slice or the indices [M] of all rows, or [B, M] of each."""
    if isinstance(index, slice):
        return x[:, :, index]
    if index.ndim == 1:
        return x.index_select(2, index)
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _rotate(x: torch.Tensor, turned: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Heads [B, H, T, D], of which `turned` is `rotate_half`, at the positions with these angles [B or 1, 1, T, D]."""
    return torch.addcmul(x * angles[0], turned, angles[1])


def _gathered(gather: Callable, x: torch.Tensor | None) -> torch.Tensor | None:
    """[B, H, T, D] with tokens gathered to slots, or slots to tokens."""
    return None if x is None else gather(x.transpose(1, 2)).transpose(1, 2)


def _with_token(held: torch.Tensor, new: torch.Tensor, window: WindowPlan) -> torch.Tensor:
    """A copy of a state's tensor [B, H, K + W, D] with a token [B, H, 1, D] in its slot."""
    if isinstance(window.slot, int):
        return held.slice_scatter(new, 2, window.slot, window.slot + 1)
    index = window.slot[:, None, None, None].expand_as(new)
    return held.scatter(2, index, torch.where(window.valid[:, None, None], new, held.gather(2, index)))


def read_window(
    queries: torch.Tensor,
    of_sinks: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    state: WindowState | None,
    window: WindowPlan,
    need_state: bool,
    dropout: float,
) -> tuple[torch.Tensor, WindowState | None]:
    """What the tokens of a call read [B, heads, T, D], and the state after the call if it is needed.

    Args:
        queries, of_sinks: scaled, at their own positions and, for sinks, at capped ones [B, heads, T, D].
        keys, values: [B, H, T, D].
        dropout: share of the weights that are set to 0.
    """
    if window.token_of_slot is not None:
        queries, of_sinks, keys, values = (
            _gathered(window.to_slots, part) for part in (queries, of_sinks, keys, values)
        )
    held = keys, values
    if state is not None:
        # it may have another precision
        state = [part.to(new.dtype) for part, new in zip(state, held, strict=True)]
    if window.slot is not None:
        held = state = WindowState(*(_with_token(*pair, window) for pair in zip(state, held, strict=True)))
    elif window.recalled is not None:
        recalled = (_take(part, window.recalled) for part in state)
        held = [torch.cat(pair, dim=2) for pair in zip(recalled, held, strict=True)]
    else:
        # so that no band copies its keys and values
        held = [part.contiguous() for part in held]
    reads = [_read_band(queries, of_sinks, *held, band, dropout) for band in window.bands]
    reads = reads[0] if len(reads) == 1 else torch.cat(reads, dim=2)
    if window.slot is None:
        state = WindowState(*(_take(part, window.kept) for part in held)) if need_state else None
    return reads if window.slot_of_token is None else _gathered(window.to_tokens, reads), state


def _read_band(queries, of_sinks, keys, values, band: Band, dropout: float) -> torch.Tensor:
    """What a band's queries read [B, heads, q, D].

    Args:
        queries, of_sinks: of all slots, at their own positions and, for sinks, at capped ones [B, heads, S, D].
        keys, values: what the call holds [B, H, M, D].
    """
    (rows, heads, _, width), asking = keys.shape, slice(band.start, band.stop)

    def score(queries: torch.Tensor, index: slice | torch.Tensor) -> torch.Tensor:
        # The queries of a head of keys are in one product: sdpa for CPUs is several times slower in bfloat16.
        asked = queries[:, :, asking].reshape(rows * heads, -1, width)
        held = _take(keys, index).flatten(0, 1)
        if band.stop - band.start == 1:
            # in bfloat16 a third of the time of the other order
            return torch.bmm(held, asked.transpose(1, 2)).transpose(1, 2)
        return torch.bmm(asked, held.transpose(1, 2))

    scores, seen = score(queries, band.window_keys), [band.window_keys]
    if band.sinks is not None:
        scores = torch.cat([score(of_sinks, band.sinks), scores], dim=2)
        are_next = isinstance(band.sinks, slice) and band.sinks.stop == band.window_keys.start
        seen = [slice(band.window_keys.stop)] if are_next else [band.sinks, band.window_keys]
    if band.bias is not None:
        grouped = scores.unflatten(0, (rows, heads)).unflatten(2, (-1, band.stop - band.start))
        # in bfloat16 `masked_fill` takes longer than the product
        scores = (grouped + band.bias.to(scores.dtype)).flatten(0, 1).flatten(1, 2)
    weights = scores.softmax(-1)
    if dropout:
        weights = nn.functional.dropout(weights, dropout)
    weights, seen = weights.to(values.dtype), [_take(values, index).flatten(0, 1) for index in seen]
    if len(seen) == 1:
        read = torch.bmm(weights, seen[0])
    else:
        number = seen[0].shape[1]
        read = torch.bmm(weights[:, :, :number], seen[0]) + torch.bmm(weights[:, :, number:], seen[1])
    return read.view(rows, -1, band.stop - band.start, width)


def _run(tensors: dict[str, torch.Tensor], sizes: list[int], dropout: str) -> list[torch.Tensor]:
    """`read_window` as one operator of a compiled graph (`opaque`)."""
    streams = [tensors.get(name) for name in ("queries", "of_sinks", "keys", "values")]
    columns, need_state, *of_window = sizes
    state = named_tuple(WindowState, tensors)
    (rows, _, length, _), plan = streams[0].shape, partial(plan_window, *of_window, streams[0].dtype)
    window = plan_again(plan, tensors, (rows, length), columns, state is not None)
    seeded, device = tensors.get("seed"), streams[0].device
    with torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=seeded is not None):
        if seeded is not None:
            # the backward pass may run it again
            torch.manual_seed(int(seeded))
        reads, after = read_window(*streams, state, window, bool(need_state), float(dropout))
    return [reads, *(after or ())]


def _shapes(tensors: dict[str, torch.Tensor], sizes: list[int], _) -> list[torch.Tensor]:
    keys, values, (_, need_state, sinks, window) = tensors["keys"], tensors["values"], sizes
    after = [x.new_empty(*x.shape[:2], sinks + window, x.shape[3]) for x in (keys, values)] if need_state else ()
    return [values.new_empty(tensors["queries"].shape), *after]


register("window_attention", _run, _shapes)


class HopeWindowAttention(HopeAttention):
    """Causal attention to the last `sliding_window` tokens and the first `attention_sinks` ones.

    Its parameters are those of `HopeAttention`; keys keep the rotary positions of their own tokens.
    """

    state_class = WindowState
    needs = frozenset({"window", "rotary"})
    own_fields = ("sliding_window", "attention_sinks")
    name = "softmax attention with a window"

    def forward(
        self,
        hidden_states: torch.Tensor,
        state: WindowState | None = None,
        *,
        window: WindowPlan | TokenPlan,
        window_positions: tuple[torch.Tensor, ...],
        need_state: bool = False,
        **_,
    ) -> tuple[torch.Tensor, WindowState | None, None]:
        """[B, T, hidden_size]; the state after the call; no weights.

        Args:
            hidden_states: [B, T, hidden_size].
            state: state after the previous call, or `None` at a text's start.
            window: plan of the call's tokens.
            window_positions: the result of the function of that name.
            need_state: whether to return the state after the last token.
        """
        queries, keys, values = self.project(hidden_states)
        queries = queries * self.scaling
        turned, (own, capped) = rotate_half(queries), (window_positions[:2], window_positions[2:])
        streams = {
            "queries": _rotate(queries, turned, own),
            "of_sinks": _rotate(queries, turned, capped) if capped else None,
            "keys": _rotate(keys, rotate_half(keys), own),
            "values": values,
        }
        # autocast multiplies in the dtype of the maps' outputs, and rotates in float32
        streams = {name: None if x is None else x.to(values.dtype) for name, x in streams.items()}
        dropout = self.attention_dropout if self.training else 0.0
        if isinstance(window, TokenPlan):
            seed = torch.randint(2**62, (), device=values.device) if dropout else None
            sizes = [window.columns(), int(need_state), self.config.attention_sinks, self.config.sliding_window]
            held = {} if state is None else state._asdict()
            tensors = streams | held | window.tensors() | {"seed": seed}
            reads, *after = call("window_attention", tensors, sizes, str(dropout))
            state = WindowState(*after) if need_state else None
        else:
            reads, state = read_window(*streams.values(), state, window, need_state, dropout)
        return self.o_proj(reads.transpose(1, 2).flatten(2)), state, None

    @staticmethod
    def check_config(config: PreTrainedConfig) -> None:
        has_layer = "window_attention" in config.layer_types
        window, sinks = config.sliding_window, config.attention_sinks
        if has_layer and window is None:
            raise ValueError("`layer_types` holds 'window_attention': give its `sliding_window`, in tokens")
        if window is not None and not has_layer:
            raise ValueError(
                f"`sliding_window` ({window}) is given and no layer has a window: name the layers 'window_attention' "
                "in `layer_types`, or leave it out"
            )
        if window is not None and window < 1:
            raise ValueError(f"`sliding_window` must be at least 1, got {window}")
        if sinks < 0:
            raise ValueError(f"`attention_sinks` must be at least 0, got {sinks}")
        reach = rotary_reach(config) if has_layer else None
        if reach is not None and window + sinks > reach:
            raise ValueError(
                f"`sliding_window` and `attention_sinks` are {window} and {sinks} tokens, and the frequencies of "
                f"`rope_parameters` ('{config.rope_parameters['rope_type']}') change after {reach}: give a window "
                "that fits into them"
            )

    @staticmethod
    def check_state(state: WindowState, config: PreTrainedConfig, dtype: torch.dtype) -> None:
        _, heads, slots, width = state.ring_keys.shape
        ours = config.attention_sinks + config.sliding_window
        # a rank of tensor parallelism has a part of the heads
        if config.num_key_value_heads % heads or (slots, width) != (ours, config.head_dim):
            raise ValueError(
                f"the cache holds windows of {slots} tokens with {heads} heads of width {width}, and this "
                f"model's have {ours} tokens and {config.num_key_value_heads} heads of width {config.head_dim}: it is "
                "the cache of another model"
            )

    @staticmethod
    def kept_bytes(config: PreTrainedConfig, batch_size: int, length: int, low: int) -> int:
        """Queries, keys, values and reads; queries once more where they see sinks; the weights of each band."""
        heads, groups, window = config.num_attention_heads, config.num_key_value_heads, config.sliding_window
        weights = beyond = 0
        for start in range(0, length, _BAND):
            stop = min(start + _BAND, length)
            sinks = config.attention_sinks if stop > window else 0
            weights += (stop - start) * (stop - max(0, start - (window - 1)) + sinks)
            beyond += (stop - start) * (sinks > 0)
        streams = (length * (2 * heads + 2 * groups) + beyond * heads) * config.head_dim
        return batch_size * low * (streams + heads * weights)

    @staticmethod
    def mixing_flops(config: PreTrainedConfig, sequence_length: int) -> int:
        """4 per channel for every key that a query sees."""
        most = min(config.sliding_window, sequence_length)
        keys = most - most**2 / (2 * sequence_length)
        keys += config.attention_sinks * (1 - most / sequence_length)
        return round(4 * keys * config.num_attention_heads * config.head_dim)

    @staticmethod
    def cache_bytes(config: PreTrainedConfig, tokens: int) -> int:
        """Keys and values of the window and the sinks, however many tokens were read."""
        return HopeAttention.cache_bytes(config, config.attention_sinks + config.sliding_window)
