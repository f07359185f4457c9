"""What mixers and levels share: a mixer's protocol, normalisation, learned factors, and the short convolution.

The convolution is causal and depthwise, and stays within a document.

Axes: b row, C slot of a span, X channel, K kernel size.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.configuration_utils import PreTrainedConfig

from .backends import asked_kernels, fast_path
from .cache_parts import HopeMemoryLayer, HopeStaticMemoryLayer
from .chunks import ChunkSpan


class Mixer:
    """What a mixer's class declares; the kinds of layers are listed in `mixers`.

    An instance is a module `mixer(hidden_states, state, need_state=..., **context)`, constructed from a `HopeConfig`
    and the layer's index. It returns its output [B, T, hidden_size] and its state after the call (`None` unless
    `need_state`), and does not change the given state. Its last linear map is `o_proj`. Submodules with parameters
    other than linear maps set `has_initial_values`; their `reset_parameters` initialises these parameters.

    Attributes:
        state_class: a NamedTuple of batch-first tensors and tuples of them, which a `HopeMemoryLayer` of a cache
            holds; `None` if the mixer writes keys and values into transformers' own layers.
        static_layer: the layer of a `StaticCache` that holds the state.
        is_recurrent: whether the state has the same size after any number of tokens.
        needs: what `context` has to hold; the first four are keywords of these names:
            "chunks": the call's tokens in chunks of `memory_chunk_size` (`chunks.ChunkPlan`);
            "blocks": the tokens in blocks of `sparse_block_size` (`chunks.SlotPlan`);
            "window": what each token sees (`window_plan.WindowPlan`);
            "retained": the same with retained tokens (`retaining_plan.RetainingPlan`);
            "rotary": cosines and sines of positions, with blocks as `block_angles`, with a window as `window_angles`,
                with retained tokens as `retained_angles`, else `position_embeddings`;
            "mask": what transformers' attention takes: `attention_mask`, `position_ids`, `cache`, and options.
            Every mixer with a state needs one of the first four, which mark documents and padding.
        heads: names of the fields of `HopeConfig` with its numbers of heads.
        own_fields: prefixes of its fields of `HopeConfig`; cache files of models without it do not depend on them.
        level_parameters: default number of parameters of a block's levels, in units of the squared width.
        name: its name in a model card.
        metrics: prefix of its rows in the training metrics.

    A mixer that adds rows to the training metrics has one of these, or both:

    - `statistics(hidden_states)`: numbers by name, for texts that begin with these inputs;
    - `begin_statistics()` and `end_statistics()`, which returns the counts of the calls between the two;
      `summary(counts)`: numbers by name of such counts of all passes and processes; and `warning(numbers, steps)`: a
      sentence about bad numbers, printed after they were bad in `steps` logged steps in a row, or `None`.
    """

    state_class: type[tuple] | None = None
    static_layer: type[HopeMemoryLayer] = HopeStaticMemoryLayer
    is_recurrent = False
    needs: frozenset[str] = frozenset()
    heads: tuple[str, ...] = ()
    own_fields: tuple[str, ...] = ()
    level_parameters = 8
    name = ""
    metrics = ""

    @classmethod
    def describe(cls, config: PreTrainedConfig) -> str:
        """The mixer in a model card."""
        return cls.name

    @staticmethod
    def check_config(config: PreTrainedConfig) -> None:
        """ValueError for values of its fields that do not fit; also called for models without such layers."""

    @staticmethod
    def check_state(state: tuple, config: PreTrainedConfig, dtype: torch.dtype) -> None:
        """ValueError for a state of another model; `dtype` is that of the hidden states [B, T, hidden_size]."""

    @staticmethod
    def tensor_parallel_maps(config: PreTrainedConfig) -> dict[str, str]:
        """transformers' tensor-parallel style of each linear map, by the map's name."""
        return {}

    @staticmethod
    def mixing_flops(config: PreTrainedConfig, sequence_length: int) -> int:
        """Forward FLOPs of the mixer's own products per token of a text of `sequence_length` tokens."""
        return 0

    @staticmethod
    def cache_bytes(config: PreTrainedConfig, tokens: int) -> int:
        """fp32 bytes of the state of one sequence after `tokens` tokens."""
        return 0

    @staticmethod
    def rounds(config: PreTrainedConfig) -> tuple[int, int] | None:
        """The tokens of a short text and of a round, where the forward pass goes over a text in rounds of operators.

        From the last round of the short text on, each takes as much memory. None where there are no rounds.
        """
        return None

    @staticmethod
    def expects_kernels(config: PreTrainedConfig) -> bool:
        """Whether models planned on this machine will run on kernels, whose memory `kept_by_kernels` then counts."""
        return False

    @staticmethod
    def kept_by_kernels(config: PreTrainedConfig, batch_size: int, length: int, low: int, is_cast: bool) -> int:
        """Bytes that autograd keeps of a forward pass besides the input.

        Args:
            low: bytes per output of a linear map.
            is_cast: whether each linear map casts its input.
        """
        return 0


def gated_norm(x: Tensor, weight: Tensor, epsilon: float, gate: Tensor | None = None, kernels: str = "auto") -> Tensor:
    """`rms_norm(x)` in the dtype of `x`, times `silu(gate)` in the gate's; `x` and `gate` are [B, T, ..., W].

    `kernels` is a value of `backends.KERNELS`.
    """
    weight = weight.to(x.dtype)
    fast_norm = fast_path("gated_norm", kernels)
    if fast_norm is not None:
        normed = fast_norm(x, weight, epsilon, gate)
        if normed is not None:
            return normed
    normed = F.rms_norm(x, x.shape[-1:], weight, epsilon)
    if gate is None:
        return normed
    return normed.to(gate.dtype) * F.silu(gate)


class HopeRMSNorm(nn.Module):
    """Root-mean-square normalisation over the last axis, in the input's dtype, computed in float32."""

    def __init__(self, width: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps
        self.kernels = asked_kernels()

    def forward(self, x: Tensor, compute: Callable | None = None) -> Tensor:
        """`x` normalised, by `compute(x, weight, epsilon)` if it is given: a norm that does more, or a kernel."""
        if compute is not None:
            return compute(x, self.weight, self.variance_epsilon)
        return gated_norm(x, self.weight, self.variance_epsilon, kernels=self.kernels)


class LearnedFactors(nn.Module):
    """Factors [number], learned from 1.

    `forward` returns them and does not apply them: FSDP frees the parameter after `forward`, and a recomputed block
    still needs its values.
    """

    has_initial_values = True

    def __init__(self, number: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(number))

    def forward(self, dtype: torch.dtype) -> Tensor:
        return self.weight.to(dtype, copy=True)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        init.ones_(self.weight)


class ShortConvolution(nn.Module):
    """Weights [H * D, 1, K] of a causal depthwise convolution over tokens, without bias.

    `forward` returns them as [K, H, D], the weights of the oldest token first. `own_weight_factor` is on the initial
    weight of the token itself, if K > 1.
    """

    has_initial_values = True

    def __init__(self, config: PreTrainedConfig, heads: int):
        super().__init__()
        self.heads = heads
        self.own_weight_factor = 1.0
        weight = torch.empty(heads * config.head_dim, 1, config.conv_kernel_size)
        self.weight = nn.Parameter(weight)

    def forward(self, dtype: torch.dtype) -> Tensor:
        weight = self.weight.to(dtype, copy=True)
        by_head = weight.view(self.heads, -1, weight.shape[-1])
        return by_head.permute(2, 0, 1)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Uniform between -1/sqrt(K) and 1/sqrt(K)."""
        size = self.weight.shape[-1]
        bound = size**-0.5
        weight = torch.empty_like(self.weight).uniform_(-bound, bound)
        if size > 1:
            weight[..., -1] *= self.own_weight_factor
        init.copy_(self.weight, weight)


def one_token_later(weight: Tensor) -> Tensor:
    """Weights [..., K] of a convolution that gives at a token what `weight` gives at the next one, but for its own."""
    if weight.shape[-1] == 1:
        return weight
    return F.pad(weight[..., :-1], (1, 0))


def with_tail(raw: Tensor, tail: Tensor, span: ChunkSpan) -> Tensor:
    """A span's padded inputs [b, K - 1 + C, X]: the tail before it [b, K - 1, X], then its inputs [b, C, X].

    Where the call begins with empty slots, the tail stands once more, right before the first token.
    """
    padded = torch.cat([tail, raw], dim=1)
    if span.tail_in is None:
        return padded
    return padded.scatter(1, span.tail_in.expand_as(tail), tail)


def tail_after(padded: Tensor, tail: Tensor, span: ChunkSpan) -> Tensor:
    """The last K - 1 inputs [b, K - 1, X] after a span, from its padded inputs [b, K - 1 + C, X]."""
    if span.tail_out is None:
        length = padded.shape[1] - tail.shape[1]
        return padded[:, length:]
    return padded.gather(1, span.tail_out.expand_as(tail))


def convolve(raw: Tensor, tail: Tensor, conv_weights: Tensor, span: ChunkSpan) -> tuple[Tensor, Tensor]:
    """Causal depthwise convolution within each document [b, C, X], and the tail for the next span.

    Args:
        raw: inputs of the span [b, C, X].
        tail: last inputs before the span [b, K - 1, X].
        conv_weights: [K, b or 1, 1, X], the oldest token's first.
    """
    tail_size = tail.shape[1]
    length = raw.shape[1]
    padded = with_tail(raw, tail, span)
    mixed = conv_weights[tail_size] * padded[:, tail_size:]
    for k in range(tail_size):
        earlier = padded[:, k : k + length]
        if span.inside is not None:
            earlier = earlier * span.inside[k]
        mixed = mixed + conv_weights[k] * earlier
    return mixed, tail_after(padded, tail, span)
