"""The mixer of memories: self-modifying Titans, and without `memory_projections` the gated DeltaNet.

Keys and values are written into the content memory, which is read at the queries (equation 86). With
`memory_projections`, further memories project the keys and values that linear maps give; the results are also written
into these memories (equation 83). One scan, `memory_scan`, writes and reads all memories under one of the rules of
`memory_delta` and `memory_paper`.

Axes: B sequence in batch, T token of the call, S slot (`chunks`), b sequences times heads, H head, N memory of a layer
(those that project, then the content memory), D head width, K kernel size of the convolution.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.configuration_utils import PreTrainedConfig

from .backends import Kernel, asked_kernels, choose, runs_plain, runs_torch
from .cache_parts import map_state
from .chunks import ChunkPlan, ChunkSpan, TokenPlan, plan_chunks
from .kernels_fla import is_expected, kept_bytes, mix, scan_obstacle
from .layers import HopeRMSNorm, LearnedFactors, Mixer, ShortConvolution, gated_norm, one_token_later
from .memory_delta import DeltaMemories
from .memory_paper import PaperMemories
from .memory_scan import (
    Memories,
    ScanInputs,
    ScanState,
    fresh_state,
    make_qkv,
    register_scan,
    scan_of,
    scan_options_json,
    scan_span,
    scan_tokens,
    unit,
    written_values,
)

# The class of each `HopeConfig.memory_rule`.
RULES = {"delta": DeltaMemories, "paper": PaperMemories}
register_scan(RULES)
# ranges from which softplus(dt_bias) and exp(A_log) are drawn
_TIME_STEPS = (0.001, 0.1)
_DECAY_RATES = (0.01, 16.0)
# The smallest zeta: rates are multiplied by it, and values divided. n steps up and n down miss 0 by n^2 times it.
LEAST_ERASED = 1e-7
# Initial weight of a token in its own key, relative to those of the tokens before it.
_OWN_KEY = 0.1
# A write with rate eta multiplies the value stored at its key by 1 - eta: at 2 the state would grow with the text.
_LARGEST_RATE = 1.99


class InitialMemory(nn.Module):
    """Learned initial weights of a layer's memories.

    Delta rule: `weight` [H, D, D] of the content memory. Paper's rule: `outer` and, for depth 2, `inner` of all
    memories, [H, N, D, D] each. `forward` returns copies: sharding engines free a module's parameters after its
    forward.
    """

    is_initial_state = has_initial_values = True

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.rule = RULES[config.memory_rule]
        shapes = self.rule.initial_shapes(config)
        self.layers = tuple(shapes)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def forward(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The weights in the order in which they are applied."""
        # Read by name: FSDP1 replaces parameters by tensors that `named_parameters` does not list.
        weights = []
        for name in self.layers:
            weight = getattr(self, name)
            weights.append(weight.to(dtype, copy=True))
        return tuple(weights)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The rule's initial values."""
        for name, weight in self.named_parameters(recurse=False):
            self.rule.reset_initial(name, weight)


class Gates(NamedTuple):
    """What `MemoryGates` gives, by the names of `ScanInputs`."""

    # eta (with the erase gate: the rate that erases, eta zeta) and log alpha
    rate: Tensor
    log_retention: Tensor
    # `None` for gates that the layer has not
    value_norm: Tensor | None = None
    erased: Tensor | None = None

    def own_share(self, share: Tensor) -> Tensor:
        """The share [H or B, T, H] of a token's value, as written, in its own read; `share` is d [H]."""
        return share if self.erased is None else share * self.erased.to(share.dtype)


class MemoryGates(nn.Module):
    """Learning rate eta and retention alpha of every token and head, parameterised as in the gated DeltaNet.

    eta = eta_max sigmoid(b + learning_rate_bias),     log alpha = -exp(A_log) softplus(a + dt_bias)

    With `memory_value_gate` a third gate gives each value its norm, 2 sigmoid(c + value_bias); in the gated DeltaNet
    values keep the norm of their projection. With `memory_erase_bias` a fourth is the share of eta that erases, zeta =
    sigmoid(z + erase_bias).
    """

    _no_weight_decay = {"learning_rate_bias", "A_log", "dt_bias", "value_bias", "erase_bias"}
    has_initial_values = True

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.config = config
        heads = config.num_memory_heads
        rule = RULES[config.memory_rule]
        has_value_gate = rule.extends_deltanet and config.memory_value_gate
        has_erase_gate = config.memory_erase_bias is not None
        gates = 2 + has_value_gate + has_erase_gate
        self.gate_proj = nn.Linear(config.hidden_size, gates * heads, bias=False)
        self.learning_rate_bias = nn.Parameter(torch.empty(heads))
        # without it alpha = sigmoid(-a - dt_bias)
        self.A_log = nn.Parameter(torch.empty(heads)) if rule.extends_deltanet else None
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.value_bias = nn.Parameter(torch.empty(heads)) if has_value_gate else None
        self.erase_bias = nn.Parameter(torch.empty(heads)) if has_erase_gate else None

    def forward(self, hidden_states: Tensor, is_frozen: bool = False) -> Gates:
        """The gates [B, T, H] of `hidden_states` [B, T, hidden_size], float32 or float64.

        With zeta the rate is eta zeta, and the norm is over zeta (`memory_delta`). `is_frozen`: see `SlotPlan`.
        """
        logits = self.gate_proj(hidden_states)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        with torch.autocast(hidden_states.device.type, enabled=False):
            heads = len(self.dt_bias)
            logits_of_gates = logits.to(dtype).split(heads, dim=-1)
            rate_logits, time_step, *more_logits = logits_of_gates
            largest_rate = float(self.config.memory_learning_rate_max)
            rate_logits = rate_logits + self.learning_rate_bias.to(dtype)
            rate = largest_rate * rate_logits.sigmoid()
            time_step = time_step + self.dt_bias.to(dtype)
            log_retention = -F.softplus(time_step)
            if self.A_log is not None:
                decay_rate = self.A_log.to(dtype).exp()
                log_retention = decay_rate * log_retention
            value_norm = None
            if self.value_bias is not None:
                value_logits = more_logits[0] + self.value_bias.to(dtype)
                value_norm = 2 * value_logits.sigmoid()
            if is_frozen:
                # the norm of values stays: the read adds a share of the token's own value, which is no write
                rate = torch.zeros_like(rate)
                log_retention = torch.zeros_like(log_retention)
            erased = None
            if self.erase_bias is not None:
                erase_logits = more_logits[1] + self.erase_bias.to(dtype)
                erased = LEAST_ERASED + (1 - LEAST_ERASED) * erase_logits.sigmoid()
                rate = rate * erased
                value_norm = value_norm / erased
        return Gates(rate, log_retention, value_norm, erased)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Learning rates spread over the heads; retention also spread, or drawn as in the gated DeltaNet."""
        config = self.config
        heads = config.num_memory_heads
        _spread(self.learning_rate_bias, config.memory_learning_rate_bias)
        if config.retention_bias is None:
            # as in flash-linear-attention; transformers' Qwen3-Next has time steps of 1.3
            shortest, longest = _TIME_STEPS
            log_steps = torch.empty(heads)
            log_steps.uniform_(math.log(shortest), math.log(longest))
            step = log_steps.exp()
            inverse_softplus = step + torch.log(-torch.expm1(-step))
            init.copy_(self.dt_bias, inverse_softplus)
            decay_rate = torch.empty(heads).uniform_(*_DECAY_RATES)
            init.copy_(self.A_log, decay_rate.log())
        else:
            init.copy_(self.dt_bias, -torch.linspace(*config.retention_bias, heads))
            if self.A_log is not None:
                init.zeros_(self.A_log)
        if self.value_bias is not None:
            init.zeros_(self.value_bias)
        if self.erase_bias is not None:
            _spread(self.erase_bias, config.memory_erase_bias)


def _spread(bias: Tensor, ends: Sequence[float]) -> None:
    """Set a bias of all heads [H] to numbers at even distances, from that of the first to that of the last head."""
    first, last = ends
    init.copy_(bias, torch.linspace(first, last, len(bias)))


class SelfModifyingTitans(Mixer, nn.Module):
    """The sequence mixer of HOPE, equations (83) to (96).

    Linear maps make keys, values and queries, and memories may project keys and values. A short convolution, SiLU and
    (for k and q) normalisation follow. Memories are written and read; the reads of each head are normalised, gated and
    projected. The scan computes in float32 (float64 in a float64 model), whatever autocast and the weights' dtype are.

    With `memory_projections=[]`, `memory_value_gate=False`, and initial memories and value shares of 0, the mixer is
    transformers' `Qwen3NextGatedDeltaNet` with as many key as value heads.
    """

    state_class = ScanState
    is_recurrent = True
    needs = frozenset({"chunks"})
    heads = ("num_memory_heads",)
    # the memories' own parameters take the place of wider levels
    level_parameters = 2
    metrics = "memory"

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        width = config.hidden_size
        heads = config.num_memory_heads
        inner = heads * config.head_dim
        rule = RULES[config.memory_rule]
        self.rule = rule
        self.projected = tuple(config.memory_projections)
        # of the memories that project, and of the content memory
        rates_of_projecting = [float(config.projection_memory_rate)] * len(self.projected)
        self.rate_factors = (*rates_of_projecting, 1.0)
        shared = self.projected if rule.shares_input else ()
        self.in_proj = nn.Linear(width, inner, bias=False) if shared else None
        self.k_proj = None if "k" in shared else nn.Linear(width, inner, bias=False)
        self.v_proj = None if "v" in shared else nn.Linear(width, inner, bias=False)
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.g_proj = nn.Linear(width, inner, bias=False)
        self.o_proj = nn.Linear(inner, width, bias=False)
        # A query begins as the next token's key, which is made of the tokens before that one: before training, a token
        # reads what followed similar tokens (docs/log).
        self.k_conv1d = ShortConvolution(config, heads)
        self.v_conv1d = ShortConvolution(config, heads)
        self.q_conv1d = ShortConvolution(config, heads)
        if rule.extends_deltanet:
            self.k_conv1d.own_weight_factor = _OWN_KEY
            # in tuples, since a module as an attribute would be registered twice
            self.q_proj.begins_as = self.k_proj, torch.clone
            self.q_conv1d.begins_as = self.k_conv1d, one_token_later
        self.initial_memory = InitialMemory(config)
        # share [H] of a token's own value in its read, Mamba-2's `D`
        self.value_share = LearnedFactors(heads) if rule.extends_deltanet else None
        self.gates = MemoryGates(config)
        # dividing the reads has the same effect as a larger epsilon of the norm
        eps = config.rms_norm_eps * (config.head_dim if rule.extends_deltanet else 1)
        self.o_norm = HopeRMSNorm(config.head_dim, eps)
        self.kernels = asked_kernels()
        self.scan_options = scan_options_json(config, self.rate_factors)
        # reasons for which no GPU kernel ran, and their counts
        self.kernel_fallbacks: Counter[tuple[str, str]] = Counter()

    def forward(
        self,
        hidden_states: Tensor,
        state: ScanState | None = None,
        *,
        chunks: ChunkPlan | TokenPlan,
        need_state: bool = False,
        **_,
    ) -> tuple[Tensor, ScanState | None]:
        """Write a call's tokens into the memories, and read at every token.

        Args:
            hidden_states: [B, T, hidden_size].
            state: state after the previous call, or `None` at a text's start; tensors are [B, H, ...].
            chunks: the slots and chunks of the call's tokens.
            need_state: whether to return the state after the last token.

        Returns:
            The mixer's output [B, T, hidden_size], and the new state.
        """
        if self.runs_on_kernels(hidden_states):
            return mix(self, hidden_states, state, chunks, need_state)
        batch_size = len(hidden_states)
        heads = self.config.num_memory_heads
        # linear maps and gates
        inputs = self.scan_inputs(hidden_states, chunks)
        if state is not None:
            state = map_state(lambda x: x.flatten(0, 1), state)
        with torch.autocast(hidden_states.device.type, enabled=False):
            memories = self.memories(batch_size, inputs.query.dtype)
            # convolutions, SiLU, normalisation, writes and reads
            if isinstance(chunks, TokenPlan):
                reads, after = scan_tokens(
                    inputs,
                    memories,
                    state,
                    chunks,
                    recompute=self.config.recompute_chunks,
                    need_state=need_state,
                    kernels=self.kernels,
                    options=self.scan_options,
                )
            else:
                scan = self.choose_scan()
                before = fresh_state(memories) if state is None else state
                reads, after = scan(inputs, memories, before, chunks.spans, need_state)
            # [b, S, D] to [B, S, H, D], then to tokens
            by_head = reads.unflatten(0, (batch_size, heads))
            reads = chunks.to_tokens(by_head.transpose(1, 2))
        # norm, gate, output
        gate = self.g_proj(hidden_states).unflatten(-1, (heads, -1))
        norm_and_gate = partial(gated_norm, gate=gate, kernels=self.kernels)
        with torch.autocast(hidden_states.device.type, enabled=False):
            gated = self.o_norm(reads, norm_and_gate)
        output = self.o_proj(gated.flatten(2))
        if after is not None:
            after = map_state(lambda x: x.unflatten(0, (batch_size, heads)), after)
        return output, after

    def scan_inputs(self, hidden_states: Tensor, plan: ChunkPlan) -> ScanInputs:
        """Keys, values, queries and gates from `hidden_states` [B, T, hidden_size], in the slots of the plan."""
        shared = None if self.in_proj is None else self._stream(self.in_proj, hidden_states, plan)
        key = shared if self.k_proj is None else self._stream(self.k_proj, hidden_states, plan)
        value = shared if self.v_proj is None else self._stream(self.v_proj, hidden_states, plan)
        query = self._stream(self.q_proj, hidden_states, plan)
        gates = self.gates(hidden_states, plan.is_frozen)._asdict()
        in_slots = {}
        for name, gate in gates.items():
            in_slots[name] = self._gate(gate, plan)
        return ScanInputs(key, value, query, **in_slots)

    def _stream(self, projection: nn.Linear, hidden_states: Tensor, plan: ChunkPlan) -> Tensor:
        """The output of a linear map in the slots of the plan, by head [b, S, D], float32 or float64."""
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        stream = projection(hidden_states)
        stream = plan.to_slots(stream).to(dtype)
        by_head = stream.unflatten(-1, (self.config.num_memory_heads, -1))
        return by_head.transpose(1, 2).flatten(0, 1)

    @staticmethod
    def _gate(gate: Tensor | None, plan: ChunkPlan) -> Tensor | None:
        """A gate [B, T, H] in the slots of the plan, by head [b, S]."""
        if gate is None:
            return None
        gate = plan.to_slots(gate).transpose(1, 2)
        if plan.valid is not None:
            # padding neither writes nor decays
            gate = torch.where(plan.valid[:, None], gate, 0.0)
        return gate.flatten(0, 1)

    def memories(self, batch_size: int, dtype: torch.dtype) -> Memories:
        """The memories of `batch_size` sequences, for the scan."""
        convolutions = (self.k_conv1d, self.v_conv1d, self.q_conv1d)
        weights_by_stream = [convolution(dtype) for convolution in convolutions]
        # [K, H, 3 D] to [K, b, 1, 3 D]
        conv_weights = torch.cat(weights_by_stream, dim=-1)
        conv_weights = conv_weights.unsqueeze(1).expand(-1, batch_size, -1, -1)
        conv_weights = conv_weights.flatten(1, 2).unsqueeze(2)
        # [H, ...] of heads to [b, ...]
        initial = []
        for weight in self.initial_memory(dtype):
            by_row = weight.expand(batch_size, *weight.shape)
            initial.append(by_row.flatten(0, 1))
        share = None
        if self.value_share is not None:
            share = self.value_share(dtype).expand(batch_size, -1)
            share = share.flatten()[:, None, None]
        return self.rule.of(conv_weights, self.projected, tuple(initial), share, self.rate_factors)

    def runs_on_kernels(self, hidden_states: Tensor) -> bool:
        """Whether `kernels_fla.mix` computes the whole mixer; it rounds its operands to the linear maps' dtype."""
        device = hidden_states.device
        if runs_plain(self.kernels) or runs_torch(self.kernels, device):
            return False
        obstacle = partial(scan_obstacle, self.rule, self.projected, hidden_states, self.config.head_dim)
        kernel = Kernel(mix, obstacle)
        chosen = choose(
            "memory_scan", self.kernels, kernel, otherwise=None, fallbacks=self.kernel_fallbacks, device=device
        )
        return chosen is not None

    def choose_scan(self) -> Callable:
        """`memory_scan.scan_plain`, or the fast scan that equals it."""
        asked = "plain" if runs_plain(self.kernels) else self.kernels
        scan = scan_of(self.config.memory_rule, asked)
        return partial(scan, recompute=self.config.recompute_chunks)

    @torch.no_grad()
    def statistics(self, hidden_states: Tensor) -> dict[str, Tensor]:
        """Means over sequences, heads and tokens, 0-dim tensors.

        | name | meaning |
        |---|---|
        | learning_rate_mean, retention_mean | eta (that erases: times zeta) and alpha of equation (88) |
        | surprise_before, surprise_after | norm of M(k) - target at the chunk's first and last weights |
        | state_norm_ratio | norm of the content memory's change over the norm of the identity |
        | key_norm, value_norm, target_norm | norms of keys before normalisation, of values and targets as written |
        """
        norms = defaultdict(list)
        plan = plan_chunks(self.config, hidden_states.shape[:2], hidden_states.device)
        with torch.autocast(hidden_states.device.type, enabled=False):
            inputs = self.scan_inputs(hidden_states, plan)
            memories = self.memories(len(hidden_states), inputs.query.dtype)
            state = fresh_state(memories)
            # each span is a chunk, so the state before it holds the weights of the chunk's start
            for span in plan.spans:
                _, after = scan_span(inputs, memories, state, span)
                vectors = _vectors_of_chunk(inputs, memories, span, state, after)
                for name, vector in vectors.items():
                    norms[name].append(vector.norm(dim=-1))
                state = after
            squared_change = _squared_change(memories, state)
        rate, retention = self.gate_values(hidden_states)
        numbers = {"learning_rate_mean": rate.mean(), "retention_mean": retention.mean()}
        for name, norms_of_spans in norms.items():
            numbers[name] = torch.cat(norms_of_spans, dim=-1).mean()
        numbers["state_norm_ratio"] = squared_change.sqrt().mean() / self.config.head_dim**0.5
        return numbers

    @torch.no_grad()
    def gate_values(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """eta (that erases: times zeta) and alpha of equation (88) of every token and head, both [B, T, H]."""
        gates = self.gates(hidden_states)
        return gates.rate, gates.log_retention.exp()

    @classmethod
    def describe(cls, config: PreTrainedConfig) -> str:
        if not config.memory_projections:
            return "made of memories: small per-sequence networks, updated while the text is read"
        projected = " and ".join(map({"k": "keys", "v": "values"}.get, config.memory_projections))
        return (
            "made of self-modifying memories: small per-sequence networks, updated while the text is read;\n"
            f"they make {projected} with new weights every {config.memory_chunk_size} tokens"
        )

    @staticmethod
    def check_config(config: PreTrainedConfig) -> None:
        if config.memory_projections not in ([], ["k"], ["v"], ["k", "v"]):
            raise ValueError(
                f"`memory_projections` is {config.memory_projections}: choose among [], ['k'], ['v'] and ['k', 'v']"
            )
        for name in ("memory_learning_rate_bias", "memory_erase_bias", "retention_bias"):
            pair = getattr(config, name)
            if pair is not None and len(pair) != 2:
                raise ValueError(f"`{name}` must be two numbers, of the first and of the last head, got {pair}")
        if not 0 <= config.memory_learning_rate_max <= _LARGEST_RATE:
            raise ValueError(
                f"`memory_learning_rate_max` must be between 0 and {_LARGEST_RATE}, got "
                f"{config.memory_learning_rate_max}: at 2 what is stored turns over without shrinking, and grows with "
                "the text"
            )
        RULES[config.memory_rule].check_config(config)

    @staticmethod
    def check_state(state: ScanState, config: PreTrainedConfig, dtype: torch.dtype) -> None:
        tail = state.conv_tail
        heads, width = config.num_memory_heads, config.head_dim
        memories = len(config.memory_projections) + 1
        expected_tail = (heads, config.conv_kernel_size - 1, 3 * width)
        heads_of_cache = tail.shape[1]
        deviation_of_row = state.current[0][0]
        memories_of_cache = deviation_of_row.numel() // (heads_of_cache * width**2)
        if tuple(tail.shape[1:]) != expected_tail or memories_of_cache != memories:
            raise ValueError(
                f"the cache holds {heads_of_cache} heads of {memories_of_cache} memories of width "
                f"{tail.shape[3] // 3}, and this model's have {heads} of {memories} of width {width}: it is the cache "
                "of another model"
            )
        dtype = torch.promote_types(dtype, torch.float32)
        if tail.dtype != dtype:
            raise ValueError(
                f"the cache holds {tail.dtype} memories, and this model computes them in {dtype}: read the text "
                "with the model as it is now"
            )

    @staticmethod
    def tensor_parallel_maps(config: PreTrainedConfig) -> dict[str, str]:
        """Every rank computes the whole layer; only the weights of its linear maps are sharded."""
        maps = ["q_proj", "o_proj", "g_proj"]
        shared = config.memory_projections if RULES[config.memory_rule].shares_input else []
        if shared:
            maps.append("in_proj")
        if "k" not in shared:
            maps.append("k_proj")
        if "v" not in shared:
            maps.append("v_proj")
        return dict.fromkeys(maps, "colwise_gather_output")

    @staticmethod
    def mixing_flops(config: PreTrainedConfig, sequence_length: int) -> int:
        """Per head and layer of a memory: the rule's products with weights, and 6 C D of a chunk's C tokens."""
        rule = RULES[config.memory_rule]
        width = config.head_dim
        projecting = len(config.memory_projections)
        products = rule.products(projecting) * width**2
        of_chunk = 6 * config.memory_chunk_size * width
        layers = config.num_memory_heads * rule.depth(config)
        return layers * (products + of_chunk)

    @staticmethod
    def cache_bytes(config: PreTrainedConfig, tokens: int) -> int:
        """The current weights, those of the chunk's start if anything reads them, and the convolutions' tail."""
        rule = RULES[config.memory_rule]
        width = config.head_dim
        copies = 2 if rule.errors_at_chunk_start or config.memory_projections else 1
        memories = len(config.memory_projections) + 1
        weights = copies * rule.depth(config) * memories * width**2
        tail = 3 * (config.conv_kernel_size - 1) * width
        return 4 * config.num_memory_heads * (weights + tail)

    @staticmethod
    def rounds(config: PreTrainedConfig) -> tuple[int, int]:
        """A round is a chunk."""
        return 4 * config.memory_chunk_size, config.memory_chunk_size

    @staticmethod
    def expects_kernels(config: PreTrainedConfig) -> bool:
        return is_expected(config)

    @staticmethod
    def kept_by_kernels(config: PreTrainedConfig, batch_size: int, length: int, low: int, is_cast: bool) -> int:
        """See `kernels_fla.kept_bytes`; five linear maps read the input, and keep its cast each."""
        tokens = batch_size * length
        casts = 5 * low * config.hidden_size * tokens if is_cast else 0
        return casts + kept_bytes(config, tokens, low)


def _vectors_of_chunk(
    inputs: ScanInputs, memories: Memories, span: ChunkSpan, before: ScanState, after: ScanState
) -> dict[str, Tensor]:
    """Vectors [b, C, D] of a chunk whose norms `statistics` gives, by name; the states are before and after it."""
    keys, values, _, _ = make_qkv(inputs, memories, before, span)
    values = written_values(inputs, values, span)
    values = inputs.own_values(values, slice(span.start, span.stop))
    unit_keys = unit(keys)
    target = memories.target(before.current, values)
    return {
        "surprise_before": memories.recall(before.current, unit_keys) - target,
        "surprise_after": memories.recall(after.current, unit_keys) - target,
        "key_norm": keys,
        "value_norm": values,
        "target_norm": target,
    }


def _squared_change(memories: Memories, state: ScanState) -> Tensor:
    """Squared norm of what the content memory has learned."""
    first_weights = memories.content(memories.fresh())
    last_weights = memories.content(state.current)
    squared_change = 0
    for first, last in zip(first_weights, last_weights, strict=True):
        change = last - first
        squared_change = squared_change + change.square().sum((-1, -2))
    return squared_change
