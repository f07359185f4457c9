"""The scan of a layer's memories, span after span in the order of the text.

For every span the scan computes keys, values and queries, writes keys and values into all memories of the layer, and
reads the content memory (equations 83 to 88). The rules (`memory_delta`, `memory_paper`) define how a memory is
applied and updated. This is the plain path, with autograd's gradients; `hope_hf.fast` has one for the delta rule,
with a backward pass written by hand. `scan_tokens` and what follows it are for compiled graphs.

Axes: B sequence in batch, T token of the call, b sequences times heads, S slot (`chunks`), C slot of a span, D head
width, K kernel size of the convolution. Tokens are rows. All tensors are float32, or float64 in a float64 model.
"""

import json
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.configuration_utils import PreTrainedConfig

from .backends import KERNELS, is_transformed, registered
from .chunks import ChunkSpan, SlotPlan, TokenPlan, beside, plan_again, plan_chunks
from .layers import convolve
from .opaque import call, register

# Added to squared norms of keys and queries, as in transformers' and flash-linear-attention's gated DeltaNet.
NORM_EPSILON = 1e-6
# what the operator of a compiled graph reads of a configuration
_FIELDS = ("memory_rule", "memory_chunk_size", "conv_kernel_size", "num_memory_heads", "memory_projections")

# The weights of memories, in the order in which they are applied; the rule defines their form.
Weights = tuple[Tensor, ...]
# What a layer's memories have learned from a text: the differences to their initial weights. Under the delta rule one
# tensor, S of all memories side by side [b, D, M D]; under the paper's one for each layer of a memory [b, N, o, i].
Deviations = tuple[Tensor, ...]


class ScanInputs(NamedTuple):
    """The scan's input for every slot; all gates of empty slots are 0."""

    # keys, values and queries before the memories project them and before the convolution [b, S, D]
    key: Tensor
    value: Tensor
    query: Tensor
    # eta (with the erase gate: eta zeta) and log alpha of equation (88) [b, S]
    rate: Tensor
    log_retention: Tensor
    # norm of each token's value [b, S], or None if values keep their own norm
    value_norm: Tensor | None = None
    # zeta, which takes the value back to its size where the token's own read adds it [b, S]; None for 1
    erased: Tensor | None = None

    def split(self, sizes: list[int]) -> list["ScanInputs"]:
        """The inputs of successive groups of `sizes` slots."""
        groups_by_field = []
        for field in self:
            if field is None:
                groups_by_field.append([None] * len(sizes))
            else:
                # `split` is one autograd node per tensor; slices would each pad their gradient with zeros
                groups_by_field.append(field.split(sizes, dim=1))
        return list(map(ScanInputs, *groups_by_field))

    def tokens(self, keys: Tensor, values: Tensor, queries: Tensor, cut: slice) -> "Tokens":
        """The tokens of a span, with its keys, values and queries [b, C, D] and the gates at its slots."""
        rate = self.rate[:, cut]
        log_retention = self.log_retention[:, cut]
        return Tokens(keys, values, self.own_values(values, cut), queries, rate, log_retention)

    def own_values(self, values: Tensor, cut: slice) -> Tensor:
        """The values of a span's tokens [b, C, D], at the size at which their own reads add them."""
        if self.erased is None:
            return values
        return values * self.erased[:, cut].unsqueeze(-1)


class ScanState(NamedTuple):
    """The state of a layer: [b, ...] in a scan, [B, H, ...] between the calls of a mixer."""

    current: Deviations
    # those at the start of the current chunk; empty if nothing reads them
    chunk_start: Deviations
    # last inputs of the convolutions of k, v and q, side by side [b, K - 1, 3 D]
    conv_tail: Tensor


class Tokens(NamedTuple):
    """Keys, values, queries and gates of a span's tokens."""

    # of norm 1 [b, C, D]
    keys: Tensor
    # as memories write them, and as the token's own read adds a share of them [b, C, D]
    values: Tensor
    own_values: Tensor
    # of norm 1 [b, C, D]
    queries: Tensor
    # eta and log alpha [b, C]
    rate: Tensor
    log_retention: Tensor


class Memories(Protocol):
    """The memories of a layer under one rule: those that project k and v, in that order, then the content memory.

    `memory_mixer` builds the layer from the class attributes and static methods.
    """

    # whether one linear map makes the input of all keys and values that memories project
    shares_input: ClassVar[bool]
    # Whether the layer is that of the gated DeltaNet, with additions: heads learn a decay rate (`A_log`), a gate of
    # values, and a share of the token's own value in its read; reads are divided by the square root of the head width
    # before their normalisation; a query begins as the key of the next token.
    extends_deltanet: ClassVar[bool]
    # Whether errors are taken at the weights of the chunk's start. Memories that project are always read there.
    errors_at_chunk_start: ClassVar[bool]

    # kernel weights of the convolutions of k, v and q, side by side, the oldest token's first [K, b, 1, 3 D]
    conv_weights: Tensor
    # which of "k" and "v" memories project
    projected: tuple[str, ...]

    @staticmethod
    def fill_defaults(config: PreTrainedConfig) -> None:
        """Set fields of the configuration that are `None` to the rule's defaults."""

    @staticmethod
    def check_config(config: PreTrainedConfig) -> None:
        """ValueError for values of the configuration that do not fit the rule."""

    @staticmethod
    def depth(config: PreTrainedConfig) -> int:
        """Layers of one memory."""

    @staticmethod
    def products(projecting: int) -> int:
        """Forward products of D x D weights per token, head and layer, in D^2 FLOPs; `projecting` memories project."""

    @staticmethod
    def initial_shapes(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
        """Shapes of the learned initial weights by parameter name, in the order in which they are applied."""

    @staticmethod
    def reset_initial(name: str, weight: Tensor) -> None:
        """Set one of the learned initial weights to its value before training."""

    @classmethod
    def of(
        cls,
        conv_weights: Tensor,
        projected: tuple[str, ...],
        initial: Weights,
        value_share: Tensor | None,
        rate_factors: tuple[float, ...],
    ) -> "Memories":
        """The memories of a call.

        Args:
            conv_weights: [K, b, 1, 3 D].
            initial: the learned initial weights [b, ...].
            value_share: [b, 1, 1], or `None` without `extends_deltanet`.
            rate_factors: factor on the learning rate of each memory.
        """

    def fresh(self) -> Deviations:
        """The deviations before the first token."""

    def project(self, chunk_start: Deviations, index: int, x: Tensor) -> Tensor:
        """Keys or values `x` [b, C, D], transformed by memory `index` at the chunk's start (equation 83)."""

    def write_and_read(self, state: ScanState, tokens: Tokens) -> tuple[Tensor, Deviations]:
        """Reads [b, C, D] of the content memory, each including its token's own write, and the deviations after it."""

    def recall(self, deviations: Deviations, keys: Tensor) -> Tensor:
        """What the content memory with these deviations returns for unit keys [b, C, D]."""

    def target(self, chunk_start: Deviations, values: Tensor) -> Tensor:
        """Targets of the content memory's writes for values [b, C, D]."""

    def content(self, deviations: Deviations) -> Weights:
        """The weights of the content memory with these deviations."""


def fresh_state(memories: Memories) -> ScanState:
    """The state before the first token."""
    fresh = memories.fresh()
    reads_chunk_start = memories.errors_at_chunk_start or memories.projected
    chunk_start = fresh if reads_chunk_start else ()
    kernel_size, rows, _, width = memories.conv_weights.shape
    conv_tail = fresh[0].new_zeros(rows, kernel_size - 1, width)
    return ScanState(fresh, chunk_start, conv_tail)


def unit(x: Tensor) -> Tensor:
    """`x` over its norm along the last axis."""
    squared_norm = x.square().sum(-1, keepdim=True)
    return x * torch.rsqrt(squared_norm + NORM_EPSILON)


def decay_matrix(rows: Tensor, columns: Tensor, strict: bool = False) -> Tensor:
    """`exp(rows_t - columns_i)` for `i <= t` (`i < t` if strict), else 0. [..., C] each; returns [..., C, C].

    The mask comes before the exponential, which overflows above the diagonal: infinity times zero is a NaN gradient.
    """
    size = rows.shape[-1]
    first_masked = 0 if strict else 1
    mask = rows.new_full((size, size), float("-inf"))
    mask.triu_(first_masked)
    exponents = rows.unsqueeze(-1) - columns.unsqueeze(-2)
    return exponents.add_(mask).exp_()


def select_rows(rows: Tensor, chosen: Deviations, other: Deviations) -> Deviations:
    """`chosen` where `rows` [b, 1, 1] is true, `other` elsewhere; tuples of tensors [b, ...]."""
    selected = []
    for where_true, where_false in zip(chosen, other, strict=True):
        is_chosen = beside(rows, where_true)
        selected.append(torch.where(is_chosen, where_true, where_false))
    return tuple(selected)


def make_qkv(
    inputs: ScanInputs, memories: Memories, state: ScanState, span: ChunkSpan
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values and queries of a span after convolution and SiLU [b, C, D], and the tail for the next span."""
    cut = slice(span.start, span.stop)
    key = inputs.key[:, cut]
    value = inputs.value[:, cut]
    query = inputs.query[:, cut]
    streams = {"k": key, "v": value, "q": query}
    for index, name in enumerate(memories.projected):
        streams[name] = memories.project(state.chunk_start, index, streams[name])
    side_by_side = torch.cat(list(streams.values()), dim=-1)
    mixed, tail = convolve(side_by_side, state.conv_tail, memories.conv_weights, span)
    keys, values, queries = F.silu(mixed).chunk(3, dim=-1)
    return keys, values, queries, tail


def written_values(inputs: ScanInputs, values: Tensor, span: ChunkSpan) -> Tensor:
    """The values [b, C, D] that a span writes; the value gate, if there is one, sets their norm."""
    if inputs.value_norm is None:
        return values
    norms = inputs.value_norm[:, span.start : span.stop]
    return unit(values) * norms.unsqueeze(-1)


def restart(memories: Memories, state: ScanState, span: ChunkSpan) -> ScanState:
    """The state before a span, with fresh memories in rows in which a document begins."""
    fresh = memories.fresh()
    current = select_rows(span.continues, state.current, fresh)
    chunk_start = state.chunk_start
    if chunk_start:
        chunk_start = select_rows(span.continues, chunk_start, fresh)
    return ScanState(current, chunk_start, state.conv_tail)


def close_span(state: ScanState, span: ChunkSpan, current: Deviations, tail: Tensor) -> ScanState:
    """The state after a span, from the `state` before it and the deviations `current` after it."""
    chunk_start = state.chunk_start
    if chunk_start and not isinstance(span.closes, bool):
        chunk_start = select_rows(span.closes, current, chunk_start)
    elif chunk_start and span.closes:
        chunk_start = current
    return ScanState(current, chunk_start, tail)


def scan_span(inputs: ScanInputs, memories: Memories, state: ScanState, span: ChunkSpan) -> tuple[Tensor, ScanState]:
    """Reads [b, C, D] of one span, and the state after it."""
    if span.continues is not None:
        state = restart(memories, state, span)
    keys, values, queries, tail = make_qkv(inputs, memories, state, span)
    values = written_values(inputs, values, span)
    cut = slice(span.start, span.stop)
    tokens = inputs.tokens(unit(keys), values, unit(queries), cut)
    reads, current = memories.write_and_read(state, tokens)
    return reads, close_span(state, span, current, tail)


def _scan_spans(
    inputs: ScanInputs, memories: Memories, state: ScanState, spans: list[ChunkSpan]
) -> tuple[Tensor, ScanState]:
    """Reads [b, S, D] of `spans`, of which the first begins at slot 0 of `inputs`."""
    reads = []
    first_slot = spans[0].start
    for span in spans:
        start = span.start - first_slot
        stop = span.stop - first_slot
        span = span._replace(start=start, stop=stop)
        read, state = scan_span(inputs, memories, state, span)
        reads.append(read)
    return torch.cat(reads, dim=1), state


def scan_plain(
    inputs: ScanInputs,
    memories: Memories,
    state: ScanState,
    spans: list[ChunkSpan],
    need_state: bool = True,
    recompute: int = 0,
) -> tuple[Tensor, ScanState | None]:
    """Reads [b, S, D] of all spans, and the state after the last if it is needed.

    Args:
        recompute: spans whose activations are recomputed together in the backward pass; 0 keeps all activations. The
            last such group always keeps its activations, since the backward pass begins with it.
    """
    # torch.func's transforms take no hooks on saved tensors, with which `checkpoint` works
    recomputes = recompute > 0 and torch.is_grad_enabled() and not is_transformed()
    spans_of_group = recompute if recomputes else len(spans)
    groups = []
    sizes = []
    for index in range(0, len(spans), spans_of_group):
        group = spans[index : index + spans_of_group]
        first_slot = group[0].start
        groups.append(group)
        sizes.append(group[-1].stop - first_slot)
    # A single group is split too: the split's gradients are contiguous, which fixes the order of the sums over them.
    inputs_of_groups = inputs.split(sizes)
    scan_again = partial(checkpoint, _scan_spans, use_reentrant=False, preserve_rng_state=False)
    reads = []
    for inputs_of_group, group in zip(inputs_of_groups, groups, strict=True):
        scan = _scan_spans if group is groups[-1] else scan_again
        read, state = scan(inputs_of_group, memories, state, group)
        reads.append(read)
    return torch.cat(reads, dim=1), state if need_state else None


def scan_of(rule: str, asked: str) -> Callable:
    """`scan_plain`, or the scan of that `memory_rule` that equals it and has a backward pass written by hand.

    `asked` is a value of `backends.KERNELS`.
    """
    scan = None
    if asked != "plain":
        scan = registered(f"scan_{rule}", asked)
    return scan or scan_plain


def scan_options_json(config: PreTrainedConfig, rate_factors: tuple[float, ...]) -> str:
    """What the operator has to know of a layer, as text; `rate_factors` as in `Memories.of`."""
    options = {"rate_factors": rate_factors}
    for name in _FIELDS:
        options[name] = getattr(config, name)
    return json.dumps(options)


@lru_cache
def _read_options(text: str) -> SimpleNamespace:
    return SimpleNamespace(**json.loads(text))


def scan_tokens(
    inputs: ScanInputs,
    memories: Memories,
    state: ScanState | None,
    plan: TokenPlan,
    *,
    recompute: int,
    need_state: bool,
    kernels: str,
    options: str,
) -> tuple[Tensor, ScanState | None]:
    """`scan_plain` as one operator of a compiled graph (`opaque`), for inputs [b, T, ...] in the order of the tokens.

    Slots, chunks and their number depend on the text, and are made while the graph runs. Returns reads [b, T, D].

    Args:
        kernels: see `backends.asked_kernels`.
        options: the result of `scan_options_json`.
    """
    initial = memories.initial if isinstance(memories.initial, tuple) else (memories.initial,)
    tensors = inputs._asdict()
    tensors["conv_weights"] = memories.conv_weights
    tensors["value_share"] = getattr(memories, "value_share", None)
    tensors |= _numbered("initial", initial)
    if state is not None:
        tensors["conv_tail"] = state.conv_tail
        tensors |= _numbered("current", state.current)
        tensors |= _numbered("chunk_start", state.chunk_start)
    tensors |= plan.tensors()
    numbers = _Numbers(plan.columns(), recompute, int(need_state), KERNELS.index(kernels))
    reads, *after = call("memory_scan", tensors, list(numbers), options)
    if not need_state:
        return reads, None
    *deviations, tail = after
    number = len(initial)
    current = tuple(deviations[:number])
    chunk_start = tuple(deviations[number:])
    return reads, ScanState(current, chunk_start, tail)


class _Numbers(NamedTuple):
    """Numbers that the operator takes."""

    # tokens that all rows have read, or 0, see `TokenPlan.columns`
    columns: int
    # as in `scan_plain`; 0 or 1
    recompute: int
    need_state: int
    # index of the value of `HOPE_KERNELS` in `KERNELS`
    kernels: int


def _numbered(name: str, tensors: Weights | Deviations) -> dict[str, Tensor]:
    """The tensors of a tuple by name and index."""
    numbered = {}
    for index, tensor in enumerate(tensors):
        numbered[f"{name}{index}"] = tensor
    return numbered


def _of_name(name: str, tensors: dict[str, Tensor]) -> Weights | Deviations:
    """The tuple that `_numbered` took apart; it has one or two tensors."""
    layers = map(tensors.get, (f"{name}0", f"{name}1"))
    return tuple(filter(torch.is_tensor, layers))


def _scan_arguments(
    rules: dict[str, type[Memories]], tensors: dict[str, Tensor], options: SimpleNamespace
) -> tuple[ScanInputs, Memories, ScanState | None]:
    """Inputs, memories, and the state or `None`, of the operator's tensors."""
    inputs = ScanInputs(*map(tensors.get, ScanInputs._fields))
    memories = rules[options.memory_rule].of(
        tensors["conv_weights"],
        tuple(options.memory_projections),
        _of_name("initial", tensors),
        tensors.get("value_share"),
        tuple(options.rate_factors),
    )
    state = None
    if "conv_tail" in tensors:
        current = _of_name("current", tensors)
        state = ScanState(current, _of_name("chunk_start", tensors), tensors["conv_tail"])
    return inputs, memories, state


def _by_head(plan: SlotPlan, heads: int) -> SlotPlan:
    """The slots of a plan for inputs [b, T, ...], whose rows are repeated for every head."""
    repeat = partial(torch.repeat_interleave, repeats=heads, dim=0)
    valid = repeat(plan.valid)
    token_of_slot = repeat(plan.token_of_slot)
    slot_of_token = repeat(plan.slot_of_token)
    return SlotPlan(None, 0, valid, token_of_slot=token_of_slot, slot_of_token=slot_of_token)


def _in_slots(inputs: ScanInputs, slots: SlotPlan) -> ScanInputs:
    """Inputs [b, S, ...] of inputs in the order of the tokens; padding neither writes nor decays."""
    in_slots = []
    for field in inputs:
        if field is not None:
            field = slots.to_slots(field)
            if field.ndim == 2:
                field = torch.where(slots.valid, field, 0.0)
        in_slots.append(field)
    return ScanInputs(*in_slots)


def _results(reads: Tensor, state: ScanState | None) -> list[Tensor]:
    """What the operator returns."""
    if state is None:
        return [reads]
    return [reads, *state.current, *state.chunk_start, state.conv_tail]


def _run_operator(
    rules: dict[str, type[Memories]], tensors: dict[str, Tensor], numbers: Sequence[int], text: str
) -> list[Tensor]:
    """The operator's results, when the graph runs."""
    of_call = _Numbers(*numbers)
    options = _read_options(text)
    inputs, memories, state = _scan_arguments(rules, tensors, options)
    rows, length, _ = inputs.query.shape
    heads = options.num_memory_heads
    shape = rows // heads, length
    make_plan = partial(plan_chunks, options)
    plan = plan_again(make_plan, tensors, shape, of_call.columns, has_past=state is not None)
    if plan.valid is not None:
        slots = _by_head(plan, heads)
        inputs = _in_slots(inputs, slots)
    scan = scan_of(options.memory_rule, KERNELS[of_call.kernels])
    if state is None:
        state = fresh_state(memories)
    need_state = bool(of_call.need_state)
    reads, after = scan(inputs, memories, state, plan.spans, need_state, of_call.recompute)
    if plan.valid is not None:
        reads = slots.to_tokens(reads)
    reads, *state_after = _results(reads, after)
    # a state may hold one tensor twice, or one of the state before
    return [reads, *map(torch.clone, state_after)]


def _operator_shapes(
    rules: dict[str, type[Memories]], tensors: dict[str, Tensor], numbers: Sequence[int], text: str
) -> list[Tensor]:
    """Tensors of the shapes of `_run_operator`, when the graph is traced."""
    of_call = _Numbers(*numbers)
    inputs, memories, _ = _scan_arguments(rules, tensors, _read_options(text))
    reads = inputs.query.new_empty(inputs.query.shape)
    state = fresh_state(memories) if of_call.need_state else None
    return _results(reads, state)


def register_scan(rules: dict[str, type[Memories]]) -> None:
    """Register the operator for the classes of these values of `memory_rule`."""
    register("memory_scan", partial(_run_operator, rules), partial(_operator_shapes, rules))
