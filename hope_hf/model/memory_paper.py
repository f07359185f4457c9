"""The paper's rule of a layer's memories in chunk-parallel form, in plain operations.

A memory is `M(z) = z + W1 act(W2 z)` (equation 89; depth 1: `M(z) = z + W z`), updated by delta gradient descent with
retention (equation 88). A token's inputs, errors and learning rates are computed at the weights of its chunk's start
(section 8.2 of the paper). Within a chunk each layer is then a linear recurrence

    W_t = alpha_t W_{t-1} - e_t W_{t-1} u_t u_t^T - w_t delta_t u_t^T

whose sum over tokens is one triangular solve. `hope_hf.reference` computes the same rule token by token.

Without more the rule diverges, so it has these additions (docs/log/rule.md): errors have a norm of at most 2 per
layer, and hidden activations and the values of targets have norm 1; the output layer alone erases along its input; the
inner layer's steps are a tenth; weights decay to their initial values. A token reads its own write (equation 82).

Axes: b sequences times heads, N memory of a layer (the content memory last), C token of a span, D head width; `o` and
`i` are the output and input width of one layer of a memory. Tokens are rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import initialization as init
from transformers.configuration_utils import PreTrainedConfig

from .memory_scan import NORM_EPSILON, Deviations, ScanState, Tokens, Weights, decay_matrix, unit

# standard deviation of a memory's output layer at initialisation, before the factor 1 / sqrt(input width)
_OUTPUT_STD = 0.05
_INNER_GAIN = 2.0
# largest norm of a token's error per layer
ERROR_CLIP = 2.0
# step of the inner layer relative to that of the output layer
INNER_RATE = 0.1
# Below this norm of the hidden activation, its normalisation counts as a constant scale: the error would explode.
_HIDDEN_NORM_FLOOR = 0.1


class PaperMemories(NamedTuple):
    """The memories of a layer under the paper's rule.

    Weights of N memories are (W,) or (W2, W1), each [b, N, o, i], and so are their deviations.
    """

    # as in `Memories`
    conv_weights: Tensor
    projected: tuple[str, ...]
    initial: Weights
    # factor on the learning rate of each memory [N, 1]
    rate_factors: Tensor

    shares_input = True
    extends_deltanet = False
    errors_at_chunk_start = True

    @staticmethod
    def fill_defaults(config: PreTrainedConfig) -> None:
        if config.memory_projections is None:
            config.memory_projections = ["k", "v"]
        if config.retention_bias is None:
            config.retention_bias = [1.0, 8.0]

    @staticmethod
    def check_config(config: PreTrainedConfig) -> None:
        if config.memory_erase_bias is not None:
            raise ValueError("`memory_erase_bias` is given and `memory_rule` is 'paper': leave one of them out")

    @staticmethod
    def depth(config: PreTrainedConfig) -> int:
        return config.memory_depth

    @staticmethod
    def products(projecting: int) -> int:
        """8 per memory, 2 more per memory that projects, 4 for the content memory's initial weights and reads."""
        return 8 * (projecting + 1) + 2 * projecting + 4

    @staticmethod
    def initial_shapes(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
        """One weight per layer, [H, N, D, D] for all memories."""
        memories = len(config.memory_projections) + 1
        shape = (config.num_memory_heads, memories, config.head_dim, config.head_dim)
        names = ["outer"] if config.memory_depth == 1 else ["inner", "outer"]
        return dict.fromkeys(names, shape)

    @staticmethod
    def reset_initial(name: str, weight: Tensor) -> None:
        """Small outer layers, orthogonal inner layers."""
        if name == "outer":
            init.normal_(weight, std=_OUTPUT_STD / weight.shape[-1] ** 0.5)
            return
        # LAPACK has no QR in half precision
        dtype = torch.promote_types(weight.dtype, torch.float32)
        noise = torch.randn(weight.shape, dtype=dtype, device=weight.device)
        init.copy_(weight, _INNER_GAIN * torch.linalg.qr(noise).Q)

    @classmethod
    def of(cls, conv_weights, projected, initial, value_share: None, rate_factors) -> "PaperMemories":
        return cls(conv_weights, projected, initial, conv_weights.new_tensor(rate_factors).unsqueeze(1))

    def fresh(self) -> Deviations:
        """The deviations before the first token."""
        return tuple(map(torch.zeros_like, self.initial))

    def weights(self, deviations: Deviations) -> Weights:
        """The weights of all memories."""
        return tuple(map(torch.add, self.initial, deviations))

    def project(self, chunk_start: Deviations, index: int, x: Tensor) -> Tensor:
        """`M(x)` of one memory with the weights of the chunk's start; [b, C, D]."""
        weights_of_memory = []
        for weight in self.weights(chunk_start):
            weights_of_memory.append(weight[:, index : index + 1])
        projected = apply_memory(weights_of_memory, x.unsqueeze(1))
        return projected.squeeze(1)

    def write_and_read(self, state: ScanState, tokens: Tokens) -> tuple[Tensor, Deviations]:
        """Reads `M_t(q_t)` of the content memory [b, C, D], and the deviations after the span."""
        keys = tokens.keys.unsqueeze(1)
        values = tokens.values.unsqueeze(1)
        queries = tokens.queries.unsqueeze(1)
        rate = self.rate_factors * tokens.rate.unsqueeze(1)
        log_retention = tokens.log_retention.unsqueeze(1)
        gates = SpanGates(rate, log_retention)
        writes = linearise(self.weights(state.chunk_start), keys, values)
        layers = []
        for deviation, initial, write in zip(state.current, self.initial, writes, strict=True):
            layers.append(LayerSpan(deviation, initial, write, gates))
        hidden = queries
        if len(layers) == 2:
            hidden = activate(layers[0].read(queries))
        reads = queries + layers[-1].read(hidden)
        deviations_after = tuple(layer.deviation_after() for layer in layers)
        return reads.squeeze(1), deviations_after

    def recall(self, deviations: Deviations, keys: Tensor) -> Tensor:
        """`M(k)` of the content memory."""
        content = self.content(deviations)
        recalled = apply_memory(content, keys.unsqueeze(1))
        return recalled.squeeze(1)

    def target(self, chunk_start: Deviations, values: Tensor) -> Tensor:
        """`M(v)` at the chunk's start (equation 84)."""
        return self.recall(chunk_start, unit(values))

    def content(self, deviations: Deviations) -> Weights:
        """The weights of the content memory, each [b, 1, o, i]."""
        return tuple(map(_last, self.weights(deviations)))


def activate(pre: Tensor) -> Tensor:
    """Hidden activation of a two-layer memory, of norm 1."""
    return unit(F.silu(pre))


def apply_memory(weights: Sequence[Tensor], z: Tensor) -> Tensor:
    """`M(z)`, equation (89). `z`: [b, 1 or N, C, D]; returns [b, N, C, D]."""
    hidden = z
    if len(weights) == 2:
        hidden = activate(z @ weights[0].mT)
    return z + hidden @ weights[-1].mT


class LayerWrite(NamedTuple):
    """The writes of a span's tokens into one layer, computed at the weights of the chunk's start."""

    # u [b, 1 or N, C, i]
    inputs: Tensor
    # delta = dL/d(W u), clipped [b, N, C, o]
    errors: Tensor
    # factor on the token's learning rate
    scale: float
    # whether the layer erases along u before the write
    erases: bool


def linearise(weights: Weights, keys: Tensor, values: Tensor) -> list[LayerWrite]:
    """Inputs and errors of every layer for the loss `|M(k) - M(v)|^2 / 2`, the target `M(v)` being a constant.

    Equations (84) and (85) with the gradient of equation (93), at the weights of the chunk's start.

    Args:
        weights: weights at the chunk's start, each [b, N, o, i].
        keys: unit keys [b, 1, C, D].
        values: [b, 1, C, D], not normalised.

    Returns:
        One `LayerWrite` per layer, in the order of `weights`.
    """
    values = unit(values)
    if len(weights) == 1:
        error = (keys - values) + (keys - values) @ weights[0].mT
        return [LayerWrite(keys, clip_norm(error), scale=1.0, erases=True)]
    inner, outer = weights
    pre = keys @ inner.mT
    hidden = activate(pre)
    hidden_of_target = activate(values @ inner.mT)
    error = (keys - values) + (hidden - hidden_of_target) @ outer.mT
    # the inner layer's error comes from the unclipped error of the outer layer, through the norm and SiLU
    grad_hidden = error @ outer
    squared_norm = _squared_norm(F.silu(pre))
    inverse_norm = torch.rsqrt(squared_norm + NORM_EPSILON)
    inverse_norm = inverse_norm.clamp(max=1 / _HIDDEN_NORM_FLOOR)
    # the norm hides the part of the gradient that lies along the activation
    along = (hidden * grad_hidden).sum(-1, keepdim=True)
    radial = hidden * along
    grad_activated = (grad_hidden - radial) * inverse_norm
    gate = torch.sigmoid(pre)
    inner_error = grad_activated * gate * (1 + pre * (1 - gate))
    return [
        LayerWrite(keys, clip_norm(inner_error), scale=INNER_RATE, erases=False),
        LayerWrite(hidden, clip_norm(error), scale=1.0, erases=True),
    ]


def _squared_norm(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True)


def clip_norm(x: Tensor) -> Tensor:
    """`x` with norms over its last axis of at most `ERROR_CLIP`."""
    squared_norm = _squared_norm(x)
    factor = ERROR_CLIP * torch.rsqrt(squared_norm + NORM_EPSILON)
    return x * factor.clamp(max=1.0)


class SpanGates:
    """Products of the gates over a span of C tokens, shared by all layers; `T_t` is the sum of log alpha up to t.

    Args:
        rate: eta of each memory and token [b, N, C].
        log_retention: log alpha [b, 1, C].
    """

    def __init__(self, rate: Tensor, log_retention: Tensor):
        self.rate = rate
        total = log_retention.cumsum(-1)
        total_before = total - log_retention
        # e^(T_{t-1} - T_i) for i < t, else 0 [b, 1, C, C], and e^(T_{t-1}) [b, 1, C, 1]
        self.decay_before = decay_matrix(total_before, total, strict=True)
        self.from_start_before = total_before.exp().unsqueeze(-1)
        # e^(T_C) [b, 1, 1, 1], and e^(T_C - T_t) [b, 1, C]
        self.from_start_to_end = total[..., -1:].exp().unsqueeze(-1)
        self.to_end = (total[..., -1:] - total).exp()
        # e^(T_t - T_i) for i <= t, else 0 [b, 1, C, C], and e^(T_t) [b, 1, C, 1]
        self.decay = decay_matrix(total, total)
        self.from_start = total.exp().unsqueeze(-1)


class LayerSpan:
    """One layer over one span: one solve, then reads at any token and the deviation at the span's end.

    With `S` the deviation at the span's start, `W_0` the initial weights, `w_i` the steps, and `w_i a_i u_i^T` the
    change that token i subtracts from the weights:

        (I + L) A = from_start_before U S^T + U W_0^T + Delta,        L_ti = decay_before_ti (u_t . u_i) w_i
        W_t x = from_start_t S x + W_0 x - sum_{i <= t} decay_ti (u_i . x) w_i a_i

    Without erasing `A = Delta`. No term is divided by the steps, which may be 0.
    """

    def __init__(self, deviation: Tensor, initial: Tensor, write: LayerWrite, gates: SpanGates):
        self.deviation = deviation
        self.initial = initial
        self.gates = gates
        self.inputs = write.inputs
        self.steps = gates.rate * write.scale
        self.changes = write.errors
        if write.erases:
            inputs = write.inputs
            reads_of_deviation = gates.from_start_before * (inputs @ deviation.mT)
            right = reads_of_deviation + write.errors + inputs @ initial.mT
            overlaps = inputs @ inputs.mT
            lower = overlaps * gates.decay_before * self.steps.unsqueeze(-2)
            # unitriangular: the solver does not read the diagonal of ones, so I + L is never formed
            self.changes = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)

    def read(self, queries: Tensor) -> Tensor:
        """`W_t x_t` of the last memory for one query per token: [b, 1, C, i] -> [b, 1, C, o]."""
        gates = self.gates
        deviation = _last(self.deviation)
        initial = _last(self.initial)
        reads_of_deviation = gates.from_start * (queries @ deviation.mT)
        reads_before = reads_of_deviation + queries @ initial.mT
        scores = queries @ _last(self.inputs).mT
        steps = _last(self.steps).unsqueeze(-2)
        attention = scores * gates.decay * steps
        return reads_before - attention @ _last(self.changes)

    def deviation_after(self) -> Tensor:
        """The deviation after the last token."""
        weights = (self.steps * self.gates.to_end).unsqueeze(-1)
        decayed = self.gates.from_start_to_end * self.deviation
        written = self.changes.mT @ (weights * self.inputs)
        return decayed - written


def _last(x: Tensor) -> Tensor:
    """The content memory's part of `x` [b, 1 or N, ...]."""
    return x[:, -1:]
