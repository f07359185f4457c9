"""The sparse mixer: native sparse attention (arXiv 2502.11089) with rotary positions.

Every query reads compressed keys of the whole text, a few selected blocks, and a sliding window (`sparse_branches`); a
gate per head and token weights the three branches. Unlike in the paper, queries, keys and values first pass a short
convolution, and queries and keys a normalisation, as in memories: short training runs need both (docs/log). Keys lie
in slots (`chunks`): documents begin at a block, and padding has no slot.

Axes: B row, T token of the call, S slot of the call, R slot of the text, H head of keys, G query heads that share it,
D head width.
"""

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from operator import itemgetter

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.configuration_utils import PreTrainedConfig

from .backends import FAST, Kernel, asked_kernels, choose, operand_dtype, runs_plain
from .cache_parts import HopeStaticMemoryLayer
from .chunks import Past, SlotPlan, TokenPlan
from .kernels_fla import read_selected_fla, selection_obstacle
from .layers import LearnedFactors, Mixer, ShortConvolution
from .sparse_branches import SparseInputs, SparseSizes
from .sparse_text import Selection, SparseState, read_text, read_tokens

BRANCHES = ("compressed", "selected", "window")
# a token whose largest share exceeds this reads practically one branch
COLLAPSED = 0.95


class SparseStatistics:
    """Counts and sums of each call, which a mixer adds while the object is its `sparse_statistics`."""

    def __init__(self):
        self.calls: list[dict] = []

    @torch.compiler.disable
    @torch.no_grad()
    def add(self, selection: Selection, top_k: int) -> None:
        """Add one call, in which queries select at most `top_k` blocks."""
        has_query = selection.own_block >= 0
        tiny = torch.finfo(torch.float32).tiny
        gates = selection.gates[has_query].double().clamp(min=tiny)
        shares = gates / gates.sum(-1, keepdim=True)
        largest_share = shares.amax(-1)
        entropy = -(shares * shares.log()).sum(-1)
        blocks = selection.blocks.transpose(1, 2)[has_query]
        is_block = blocks >= 0
        number = is_block.sum(-1)
        own_block = selection.own_block[has_query][:, None, None]
        distances = (own_block - blocks)[is_block]
        sums = {
            # of tokens and query heads
            "gates": entropy.numel(),
            "entropy": entropy.sum().item(),
            "collapsed": (largest_share > COLLAPSED).sum().item(),
            # of tokens and heads of keys
            "rows": number.numel(),
            "k": number.sum().item(),
            "k_at_max": (number == top_k).sum().item(),
        }
        for branch, share in zip(BRANCHES, shares.sum((0, 1)).tolist(), strict=True):
            sums[f"share_{branch}"] = share
        is_empty = entropy.numel() == 0
        self.calls.append({
            "sums": sums,
            "entropy_min": math.inf if is_empty else entropy.amin().item(),
            "gate_max": 0.0 if is_empty else largest_share.amax().item(),
            "k_max": 0 if is_empty else number.amax().item(),
            # how many selected blocks lie 0, 1, ... blocks before the query's own
            "distances": dict(enumerate(torch.bincount(distances).tolist())),
        })  # fmt: skip

    @staticmethod
    def summary(calls: list[dict], block: int) -> dict[str, float]:
        """Numbers by name from the counts of calls; their order and division do not matter."""
        total = Counter()
        distances = Counter()
        for call in calls:
            total.update(call["sums"])
            distances.update(call["distances"])
        gates = max(1, total["gates"])
        rows = max(1, total["rows"])
        summary = {
            "gate_entropy_mean": total["entropy"] / gates,
            "gate_entropy_min": min(map(itemgetter("entropy_min"), calls)),
            "gate_max": max(map(itemgetter("gate_max"), calls)),
            "gate_collapse_fraction": total["collapsed"] / gates,
        }
        for branch in BRANCHES:
            summary[f"share_{branch}"] = total[f"share_{branch}"] / gates
        summary |= {
            "rows": total["rows"],
            "k_mean": total["k"] / rows,
            "k_max": max(map(itemgetter("k_max"), calls)),
            "k_at_max_percent": 100 * total["k_at_max"] / rows,
            "selected_distance_median": block * _quantile(distances, 0.5),
            "selected_distance_p95": block * _quantile(distances, 0.95),
        }
        return summary


def _quantile(counts: Counter[int], share: float) -> int:
    """The smallest value such that at least this share of the counts is not above it."""
    least = share * counts.total()
    counted = 0
    for value in sorted(counts):
        counted += counts[value]
        if counted >= least:
            return value
    return 0


class HopeStaticSparseLayer(HopeStaticMemoryLayer):
    """Sparse attention in transformers' `StaticCache`: memory for `max_cache_len` tokens from the first call on."""

    def __init__(self, state_class: type[tuple], max_cache_len: int = 0, **kwargs):
        super().__init__(state_class, **kwargs)
        self.max_cache_len = max_cache_len

    def update_state(self, state: SparseState, past: Past) -> None:
        """As in the base class; the first state is padded to the cache's length."""
        if self.state is None:
            blocks = state.compressed_keys.shape[2]
            block = state.slot_keys.shape[2] // blocks
            # one block more, for a call that begins within one
            blocks_of_cache = -(-self.max_cache_len // block) + 1
            missing = max(0, blocks_of_cache - blocks)
            missing_slots = (0, 0, 0, missing * block)
            missing_blocks = (0, 0, 0, 0, 0, missing)
            state = SparseState(
                slot_keys=F.pad(state.slot_keys, missing_slots),
                slot_values=F.pad(state.slot_values, missing_slots),
                compressed_keys=F.pad(state.compressed_keys, missing_blocks),
                compressed_values=F.pad(state.compressed_values, missing_blocks),
                first=state.first,
                conv_tail=state.conv_tail,
            )
        super().update_state(state, past)


class BlockCompression(nn.Module):
    """Learned weights [H, stride, D] that sum the tokens of a stride to one; the initial weights give their mean."""

    _no_weight_decay = {"weight"}
    has_initial_values = True

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        shape = config.num_key_value_heads, config.sparse_compress_stride, config.head_dim
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self) -> Tensor:
        """A copy of the weights, see `LearnedFactors`; `sparse_branches.compress` applies them."""
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
    name = "native sparse attention"
    metrics = "sparse"

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        width = config.hidden_size
        heads = config.num_attention_heads
        key_heads = config.num_key_value_heads
        self.q_proj = nn.Linear(width, heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(width, key_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(width, key_heads * config.head_dim, bias=False)
        self.branch_proj = nn.Linear(width, len(BRANCHES) * heads, bias=False)
        self.o_proj = nn.Linear(heads * config.head_dim, width, bias=False)
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            # A larger scale makes recall faster to learn with memories, and text slower without them (docs/log).
            projection.keeps_scale = config.has_memories
        self.q_conv1d = ShortConvolution(config, heads)
        self.k_conv1d = ShortConvolution(config, key_heads)
        self.v_conv1d = ShortConvolution(config, key_heads)
        # factors of the normalised queries and keys, shared by all heads
        self.q_norm = LearnedFactors(config.head_dim)
        self.k_norm = LearnedFactors(config.head_dim)
        self.k_compress = BlockCompression(config)
        self.v_compress = BlockCompression(config)
        self.sizes = SparseSizes(
            block=config.sparse_block_size,
            stride=config.sparse_compress_stride,
            top_k=config.sparse_top_k,
            window=config.sparse_window,
            heads=heads,
            key_heads=key_heads,
            epsilon=config.rms_norm_eps,
        )
        self.kernels = asked_kernels()
        # reasons for which no GPU kernel ran, and their counts
        self.kernel_fallbacks: Counter[tuple[str, str]] = Counter()
        # every call adds to it unless it is None
        self.sparse_statistics: SparseStatistics | None = None

    def forward(
        self,
        hidden_states: Tensor,
        state: SparseState | None = None,
        *,
        blocks: SlotPlan | TokenPlan,
        block_angles: tuple[Tensor, Tensor],
        need_state: bool = False,
        **_,
    ) -> tuple[Tensor, SparseState | None]:
        """Attend from a call's tokens to the text so far.

        Args:
            hidden_states: [B, T, hidden_size].
            state: state after the previous call, or `None` at a text's start.
            blocks: slots of the call's tokens; documents begin at multiples of a block.
            block_angles: cosines and sines of each slot's position in its document [B or 1, S, D].
            need_state: whether to return the state after the last token.

        Returns:
            The mixer's output [B, T, hidden_size], and the new state.
        """
        inputs = self.inputs(hidden_states, block_angles)
        selects = self.sparse_statistics is not None
        with torch.autocast(hidden_states.device.type, enabled=False):
            if isinstance(blocks, TokenPlan):
                is_plain = self.kernels == "plain"
                result = read_tokens(inputs, state, blocks, self.sizes, is_plain, need_state, selects)
            else:
                choose_reads = None
                if not runs_plain(self.kernels):
                    choose_reads = partial(self.choose_reads, operands=operand_dtype(hidden_states))
                result = read_text(inputs, state, blocks, self.sizes, choose_reads, need_state, selects)
        output, after, selection = result
        if selects:
            self.sparse_statistics.add(selection, self.sizes.top_k)
        output = output.to(hidden_states.dtype)
        return self.o_proj(output), after

    def inputs(self, hidden_states: Tensor, angles: tuple[Tensor, Tensor]) -> SparseInputs:
        """What `read_text` reads of `hidden_states` [B, T, hidden_size] and of the parameters."""
        query = self.q_proj(hidden_states)
        key = self.k_proj(hidden_states)
        value = self.v_proj(hidden_states)
        raw = torch.cat([query, key, value], dim=-1)
        conv_weights = []
        for convolution in (self.q_conv1d, self.k_conv1d, self.v_conv1d):
            conv_weights.append(convolution(raw.dtype).flatten(1))
        # [K, 1, 1, C]
        conv_weights = torch.cat(conv_weights, dim=-1)[:, None, None]
        scale = self.config.head_dim**-0.5
        cos, sin = angles
        return SparseInputs(
            raw=raw,
            gates=self.branch_gates(hidden_states),
            cos=cos,
            sin=sin,
            conv_weights=conv_weights,
            query_norm=self.q_norm(raw.dtype) * scale,
            key_norm=self.k_norm(raw.dtype),
            key_weights=self.k_compress(),
            value_weights=self.v_compress(),
        )

    def branch_gates(self, hidden_states: Tensor) -> Tensor:
        """Weights of the three branches for every token and head, each from 0 to 1 [B, T, heads, 3]."""
        logits = self.branch_proj(hidden_states)
        logits = logits.unflatten(-1, (-1, len(BRANCHES)))
        # Sigmoids, as in the paper; with a softmax over the branches recall is learned far later (docs/log).
        return logits.sigmoid()

    def choose_reads(self, query: Tensor, base: int, operands: torch.dtype) -> Callable | None:
        """The fast function that reads for a text's queries, if there is one.

        GPU kernels round their operands to `operands`.
        """
        read = FAST.get("sparse_reads")
        read_by_kernel = None
        if read is not None:
            read_selected = partial(read_selected_fla, dtype=operands)
            read_by_kernel = partial(read, selected_by=read_selected)
        obstacle = partial(_obstacle, query, base, self.sizes)
        kernel = Kernel(read_by_kernel, obstacle)
        return choose("sparse_attention", self.kernels, kernel, read, self.kernel_fallbacks, query.device)

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
        _, heads, slots, width = state.slot_keys.shape
        blocks, strides = state.compressed_keys.shape[2:4]
        block = slots // blocks
        kernel_size = state.conv_tail.shape[1] + 1
        of_cache = _layout(heads, width, block, block // strides, kernel_size)
        of_model = _layout(
            config.num_key_value_heads,
            config.head_dim,
            config.sparse_block_size,
            config.sparse_compress_stride,
            config.conv_kernel_size,
        )
        if of_cache != of_model:
            raise ValueError(
                f"the cache holds sparse attention with {of_cache}, and this model's has {of_model}: it is the cache "
                "of another model"
            )

    @staticmethod
    def tensor_parallel_maps(config: PreTrainedConfig) -> dict[str, str]:
        """Every rank computes the whole layer; only the weights of its linear maps are sharded."""
        maps = "q_proj", "k_proj", "v_proj", "branch_proj", "o_proj"
        return dict.fromkeys(maps, "colwise_gather_output")

    @staticmethod
    def mixing_flops(config: PreTrainedConfig, sequence_length: int) -> int:
        """4 per channel for every key that the branches read."""
        keys = _mean_keys(config.sparse_window, sequence_length)
        keys += _mean_keys(config.sparse_top_k * config.sparse_block_size, sequence_length)
        keys += sequence_length / (2 * config.sparse_compress_stride)
        return round(4 * keys * config.num_attention_heads * config.head_dim)

    @staticmethod
    def cache_bytes(config: PreTrainedConfig, tokens: int) -> int:
        """Whole blocks, their compressed keys, the convolutions' tail, and the int64 `first`."""
        key_channels = config.num_key_value_heads * config.head_dim
        channels = config.num_attention_heads * config.head_dim + 2 * key_channels
        blocks = -(-tokens // config.sparse_block_size)
        slots = blocks * config.sparse_block_size
        compressed = slots // config.sparse_compress_stride
        numbers = 2 * (slots + compressed) * key_channels
        numbers += (config.conv_kernel_size - 1) * channels
        return 4 * (numbers + 2)

    @staticmethod
    def rounds(config: PreTrainedConfig) -> tuple[int, int]:
        """A round is a block of queries, from where on they read all the blocks and tokens that they may."""
        block = config.sparse_block_size
        return max(config.sparse_window, config.sparse_top_k * block) + block, block

    def begin_statistics(self) -> None:
        """Collect statistics of the calls from now on."""
        self.sparse_statistics = SparseStatistics()

    def end_statistics(self) -> list[dict]:
        """The statistics of each call since `begin_statistics`; stops collecting."""
        calls = self.sparse_statistics.calls
        self.sparse_statistics = None
        return calls

    def summary(self, calls: list[dict]) -> dict[str, float]:
        """`SparseStatistics.summary` of calls of this layer, or of layers of the same sizes."""
        return SparseStatistics.summary(calls, self.sizes.block)

    def warning(self, rows: dict[str, float], steps: int) -> str | None:
        """A sentence if most tokens and heads read one branch."""
        if rows["gate_collapse_fraction"] <= 0.5:
            return None
        return (
            f"sparse attention of layer {self.layer_idx} reads one branch: in the last {steps} logged steps the "
            f"largest of most gates had more than {COLLAPSED} of their sum "
            f"({self.metrics}/{self.layer_idx}/gate_collapse_fraction)"
        )


def _obstacle(query: Tensor, base: int, sizes: SparseSizes) -> str | None:
    """Why kernels of GPUs cannot read for queries [B, H, G, S, D], the first of which is at slot `base`."""
    if "sparse_reads" not in FAST:
        return "the package hope_hf is not installed with the model's code"
    return selection_obstacle(query, base, sizes)


def _layout(heads: int, width: int, block: int, stride: int, kernel_size: int) -> str:
    """What a state and a model have to agree on."""
    return (
        f"{heads} heads of width {width}, blocks of {block}, strides of {stride} and convolutions of {kernel_size} "
        "tokens"
    )


def _mean_keys(most: int, sequence_length: int) -> float:
    """Mean number of the last `most` tokens that a token of a text sees."""
    most = min(most, sequence_length)
    return most - most**2 / (2 * sequence_length)
