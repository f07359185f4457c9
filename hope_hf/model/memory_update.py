"""The update rules of the self-modifying memories in chunk-parallel form, as plain functions of tensors.

A memory is `M(z) = z + W1 act(W2 z)` (equation 89; depth 1: `M(z) = z + W z`) and learns with delta gradient descent
and retention (equation 88). Everything a token writes (inputs, errors, learning rates) is taken at the weights of its
chunk's start (section 8.2 of the paper), so that inside a chunk each layer is a linear recurrence

    W_t = alpha_t W_{t-1} - e_t W_{t-1} u_t u_t^T - w_t delta_t u_t^T

whose sum over tokens is one triangular solve. The slow twin of this file is `hope_hf.reference`: the same rules token
by token.

Two sizes are kept apart. The *chunk* is semantic: where errors are taken. The *tile* (at most `TILE` tokens) is
computational: how much of the recurrence one triangular solve covers. Results do not depend on the tile.

Axes of a tensor: B sequence in batch, H head, N memory of a group, C token in chunk or tile, D head width, M memory
width; `o` and `i` are the output and input width of one layer. Tokens are rows. Precision: every tensor here is
float32 (float64 if the inputs are), whatever the model's dtype.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from .vector_norms import back_through_unit_silu, clip_norm, unit, unit_silu

# One triangular solve covers at most this many tokens: its cost grows with the square of the tile.
TILE = 64
# Below this norm of the hidden activation its normalisation is treated as a constant scale, or the error explodes.
_HIDDEN_NORM_FLOOR = 0.1


class MemoryRule(NamedTuple):
    """What `HopeConfig` says about the memories' inner learning rule; its docstring explains the fields."""

    depth: int = 2
    erase: str = "output"
    hidden_norm: str = "unit"
    inner_rate: float = 0.1
    error_clip: float | None = 2.0
    gradient_factor: float = 1.0
    target_norm: bool = True
    read_mode: str = "inclusive"
    decay_to_initial: bool = True
    momentum: bool = False
    # learning rate 0 and retention towards the initial state: nothing is ever written
    frozen: bool = False


# The weights of a group of memories in the order in which they act: (W,) or (W2, W1); each [..., N, o, i].
Weights = tuple[torch.Tensor, ...]


class MemoryState(NamedTuple):
    """What a group of memories carries from token to token; every tensor [B, H, N, o, i] in float32.

    With `decay_to_initial` the weights are stored as deviations from their learned initial value, else as they are.
    """

    # the weights now
    run: Weights
    # the weights at the start of the current chunk, from which errors and targets are taken
    snap: Weights
    # running sum of past writes; empty without momentum
    momentum: Weights


class Gates(NamedTuple):
    """Per token and head: what is written, kept and carried on. All [B, H, C]; padding has 0 in the first two."""

    # eta of equation (88)
    learning_rate: torch.Tensor
    log_retention: torch.Tensor
    # log of the momentum's coefficient, only with momentum
    log_momentum: torch.Tensor | None = None
    # True for tokens, False for padding, or None where all are tokens; only momentum, which moves weights without a
    # write, needs it
    valid: torch.Tensor | None = None

    def split(self, sizes: list[int]) -> list["Gates"]:
        """The gates of successive runs of tokens."""
        return [Gates(*part) for part in zip(*(split_tokens(gate, sizes, -1) for gate in self), strict=True)]


def split_tokens(x: torch.Tensor | None, sizes: list[int], axis: int) -> tuple:
    """`x` in successive runs of tokens: one autograd node, where a slice each would pad every gradient with zeros."""
    return (None,) * len(sizes) if x is None else x.split(sizes, dim=axis)


def initial_state(initial: Weights, batch_size: int, rule: MemoryRule) -> MemoryState:
    """The state of a memory that has read nothing. `initial`: the learned weights, each [H, N, o, i]."""
    shape = (batch_size, -1, -1, -1, -1)
    zeros = tuple(torch.zeros_like(weight).expand(shape).contiguous() for weight in initial)
    run = zeros if rule.decay_to_initial else tuple(weight.expand(shape) for weight in initial)
    return MemoryState(run, run, zeros if rule.momentum else ())


def effective_weights(stored: Weights, initial: Weights, rule: MemoryRule) -> Weights:
    """The weights themselves, from what a `MemoryState` stores of them."""
    if not rule.decay_to_initial:
        return stored
    return tuple(base + deviation for base, deviation in zip(initial, stored, strict=True))


def activate(pre: torch.Tensor, rule: MemoryRule) -> torch.Tensor:
    """Hidden activation of a two-layer memory, with norm 1 for `hidden_norm="unit"`."""
    return unit_silu(pre)[0] if rule.hidden_norm == "unit" else F.silu(pre)


def apply_memory(weights: Weights, z: torch.Tensor, rule: MemoryRule) -> torch.Tensor:
    """`M(z)`, equation (89). `z`: [B, H, 1 or N, C, D]; returns [B, H, N, C, D]."""
    hidden = z if rule.depth == 1 else activate(z @ weights[0].mT, rule)
    return z + hidden @ weights[-1].mT


class LayerWrite(NamedTuple):
    """What the tokens of a chunk write into one layer, fixed by the weights at the chunk's start."""

    # u [B, H, 1 or N, C, i]
    inputs: torch.Tensor
    # delta = dL/d(W u), clipped [B, H, N, C, o]
    errors: torch.Tensor
    # factor on the token's learning rate: float or [B, H, N, C]
    scale: torch.Tensor | float
    # whether the layer erases along u before it writes
    erase: bool

    def split(self, sizes: list[int]) -> list["LayerWrite"]:
        """What successive runs of tokens write."""
        if len(sizes) == 1:
            return [self]
        fixed = isinstance(self.scale, float)
        scales = (self.scale,) * len(sizes) if fixed else split_tokens(self.scale, sizes, -1)
        parts = zip(split_tokens(self.inputs, sizes, -2), split_tokens(self.errors, sizes, -2), scales, strict=True)
        return [LayerWrite(*part, self.erase) for part in parts]


def linearise(weights: Weights, keys: torch.Tensor, values: torch.Tensor, rule: MemoryRule) -> list[LayerWrite]:
    """Inputs and errors of every layer for the loss `|M(k) - M(v)|^2`, the target `M(v)` being a constant.

    Equations (84) and (85) with the gradient of equation (93), at the weights of the chunk's start.

    Args:
        weights: effective weights at the chunk's start, each [B, H, N, o, i].
        keys: unit keys [B, H, 1, C, D].
        values: values [B, H, 1, C, D], not normalised.

    Returns:
        One `LayerWrite` per layer, in the order of `weights`.
    """
    values = unit(values) if rule.target_norm else values
    if rule.depth == 1:
        error = _error(keys, values, keys, values, weights[0], rule)
        return [LayerWrite(keys, clip_norm(error, rule.error_clip), 1.0, rule.erase != "none")]
    inner, outer = weights
    pre = keys @ inner.mT
    if rule.hidden_norm == "unit":
        hidden, inverse_norm = unit_silu(pre)
    else:
        hidden = F.silu(pre)
    error = _error(keys, values, hidden, activate(values @ inner.mT, rule), outer, rule)
    # the inner layer's error is formed from the unclipped outer one
    back = error @ outer
    if rule.hidden_norm == "unit":
        inner_error = back_through_unit_silu(back, pre, hidden, inverse_norm, 1 / _HIDDEN_NORM_FLOOR)
    else:
        gate = torch.sigmoid(pre)
        inner_error = back * (gate + hidden * (1 - gate))
    scale = 1 / hidden.square().sum(-1).clamp(min=1.0) if rule.hidden_norm == "step" else 1.0
    return [
        LayerWrite(keys, clip_norm(inner_error, rule.error_clip), rule.inner_rate, rule.erase == "both"),
        LayerWrite(hidden, clip_norm(error, rule.error_clip), scale, rule.erase != "none"),
    ]


def _error(keys, values, hidden_keys, hidden_values, weight, rule: MemoryRule) -> torch.Tensor:
    """`M(k) - M(v)`, the gradient at the output, times the factor of equation (93) or (88)."""
    error = (keys - values) + (hidden_keys - hidden_values) @ weight.mT
    return error if rule.gradient_factor == 1 else rule.gradient_factor * error


def decay_matrix(rows: torch.Tensor, columns: torch.Tensor, strict: bool) -> torch.Tensor:
    """`exp(rows_t - columns_i)` for `i <= t` (`i < t` if strict), else 0. [..., C] each; returns [..., C, C].

    Masked before the exponential: above the diagonal it overflows, and an overflow times zero is a NaN gradient.
    """
    size = rows.shape[-1]
    keep = torch.ones(size, size, dtype=torch.bool, device=rows.device).tril(-1 if strict else 0)
    return (rows[..., :, None] - columns[..., None, :]).masked_fill(~keep, float("-inf")).exp()


class TileGates:
    """Products of the gates over a tile, shared by all layers and memories of a group. [B, H, 1, C(, 1 or C)] each.

    `read_mode`: at which weights a token reads ("inclusive" or "exclusive" of its own write), `None` where none does.
    """

    def __init__(self, gates: Gates, read_mode: str | None):
        self.learning_rate = gates.learning_rate.unsqueeze(2)
        total = gates.log_retention.cumsum(-1)
        before = total - gates.log_retention
        self.decay_before = decay_matrix(before, total, strict=True).unsqueeze(2)
        self.keep_before = before.exp().unsqueeze(2).unsqueeze(-1)
        self.keep_all = total[..., -1:].exp().unsqueeze(2).unsqueeze(-1)
        self.keep_after = (total[..., -1:] - total).exp().unsqueeze(2)
        if read_mode == "exclusive":
            self.decay_read, self.keep_read = self.decay_before, self.keep_before
        elif read_mode == "inclusive":
            self.decay_read = decay_matrix(total, total, strict=False).unsqueeze(2)
            self.keep_read = total.exp().unsqueeze(2).unsqueeze(-1)
        if gates.log_momentum is not None:
            self._carry_momentum(gates, total, before, read_mode)

    def _carry_momentum(self, gates, total, before, read_mode) -> None:
        # A write lives on in the momentum: token i reaches token t through every j between,
        # m_ti = sum_j (g_t / g_j) (b_j / b_i).
        carried = gates.log_momentum.cumsum(-1)
        spread = decay_matrix(carried, carried, strict=False)
        growth = carried.exp().unsqueeze(-1)
        # momentum multiplies the effective learning rate by 1 / (1 - coefficient): the write gives that back
        self.write_rate = self.learning_rate * -torch.expm1(gates.log_momentum).unsqueeze(2)
        self.momentum_keep = carried[..., -1:].exp().unsqueeze(2).unsqueeze(-1)
        self.momentum_after = (carried[..., -1:] - carried).exp().unsqueeze(2)
        valid = 1.0 if gates.valid is None else gates.valid.to(total.dtype).unsqueeze(-2)
        upto = decay_matrix(total, total, strict=False) * valid
        until = decay_matrix(before, total, strict=True) * valid
        self.momentum_before = (until @ spread).unsqueeze(2)
        self.growth_before = (until @ growth).unsqueeze(2)
        momentum_upto, growth_upto = (upto @ spread).unsqueeze(2), (upto @ growth).unsqueeze(2)
        exclusive = read_mode == "exclusive"
        self.momentum_read = self.momentum_before if exclusive else momentum_upto
        self.growth_read = self.growth_before if exclusive else growth_upto
        self.momentum_end, self.growth_end = momentum_upto[..., -1, :], growth_upto[..., -1:, :]


class LayerTile:
    """One layer over one tile: solved once, then read at any token and carried to the tile's end.

    With `D` the stored weights at the tile's start, `W_init` the initial weights (0 unless retention leads there),
    `w_i` the steps, and `w_i a_i u_i^T` what token i takes from the weights:

        (I + L) A = keep_before U D^T + U W_init^T + Delta,           L_ti = decay_before_ti (u_t . u_i) w_i
        W_t x = keep_t D x + W_init x - sum_{i <= t} decay_ti (u_i . x) w_i a_i

    Without erasing `A = Delta`. With momentum `Delta` leaves the solve and is carried on: see `TileGates`. The steps
    scale the [C, C] matrices and never the [C, o] ones, and nothing is divided by them: they may be 0.
    """

    def __init__(
        self,
        stored: torch.Tensor,
        initial: torch.Tensor | None,
        momentum: torch.Tensor | None,
        write: LayerWrite,
        gates: TileGates,
    ):
        self.stored, self.initial, self.momentum, self.gates = stored, initial, momentum, gates
        self.inputs, self.errors = write.inputs, write.errors
        self.learning_rate = gates.learning_rate * write.scale
        self.write_rate = None if momentum is None else gates.write_rate * write.scale
        if not write.erase:
            self.corrections = self.errors if momentum is None else None
            return
        gram = self.inputs @ self.inputs.mT
        right = gates.keep_before * (self.inputs @ stored.mT)
        if initial is not None:
            right = right + self.inputs @ initial.mT
        if momentum is None:
            right = right + self.errors
        else:
            right = right + gates.growth_before * (self.inputs @ momentum.mT)
            right = right - (gram * _scale_columns(gates.momentum_before, self.write_rate)) @ self.errors
        lower = gram * _scale_columns(gates.decay_before, self.learning_rate)
        # unitriangular: the diagonal of ones is not read, so (I + L) is never formed
        self.corrections = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)

    def read(self, queries: torch.Tensor) -> torch.Tensor:
        """`W_t x_t` for one query a token. `queries`: [B, H, N, C, i]; returns [B, H, N, C, o]."""
        gates = self.gates
        result = gates.keep_read * (queries @ self.stored.mT)
        if self.initial is not None:
            result = result + queries @ self.initial.mT
        similarity = queries @ self.inputs.mT
        if self.corrections is not None:
            result = result - (similarity * _scale_columns(gates.decay_read, self.learning_rate)) @ self.corrections
        if self.momentum is not None:
            result = result + gates.growth_read * (queries @ self.momentum.mT)
            result = result - (similarity * _scale_columns(gates.momentum_read, self.write_rate)) @ self.errors
        return result

    def end(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Stored weights and momentum after the tile's last token."""
        gates = self.gates
        stored = gates.keep_all * self.stored
        if self.corrections is not None:
            stored = stored - self._sum(self.corrections, self.learning_rate * gates.keep_after)
        if self.momentum is None:
            return stored, None
        stored = (
            stored + gates.growth_end * self.momentum - self._sum(self.errors, self.write_rate * gates.momentum_end)
        )
        carried = gates.momentum_keep * self.momentum
        return stored, carried - self._sum(self.errors, self.write_rate * gates.momentum_after)

    def _sum(self, vectors: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sum over tokens of `weight vector input^T` [B, H, N, o, i]."""
        return vectors.mT @ (weights.unsqueeze(-1) * self.inputs)


def _scale_columns(matrix: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return matrix * scale.unsqueeze(-2)


def update_chunk(
    state: MemoryState,
    initial: Weights,
    keys: torch.Tensor,
    values: torch.Tensor,
    gates: Gates,
    rule: MemoryRule,
    queries: torch.Tensor | None = None,
    tile: int = TILE,
    need_state: bool = True,
) -> tuple[torch.Tensor | None, MemoryState | None]:
    """Write the tokens of (a part of) one chunk, and read at each of them.

    Args:
        state: of the group of memories; `snap` may be older than `run` where the chunk began in an earlier call.
        initial: learned initial weights, each [H, N, o, i].
        keys: unit keys, shared by the group's memories [B, H, C, D].
        values: values [B, H, C, D].
        gates: learning rate, log retention, log momentum [B, H, C].
        queries: unit queries [B, H, C, D], or `None` to write only.
        tile: tokens of one triangular solve; any value gives the same result.
        need_state: False where nobody reads the memory after these tokens: saves its last update.

    Returns:
        Reads [B, H, N, C, D] (`None` without queries), and the state after the last token with `snap` unchanged
        (`None` unless needed).
    """
    if rule.frozen:
        return None if queries is None else apply_memory(initial, queries.unsqueeze(2), rule), state
    base = initial if rule.decay_to_initial else (None,) * len(initial)
    snap = effective_weights(state.snap, initial, rule)
    writes = linearise(snap, keys.unsqueeze(2), values.unsqueeze(2), rule)
    length = keys.shape[-2]
    sizes = [min(tile, length - start) for start in range(0, length, tile)]
    reads, query_tiles = [], (None,) * len(sizes)
    if queries is not None and rule.read_mode == "start":
        reads.append(apply_memory(snap, queries.unsqueeze(2), rule))
    elif queries is not None:
        query_tiles = split_tokens(queries.unsqueeze(2), sizes, -2)
    run, momentum = state.run, state.momentum or (None,) * len(initial)
    write_tiles = zip(*(write.split(sizes) for write in writes), strict=True)
    for index, (layer_writes, tile_queries, tile_gates) in enumerate(
        zip(write_tiles, query_tiles, gates.split(sizes), strict=True)
    ):
        products = TileGates(tile_gates, None if tile_queries is None else rule.read_mode)
        layers = [LayerTile(*parts, products) for parts in zip(run, base, momentum, layer_writes, strict=True)]
        if tile_queries is not None:
            reads.append(read_tile(layers, tile_queries, rule))
        if need_state or index < len(sizes) - 1:
            run, momentum = zip(*(layer.end() for layer in layers), strict=True)
    output = None if not reads else reads[0] if len(reads) == 1 else torch.cat(reads, dim=-2)
    if not need_state:
        return output, None
    return output, MemoryState(tuple(run), state.snap, tuple(momentum) if rule.momentum else ())


def read_tile(layers: list[LayerTile], queries: torch.Tensor, rule: MemoryRule) -> torch.Tensor:
    """`M_t(q_t)` for one query a token, each at its own token's weights. `queries`: [B, H, 1, C, D]."""
    hidden = queries if rule.depth == 1 else activate(layers[0].read(queries), rule)
    return queries + layers[-1].read(hidden)
