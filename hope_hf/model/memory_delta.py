"""The gated delta rule of a layer's memories in plain operations.

A memory is a linear map of rows, `M(z) = z W`. Its state is the deviation `S = W - W_0` from learned initial weights.
Every token first decays the deviation, then writes its value at its unit key:

    S'_t = alpha_t S_{t-1}
    S_t  = S'_t + rho eta_t k_t^T (v_t - k_t (W_0 + S'_t))

A read is `q_t W_t + d v_t`, with a learned share d of the token's own value, as in Mamba-2 (arXiv 2405.21060).

With an erase gate zeta a token writes eta v, and erases what is stored at its key at the rate eta zeta alone:

    S_t  = S'_t + rho eta_t k_t^T (v_t - zeta_t k_t (W_0 + S'_t))

That is the rule above with the rate `eta zeta` and the value `v / zeta`, which the gates give, and with the share
`d zeta` in the read. At zeta = 0 a memory adds without erasing, so it counts. The gates of Gated DeltaNet-2 (arXiv
2605.22791) are a vector each.

With `rho = 1`, `W_0 = 0` and `d = 0` this is the gated DeltaNet (Yang et al., arXiv 2412.06464). HOPE adds memories
under the same rule that project keys and values (equation 83 of arXiv 2512.24695). These begin at the identity,
`W_0 = I`, after a linear map that is trained.

Axes: b sequences times heads, C slot of a span, D head width, M memories of a layer (those that project
k and v, in that order, then the content memory), side by side as columns.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import initialization as init
from transformers.configuration_utils import PreTrainedConfig

from .memory_scan import Deviations, ScanState, Tokens, Weights, decay_matrix


class DeltaMemories(NamedTuple):
    """The memories of a layer under the delta rule; states are [b, D, M D]."""

    # as in `Memories`
    conv_weights: Tensor
    projected: tuple[str, ...]
    # W_0 of the content memory [b, D, D]
    initial: Tensor
    # d [b, 1, 1]
    value_share: Tensor
    # rho of each memory; 1 for the content memory, which is the last
    rate_factors: tuple[float, ...]

    shares_input = False
    extends_deltanet = True
    errors_at_chunk_start = False

    @staticmethod
    def check_config(config: PreTrainedConfig) -> None:
        if "v" in config.memory_projections and not config.memory_value_gate:
            raise ValueError(
                "`memory_value_gate` is off and `memory_projections` holds 'v': a memory that is taught values of its "
                "own making can grow without bound; leave one of them out"
            )
        if config.memory_erase_bias is not None and not config.memory_value_gate:
            raise ValueError(
                "`memory_erase_bias` is given and `memory_value_gate` is off: both gates make what is written; leave "
                "`memory_value_gate` out"
            )
        if config.memory_erase_bias is not None and config.memory_projections:
            raise ValueError(
                "`memory_erase_bias` is given and `memory_projections` is not empty: a memory that projects keys or "
                "values and does not erase grows without bound; leave one of them out"
            )
        if config.memory_depth != 1:
            raise ValueError(
                f"`memory_depth` is {config.memory_depth} and `memory_rule` is '{config.memory_rule}', whose memories "
                "are linear maps: leave it out, or set `memory_rule` to 'paper'"
            )

    @staticmethod
    def fill_defaults(config: PreTrainedConfig) -> None:
        if config.memory_projections is None:
            config.memory_projections = []

    @staticmethod
    def depth(config: PreTrainedConfig) -> int:
        return 1

    @staticmethod
    def products(projecting: int) -> int:
        """4 per memory, 2 more per memory that projects, 6 for the content memory's initial weights and reads."""
        return 4 * (projecting + 1) + 2 * projecting + 6

    @staticmethod
    def initial_shapes(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
        """The shape of the content memory's weights; the other memories begin at the identity."""
        return {"weight": (config.num_memory_heads, config.head_dim, config.head_dim)}

    @staticmethod
    def reset_initial(name: str, weight: Tensor) -> None:
        """0: small random weights are noise in the reads, and delay the learning of recall (docs/log)."""
        init.zeros_(weight)

    @classmethod
    def of(cls, conv_weights, projected, initial, value_share, rate_factors) -> "DeltaMemories":
        (weight,) = initial
        return cls(conv_weights, projected, weight, value_share, rate_factors)

    def fresh(self) -> Deviations:
        """The deviation before the first token."""
        rows, width, _ = self.initial.shape
        return (self.initial.new_zeros(rows, width, width * len(self.rate_factors)),)

    def project(self, chunk_start: Deviations, index: int, x: Tensor) -> Tensor:
        """`x (I + S)` with the deviation S of one memory at the chunk's start; [b, C, D]."""
        (deviation,) = chunk_start
        width = x.shape[-1]
        first = index * width
        of_memory = deviation[..., first : first + width]
        return x + x @ of_memory

    def write_and_read(self, state: ScanState, tokens: Tokens) -> tuple[Tensor, Deviations]:
        """Reads `q_t W_t + d v_t` [b, C, D], and the deviation after the span; the span's size changes neither.

        With `g_t` the sum of log alpha up to token t, the errors `A_t = k_t (W_0 + S'_t) - v_t` solve

            (I + rho L) A = K W_0 + e^g (K S) - V,   L_ti = e^(g_t - g_i) eta_i (k_t . k_i) for i < t
        """
        (deviation,) = state.current
        keys = tokens.keys
        values = tokens.values
        queries = tokens.queries
        width = keys.shape[-1]
        total = tokens.log_retention.cumsum(-1)
        decay_from_start = total.exp().unsqueeze(-1)
        rated_decay = decay_matrix(total, total) * tokens.rate.unsqueeze(-2)
        lower = (keys @ keys.mT * rated_decay).tril(-1)
        # K W_0 of each memory; those that project begin at the identity
        initial_reads = [keys] * len(self.projected)
        initial_reads.append(keys @ self.initial)
        targets = values.repeat(1, 1, len(self.rate_factors))
        reads_of_deviation = decay_from_start * (keys @ deviation)
        right = torch.cat(initial_reads, dim=-1) + reads_of_deviation - targets
        # A of each memory, times its rho
        errors = []
        for factor, right_of_memory in zip(self.rate_factors, right.split(width, dim=-1), strict=True):
            system = factor * lower
            solved = torch.linalg.solve_triangular(system, right_of_memory, upper=False, unitriangular=True)
            errors.append(solved * factor)
        content = deviation[..., -width:]
        reads = queries @ self.initial + self.value_share * tokens.own_values
        reads = reads + decay_from_start * (queries @ content)
        attention = queries @ keys.mT * rated_decay
        reads = reads - attention @ errors[-1]
        decay_to_end = (total[:, -1:] - total).exp()
        written_keys = (tokens.rate * decay_to_end).unsqueeze(-1) * keys
        decayed = decay_from_start[:, -1:] * deviation
        written = written_keys.mT @ torch.cat(errors, dim=-1)
        deviation_after = decayed - written
        return reads, (deviation_after,)

    def recall(self, deviations: Deviations, keys: Tensor) -> Tensor:
        """`k W` of the content memory."""
        (weights,) = self.content(deviations)
        return keys @ weights

    def target(self, _: Deviations, values: Tensor) -> Tensor:
        """The values."""
        return values

    def content(self, deviations: Deviations) -> Weights:
        """`W` of the content memory [b, D, D]."""
        (deviation,) = deviations
        width = self.initial.shape[-1]
        return (self.initial + deviation[..., -width:],)
