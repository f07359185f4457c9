"""The mixer of memories for one more token per row, without gradients: the same in few operators.

On a CPU such a token costs what calling operators and modules costs. So keys, values and queries of all heads go
through an operator together, weights are applied without calling their modules, and what is made of parameters alone
is kept between tokens. Modules that do more than apply their weights are called.

Axes: B row, H head, b rows times heads, K kernel size of the convolution, D head width.
"""

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, itemgetter, methodcaller
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as modules
from torch.utils.hooks import RemovableHandle

from .chunks import ChunkPlan
from .layers import full_precision, is_one_token, normalised
from .memory_delta import DeltaMemories, TokenGates, step_token
from .memory_scan import ScanState

_HAS_FORWARD = methodcaller("__contains__", "forward")
_VERSION, _ADDRESS = attrgetter("_version"), torch.Tensor.data_ptr
_PARAMETERS = frozenset({nn.Parameter, type(None)})
_PARTS = itemgetter(
    "k_proj", "v_proj", "q_proj", "g_proj", "o_proj", "o_norm", "gates", "k_conv1d", "v_conv1d", "q_conv1d",
    "initial_memory", "value_share",
)  # fmt: skip
# For the blocks of each model without hooks, the number of hooks that the process had then registered.
_WITHOUT_HOOKS: WeakKeyDictionary[nn.ModuleList, int] = WeakKeyDictionary()


def without_hooks(blocks: nn.ModuleList, hidden_states: torch.Tensor) -> bool:
    """Whether a call of inputs [B, T, hidden_size] is one token per row, and no module within the blocks has hooks."""
    if torch.compiler.is_compiling():
        return False
    if not is_one_token(hidden_states):
        _WITHOUT_HOOKS.pop(blocks, None)
        return False
    if modules._global_forward_hooks or modules._global_forward_pre_hooks:
        return False
    # Modules are looked at once a text, since that takes as long as dozens of operators. A hook gets the next number.
    if _WITHOUT_HOOKS.get(blocks) == RemovableHandle.next_id:
        return True
    parts = (part for block in blocks for part in block.modules() if part is not block)
    if any(part._forward_hooks or part._forward_pre_hooks for part in parts):
        return False
    _WITHOUT_HOOKS[blocks] = RemovableHandle.next_id
    return True


def parameters_of(parts: Sequence[nn.Module], kinds: frozenset[type]) -> list[dict[str, nn.Parameter]] | None:
    """The parameters of each module by name; `None` unless modules without hooks do nothing but apply these.

    Another class or `forward` (adapters, quantised maps, offloading) does more, and parameters of another type
    (shards, quantised weights) or none (parametrizations) are not weights to multiply with.
    """
    if not kinds.issuperset(map(type, parts)) or any(map(_HAS_FORWARD, map(vars, parts))):
        return None
    found = [part._parameters for part in parts]
    return found if _PARAMETERS.issuperset(map(type, chain.from_iterable(map(dict.values, found)))) else None


class _Made(NamedTuple):
    """What is made of a layer's parameters, for one row; tensors are those of the states' dtype."""

    memories: DeltaMemories
    # eta and the norm of values are `scale sigmoid(sign logits + bias)`, alpha is that to the power of `power`, since
    # exp(-softplus(x)) = sigmoid(-x); for the gates of all heads side by side, `power` [H, 1, 1]
    sign: torch.Tensor
    bias: torch.Tensor
    scale: torch.Tensor
    power: torch.Tensor

    def of_rows(self, rows: int) -> "_Made":
        """The same for several rows; the gates' logits have an axis for these."""
        weights, projected, initial, share, *other = self.memories
        initial, share, power = (part.repeat(rows, 1, 1) for part in (initial, share, self.power))
        weights = weights.repeat(1, rows, 1, 1)
        return self._replace(memories=DeltaMemories(weights, projected, initial, share, *other), power=power)


class _Kept(NamedTuple):
    """An entry of `_KEPT`."""

    # dtype of the states, the largest learning rate, and the parameters' versions and addresses
    key: tuple
    made: _Made
    # hold the memory at the addresses, so that no other parameter gets one of them
    sources: list[torch.Tensor]


# Of each layer until it reads more than a token: writes to a parameter's `.data` change neither version nor address.
# No part of modules, which are copied and saved.
_KEPT: WeakKeyDictionary[nn.Module, _Kept] = WeakKeyDictionary()


def forget(mixer: nn.Module) -> None:
    """Drop what is kept between the tokens of a layer."""
    if not torch.compiler.is_compiling():
        _KEPT.pop(mixer, None)


def _made_of(mixer: nn.Module, dtype: torch.dtype, parts: Sequence[dict[str, nn.Parameter]]) -> _Made:
    """What is made of gates, convolutions, initial memory and value share; made again if a parameter changed."""
    gates, *others = parts
    parameters = *(part["weight"] for part in others), *gates.values()
    most = float(mixer.config.memory_learning_rate_max)
    # an inference tensor has no version
    key = None
    if not any(map(torch.Tensor.is_inference, parameters)):
        key = dtype, most, *map(_VERSION, parameters), *map(_ADDRESS, parameters)
        kept = _KEPT.get(mixer)
        if kept is not None and kept.key == key:
            return kept.made
    sources = [part.detach() for part in parameters]
    heads, width, _ = sources[3].shape
    # [3 H D, 1, K] to [H, K, 3 D], and views of that
    taps = torch.cat([part.to(dtype) for part in sources[:3]]).view(3, heads, width, -1).permute(1, 3, 0, 2)
    taps = taps.reshape(heads, -1, 3 * width).transpose(0, 1).unsqueeze(2)
    initial, share = sources[3].to(dtype), sources[4].to(dtype).view(heads, 1, 1)
    memories = DeltaMemories(taps, mixer.projected, initial, share, mixer.rate_factors)
    one, has_norm = initial.new_ones(heads), gates.get("value_bias") is not None
    biases = [gates[name].detach().to(dtype) for name in ("learning_rate_bias", "dt_bias")]
    signs, scales = [one, -one], [most * one, one]
    if has_norm:
        biases, signs, scales = [*biases, gates["value_bias"].detach().to(dtype)], [*signs, one], [*scales, 2 * one]
    sign, bias, scale = map(torch.cat, (signs, biases, scales))
    made = _Made(memories, sign, sign * bias, scale, gates["A_log"].detach().to(dtype).exp().view(heads, 1, 1))
    if key is not None:
        _KEPT[mixer] = _Kept(key, made, sources)
    return made


def read_token(
    mixer: nn.Module, hidden_states: torch.Tensor, state: ScanState, plan: ChunkPlan, unhooked: bool
) -> tuple[torch.Tensor, ScanState]:
    """`SelfModifyingTitans.forward` for one token per row under the delta rule, without gradients.

    Args:
        mixer: the `SelfModifyingTitans`.
        hidden_states: [B, 1, hidden_size].
        state: after the previous call; tensors are [B, H, ...].
        plan: the token's slot.
        unhooked: whether no module in the mixer has hooks.
    """
    (current,), chunk_start, tail = state
    rows, heads, _, width = tail.shape
    batch, dtype = rows * heads, tail.dtype
    shape = batch, 1, width // 3
    parts = _PARTS(mixer._modules)
    maps, gate_proj = parts[:4], parts[6]._modules["gate_proj"]
    found = parameters_of((gate_proj, *parts), mixer.plain_kinds) if unhooked else None
    if found is None:
        *streams, gate = (part(hidden_states) for part in maps)
    else:
        logits, *streams, gate = (F.linear(hidden_states, part["weight"]) for part in found[:5])
    raw = torch.cat([stream.reshape(shape) for stream in streams], dim=-1)
    raw = raw if raw.dtype == dtype else raw.to(dtype)
    with full_precision(hidden_states.device.type):
        if found is not None:
            made = _made_of(mixer, dtype, found[7:])
            made = made if rows == 1 else made.of_rows(rows)
            memories = made.memories
            sigmoids = torch.addcmul(made.bias, logits.to(dtype), made.sign).sigmoid_().mul_(made.scale)
            if rows > 1:
                sigmoids = sigmoids.view(rows, -1, heads).transpose(0, 1)
            rate, retention, *norm = sigmoids.reshape(-1, batch, 1, 1).unbind(0)
            retention = retention.pow(made.power)
        else:
            memories = mixer.memories(rows, dtype)
            gates = [part.reshape(batch, 1, 1) for part in mixer.gates(hidden_states) if part is not None]
            rate, retention, *norm = gates
            retention = retention.exp()
        if plan.valid is not None:
            valid = plan.valid.expand(rows, heads).reshape(batch, 1, 1)
            rate, retention = torch.where(valid, rate, 0.0), torch.where(valid, retention, 1.0)
        gates = TokenGates(rate, retention, norm[0] if norm else None)
        chunk_start = tuple(part.flatten(0, 1) for part in chunk_start)
        state = ScanState((current.flatten(0, 1),), chunk_start, tail.flatten(0, 1))
        reads, after = step_token(raw, gates, memories, state, plan.spans[0])
        o_proj, o_norm = parts[4:6]
        normed = o_norm(reads) if found is None else normalised(reads, found[6]["weight"], o_norm.variance_epsilon)
    gated = normed.view(rows, 1, -1).to(gate.dtype) * F.silu(gate)
    output = o_proj(gated) if found is None else F.linear(gated, found[5]["weight"])
    current, chunk_start = ([part.view(rows, heads, *part.shape[1:]) for part in parts] for parts in after[:2])
    return output, ScanState(tuple(current), tuple(chunk_start), after.conv_tail.view(tail.shape))
