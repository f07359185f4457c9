"""One more token per row of a text, without gradients: what a block computes, in few operators.

Such a token costs what calling operators and modules costs, and on a GPU what launching kernels costs. So keys, values
and queries of all heads go through an operator together, weights are applied without calling their modules, and what
is made of parameters alone is kept between tokens. Linear maps that do more than apply their weights (adapters,
quantised or sharded weights, hooks) are called; where another module does more, the mixer or the levels are called as
a whole. Nothing is read off the device, so that a CUDA graph can record a token.

Axes: B row, X hidden size, H head, b rows times heads, K kernel size of the convolution, D head width.
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as modules
from transformers.cache_utils import Cache

from ..model.backends import runs_plain
from ..model.chunks import ChunkPlan, ChunkSpan
from ..model.layers import HopeRMSNorm, tail_after
from ..model.memory_delta import DeltaMemories
from ..model.memory_mixer import LEAST_ERASED
from ..model.memory_scan import NORM_EPSILON, ScanState, close_span, restart

_VERSION = attrgetter("_version")
# Classes of the model that do nothing but apply their parameters, or call modules that are looked at themselves. By
# name: a copy of the model's code from the Hub has classes of its own.
_PLAIN = frozenset({
    "HopeRMSNorm", "LearnedFactors", "ShortConvolution", "InitialMemory", "MemoryGates", "SelfModifyingTitans",
    "ContinuumMemory", "ContinuumLevel",
})  # fmt: skip
# their files
_FILES = frozenset({"layers", "memory_mixer", "continuum"})


def _is_of_class(part: nn.Module, name: str) -> bool:
    """Whether a module is of exactly that class of the model."""
    kind = type(part)
    file = kind.__module__.rpartition(".")[2]
    return kind.__name__ == name and file in _FILES


def _is_plain(part: nn.Module) -> bool:
    """Whether a module does nothing but apply its parameters.

    Another class or `forward` (adapters, quantised maps, offloading) does more, and parameters of another type
    (shards, quantised weights) or none (parametrizations) are not weights to multiply with.
    """
    kind = type(part)
    name = kind.__name__
    is_known = kind is nn.Linear or (name in _PLAIN and _is_of_class(part, name))
    if not is_known:
        return False
    if part._forward_hooks or part._forward_pre_hooks:
        return False
    if "forward" in vars(part) or "_compiled_call_impl" in vars(part):
        return False
    types_of_parameters = set(map(type, part._parameters.values()))
    return types_of_parameters <= {nn.Parameter, type(None)}


def _map_of(linear: nn.Module) -> Callable[[Tensor], Tensor]:
    """The linear map of [B, ...]."""
    if not _is_plain(linear):
        # called as in a text
        return lambda x: linear(x.unsqueeze(1)).squeeze(1)
    return partial(F.linear, weight=linear.weight, bias=linear.bias)


def _residual_of(linear: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """The sum of a residual stream [B, X] and the linear map of [B, ...]."""
    if not _is_plain(linear) or linear.bias is not None:
        mapped = _map_of(linear)
        return lambda residual, x: residual + mapped(x)
    weight = linear.weight
    return lambda residual, x: torch.addmm(residual, x, weight.t())


def _norm_of(norm: HopeRMSNorm, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The norm over the last axis, of tensors of that dtype."""
    weight = norm.weight.detach().to(dtype)
    epsilon = norm.variance_epsilon
    if dtype not in (torch.float32, torch.float64):
        return lambda x: F.rms_norm(x, x.shape[-1:], weight, epsilon)
    width = len(weight)
    least = weight.new_tensor((width * epsilon) ** 0.5)
    weight = width**0.5 * weight
    return lambda x: over_norm(x, least).mul_(weight)


class TokenGates(NamedTuple):
    """The gates of one token [b, 1, 1]; a token that is padding has `rate` 0 and `retention` 1."""

    # eta and alpha
    rate: Tensor
    retention: Tensor
    # norm of the value, or None if it keeps its own
    value_norm: Tensor | None
    # share of the value in its own read
    own_share: Tensor


def over_norm(x: Tensor, least: Tensor) -> Tensor:
    """`x / sqrt(|x|^2 + least^2)` along the last axis, in the fewest operators."""
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(least)


def step_token(
    raw: Tensor,
    gates: TokenGates,
    memories: DeltaMemories,
    state: ScanState,
    span: ChunkSpan,
    least: Tensor,
) -> tuple[Tensor, ScanState]:
    """`memory_scan.scan_span` for a span of one token, without gradients: reads [b, 1, D], and the state after it.

    Args:
        raw: the token's keys, values and queries, as in `ScanInputs`, side by side [b, 1, 3 D].
        gates: of the token.
        memories: the layer's memories.
        state: before the token; tensors are [b, ...].
        span: the token's slot.
        least: square root of `NORM_EPSILON`.
    """
    if span.continues is not None:
        state = restart(memories, state, span)
    (current,), chunk_start, tail = state
    rows, _, columns = raw.shape
    width = columns // 3
    for index, name in enumerate(memories.projected):
        stream = _columns(raw, "kvq".index(name), width)
        deviation = _columns(chunk_start[0], index, width)
        stream += torch.bmm(stream, deviation)
    padded = torch.cat([tail, raw], dim=1)
    mixed = _convolved(padded, raw, memories.conv_weights, span)
    # keys, values and queries
    active = F.silu(mixed).view(rows, 3, width)
    units = over_norm(active, least)
    key, value, query = units.chunk(3, dim=1)
    if gates.value_norm is None:
        value = active[:, 1:2]
    else:
        value = value * gates.value_norm
    # k W_0 and q W_0
    initial_reads = torch.bmm(units, memories.initial)
    initial_of_key, _, initial_of_query = initial_reads.split(1, dim=1)
    decayed = current * gates.retention
    errors = _errors(key, value, decayed, initial_of_key, memories)
    current = decayed.addcmul_(key.mT, errors.mul_(gates.rate))
    content = current[..., -width:]
    reads = torch.baddbmm(initial_of_query, query, content)
    reads.addcmul_(gates.own_share, value)
    tail = tail_after(padded, tail, span)
    return reads, close_span(state, span, (current,), tail)


def _columns(x: Tensor, index: int, width: int) -> Tensor:
    """The columns of one of several parts of that width, which lie side by side in `x` [..., parts width]."""
    first = index * width
    return x[..., first : first + width]


def _convolved(padded: Tensor, raw: Tensor, conv_weights: Tensor, span: ChunkSpan) -> Tensor:
    """The convolution [b, 3 D] of the last of the inputs `padded` [b, K, 3 D], which is `raw` [b, 1, 3 D]."""
    if span.inside is not None:
        inside = span.inside.squeeze(-1).transpose(0, 1)
        # the token itself always belongs to its document
        earlier = padded[:, :-1] * inside
        padded = torch.cat([earlier, raw], dim=1)
    weights = conv_weights.squeeze(2).transpose(0, 1)
    return (padded * weights).sum(1)


def _errors(key: Tensor, value: Tensor, decayed: Tensor, initial_read: Tensor, memories: DeltaMemories) -> Tensor:
    """`rho (v - k W)` of each memory side by side [b, 1, M D], before the token's write.

    Args:
        key: of norm 1 [b, 1, D].
        value: [b, 1, D].
        decayed: the decayed deviations [b, D, M D].
        initial_read: the key's read of the content memory's initial weights [b, 1, D].
    """
    width = key.shape[-1]
    factors = memories.rate_factors
    targets = value
    if memories.projected:
        targets = value.repeat(1, 1, len(factors))
    errors = torch.baddbmm(targets, key, decayed, alpha=-1)
    errors[..., -width:].sub_(initial_read)
    # the memories that project begin at the identity
    for index, factor in enumerate(factors[:-1]):
        errors_of_memory = _columns(errors, index, width)
        errors_of_memory.sub_(key).mul_(factor)
    return errors


class _GateWeights(NamedTuple):
    """eta, the norm of values and zeta are `scale sigmoid(sign logits + bias) + lowest`, of all heads side by side.

    alpha is that to the power of `power` [H, 1, 1], since exp(-softplus(x)) = sigmoid(-x).
    """

    sign: Tensor
    bias: Tensor
    scale: Tensor
    lowest: Tensor
    power: Tensor

    @classmethod
    def of(cls, gates: nn.Module, most: float, dtype: torch.dtype) -> "_GateWeights":
        """The weights of `MemoryGates`, whose largest learning rate is `most`."""
        rate = _gate_row(gates.learning_rate_bias, dtype, scale=most)
        retention = _gate_row(gates.dt_bias, dtype, sign=-1)
        rows = [rate, retention]
        if gates.value_bias is not None:
            value_norm = _gate_row(gates.value_bias, dtype, scale=2)
            rows.append(value_norm)
        if gates.erase_bias is not None:
            erased = _gate_row(gates.erase_bias, dtype, scale=1 - LEAST_ERASED, lowest=LEAST_ERASED)
            rows.append(erased)
        sign, bias, scale, lowest = torch.cat(rows, dim=1).unbind()
        decay_rate = gates.A_log.to(dtype).exp()
        return cls(sign, bias, scale, lowest, power=decay_rate.view(-1, 1, 1))


def _gate_row(bias: Tensor, dtype: torch.dtype, sign: float = 1, scale: float = 1, lowest: float = 0) -> Tensor:
    """`sign`, `sign bias`, `scale` and `lowest` of a gate with `bias` [H], as in `_GateWeights`; [4, H]."""
    bias = bias.to(dtype)
    rows = torch.full_like(bias, sign), sign * bias, torch.full_like(bias, scale), torch.full_like(bias, lowest)
    return torch.stack(rows)


def _side_by_side(weights: list[Tensor], heads: int, width: int) -> Tensor:
    """Weights [K, H, 1, 3 D] of the convolutions of k, v and q [H D, 1, K] each; those of a head lie together."""
    # [3, H, D, K] to [H, K, 3, D]
    by_stream = torch.cat(weights).view(3, heads, width, -1)
    by_head = by_stream.permute(1, 3, 0, 2)
    by_head = by_head.reshape(heads, -1, 3 * width)
    return by_head.transpose(0, 1).unsqueeze(2)


class _TokenMemory(NamedTuple):
    """A mixer of memories under the delta rule, for one row; tensors are those of the states' dtype."""

    norm: Callable
    norm_of_reads: Callable
    # of the gates' logits, keys, values, queries, and the gate of the reads
    maps: tuple[Callable, ...]
    residual: Callable
    memories: DeltaMemories
    gates: _GateWeights
    # square root of `NORM_EPSILON`
    least: Tensor

    @property
    def power(self) -> Tensor:
        """The power that makes retention of a sigmoid [H, 1, 1]."""
        return self.gates.power

    @classmethod
    def of(cls, block: nn.Module, low: torch.dtype) -> "_TokenMemory | None":
        """The mixer of a block and the norm before it, if only linear maps do more; `low` is the inputs' dtype."""
        norm = block.input_layernorm
        mixer = block.mixer
        if not _is_of_class(mixer, "SelfModifyingTitans") or mixer.config.memory_rule != "delta":
            return None
        convolutions = mixer.k_conv1d, mixer.v_conv1d, mixer.q_conv1d
        gates = mixer.gates
        modules_of_mixer = mixer.o_norm, gates, mixer.initial_memory, mixer.value_share
        if not all(map(_is_plain, (norm, mixer, *convolutions, *modules_of_mixer))):
            return None
        dtype = torch.promote_types(low, torch.float32)
        (initial,) = mixer.initial_memory(dtype)
        heads, width, _ = initial.shape
        weights_of_streams = [convolution.weight.to(dtype) for convolution in convolutions]
        conv_weights = _side_by_side(weights_of_streams, heads, width)
        value_share = mixer.value_share(dtype).view(heads, 1, 1)
        memories = DeltaMemories(conv_weights, mixer.projected, initial, value_share, mixer.rate_factors)
        linear = gates.gate_proj, mixer.k_proj, mixer.v_proj, mixer.q_proj, mixer.g_proj
        largest_rate = float(mixer.config.memory_learning_rate_max)
        return cls(
            norm=_norm_of(norm, low),
            norm_of_reads=_norm_of(mixer.o_norm, dtype),
            maps=tuple(map(_map_of, linear)),
            residual=_residual_of(mixer.o_proj),
            memories=memories,
            gates=_GateWeights.of(gates, largest_rate, dtype),
            least=initial.new_tensor(NORM_EPSILON**0.5),
        )

    def for_rows(self, rows: int) -> "_TokenMemory":
        """The same for several rows."""
        memories = self.memories
        memories = memories._replace(
            conv_weights=memories.conv_weights.repeat(1, rows, 1, 1),
            initial=memories.initial.repeat(rows, 1, 1),
            value_share=memories.value_share.repeat(rows, 1, 1),
        )
        gates = self.gates._replace(power=self.power.repeat(rows, 1, 1))
        return self._replace(memories=memories, gates=gates)

    def read(self, hidden_states: Tensor, state: ScanState, plan: ChunkPlan) -> tuple[Tensor, ScanState]:
        """Hidden states [B, 1, X] after the mixer, and its state.

        Args:
            hidden_states: before it, [B, 1, X].
            state: after the previous call; tensors are [B, H, ...].
            plan: the token's slot.
        """
        (current,), chunk_start, tail = state
        rows, heads, _, columns = tail.shape
        weights = self if rows == 1 else self.for_rows(rows)
        residual = hidden_states.squeeze(1)
        normed = self.norm(residual)
        logits, *streams, gate = [apply(normed) for apply in self.maps]
        shape_of_stream = rows * heads, 1, columns // 3
        by_head = [stream.reshape(shape_of_stream) for stream in streams]
        raw = torch.cat(by_head, dim=-1)
        if raw.dtype != tail.dtype:
            raw = raw.to(tail.dtype)
        gates = weights.token_gates(logits.to(tail.dtype), rows, plan)
        chunk_start = tuple(part.flatten(0, 1) for part in chunk_start)
        state = ScanState((current.flatten(0, 1),), chunk_start, tail.flatten(0, 1))
        (span,) = plan.spans
        reads, after = step_token(raw, gates, weights.memories, state, span, self.least)
        normed_reads = self.norm_of_reads(reads).view(rows, -1)
        gated = normed_reads.to(gate.dtype) * F.silu(gate)
        # `view`: torch's `unflatten` is a Python function, which costs a token microseconds
        shape_of_deviation = current.shape
        (current,) = after.current
        current = current.view(shape_of_deviation)
        chunk_start = tuple(part.view(shape_of_deviation) for part in after.chunk_start)
        conv_tail = after.conv_tail.view(tail.shape)
        hidden_states = self.residual(residual, gated)
        return hidden_states.unsqueeze(1), ScanState((current,), chunk_start, conv_tail)

    def token_gates(self, logits: Tensor, rows: int, plan: ChunkPlan) -> TokenGates:
        """The gates of a token, from their logits [B, gates H]; `self` is that of all rows."""
        weights = self.gates
        sigmoids = torch.addcmul(weights.bias, logits, weights.sign).sigmoid_()
        values = torch.addcmul(weights.lowest, sigmoids, weights.scale)
        rows_times_heads = len(weights.power)
        heads = rows_times_heads // rows
        if rows > 1:
            values = values.view(rows, -1, heads).transpose(0, 1)
        by_gate = values.reshape(-1, rows_times_heads, 1, 1)
        rate, retention, *others = by_gate.unbind(0)
        retention = retention.pow(weights.power)
        value_norm = others[0] if others else None
        own_share = self.memories.value_share
        if len(others) == 2:
            erased = others[1]
            rate = rate * erased
            value_norm = value_norm / erased
            own_share = own_share * erased
        if plan.valid is not None:
            valid = plan.valid.expand(rows, heads).reshape(rows_times_heads, 1, 1)
            rate = torch.where(valid, rate, 0.0)
            retention = torch.where(valid, retention, 1.0)
        if plan.is_frozen:
            rate = torch.zeros_like(rate)
            retention = torch.ones_like(retention)
        return TokenGates(rate, retention, value_norm, own_share)


class _TokenLevel(NamedTuple):
    """One level of a chain."""

    norm: Callable
    gate: Callable
    up: Callable
    activation: Callable
    residual: Callable


class _TokenLevels:
    """Levels in a chain."""

    def __init__(self, levels: Iterable[nn.Module], dtype: torch.dtype):
        self.levels = []
        for level in levels:
            weights = _TokenLevel(
                _norm_of(level.norm, dtype),
                _map_of(level.gate_proj),
                _map_of(level.up_proj),
                level.act_fn,
                _residual_of(level.down_proj),
            )
            self.levels.append(weights)

    @classmethod
    def of(cls, continuum: nn.Module, dtype: torch.dtype) -> "_TokenLevels | None":
        """The levels of a block, if all of them but linear maps and activations are plain."""
        if not _is_of_class(continuum, "ContinuumMemory") or not _is_plain(continuum):
            return None
        for level in continuum.levels:
            if not _is_plain(level) or not _is_plain(level.norm):
                return None
        return cls(continuum.levels, dtype)

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """Hidden states [B, 1, X] after the levels."""
        hidden_states = hidden_states.squeeze(1)
        for norm, gate, up, activation, residual in self.levels:
            normed = norm(hidden_states)
            active = activation(gate(normed)) * up(normed)
            hidden_states = residual(hidden_states, active)
        return hidden_states.unsqueeze(1)


class TokenWeights:
    """What a block computes a token with; `None` for a part whose modules have to be called.

    Args:
        dtype: of the inputs.
        largest_rate: of the memories, `None` without any.
    """

    def __init__(self, block: nn.Module, dtype: torch.dtype, largest_rate: float | None):
        self.attributes = []
        self.children = []
        self.parameters = []
        self.hooks = []
        self.derived_from = []
        for module in block.modules():
            self.attributes.append(vars(module))
            self.children.append(module._modules)
            self.parameters.append(module._parameters)
            self.hooks += [module._forward_hooks, module._forward_pre_hooks]
            if isinstance(module, nn.Linear):
                # its weights are read at every token
                continue
            for parameter in module.parameters(recurse=False):
                # an inference tensor has no version
                if type(parameter) is nn.Parameter and not parameter.is_inference():
                    self.derived_from.append(parameter)
        # hold the memory at the addresses, so that no other parameter gets one of them
        self.sources = [parameter.detach() for parameter in self.derived_from]
        self.made_with = self.fingerprint(dtype, largest_rate)
        self.memory = _TokenMemory.of(block, dtype)
        self.levels = _TokenLevels.of(block.continuum, dtype)

    def fingerprint(self, dtype: torch.dtype, largest_rate: float | None) -> tuple:
        """What stays the same while no module, parameter, hook or `forward` of a module is changed."""
        # by `map`, since this runs at every token
        return (
            dtype,
            largest_rate,
            [*chain.from_iterable(map(dict.values, self.children))],
            [*map(id, chain.from_iterable(map(dict.values, self.parameters)))],
            [*map(_VERSION, self.derived_from)],
            [*map(Tensor.data_ptr, self.derived_from)],
            [*filter(None, self.hooks)],
            [*map(len, self.attributes)],
        )

    def is_current(self, dtype: torch.dtype, largest_rate: float | None) -> bool:
        """Whether the block would be read with the same weights now."""
        return self.made_with == self.fingerprint(dtype, largest_rate)


# Of each block until it reads more than a token, or a text begins (see `forget_text`): writes to a parameter's
# `.data`, which often put averaged weights in place, change neither version nor address. No part of modules, which are
# copied and saved.
_WEIGHTS: WeakKeyDictionary[nn.Module, TokenWeights] = WeakKeyDictionary()


def forget_text(blocks: Iterable[nn.Module], cache: Cache | None) -> None:
    """Drop what blocks keep between the tokens of a text, unless this call goes on with the text in `cache`."""
    if torch.compiler.is_compiling():
        return
    columns = 0 if cache is None else cache.get_seq_length()
    # The count of a cache of fixed length lies on the device, and reading it would make every token wait.
    if isinstance(columns, int) and columns == 0:
        for block in blocks:
            _WEIGHTS.pop(block, None)


def fast_token_paths(
    block: nn.Module, hidden_states: Tensor, state: tuple | None
) -> tuple[_TokenMemory | None, Callable[[Tensor], Tensor] | None]:
    """What a `HopeBlock` reads inputs [B, T, X] with, if they are one token per row, without gradients.

    `None` for the mixer or the levels means that their modules have to be called.
    """
    if torch.compiler.is_compiling():
        return None, None
    if hidden_states.shape[1] != 1 or torch.is_grad_enabled():
        _WEIGHTS.pop(block, None)
        return None, None
    if modules._global_forward_hooks or modules._global_forward_pre_hooks:
        return None, None
    # fake tensors and the like must not be kept, and autocast gives sums another dtype
    if type(hidden_states) is not Tensor or torch.is_autocast_enabled(hidden_states.device.type):
        return None, None
    mixer = block.mixer
    dtype = hidden_states.dtype
    largest_rate = None
    if _is_of_class(mixer, "SelfModifyingTitans"):
        largest_rate = mixer.config.memory_learning_rate_max
    weights = _WEIGHTS.get(block)
    if weights is None or not weights.is_current(dtype, largest_rate):
        weights = _WEIGHTS[block] = TokenWeights(block, dtype, largest_rate)
    if state is None or weights.memory is None or runs_plain(mixer.kernels):
        return None, weights.levels
    return weights.memory, weights.levels
