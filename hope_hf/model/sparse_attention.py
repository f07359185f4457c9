"""The sparse mixer: native sparse attention (arXiv 2502.11089) with rotary positions.

Every query reads compressed keys of the whole text, a few selected blocks, and a sliding window (`sparse_branches`); a
gate per head and token weights the three branches. Unlike in the paper, queries, keys and values first pass a short
convolution, and queries and keys a normalisation, as in memories: short training runs need both (docs/log). Keys lie
in slots (`chunks`): documents begin at a block, and padding has no slot.

Axes: B row, T token of the call, S slot of the call, R slot of the text, H head of keys, G query heads that share it,
D head width.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.configuration_utils import PreTrainedConfig

from .backends import FAST, Kernel, asked_kernels, choose, operand_dtype, runs_plain
from .cache_parts import HopeStaticMemoryLayer
from .chunks import Past, SlotPlan, TokenPlan
from .kernels_fla import read_selected_fla, selection_obstacle
from .layers import LearnedFactors, Mixer, ShortConvolution
from .sparse_branches import QkvSizes, QkvWeights, SparseSizes
from .sparse_text import SparseInputs, SparseState, read_text, read_tokens

BRANCHES = ("compressed", "selected", "window")
# a token whose largest share exceeds this reads practically one branch
COLLAPSED = 0.95


class SparseStatistics:
    """Sums per call, which a mixer adds while the object is its `sparse_statistics`."""

    def __init__(self):
        self._parts: list[dict[str, torch.Tensor]] = []

    @torch.compiler.disable
    @torch.no_grad()
    def add(self, gates: torch.Tensor, chosen: torch.Tensor, own: torch.Tensor, top_k: int) -> None:
        """Add one call.

        Args:
            gates: weights of the branches [B, S, heads, 3]; shares are these divided by their sum.
            chosen: selected blocks [B, H, S, X], -1 for none.
            own: block of each query [B, S], -1 for padding and empty slots.
            top_k: maximal number of selected blocks.
        """
        valid = own >= 0
        gates = gates[valid].double().clamp(min=torch.finfo(torch.float32).tiny)
        shares = gates / gates.sum(-1, keepdim=True)
        entropy = -(shares * shares.log()).sum(-1)
        largest = shares.amax(-1)
        blocks = chosen.transpose(1, 2)[valid]
        is_read = blocks >= 0
        number = is_read.sum(-1)
        away = (own[valid][:, None, None] - blocks)[is_read]
        self._parts.append({
            "gates": torch.tensor(entropy.numel()), "entropy": entropy.sum(), "shares": shares.sum((0, 1)),
            "collapsed": (largest > COLLAPSED).sum(), "rows": torch.tensor(number.numel()), "k": number.sum(),
            "k_at_max": (number == top_k).sum(), "distances": torch.bincount(away),
            "entropy_min": entropy.amin() if entropy.numel() else entropy.new_tensor(torch.inf),
            "gate_max": largest.amax() if largest.numel() else largest.new_tensor(0.0),
            "k_max": number.amax() if number.numel() else torch.tensor(0),
        })  # fmt: skip

    def read(self) -> list[dict]:
        """The sums of each call as numbers and lists."""
        return [{name: value.tolist() for name, value in part.items()} for part in self._parts]


class HopeStaticSparseLayer(HopeStaticMemoryLayer):
    """Sparse attention in transformers' `StaticCache`: memory for `max_cache_len` tokens from the first call on."""

    def __init__(self, state_class: type[tuple], max_cache_len: int = 0, **kwargs):
        super().__init__(state_class, **kwargs)
        self.max_cache_len = max_cache_len

    def update_state(self, state: SparseState, past: Past) -> None:
        """As in the base class; the first state is padded to the cache's length."""
        if self.state is None:
            held = state.compressed_keys.shape[2]
            block = state.slot_keys.shape[2] // held
            # one block more, for a call that begins within one
            more = max(0, -(-self.max_cache_len // block) + 1 - held)
            slots = (F.pad(part, (0, 0, 0, more * block)) for part in state[:2])
            compressed = (F.pad(part, (0, 0, 0, 0, 0, more)) for part in state[2:4])
            state = SparseState(*slots, *compressed, *state[4:])
        super().update_state(state, past)


class BlockCompression(nn.Module):
    """Learned weights [H, stride, D] that sum the tokens of a stride to one; the initial weights give their mean."""

    _no_weight_decay = {"weight"}
    has_initial_values = True

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(config.num_key_value_heads, config.sparse_compress_stride, config.head_dim)
        )

    def forward(self) -> torch.Tensor:
        """A copy of the weights, see `LearnedFactors`; `sparse_text.compress` applies them."""
        return self.weight.clone()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        init.constant_(self.weight, 1 / self.weight.shape[1])


class HopeSparseAttention(Mixer, nn.Module):
    """Causal attention whose cost per token grows with `top_k * block + window + T / stride`."""

    state_class = SparseState
    static_layer = HopeStaticSparseLayer
    needs = frozenset({"blocks", "rotary"})
    heads = ("num_attention_heads", "num_key_value_heads")
    own_fields = ("sparse_",)
    input_readers = 4
    name = "native sparse attention"
    metrics = "sparse"

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        width, heads, shared = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(width, heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(width, shared * config.head_dim, bias=False)
        self.v_proj = nn.Linear(width, shared * config.head_dim, bias=False)
        self.branch_proj = nn.Linear(width, len(BRANCHES) * heads, bias=False)
        self.o_proj = nn.Linear(heads * config.head_dim, width, bias=False)
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            # A larger scale makes recall faster to learn with memories, and text slower without them (docs/log).
            projection.keeps_scale = config.has_memories
        self.q_conv1d = ShortConvolution(config, heads)
        self.k_conv1d = ShortConvolution(config, shared)
        self.v_conv1d = ShortConvolution(config, shared)
        # factors of the normalised queries and keys, shared by all heads
        self.q_norm = LearnedFactors(config.head_dim)
        self.k_norm = LearnedFactors(config.head_dim)
        self.k_compress = BlockCompression(config)
        self.v_compress = BlockCompression(config)
        self.sizes = SparseSizes(
            config.sparse_block_size, config.sparse_compress_stride, config.sparse_top_k, config.sparse_window
        )
        self.qkv_sizes = QkvSizes(config.num_attention_heads, config.num_key_value_heads, config.rms_norm_eps)
        self.kernels = asked_kernels()
        # reasons for which no GPU kernel ran, and their counts
        self.kernel_fallbacks: Counter[tuple[str, str]] = Counter()
        # every call adds to it unless it is None
        self.sparse_statistics: SparseStatistics | None = None

    def forward(
        self,
        hidden_states: torch.Tensor,
        state: SparseState | None = None,
        *,
        blocks: SlotPlan | TokenPlan,
        block_positions: tuple[torch.Tensor, torch.Tensor],
        need_state: bool = False,
        **_,
    ) -> tuple[torch.Tensor, SparseState | None]:
        """Attend from a call's tokens to the text so far.

        Args:
            hidden_states: [B, T, hidden_size].
            state: state after the previous call, or `None` at a text's start.
            blocks: slots of the call's tokens; documents begin at multiples of a block.
            block_positions: cosines and sines of each slot's position in its document [B or 1, S, D].
            need_state: whether to return the state after the last token.

        Returns:
            The mixer's output [B, T, hidden_size], and the new state.
        """
        inputs, is_plain = self.inputs(hidden_states, block_positions), runs_plain(self.kernels)
        call = inputs, state, blocks, self.sizes, self.qkv_sizes
        selects = self.sparse_statistics is not None
        with torch.autocast(hidden_states.device.type, enabled=False):
            if isinstance(blocks, TokenPlan):
                output, after, selection = read_tokens(*call, self.kernels == "plain", need_state, selects)
            else:
                read = None if is_plain else partial(self.choose_reads, operands=operand_dtype(hidden_states))
                output, after, selection = read_text(*call, read, need_state, selects)
        if selects:
            self.sparse_statistics.add(*selection, self.sizes.top_k)
        return self.o_proj(output.to(hidden_states.dtype)), after

    def inputs(self, hidden_states: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> SparseInputs:
        """What `read_text` reads of `hidden_states` [B, T, hidden_size] and of the parameters."""
        raw = torch.cat([projection(hidden_states) for projection in (self.q_proj, self.k_proj, self.v_proj)], dim=-1)
        convolutions = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        conv_weights = torch.cat([convolution(raw.dtype).flatten(1) for convolution in convolutions], dim=-1)
        # the norm's factors include the scale of attention
        query_norm = self.q_norm(raw.dtype) * self.config.head_dim**-0.5
        weights = QkvWeights(conv_weights[:, None, None], query_norm, self.k_norm(raw.dtype))
        gates = self.branch_gates(hidden_states)
        return SparseInputs(raw, gates, *angles, *weights, self.k_compress(), self.v_compress())

    def choose_reads(self, query: torch.Tensor, base: int, operands: torch.dtype) -> Callable | None:
        """The fast function that reads for a text's queries, if there is one.

        GPU kernels round their operands to `operands`.
        """
        read = FAST.get("sparse_reads")
        by_fla = None if read is None else partial(read, selected_by=partial(read_selected_fla, dtype=operands))

        def obstacle() -> str | None:
            if read is None:
                return "the package hope_hf is not installed with the model's code"
            return selection_obstacle(query, base, self.sizes)

        kernel, counted = Kernel(by_fla, obstacle), self.kernel_fallbacks
        return choose("sparse_attention", self.kernels, kernel, read, counted, query.device)

    @staticmethod
    def check_config(config: PreTrainedConfig) -> None:
        block = config.sparse_block_size
        if block % config.sparse_compress_stride:
            raise ValueError(
                f"`sparse_compress_stride` ({config.sparse_compress_stride}) must divide `sparse_block_size` ({block})"
            )
        if config.sparse_window % block:
            raise ValueError(f"`sparse_block_size` ({block}) must divide `sparse_window` ({config.sparse_window})")

    @staticmethod
    def check_state(state: SparseState, config: PreTrainedConfig, dtype: torch.dtype) -> None:
        (_, heads, slots, width), (blocks, strides) = state.slot_keys.shape, state.compressed_keys.shape[2:4]
        held = (heads, width, slots // blocks, slots // (blocks * strides), state.conv_tail.shape[1] + 1)
        ours = (
            config.num_key_value_heads, config.head_dim, config.sparse_block_size, config.sparse_compress_stride,
            config.conv_kernel_size,
        )  # fmt: skip
        if held != ours:
            layout = "{} heads of width {}, blocks of {}, strides of {} and convolutions of {} tokens"
            raise ValueError(
                f"the cache holds sparse attention with {layout.format(*held)}, and this model's has "
                f"{layout.format(*ours)}: it is the cache of another model"
            )

    @staticmethod
    def tensor_parallel_maps(config: PreTrainedConfig) -> dict[str, str]:
        """Every rank computes the whole layer; only the weights of its linear maps are sharded."""
        return dict.fromkeys(("q_proj", "k_proj", "v_proj", "branch_proj", "o_proj"), "colwise_gather_output")

    @staticmethod
    def mixing_flops(config: PreTrainedConfig, sequence_length: int) -> int:
        """4 per channel for every key that the branches read."""

        def seen(most: int) -> float:
            """Mean number of the last `most` tokens that a token sees."""
            most = min(most, sequence_length)
            return most - most**2 / (2 * sequence_length)

        keys = seen(config.sparse_window) + seen(config.sparse_top_k * config.sparse_block_size)
        keys += sequence_length / (2 * config.sparse_compress_stride)
        return round(4 * keys * config.num_attention_heads * config.head_dim)

    @staticmethod
    def cache_bytes(config: PreTrainedConfig, tokens: int) -> int:
        """Whole blocks, their compressed keys, the convolutions' tail, and the int64 `first`."""
        width, groups = config.head_dim, config.num_key_value_heads
        slots = -(-tokens // config.sparse_block_size) * config.sparse_block_size
        compressed = slots // config.sparse_compress_stride
        tail = (config.conv_kernel_size - 1) * (config.num_attention_heads + 2 * groups) * width
        return 4 * (2 * (slots + compressed) * groups * width + tail + 2)

    @staticmethod
    def kept_bytes(config: PreTrainedConfig, batch_size: int, length: int, low: int) -> int:
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        # outputs of the linear maps, and the output; in fp32 queries, keys, values, the selected branch and gates
        streams = low * (2 * heads + 2 * groups) + 4 * (2 * heads + 2 * groups)
        compressed = 4 * 2 * groups * config.head_dim // config.sparse_compress_stride
        # int64 indices of the queries that read a block
        selected = 8 * config.sparse_top_k * groups
        return batch_size * length * (streams * config.head_dim + compressed + 4 * 3 * heads + selected)

    def branch_gates(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Weights of the three branches for every token and head, each from 0 to 1 [B, T, heads, 3]."""
        # Sigmoids, as in the paper; with a softmax over the branches recall is learned far later (docs/log).
        return self.branch_proj(hidden_states).unflatten(-1, (-1, len(BRANCHES))).sigmoid()

    def begin_statistics(self) -> None:
        """Collect statistics of the calls from now on."""
        self.sparse_statistics = SparseStatistics()

    def end_statistics(self) -> list[dict]:
        """The statistics of each call since `begin_statistics`; stops collecting."""
        found, self.sparse_statistics = self.sparse_statistics, None
        return found.read()

    def summary(self, parts: list[dict]) -> dict[str, float]:
        """Numbers by name from the counts of `SparseStatistics`; their order and division do not matter."""

        def total(name: str) -> float:
            return sum(part[name] for part in parts)

        block, gates, rows = self.sizes.block, max(1, total("gates")), max(1, total("rows"))
        shares = [sum(share) / gates for share in zip(*(part["shares"] for part in parts), strict=True)]
        distances = Counter()
        for part in parts:
            distances.update(dict(enumerate(part["distances"])))
        return {
            "gate_entropy_mean": total("entropy") / gates,
            "gate_entropy_min": min(part["entropy_min"] for part in parts),
            "gate_max": max(part["gate_max"] for part in parts),
            "gate_collapse_fraction": total("collapsed") / gates,
            **dict(zip((f"share_{branch}" for branch in BRANCHES), shares, strict=True)),
            "rows": total("rows"),
            "k_mean": total("k") / rows,
            "k_max": max(part["k_max"] for part in parts),
            "k_at_max_percent": 100 * total("k_at_max") / rows,
            "selected_distance_median": block * _quantile(distances, 0.5),
            "selected_distance_p95": block * _quantile(distances, 0.95),
        }

    def warning(self, rows: dict[str, float], steps: int) -> str | None:
        """A sentence if most tokens and heads read one branch."""
        if rows["gate_collapse_fraction"] <= 0.5:
            return None
        return (
            f"sparse attention of layer {self.layer_idx} reads one branch: in the last {steps} logged steps the "
            f"largest of most gates had more than {COLLAPSED} of their sum "
            f"({self.metrics}/{self.layer_idx}/gate_collapse_fraction)"
        )


def _quantile(counts: Counter[int], share: float) -> int:
    """The smallest value such that at least this share of the counts is not above it."""
    wanted, below = share * counts.total(), 0
    for value in sorted(counts):
        below += counts[value]
        if below >= wanted:
            return value
    return 0
