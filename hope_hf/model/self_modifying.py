"""Self-modifying Titans: memories that write keys, values, if wished learning rates and retentions, and themselves.

Two scans over the sequence. Scan 1 runs the memories that make k, v (, eta and alpha) of equation (83), which never
depend on the content memory; scan 2 runs the content memory on what scan 1 made and reads it (equation 86). Both walk
over chunks in Python and are parallel over sequences, heads, memories and the tokens of a chunk.

Axes: B sequence in batch, T token of the call, S slot (`chunk_layout`), H head, N memory of a group, D head width,
M memory width, K width of the convolution.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

from .chunk_layout import ChunkLayout, ChunkPlan, plan_chunks
from .chunk_steps import GateWeights, MemoryGroup, ProjectionGroup, ProjectionInputs, Projections
from .configuration_hope import HopeConfig
from .memory_scan import measure_surprise, scan_content, scan_projections
from .memory_update import MemoryRule, MemoryState, Weights
from .vector_norms import unit

# standard deviation of a memory's output layer at initialisation, times 1 / sqrt(its input width)
_OUTPUT_STD = 0.05
_INNER_GAIN = 2.0
_READOUT_STD = 0.02


class HopeRMSNorm(nn.Module):
    """Root-mean-square normalisation over the last axis, in the input's dtype but for its float32 statistics."""

    def __init__(self, width: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * F.rms_norm(wide, wide.shape[-1:], eps=self.variance_epsilon).to(x.dtype)


class InitialMemory(nn.Module):
    """Learned initial weights of a group of memories: W2 [H, N, M, D] and W1 [H, N, D, M], or W [H, N, D, D].

    A module of its own, read through `forward`: sharding engines gather parameters around a module's forward and free
    them after it, so what it returns owns its storage.
    """

    is_initial_state = True

    def __init__(self, config: HopeConfig, num_memories: int, expansion: int):
        super().__init__()
        heads, width = config.num_attention_heads, config.head_dim
        hidden = width * expansion if config.memory_depth == 2 else width
        self.inner = None
        if config.memory_depth == 2:
            self.inner = nn.Parameter(torch.empty(heads, num_memories, hidden, width))
        self.outer = nn.Parameter(torch.empty(heads, num_memories, width, hidden))

    def forward(self, dtype: torch.dtype) -> Weights:
        layers = (self.outer,) if self.inner is None else (self.inner, self.outer)
        return tuple(layer.to(dtype, copy=True) for layer in layers)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Near the identity: W1 small; the rows of W2, or its columns where those are fewer, orthogonal."""
        init.normal_(self.outer, std=_OUTPUT_STD / self.outer.shape[-1] ** 0.5)
        if self.inner is not None:
            noise = torch.randn(self.inner.shape, device=self.inner.device)
            tall = noise.shape[-2] >= noise.shape[-1]
            basis = torch.linalg.qr(noise if tall else noise.mT).Q
            init.copy_(self.inner, _INNER_GAIN * (basis if tall else basis.mT))


class ShortConvolution(nn.Module):
    """Weights [H * D, 1, K] of a causal depthwise convolution over tokens, without bias.

    `forward` hands them out as taps [K, H, D]: scan 1 applies those of keys, values and queries together.
    """

    def __init__(self, config: HopeConfig):
        super().__init__()
        self.heads = config.num_attention_heads
        self.weight = nn.Parameter(torch.empty(self.heads * config.head_dim, 1, config.conv_kernel_size))

    def forward(self, dtype: torch.dtype) -> torch.Tensor:
        return self.weight.to(dtype, copy=True).view(self.heads, -1, self.weight.shape[-1]).permute(2, 0, 1)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Uniform between -1/sqrt(K) and 1/sqrt(K)."""
        bound = self.weight.shape[-1] ** -0.5
        init.uniform_(self.weight, -bound, bound)


class MemoryGates(nn.Module):
    """Learning rate eta and retention alpha of every token and head, read from memories' outputs or from the input."""

    _no_weight_decay = {"learning_rate_readout", "retention_readout", "learning_rate_bias", "retention_bias"}

    def __init__(self, config: HopeConfig):
        super().__init__()
        self.config = config
        heads, width = config.num_attention_heads, config.head_dim
        if config.gate_mode == "memory":
            self.learning_rate_readout = nn.Parameter(torch.empty(heads, width))
            self.retention_readout = nn.Parameter(torch.empty(heads, width))
        else:
            self.gate_proj = nn.Linear(config.hidden_size, 2 * heads, bias=False)
        self.learning_rate_bias = nn.Parameter(torch.empty(heads))
        self.retention_bias = nn.Parameter(torch.empty(heads))

    def forward(self, dtype: torch.dtype) -> GateWeights:
        """The weights in `dtype`, each owning its storage."""
        biases = (bias.to(dtype, copy=True).unsqueeze(-1) for bias in (self.learning_rate_bias, self.retention_bias))
        readouts = None
        if self.config.gate_mode == "memory":
            readouts = torch.stack([self.learning_rate_readout, self.retention_readout], 1).to(dtype).unsqueeze(2)
        return GateWeights(*biases, readouts, float(self.config.memory_learning_rate_max))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Learning rates and horizons of retention, spread over the heads."""
        config = self.config
        if config.gate_mode == "memory":
            init.normal_(self.learning_rate_readout, std=_READOUT_STD)
            init.normal_(self.retention_readout, std=_READOUT_STD)
        for bias, low, high in (
            (self.learning_rate_bias, config.memory_learning_rate_bias_min, config.memory_learning_rate_bias_max),
            (self.retention_bias, config.retention_bias_min, config.retention_bias_max),
        ):
            init.copy_(bias, torch.linspace(low, high, config.num_attention_heads))


class SelfModifyingTitans(nn.Module):
    """The sequence mixer of HOPE, equations (83) to (96).

    Static maps make the memories' input and the query; memories make k and v from that input (and eta and alpha with
    `gate_mode="memory"`); k, v and q pass a short convolution, SiLU and (k, q) normalisation; the content memory is
    written and read; per head its output is normalised, gated and projected. Everything between the static maps is
    float32 (float64 in a float64 model), whatever autocast or the weights' dtype say.
    """

    def __init__(self, config: HopeConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.rule = MemoryRule(
            depth=config.memory_depth,
            erase=config.memory_erase,
            hidden_norm=config.memory_hidden_norm,
            inner_rate=float(config.inner_layer_rate),
            error_clip=config.memory_error_clip,
            gradient_factor=float(config.memory_gradient_factor),
            target_norm=config.memory_target_norm,
            read_mode=config.memory_read_mode,
            decay_to_initial=config.memory_decay_to == "initial",
            momentum=config.memory_momentum,
            frozen=config.memory_learning_rate_max == 0 and config.memory_decay_to == "initial",
        )
        self.memory_names = (["k"] if config.adaptive_k else []) + (["v"] if config.adaptive_v else [])
        self.memory_names += ["learning_rate", "retention"] if config.gate_mode == "memory" else []
        self.memory_names += ["q"] if config.adaptive_q else []
        width, inner = config.hidden_size, config.num_attention_heads * config.head_dim
        self.in_proj = nn.Linear(width, inner, bias=False)
        if not config.adaptive_k:
            self.k_proj = nn.Linear(width, inner, bias=False)
        if not config.adaptive_v:
            self.v_proj = nn.Linear(width, inner, bias=False)
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.g_proj = nn.Linear(width, inner, bias=False)
        self.o_proj = nn.Linear(inner, width, bias=False)
        self.k_conv1d = ShortConvolution(config)
        self.v_conv1d = ShortConvolution(config)
        self.q_conv1d = ShortConvolution(config)
        self.projection_memory = InitialMemory(config, len(self.memory_names), config.projection_memory_expansion)
        self.content_memory = InitialMemory(config, 1, config.memory_expansion)
        self.gates = MemoryGates(config)
        if config.memory_momentum:
            self.momentum_proj = nn.Linear(width, config.num_attention_heads)
        self.o_norm = HopeRMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        plan: ChunkPlan,
        state: dict[str, torch.Tensor] | None = None,
        need_state: bool = False,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor] | None]:
        """Read a piece of text and learn from it.

        Args:
            hidden_states: [B, T, hidden_size].
            plan: which chunk each token falls in.
            state: what the call before returned, or `None` at a text's start.
            need_state: whether to return the state after the last token.

        Returns:
            The mixer's output [B, T, hidden_size], and the new state: batch-first tensors by name.
        """
        made, after = self._make_projections(hidden_states, plan, state, need_state)
        with torch.autocast(hidden_states.device.type, enabled=False):
            made = self._relay(made, plan.projection, plan.content)
            reads, content = scan_content(
                made,
                self._content(made),
                None if state is None else unpack_state(state, "content"),
                plan.content,
                self.config.recompute_chunks,
                need_state,
            )
            normed = self.o_norm(plan.content.to_tokens(reads.transpose(1, 2)))
        gate = F.silu(self.g_proj(hidden_states))
        output = self.o_proj(normed.flatten(2).to(gate.dtype) * gate)
        if not need_state:
            return output, None
        counts = {"seen": plan.seen_after, "digest": plan.digest_after}
        return output, {**after, **pack_state(content, "content"), **counts}

    @torch.no_grad()
    def statistics(self, hidden_states: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the memories do with a text that begins with `hidden_states` [B, T, hidden_size]: means, 0-dim tensors.

        | name | meaning |
        |---|---|
        | learning_rate_mean, retention_mean | eta and alpha of equation (88) |
        | surprise_before, surprise_after | norm of M(k) - target at the chunk's first and last weights |
        | state_norm_ratio | norm of the content memory's change over the norm of its initial state |
        | key_norm, value_norm, target_norm | norms before normalisation; the target's as it is |
        """
        plan = plan_chunks(self.config, hidden_states.shape[:2], hidden_states.device, None, None, None)
        made, _ = self._make_projections(hidden_states, plan, None, need_state=False)
        with torch.autocast(hidden_states.device.type, enabled=False):
            return {
                "learning_rate_mean": made.learning_rate.mean(),
                "retention_mean": made.log_retention.exp().mean(),
                "key_norm": made.streams[:, :, 0].norm(dim=-1).mean(),
                "value_norm": made.streams[:, :, 1].norm(dim=-1).mean(),
                **measure_surprise(made, self._content(made), plan.content),
            }

    @torch.no_grad()
    def gate_values(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Learning rate and retention, eta and alpha of equation (88), of every token and head, both [B, T, H].

        For texts that begin with `hidden_states` [B, T, hidden_size].
        """
        plan = plan_chunks(self.config, hidden_states.shape[:2], hidden_states.device, None, None, None)
        made, _ = self._make_projections(hidden_states, plan, None, need_state=False)
        return made.learning_rate.transpose(1, 2), made.log_retention.exp().transpose(1, 2)

    @torch.no_grad()
    def contribution(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Norm of what the content memory adds to its query, |M_t(q_t) - q_t|, per token [B, T, H]: is it alive?

        For texts that begin with `hidden_states` [B, T, hidden_size].
        """
        plan = plan_chunks(self.config, hidden_states.shape[:2], hidden_states.device, None, None, None)
        made, _ = self._make_projections(hidden_states, plan, None, need_state=False)
        with torch.autocast(hidden_states.device.type, enabled=False):
            reads, _ = scan_content(made, self._content(made), None, plan.content, 0, need_state=False)
            return (reads - unit(made.streams[:, :, 2])).norm(dim=-1).transpose(1, 2)

    def _content(self, made: Projections) -> MemoryGroup:
        """The content memory, for what scan 1 made."""
        return MemoryGroup.of(self.content_memory(made.learning_rate.dtype), len(made.learning_rate), self.rule)

    def _make_projections(
        self, hidden_states: torch.Tensor, plan: ChunkPlan, state: dict[str, torch.Tensor] | None, need_state: bool
    ) -> tuple[Projections, dict[str, torch.Tensor]]:
        """Scan 1 on the slots of its layout, and its part of the new state."""
        config, layout = self.config, plan.projection
        x, query = self.in_proj(hidden_states), self.q_proj(hidden_states)
        key = None if config.adaptive_k else self.k_proj(hidden_states)
        value = None if config.adaptive_v else self.v_proj(hidden_states)
        static_gates = self.gates.gate_proj(hidden_states) if config.gate_mode == "static" else None
        momentum = self.momentum_proj(hidden_states) if config.memory_momentum else None
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)

        def per_head(x: torch.Tensor, *shape: int) -> torch.Tensor:
            """[B, T, product of shape] to [B, S, *shape] in the scans' dtype."""
            return layout.to_slots(x).to(dtype).unflatten(-1, shape)

        with torch.autocast(hidden_states.device.type, enabled=False):
            heads = config.num_attention_heads
            log_momentum = None
            if momentum is not None:
                log_momentum = F.logsigmoid(per_head(momentum, heads)).transpose(1, 2)
                if layout.valid is not None:
                    # padding carries the momentum on unchanged
                    log_momentum = torch.where(layout.valid[:, None], log_momentum, 0.0)
            x, key, value, query = (
                None if part is None else per_head(part, heads, config.head_dim).transpose(1, 2).contiguous()
                for part in (x, key, value, query)
            )
            memory_input = x.unsqueeze(2)
            if config.adaptive_q:
                others = memory_input.expand(-1, -1, len(self.memory_names) - 1, -1, -1)
                memory_input = torch.cat([others, query.unsqueeze(2)], dim=2)
            inputs = ProjectionInputs(
                memory_input,
                (key, value, None if config.adaptive_q else query),
                None if static_gates is None else per_head(static_gates, 2, heads).permute(0, 3, 2, 1),
                log_momentum,
            )
            taps = torch.stack([conv(dtype) for conv in (self.k_conv1d, self.v_conv1d, self.q_conv1d)], dim=2)
            memories = MemoryGroup.of(self.projection_memory(dtype), len(x), self.rule)
            made, projection, tail = scan_projections(
                inputs,
                ProjectionGroup(memories, taps, self.gates(dtype), float(config.projection_memory_rate)),
                None if state is None else unpack_state(state, "projection"),
                None if state is None else state["conv_tail"],
                layout,
                config.recompute_chunks,
                need_state,
            )
        return made, {**pack_state(projection, "projection"), "conv_tail": tail} if need_state else {}

    @staticmethod
    def _relay(made: Projections, source: ChunkLayout, target: ChunkLayout) -> Projections:
        """Move what scan 1 made from its slots to those of scan 2."""
        if source.token_of_slot is None:
            return made
        index = source.slot_of_token.gather(1, target.token_of_slot)

        def move(x: torch.Tensor, axis: int) -> torch.Tensor:
            spread = index.view(index.shape[0], *(1,) * (axis - 1), -1, *(1,) * (x.ndim - axis - 1))
            return x.gather(axis, spread.expand(*x.shape[:axis], -1, *x.shape[axis + 1 :]))

        def move_gate(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else torch.where(target.valid[:, None], move(x, 2), 0.0)

        return Projections(move(made.streams, 3), *(move_gate(gate) for gate in made[1:]))


def pack_state(state: MemoryState, group: str) -> dict[str, torch.Tensor]:
    """A memory's state as tensors by name: `<group>.<run|snap|momentum>.<layer>`."""
    return {
        f"{group}.{field}.{layer}": tensor
        for field, weights in state._asdict().items()
        for layer, tensor in enumerate(weights)
    }


def unpack_state(tensors: dict[str, torch.Tensor], group: str) -> MemoryState:
    """The inverse of `pack_state`."""

    def collect(field: str) -> Weights:
        prefix = f"{group}.{field}."
        return tuple(tensors[name] for name in sorted(tensors) if name.startswith(prefix))

    return MemoryState(*(collect(field) for field in MemoryState._fields))
