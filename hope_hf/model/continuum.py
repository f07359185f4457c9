"""Continuum memory system: MLP levels, which training may update at different periods (equations 70 to 74).

A level's period is the number of tokens between two of its updates. The optimizer (`hope_hf.optim`) applies periods of
one optimizer step or more; it finds the levels by their attributes `level` and `period`. In a forward pass every level
is an ordinary MLP, to whose weights a cache may add what the text so far has taught (`level_learning.py`).
"""

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig

from .backends import operand_dtype
from .layers import HopeRMSNorm, LearnedFactors


class ContinuumLevel(nn.Module):
    """One level: an MLP with a gate (SwiGLU unless `hidden_act` differs) after its own norm, without the residual.

    `level` counts from 0, the fastest; all its parameters are updated every `period` tokens.
    """

    def __init__(self, config: PreTrainedConfig, level: int):
        super().__init__()
        self.level = level
        self.period = config.level_periods[level]
        width = config.hidden_size
        hidden = config.level_intermediate_sizes[level]
        self.norm = HopeRMSNorm(width, config.rms_norm_eps)
        self.gate_proj = nn.Linear(width, hidden, bias=config.mlp_bias)
        self.up_proj = nn.Linear(width, hidden, bias=config.mlp_bias)
        self.down_proj = nn.Linear(hidden, width, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor, deltas: dict[str, Tensor] | None = None) -> Tensor:
        """[B, T, hidden_size], with differences to the weights [B, o, i] of the maps that learned from each row."""
        deltas = deltas or {}
        normed = self.norm(hidden_states)
        gate = _with_delta(self.gate_proj, normed, deltas.get("gate_proj"))
        up = _with_delta(self.up_proj, normed, deltas.get("up_proj"))
        active = self.act_fn(gate) * up
        return _with_delta(self.down_proj, active, deltas.get("down_proj"))


def _with_delta(projection: nn.Module, inputs: Tensor, delta: Tensor | None) -> Tensor:
    """The map of inputs [B, T, i] with weights `W + D` for each row, `D` [B, o, i]."""
    if delta is None:
        return projection(inputs)
    if delta.requires_grad and _can_add(projection, inputs, delta):
        return _summed_map(projection, inputs, delta)
    outputs = projection(inputs)
    delta = delta.to(inputs.dtype)
    return outputs + torch.bmm(inputs, delta.mT)


def _can_add(projection: nn.Module, inputs: Tensor, delta: Tensor) -> bool:
    """Whether a map is a plain one, and its weight's dtype does not round the difference away."""
    if type(projection) is not nn.Linear:
        # adapted
        return False
    weight = projection.weight
    if type(weight) is not nn.Parameter:
        # quantised or sharded
        return False
    dtype = operand_dtype(inputs)
    return dtype == weight.dtype == delta.dtype


def _summed_map(projection: nn.Linear, inputs: Tensor, delta: Tensor) -> Tensor:
    """`_with_delta` in one product forward, and one for each gradient; the weight gets none."""
    weight = projection.weight.detach()
    bias = projection.bias
    moved = weight + delta
    if len(moved) == 1:
        return nn.functional.linear(inputs, moved.squeeze(0), bias)
    outputs = torch.bmm(inputs, moved.mT)
    return outputs if bias is None else outputs + bias


class ContinuumMemory(nn.Module):
    """The levels of a block in a chain (73), `x <- x + MLP_l(norm(x))`, fast to slow.

    `continuum(hidden_states, deltas)` returns its output, with residual connections; `deltas` are what each row's text
    has taught, by level and map.
    """

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.levels = nn.ModuleList()
        for level in range(len(config.level_periods)):
            self.levels.append(ContinuumLevel(config, level))

    def forward(self, hidden_states: Tensor, deltas: dict[int, dict] | None = None) -> Tensor:
        """[B, T, hidden_size]."""
        deltas = deltas or {}
        for level in self.levels:
            output = level(hidden_states, deltas.get(level.level))
            hidden_states = hidden_states + output
        return hidden_states


class IndependentContinuum(ContinuumMemory):
    """Levels side by side (74): `x + sum_l w_l MLP_l(norm(x))` with learned weights that start at 1."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        self.mix = LearnedFactors(len(self.levels))

    def forward(self, hidden_states: Tensor, deltas: dict[int, dict] | None = None) -> Tensor:
        """[B, T, hidden_size]."""
        deltas = deltas or {}
        weights = self.mix(hidden_states.dtype)
        total = 0
        for level, weight in zip(self.levels, weights, strict=True):
            output = level(hidden_states, deltas.get(level.level))
            total = total + weight * output
        return hidden_states + total


# The class of levels of each `HopeConfig.level_variant`.
CONTINUA = {"sequential": ContinuumMemory, "independent": IndependentContinuum}
