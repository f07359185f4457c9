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
from torch import nn
from torch.nn.modules import module as modules
from transformers.cache_utils import Cache

from ..model.backends import runs_plain
from ..model.chunks import ChunkPlan, ChunkSpan
from ..model.layers import HopeRMSNorm, tail_after
from ..model.memory_delta import DeltaMemories
from ..model.memory_mixer import LEAST_ERASED
from ..model.memory_scan import NORM_EPSILON, ScanState, close_span, restart

_VERSION = attrgetter("_version")
_OWNED, _HOOKS = ("_modules", "_parameters"), ("_forward_hooks", "_forward_pre_hooks")
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
    return kind.__name__ == name and kind.__module__.rpartition(".")[2] in _FILES


def _has_plain_class(part: nn.Module) -> bool:
    kind = type(part)
    return kind is nn.Linear or kind.__name__ in _PLAIN and _is_of_class(part, kind.__name__)


def _is_plain(part: nn.Module) -> bool:
    """Whether a module does nothing but apply its parameters.

    Another class or `forward` (adapters, quantised maps, offloading) does more, and parameters of another type
    (shards, quantised weights) or none (parametrizations) are not weights to multiply with.
    """
    held = vars(part)
    return (
        _has_plain_class(part)
        and not ({"forward", "_compiled_call_impl"} & held.keys() or part._forward_hooks or part._forward_pre_hooks)
        and {nn.Parameter, type(None)}.issuperset(map(type, held["_parameters"].values()))
    )


def _map_of(linear: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """The linear map of [B, ...]."""
    if not _is_plain(linear):
        # called as in a text
        return lambda x: linear(x.unsqueeze(1)).squeeze(1)
    return partial(F.linear, weight=linear.weight, bias=linear.bias)


def _residual_of(linear: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The sum of a residual stream [B, X] and the linear map of [B, ...]."""
    if not _is_plain(linear) or linear.bias is not None:
        mapped = _map_of(linear)
        return lambda residual, x: residual + mapped(x)
    weight = linear.weight
    return lambda residual, x: torch.addmm(residual, x, weight.t())


def _norm_of(norm: HopeRMSNorm, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """The norm over the last axis, of tensors of that dtype."""
    weight, epsilon = norm.weight.detach().to(dtype), norm.variance_epsilon
    if dtype not in (torch.float32, torch.float64):
        return lambda x: F.rms_norm(x, x.shape[-1:], weight, epsilon)
    width = len(weight)
    weight, least = width**0.5 * weight, weight.new_tensor((width * epsilon) ** 0.5)
    return lambda x: over_norm(x, least).mul_(weight)


class TokenGates(NamedTuple):
    """The gates of one token [b, 1, 1]; a token that is padding has `rate` 0 and `retention` 1."""

    # eta and alpha
    rate: torch.Tensor
    retention: torch.Tensor
    # as in `ScanInputs`
    value_norm: torch.Tensor | None
    erased: torch.Tensor | None


def over_norm(x: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """`x / sqrt(|x|^2 + least^2)` along the last axis, in the fewest operators."""
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(least)


def step_token(
    raw: torch.Tensor,
    gates: TokenGates,
    memories: DeltaMemories,
    state: ScanState,
    span: ChunkSpan,
    least: torch.Tensor,
) -> tuple[torch.Tensor, ScanState]:
    """`memory_scan.scan_span` for a span of one token, without gradients: reads [b, 1, D], and the state after it.

    Args:
        raw: the token's keys, values and queries, as in `ScanInputs`, side by side [b, 1, 3 D].
        gates: of the token.
        memories: the layer's memories.
        state: before the token; tensors are [b, ...].
        span: the token's slot.
        least: square root of `NORM_EPSILON`.
    """
    if span.keeps is not None:
        state = restart(memories, state, span)
    (current,), chunk_start, tail = state
    rows, _, width = raw.shape
    width //= 3
    for index, name in enumerate(memories.projected):
        part = raw[..., "kvq".index(name) * width :][..., :width]
        part += torch.bmm(part, chunk_start[0][..., index * width : (index + 1) * width])
    padded = seen = torch.cat([tail, raw], dim=1)
    if span.inside is not None:
        # the token itself always belongs to its document
        seen = torch.cat([tail * span.inside.squeeze(-1).transpose(0, 1), raw], dim=1)
    qkv = F.silu((seen * memories.conv_weights.squeeze(2).transpose(0, 1)).sum(1)).view(rows, 3, width)
    units = over_norm(qkv, least)
    key, value, query = units.chunk(3, dim=1)
    value = qkv[:, 1:2] if gates.value_norm is None else value * gates.value_norm
    decayed = current * gates.retention
    # k W_0 and q W_0
    initial_reads = torch.bmm(units, memories.initial)
    targets = value if not memories.projected else value.repeat(1, 1, len(memories.rate_factors))
    errors = torch.baddbmm(targets, key, decayed, alpha=-1)
    content = errors if not memories.projected else errors[..., -width:]
    content.sub_(initial_reads[:, :1])
    for index, factor in enumerate(memories.rate_factors[:-1]):
        errors[..., index * width : (index + 1) * width].sub_(key).mul_(factor)
    current = decayed.addcmul_(key.mT, errors.mul_(gates.rate))
    written = current if not memories.projected else current[..., -width:]
    share = memories.value_share if gates.erased is None else memories.value_share * gates.erased
    reads = torch.baddbmm(initial_reads[:, 2:], query, written).addcmul_(share, value)
    return reads, close_span(state, span, (current,), tail_after(padded, tail, span))


class _Memory(NamedTuple):
    """A mixer of memories under the delta rule, for one row; tensors are those of the states' dtype."""

    # before the mixer, and of the reads
    norms: tuple[Callable, Callable]
    # of the gates' logits, keys, values, queries, and the gate of the reads
    maps: tuple[Callable, ...]
    residual: Callable
    memories: DeltaMemories
    # eta, the norm of values and zeta are `scale sigmoid(sign logits + bias) + lowest`, alpha is that to the power of
    # `power`, since exp(-softplus(x)) = sigmoid(-x); for the gates of all heads side by side, `power` [H, 1, 1]
    sign: torch.Tensor
    bias: torch.Tensor
    scale: torch.Tensor
    lowest: torch.Tensor
    power: torch.Tensor
    # square root of `NORM_EPSILON`
    least: torch.Tensor

    @classmethod
    def of(cls, block: nn.Module, low: torch.dtype) -> "_Memory | None":
        """The mixer of a block and the norm before it, if only linear maps do more; `low` is the inputs' dtype."""
        norm, mixer = block.input_layernorm, block.mixer
        if not _is_of_class(mixer, "SelfModifyingTitans") or mixer.config.memory_rule != "delta":
            return None
        gates, convolutions = mixer.gates, (mixer.k_conv1d, mixer.v_conv1d, mixer.q_conv1d)
        parts = norm, mixer, mixer.o_norm, gates, *convolutions, mixer.initial_memory, mixer.value_share
        if not all(map(_is_plain, parts)):
            return None
        dtype = torch.promote_types(low, torch.float32)
        (initial,) = mixer.initial_memory(dtype)
        heads, width, _ = initial.shape
        # [3 H D, 1, K] to [H, K, 3 D], and views of that
        taps = torch.cat([part.weight.to(dtype) for part in convolutions]).view(3, heads, width, -1)
        taps = taps.permute(1, 3, 0, 2).reshape(heads, -1, 3 * width).transpose(0, 1).unsqueeze(2)
        share = mixer.value_share(dtype).view(heads, 1, 1)
        one, most = initial.new_ones(heads), float(mixer.config.memory_learning_rate_max)
        rows = [(gates.learning_rate_bias, one, most * one, 0 * one), (gates.dt_bias, -one, one, 0 * one)]
        if gates.value_bias is not None:
            rows.append((gates.value_bias, one, 2 * one, 0 * one))
        if gates.erase_bias is not None:
            rows.append((gates.erase_bias, one, (1 - LEAST_ERASED) * one, LEAST_ERASED * one))
        rows = zip(*rows, strict=True)
        bias, sign, scale, lowest = (torch.cat([part.to(dtype) for part in parts]) for parts in rows)
        return cls(
            (_norm_of(norm, low), _norm_of(mixer.o_norm, dtype)),
            tuple(map(_map_of, (gates.gate_proj, mixer.k_proj, mixer.v_proj, mixer.q_proj, mixer.g_proj))),
            _residual_of(mixer.o_proj),
            DeltaMemories(taps, mixer.projected, initial, share, mixer.rate_factors),
            sign,
            sign * bias,
            scale,
            lowest,
            gates.A_log.to(dtype).exp().view(heads, 1, 1),
            initial.new_tensor(NORM_EPSILON**0.5),
        )

    def of_rows(self, rows: int) -> "_Memory":
        """The same for several rows."""
        weights, projected, initial, share, *other = self.memories
        initial, share, power = (part.repeat(rows, 1, 1) for part in (initial, share, self.power))
        weights = weights.repeat(1, rows, 1, 1)
        return self._replace(memories=DeltaMemories(weights, projected, initial, share, *other), power=power)

    def read(self, hidden_states: torch.Tensor, state: ScanState, plan: ChunkPlan) -> tuple[torch.Tensor, ScanState]:
        """Hidden states [B, 1, X] after the mixer, and its state.

        Args:
            hidden_states: before it, [B, 1, X].
            state: after the previous call; tensors are [B, H, ...].
            plan: the token's slot.
        """
        (current,), chunk_start, tail = state
        rows, heads, _, width = tail.shape
        batch, dtype = rows * heads, tail.dtype
        made = self if rows == 1 else self.of_rows(rows)
        hidden_states = hidden_states.squeeze(1)
        normed = self.norms[0](hidden_states)
        logits, *streams, gate = [apply(normed) for apply in self.maps]
        shape = batch, 1, width // 3
        raw = torch.cat([stream.reshape(shape) for stream in streams], dim=-1)
        raw = raw if raw.dtype == dtype else raw.to(dtype)
        sigmoids = torch.addcmul(self.bias, logits.to(dtype), self.sign).sigmoid_()
        sigmoids = torch.addcmul(self.lowest, sigmoids, self.scale)
        if rows > 1:
            sigmoids = sigmoids.view(rows, -1, heads).transpose(0, 1)
        rate, retention, *more = sigmoids.reshape(-1, batch, 1, 1).unbind(0)
        retention = retention.pow(made.power)
        norm, erased = (*more, None, None)[:2]
        if erased is not None:
            rate, norm = rate * erased, norm / erased
        if plan.valid is not None:
            valid = plan.valid.expand(rows, heads).reshape(batch, 1, 1)
            rate, retention = torch.where(valid, rate, 0.0), torch.where(valid, retention, 1.0)
        if plan.is_frozen:
            rate, retention = torch.zeros_like(rate), torch.ones_like(retention)
        gates = TokenGates(rate, retention, norm, erased)
        chunk_start = tuple(part.flatten(0, 1) for part in chunk_start)
        state = ScanState((current.flatten(0, 1),), chunk_start, tail.flatten(0, 1))
        reads, after = step_token(raw, gates, made.memories, state, plan.spans[0], self.least)
        gated = self.norms[1](reads).view(rows, -1).to(gate.dtype) * F.silu(gate)
        current, chunk_start = ([part.view(rows, heads, *part.shape[1:]) for part in parts] for parts in after[:2])
        after = ScanState(tuple(current), tuple(chunk_start), after.conv_tail.view(tail.shape))
        return self.residual(hidden_states, gated).unsqueeze(1), after


def _levels_of(continuum: nn.Module, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Hidden states [B, 1, X] after levels in a chain, if all of them but linear maps and activations are plain."""
    if not _is_of_class(continuum, "ContinuumMemory"):
        return None
    levels = [*continuum.levels]
    if not all(map(_is_plain, (continuum, *levels, *(level.norm for level in levels)))):
        return None
    steps = [
        (_norm_of(x.norm, dtype), _map_of(x.gate_proj), _map_of(x.up_proj), x.act_fn, _residual_of(x.down_proj))
        for x in levels
    ]

    def read(hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = hidden_states.squeeze(1)
        for norm, gate, up, activation, residual in steps:
            normed = norm(hidden_states)
            hidden_states = residual(hidden_states, activation(gate(normed)) * up(normed))
        return hidden_states.unsqueeze(1)

    return read


class _Kept:
    """What a block computes a token with; `None` for a part whose modules have to be called.

    `about`: dtype of the inputs, and the largest learning rate.
    """

    def __init__(self, block: nn.Module, about: tuple[torch.dtype, float | None]):
        found = list(block.modules())
        self.attributes = [*map(vars, found)]
        self.children, self.parameters = ([held[name] for held in self.attributes] for name in _OWNED)
        self.hooks = [held[name] for held in self.attributes for name in _HOOKS]
        # The weights of linear maps are read at every token.
        made = (part for module in found if not isinstance(module, nn.Linear) for part in module.parameters(False))
        # an inference tensor has no version
        self.made = [part for part in made if type(part) is nn.Parameter and not part.is_inference()]
        # hold the memory at the addresses, so that no other parameter gets one of them
        self.sources = [part.detach() for part in self.made]
        self.seen = self.look(about)
        self.memory, self.levels = _Memory.of(block, about[0]), _levels_of(block.continuum, about[0])

    def look(self, about: tuple) -> tuple:
        """What stays the same while no module, parameter, hook or `forward` of a module is changed."""
        return (
            about,
            [*chain.from_iterable(map(dict.values, self.children))],
            [*map(id, chain.from_iterable(map(dict.values, self.parameters)))],
            [*map(_VERSION, self.made)],
            [*map(torch.Tensor.data_ptr, self.made)],
            [*filter(None, self.hooks)],
            [*map(len, self.attributes)],
        )


# Of each block until it reads more than a token, or a text begins (see `forget_text`): writes to a parameter's
# `.data`, which often put averaged weights in place, change neither version nor address. No part of modules, which are
# copied and saved.
_KEPT: WeakKeyDictionary[nn.Module, _Kept] = WeakKeyDictionary()


def forget_text(blocks: Iterable[nn.Module], cache: Cache | None) -> None:
    """Drop what blocks keep between the tokens of a text, unless this call goes on with the text in `cache`."""
    if torch.compiler.is_compiling():
        return
    seen = 0 if cache is None else cache.get_seq_length()
    # The count of a cache of fixed length lies on the device, and reading it would make every token wait.
    if isinstance(seen, int) and seen == 0:
        for block in blocks:
            _KEPT.pop(block, None)


def token_of(
    block: nn.Module, hidden_states: torch.Tensor, state: tuple | None
) -> tuple[_Memory | None, Callable[[torch.Tensor], torch.Tensor] | None]:
    """What a `HopeBlock` reads inputs [B, T, X] with, if they are one token per row, without gradients.

    `None` for the mixer or the levels means that their modules have to be called.
    """
    if torch.compiler.is_compiling():
        return None, None
    if hidden_states.shape[1] != 1 or torch.is_grad_enabled():
        _KEPT.pop(block, None)
        return None, None
    # fake tensors and the like must not be kept, and autocast gives sums another dtype
    if (
        modules._global_forward_hooks
        or modules._global_forward_pre_hooks
        or type(hidden_states) is not torch.Tensor
        or torch.is_autocast_enabled(hidden_states.device.type)
    ):
        return None, None
    mixer = block.mixer
    has_memory = _is_of_class(mixer, "SelfModifyingTitans")
    about = hidden_states.dtype, mixer.config.memory_learning_rate_max if has_memory else None
    kept = _KEPT.get(block)
    if kept is None or kept.seen != kept.look(about):
        kept = _KEPT[block] = _Kept(block, about)
    memory = kept.memory
    if memory is not None and (state is None or runs_plain(mixer.kernels)):
        memory = None
    return memory, kept.levels
