"""Softmax attention to the last tokens and to a document's first ones, with a state of constant size.

A query sees the last `sliding_window` tokens, its own included, and the first `attention_sinks` tokens of its document
("sinks", arXiv 2309.17453). A long call is computed in bands of queries: each sees the keys of its window and the
sinks, so that time and memory grow in proportion to the text.

Axes: B row, T token of the call, S slot of the call (`chunks`; padding has no slot, and documents follow each other),
H head of keys, D head width; K sinks, W window; M keys of a call: of earlier calls, then of its own slots.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig

from .attention import HopeAttention, rotary_reach
from .backends import asked_kernels, fast_path
from .chunks import TokenPlan, plan_again
from .opaque import Tensors, call, named_tuple, register, seeded
from .streams import Angles, Streams, make_streams, scores_of, take, to_tokens, with_token
from .window_plan import BAND, Band, WindowPlan, WindowSizes, plan_window


class WindowState(NamedTuple):
    """Keys, after rotation, and values of the current document [B, H, K + W, D].

    Token t of the document lies in slot t if it is a sink (t < K), else in slot K + (t - K) % W, which token t - W had
    before. After n tokens the first n slots are filled; the other ones are never read.
    """

    ring_keys: Tensor
    ring_values: Tensor


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


def _run(tensors: Tensors, numbers: list[int], dropout: str) -> list[Tensor]:
    """`read_window` as one operator of a compiled graph (`opaque`)."""
    columns, need_state, *numbers = numbers
    queries = tensors["queries"]
    streams = Streams(
        queries=queries,
        sink_queries=tensors.get("sink_queries"),
        keys=tensors["keys"],
        values=tensors["values"],
    )
    state = named_tuple(WindowState, tensors)
    make_plan = partial(plan_window, WindowSizes(*numbers), queries.dtype)
    rows, _, length, _ = queries.shape
    shape = rows, length
    plan = plan_again(make_plan, tensors, shape, columns, has_past=state is not None)
    with seeded(tensors):
        reads, after = read_window(streams, state, plan, bool(need_state), float(dropout))
    return [reads, *(after or ())]


def _shapes(tensors: Tensors, numbers: list[int], _) -> list[Tensor]:
    _, need_state, *numbers = numbers
    values = tensors["values"]
    reads = values.new_empty(tensors["queries"].shape)
    if not need_state:
        return [reads]
    rows, key_heads, _, width = values.shape
    state_shape = rows, key_heads, WindowSizes(*numbers).slots, width
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
        numbers = [plan.columns(), int(need_state), *WindowSizes.of(self.config)]
        reads, *after = call("window_attention", tensors, numbers, str(dropout))
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
        expected_slots = WindowSizes.of(config).slots
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
        return config.sliding_window + 2 * BAND, BAND

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
        return HopeAttention.cache_bytes(config, WindowSizes.of(config).slots)
