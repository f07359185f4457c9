"""Softmax attention to the last tokens and to a document's first ones, with a state of constant size.

A query sees the last `sliding_window` tokens, its own included, and the first `attention_sinks` tokens of its document
("sinks", arXiv 2309.17453). A long call is computed in bands of queries: each sees the keys of its window and the
sinks, so that time and memory grow in proportion to the text.

Axes: B row, T token of the call, S slot of the call (`chunks`; padding has no slot, and documents follow each other),
H head of keys, D head width; K sinks, W window; M keys of a call: of earlier calls, then of its own slots.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig

from .attention import HopeAttention, rotary_reach
from .backends import asked_kernels, fast_path
from .chunks import Past, SlotPlan, TokenPlan, plan_again, plan_slots
from .opaque import Tensors, call, named_tuple, register, seeded
from .streams import Angles, Streams, angles_at, bias_of, make_streams, scores_of, take, to_tokens, with_token

# Queries that are computed together: more of them compute more scores that no query sees, fewer take more operations.
_BAND = 128


class WindowState(NamedTuple):
    """Keys, after rotation, and values of the current document [B, H, K + W, D].

    Token t of the document lies in slot t if it is a sink (t < K), else in slot K + (t - K) % W, which token t - W had
    before. After n tokens the first n slots are filled; the other ones are never read.
    """

    ring_keys: Tensor
    ring_values: Tensor


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
    sinks: int,
    window: int,
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
        _plan_token(plan, position, sinks, window, dtype)
    else:
        _plan_text(plan, position, sinks, window, dtype, goes_on)
    return plan


def _plan_token(
    plan: WindowPlan,
    position: Tensor,
    sinks: int,
    window: int,
    dtype: torch.dtype,
) -> None:
    """One token at `position` [B or 1, 1] that goes on with a state."""
    size = sinks + window
    sink_slots = slice(sinks) if sinks else None
    window_slots = slice(sinks, size)
    bias = None
    if plan.valid is not None:
        plan.token_slot = _state_slot(position[:, 0], sinks, window)
        slot = torch.arange(size, device=position.device)
        is_empty = slot > position
        bias = bias_of(is_empty[:, None], dtype)
    else:
        plan.token_slot = _state_slot(plan.seen_before, sinks, window)
        if plan.seen_before < size:
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
    plan: WindowPlan,
    position: Tensor,
    sinks: int,
    window: int,
    dtype: torch.dtype,
    goes_on: bool,
) -> None:
    """Any other call, whose slots are at `position` [B or 1, S] of their documents."""
    if plan.valid is None:
        before = most_before = plan.seen_before
        after = before + position.shape[1]
        first_slot = -before
    else:
        before = plan.seen_before[:, None]
        # any number of tokens, unless the text begins
        most_before = sinks + window if goes_on else 0
        # of each row's last document
        after = plan.after.seen[:, None]
        first_slot = plan.valid.sum(1, keepdim=True) - after
    earlier = _EarlierKeys(
        sinks=min(most_before, sinks),
        window=min(most_before, window),
    )
    device = position.device
    if most_before:
        window_tokens = before + torch.arange(-earlier.window, 0, device=device)
        window_slots = _state_slot(window_tokens.clamp(min=0), sinks, window)
        sink_slots = torch.arange(earlier.sinks, device=device)
        sink_slots = sink_slots.expand(*window_slots.shape[:-1], -1)
        plan.recalled_slots = torch.cat([sink_slots, window_slots], dim=-1)
    bands = _plan_bands(plan, position, sinks, window, dtype, earlier, most_before)
    plan.bands = tuple(bands)
    slot = torch.arange(sinks + window, device=device)
    # of two tokens with the same slot, the later one stays
    last_token = after - 1
    last_of_slot = last_token - (last_token - slot) % window
    token = torch.where(slot < sinks, slot, last_of_slot)
    key = earlier.index(token, first_slot)
    plan.keys_after = torch.where(slot < after, key, 0)


def _plan_bands(
    plan: WindowPlan,
    position: Tensor,
    sinks: int,
    window: int,
    dtype: torch.dtype,
    earlier: _EarlierKeys,
    most_before: int,
) -> list[Band]:
    """The bands of a call after at most `most_before` tokens of its documents; see `_plan_text`."""
    length = position.shape[1]
    device = position.device
    is_uniform = plan.valid is None
    # A query that sees sinks outside of its window is the `window`-th token of its document or a later one: with bands
    # of at most that many queries, all of a band see the sinks of one document, which contains the band's first slot.
    band_size = _BAND if is_uniform else min(_BAND, window)
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
        sees_all_sinks = is_uniform and most_before + start >= sinks + window - 1
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


def _state_slot(token: int | Tensor, sinks: int, window: int) -> int | Tensor:
    """The state's slot of a document's token or tokens."""
    ring = sinks + (token - sinks) % window
    if isinstance(token, Tensor):
        return torch.where(token < sinks, token, ring)
    return token if token < sinks else ring


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
    capped = position.clamp(max=config.attention_sinks + config.sliding_window - 1)
    return angles, angles_at(rotary, hidden_states, capped)


def read_window(
    streams: Streams,
    state: WindowState | None,
    plan: WindowPlan,
    need_state: bool,
    dropout: float,
    read_fast: Callable | None = None,
) -> tuple[Tensor, WindowState | None]:
    """What the tokens of a call read [B, heads, T, D], and the state after the call if it is needed.

    Args:
        state: state before the call, which may have another dtype.
        dropout: share of the weights that are set to 0.
        read_fast: the fast path `window_reads`.
    """
    streams = streams.in_slots(plan)
    keys = streams.keys
    values = streams.values
    ring_keys = ring_values = None
    # first keys without a gradient
    constant_keys = 0
    if state is not None:
        ring_keys = state.ring_keys.to(keys.dtype)
        ring_values = state.ring_values.to(values.dtype)
    if plan.token_slot is not None:
        keys = with_token(ring_keys, keys, plan.token_slot, plan.valid)
        values = with_token(ring_values, values, plan.token_slot, plan.valid)
    elif plan.recalled_slots is not None:
        earlier_keys = take(ring_keys, plan.recalled_slots)
        earlier_values = take(ring_values, plan.recalled_slots)
        keys = torch.cat([earlier_keys, keys], dim=2)
        values = torch.cat([earlier_values, values], dim=2)
        if not (ring_keys.requires_grad or ring_values.requires_grad):
            constant_keys = earlier_keys.shape[2]
    else:
        # so that no band copies its keys and values
        keys = keys.contiguous()
        values = values.contiguous()
    reads = None
    if read_fast is not None and not dropout:
        reads = read_fast(streams, keys, values, plan.bands, constant_keys)
    if reads is None:
        reads_of_bands = []
        for band in plan.bands:
            reads_of_band, _ = read_band(streams, keys, values, band, dropout)
            reads_of_bands.append(reads_of_band)
        reads = reads_of_bands[0]
        if len(reads_of_bands) > 1:
            reads = torch.cat(reads_of_bands, dim=2)
    reads = to_tokens(plan, reads)
    if not need_state:
        return reads, None
    if plan.keys_after is not None:
        keys = take(keys, plan.keys_after)
        values = take(values, plan.keys_after)
    return reads, WindowState(keys, values)


def read_band(
    streams: Streams,
    keys: Tensor,
    values: Tensor,
    band: Band,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """What a band's queries read [B, heads, q, D] from keys and values [B, H, M, D], and their weights.

    The weights [B H, heads / H q, k] are of the keys that the band sees, the sinks' first.
    """
    rows, key_heads, _, width = keys.shape
    queries = take(streams.queries, band.queries)
    number = queries.shape[2]
    window_keys = take(keys, band.window_keys)
    scores = scores_of(queries, window_keys)
    if band.sinks is not None:
        sink_queries = take(streams.sink_queries, band.queries)
        sink_keys = take(keys, band.sinks)
        sink_scores = scores_of(sink_queries, sink_keys)
        scores = torch.cat([sink_scores, scores], dim=2)
    if band.bias is not None:
        # [B, H, heads / H, q, keys]
        grouped = scores.unflatten(0, (rows, key_heads))
        grouped = grouped.unflatten(2, (-1, number))
        # in bfloat16 `masked_fill` takes longer than the product
        biased = grouped + band.bias.to(scores.dtype)
        scores = biased.flatten(0, 1).flatten(1, 2)
    weights = scores.softmax(-1)
    if dropout:
        weights = nn.functional.dropout(weights, dropout)
    weights = weights.to(values.dtype)
    reads = _read_values(weights, values, band)
    return reads.view(rows, -1, number, width), weights


def _read_values(weights: Tensor, values: Tensor, band: Band) -> Tensor:
    """Sums [B H, heads / H q, D] of values [B, H, M, D] by the weights of a band [B H, heads / H q, k]."""
    window_keys = band.window_keys
    sink_values = None
    if isinstance(band.sinks, slice) and band.sinks.stop == window_keys.start:
        # the sinks are next to the window: one product reads both
        window_keys = slice(window_keys.stop)
    elif band.sinks is not None:
        sink_values = take(values, band.sinks).flatten(0, 1)
    window_values = take(values, window_keys).flatten(0, 1)
    if sink_values is None:
        return torch.bmm(weights, window_values)
    sinks = sink_values.shape[1]
    sink_weights, window_weights = weights.tensor_split([sinks], dim=2)
    sink_reads = torch.bmm(sink_weights, sink_values)
    window_reads = torch.bmm(window_weights, window_values)
    return sink_reads + window_reads


def _run(tensors: Tensors, sizes: list[int], dropout: str) -> list[Tensor]:
    """`read_window` as one operator of a compiled graph (`opaque`)."""
    columns, need_state, sinks, window = sizes
    queries = tensors["queries"]
    streams = Streams(
        queries=queries,
        sink_queries=tensors.get("sink_queries"),
        keys=tensors["keys"],
        values=tensors["values"],
    )
    state = named_tuple(WindowState, tensors)
    make_plan = partial(plan_window, sinks, window, queries.dtype)
    rows, _, length, _ = queries.shape
    shape = rows, length
    plan = plan_again(make_plan, tensors, shape, columns, has_past=state is not None)
    with seeded(tensors):
        reads, after = read_window(streams, state, plan, bool(need_state), float(dropout))
    return [reads, *(after or ())]


def _shapes(tensors: Tensors, sizes: list[int], _) -> list[Tensor]:
    _, need_state, sinks, window = sizes
    values = tensors["values"]
    reads = values.new_empty(tensors["queries"].shape)
    if not need_state:
        return [reads]
    rows, key_heads, _, width = values.shape
    state_shape = rows, key_heads, sinks + window, width
    ring_keys = tensors["keys"].new_empty(state_shape)
    ring_values = values.new_empty(state_shape)
    return [reads, ring_keys, ring_values]


register("window_attention", _run, _shapes)


class HopeWindowAttention(HopeAttention):
    """Causal attention to the last `sliding_window` tokens and the first `attention_sinks` ones.

    Its parameters are those of `HopeAttention`; keys keep the rotary positions of their own tokens.
    """

    state_class = WindowState
    needs = frozenset({"window", "rotary"})
    own_fields = ("sliding_window", "attention_sinks")
    name = "softmax attention with a window"

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.kernels = asked_kernels()

    def forward(
        self,
        hidden_states: Tensor,
        state: WindowState | None = None,
        *,
        window: WindowPlan | TokenPlan,
        window_angles: tuple[Angles, Angles | None],
        need_state: bool = False,
        **_,
    ) -> tuple[Tensor, WindowState | None, None]:
        """[B, T, hidden_size]; the state after the call; no weights.

        Args:
            hidden_states: [B, T, hidden_size].
            state: state after the previous call, or `None` at a text's start.
            window: plan of the call's tokens.
            window_angles: the result of the function of that name.
            need_state: whether to return the state after the last token.
        """
        streams = make_streams(self, hidden_states, *window_angles)
        dropout = self.attention_dropout if self.training else 0.0
        if isinstance(window, TokenPlan):
            reads, state = self._read_in_graph(streams, state, window, need_state, dropout)
        else:
            read_fast = fast_path("window_reads", self.kernels)
            reads, state = read_window(streams, state, window, need_state, dropout, read_fast)
        by_token = reads.transpose(1, 2)
        return self.o_proj(by_token.flatten(2)), state, None

    def _read_in_graph(
        self,
        streams: Streams,
        state: WindowState | None,
        plan: TokenPlan,
        need_state: bool,
        dropout: float,
    ) -> tuple[Tensor, WindowState | None]:
        """`read_window` as one operator of a compiled graph."""
        tensors = streams._asdict() | plan.tensors()
        if state is not None:
            tensors |= state._asdict()
        if dropout:
            device = streams.values.device
            tensors["seed"] = torch.randint(2**62, (), device=device)
        config = self.config
        sizes = [plan.columns(), int(need_state), config.attention_sinks, config.sliding_window]
        reads, *after = call("window_attention", tensors, sizes, str(dropout))
        return reads, WindowState(*after) if need_state else None

    @staticmethod
    def check_config(config: PreTrainedConfig) -> None:
        window = config.sliding_window
        sinks = config.attention_sinks
        if sinks < 0:
            raise ValueError(f"`attention_sinks` must be at least 0, got {sinks}")
        if not config.has_window:
            if window is None:
                return
            raise ValueError(
                f"`sliding_window` ({window}) is given and no layer has a window: name the layers 'window_attention' "
                "in `layer_types`, or leave it out"
            )
        if window is None:
            kind = next(kind for kind in config.layer_types if kind in ("window_attention", "retaining_attention"))
            raise ValueError(f"`layer_types` holds '{kind}': give its `sliding_window`, in tokens")
        if window < 1:
            raise ValueError(f"`sliding_window` must be at least 1, got {window}")
        reach = rotary_reach(config)
        if reach is not None and window + sinks > reach:
            raise ValueError(
                f"`sliding_window` and `attention_sinks` are {window} and {sinks} tokens, and the frequencies of "
                f"`rope_parameters` ('{config.rope_parameters['rope_type']}') change after {reach}: give a window "
                "that fits into them"
            )

    @staticmethod
    def check_state(state: WindowState, config: PreTrainedConfig, dtype: torch.dtype) -> None:
        _, key_heads, slots, width = state.ring_keys.shape
        expected_slots = config.attention_sinks + config.sliding_window
        # a rank of tensor parallelism has a part of the heads
        has_other_heads = config.num_key_value_heads % key_heads
        if has_other_heads or slots != expected_slots or width != config.head_dim:
            raise ValueError(
                f"the cache holds windows of {slots} tokens with {key_heads} heads of width {width}, and this model's "
                f"have {expected_slots} tokens and {config.num_key_value_heads} heads of width {config.head_dim}: it "
                "is the cache of another model"
            )

    @staticmethod
    def rounds(config: PreTrainedConfig) -> tuple[int, int]:
        """A round is a band of queries, from where on a window is full."""
        return config.sliding_window + 2 * _BAND, _BAND

    @staticmethod
    def mixing_flops(config: PreTrainedConfig, sequence_length: int) -> int:
        """4 per channel for every key that a query sees."""
        most = min(config.sliding_window, sequence_length)
        keys = most - most**2 / (2 * sequence_length)
        keys += config.attention_sinks * (1 - most / sequence_length)
        channels = config.num_attention_heads * config.head_dim
        return round(4 * keys * channels)

    @staticmethod
    def cache_bytes(config: PreTrainedConfig, tokens: int) -> int:
        """Keys and values of the window and the sinks, however many tokens were read."""
        size = config.attention_sinks + config.sliding_window
        return HopeAttention.cache_bytes(config, size)
