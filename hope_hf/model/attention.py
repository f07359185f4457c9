"""Softmax attention as Llama, Mistral, Qwen2 and Qwen3 have it, with transformers' own kernels: positions and mask.

The rope types "dynamic" and "longrope" define other frequencies for texts beyond the trained length. transformers
changes them while a text is read, and keys that are read already keep the old ones: a text read in pieces, or in a
batch with a longer one, gives other values. Here texts have the frequencies of the trained length. Windows need no
others, since no distance in them is longer; other attention refuses longer texts.

Axes: B row, T token of the call, S token of the text, H head.
"""

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig
from transformers.masking_utils import create_causal_mask, packed_sequence_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from .cache_hope import CACHE_NAME
from .cache_parts import KeyValues
from .documents import Documents, later_begins
from .layers import HopeRMSNorm, Mixer


def rotary_reach(config: PreTrainedConfig) -> int | None:
    """Tokens up to which the frequencies are those of the rope type; `None` for types that have one set of them."""
    fields = config.rope_parameters or {}
    kind = fields.get("rope_type", "default")
    if "dynamic" in kind:
        return config.max_position_embeddings
    if kind == "longrope":
        return fields.get("original_max_position_embeddings", config.max_position_embeddings)
    return None


def check_reach(config: PreTrainedConfig, position_ids: Tensor, columns: int | Tensor) -> None:
    """ValueError if a position [B, T] lies beyond the reach.

    Args:
        columns: tokens of the call and of those before, padding included: no position is higher.
    """
    reach = rotary_reach(config)
    if reach is None:
        return
    message = (
        f"`rope_parameters` has the rope_type '{config.rope_parameters['rope_type']}', whose frequencies change after "
        f"{reach} tokens, and keys that are read keep theirs: read shorter texts, give a window (`sliding_window`), "
        "or set another rope_type"
    )
    if torch.compiler.is_compiling():
        torch._assert_async((position_ids < reach).all(), message)
        return
    may_exceed = not isinstance(columns, int) or columns > reach
    if may_exceed and int(position_ids.max()) >= reach:
        raise ValueError(message)


class HopeRotaryEmbedding(LlamaRotaryEmbedding):
    """Cosines and sines [B, T, head_dim] of positions [B, T], in the dtype of `x`.

    `model.to(torch.bfloat16)`, and DeepSpeed, round every buffer, `from_pretrained(dtype=torch.bfloat16)` does not:
    frequencies stay as exact as they were made.
    """

    def _apply(self, fn, recurse=True):
        exact = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, frequencies in exact.items():
            moved = self._buffers[name]
            if moved.dtype != frequencies.dtype:
                self._buffers[name] = frequencies.to(moved.device)
        return self

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        # transformers' forward changes the frequencies first
        frequencies = self.inv_freq.to(device=x.device, dtype=torch.float)
        angles = position_ids[..., None].float() * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        cosines = angles.cos() * self.attention_scaling
        sines = angles.sin() * self.attention_scaling
        return cosines.to(x.dtype), sines.to(x.dtype)


class HopeAttention(Mixer, LlamaAttention):
    """Causal multi-head attention with rotary positions.

    With `use_qk_norm`, queries and keys are normalised over the head width before they are rotated, as in Qwen3.
    """

    needs = frozenset({"mask", "rotary"})
    heads = ("num_attention_heads", "num_key_value_heads")
    name = "softmax attention"

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        if config.attention_out_bias not in (None, config.attention_bias):
            self.o_proj = nn.Linear(self.o_proj.in_features, self.o_proj.out_features, config.attention_out_bias)
        self.q_norm = self.k_norm = None
        if config.use_qk_norm:
            self.q_norm = HopeRMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = HopeRMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        state: KeyValues | None = None,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        chunks=None,
        need_state: bool = False,
        cache: Cache | None = None,
        **options,
    ) -> tuple[Tensor, KeyValues | None, Tensor | None]:
        """[B, T, hidden_size]; the state after the call; weights [B, H, T, T] of eager attention.

        Args:
            hidden_states: [B, T, hidden_size].
            state: keys and values of the text so far, unless a cache is given.
            position_embeddings: cosines and sines [B, T, head_dim] of the positions.
            attention_mask: [B, 1, T, S] or what else the kernel takes; `None`: the causal mask.
            need_state: whether to return the state after the last token.
            cache: cache to write into; no state is then read or returned.
            options: of the kernels.
        """
        queries, keys, values = self.project(hidden_states)
        queries, keys = apply_rotary_pos_emb(queries, keys, *position_embeddings)
        state_after = None
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx)
        elif need_state:
            if state is not None:
                # in new tensors: a block that is recomputed in the backward pass reads the same state again
                keys = torch.cat([state.keys, keys], dim=-2)
                values = torch.cat([state.values, values], dim=-2)
            state_after = KeyValues(keys, values)
        kernel = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.attention_dropout if self.training else 0.0
        reads, weights = kernel(
            self, queries, keys, values, attention_mask, dropout=dropout, scaling=self.scaling, **options
        )
        all_heads = reads.reshape(*reads.shape[:-2], -1)
        return self.o_proj(all_heads.contiguous()), state_after, weights

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, H, T, head_dim], keys and values [B, key heads, T, head_dim], without positions."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        queries = self.q_proj(hidden_states).view(shape)
        keys = self.k_proj(hidden_states).view(shape)
        values = self.v_proj(hidden_states).view(shape)
        if self.q_norm is not None:
            queries = self.q_norm(queries)
            keys = self.k_norm(keys)
        return queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)

    @staticmethod
    def tensor_parallel_maps(config: PreTrainedConfig) -> dict[str, str]:
        """Each rank computes the heads of its part of the maps; `o_proj` sums over the ranks."""
        maps = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
        # every rank normalises its own heads with the same weights
        norms = ("q_norm", "k_norm") if config.use_qk_norm else ()
        return maps | dict.fromkeys(norms, "replicated_with_grad_allreduce")

    @staticmethod
    def mixing_flops(config: PreTrainedConfig, sequence_length: int) -> int:
        """2 T per channel: scores and reads of T / 2 keys on average."""
        return 2 * sequence_length * config.num_attention_heads * config.head_dim

    @staticmethod
    def cache_bytes(config: PreTrainedConfig, tokens: int) -> int:
        """Keys and values of all tokens."""
        return 4 * 2 * tokens * config.num_key_value_heads * config.head_dim


def attention_arguments(
    config: PreTrainedConfig,
    rotary: torch.nn.Module,
    hidden_states: Tensor,
    attention_mask: Tensor | dict | None,
    documents: Documents,
    cache: Cache | None,
) -> dict:
    """What `HopeAttention.forward` takes besides hidden states.

    Args:
        rotary: makes cosines and sines of positions.
        hidden_states: [B, T, hidden_size].
        attention_mask: the model's argument, or the masks that `generate` makes for a cache of fixed length.
        documents: padding and documents of the call.
        cache: the cache before the call.

    Raises:
        ValueError: the kernels do not support the mask, or positions lie beyond the reach of the rotary frequencies.
    """
    columns = hidden_states.shape[1]
    if cache is not None:
        columns = cache.get_seq_length() + columns
    position_ids = documents.position_ids
    if position_ids is None:
        position_ids = _counted_positions(hidden_states, attention_mask, cache)
    check_reach(config, position_ids, columns)
    if isinstance(attention_mask, dict):
        mask = attention_mask["attention"]
    elif attention_mask is None or getattr(attention_mask, "ndim", None) == 2:
        mask = _mask_of_tokens(config, hidden_states, attention_mask, documents, position_ids, cache)
    else:
        mask = _mask_for_kernels(config, hidden_states, attention_mask)
    return {
        "attention_mask": mask,
        # kernels without a mask find documents in the positions
        "position_ids": position_ids,
        "position_embeddings": rotary(hidden_states, position_ids=position_ids),
        "cache": cache,
    }


def _mask_for_kernels(config: PreTrainedConfig, hidden_states: Tensor, attention_mask):
    """A mask of four dimensions, or a `BlockMask` of flex attention, as the kernels take it; it stands for documents.

    Raises:
        ValueError: the kernels do not support the mask.
    """
    kernels = config._attn_implementation
    if not isinstance(attention_mask, Tensor):
        if kernels != "flex_attention":
            raise ValueError(
                f"attention_mask is a {type(attention_mask).__name__}, which {kernels} does not take: set "
                "attn_implementation to flex_attention"
            )
        return attention_mask
    if attention_mask.ndim != 4 or "flash" in kernels:
        shapes = "(batch, tokens)" if "flash" in kernels else "(batch, tokens) or four dimensions"
        raise ValueError(f"attention_mask has the shape {tuple(attention_mask.shape)}, and {kernels} takes {shapes}")
    if attention_mask.is_floating_point():
        return attention_mask
    # eager attention adds the mask to its scores
    lowest = torch.finfo(hidden_states.dtype).min
    return hidden_states.new_zeros(attention_mask.shape).masked_fill(~attention_mask.bool(), lowest)


def _mask_of_tokens(
    config: PreTrainedConfig,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    documents: Documents,
    position_ids: Tensor,
    cache: Cache | None,
) -> Tensor | None:
    """The kernels' mask for an attention mask [B, columns seen + T], or `None`, and positions [B or 1, T].

    Raises:
        ValueError: the kernels do not keep the documents apart.
    """
    # transformers finds packed documents in the positions only without a cache and a mask: an empty cache and a mask
    # without padding are left out
    if cache is not None and not cache.is_compileable and not cache.get_seq_length():
        cache = None
    documents_differ = None
    if cache is not None and documents.position_ids is not None:
        _require_one_document(attention_mask, documents.position_ids, hidden_states.shape[:2], cache)
    if cache is None and documents.padding is None:
        attention_mask = None
    elif cache is None and documents.position_ids is not None:
        begins = later_begins(*documents)
        if torch.compiler.is_compiling() or bool(begins.any()):
            if "flash" in config._attn_implementation:
                raise ValueError(
                    "flash attention does not keep documents apart in a row with padding: leave the padding out, with "
                    "its attention_mask"
                )
            documents_differ = packed_sequence_mask_function(begins.cumsum(1))
    return create_causal_mask(
        config=config,
        inputs_embeds=hidden_states,
        attention_mask=attention_mask,
        position_ids=position_ids,
        and_mask_function=documents_differ,
        layer_idx=config.attention_layer,
        **{CACHE_NAME: cache},
    )


def _require_one_document(
    attention_mask: Tensor | None, position_ids: Tensor, shape: tuple[int, int], cache: Cache
) -> None:
    """ValueError if a document begins in a row [B, T] of which a cache of keys holds tokens.

    Left out in a graph, and for a single token on a device, since `generate` would wait for every token.
    """
    waits = shape[1] == 1 and position_ids.device.type != "cpu"
    if torch.compiler.is_compiling() or cache.is_compileable or waits or not bool((position_ids == 0).any()):
        return
    padding = attention_mask
    if padding is None:
        batch_size, length = shape
        columns = int(cache.get_seq_length()) + length
        padding = position_ids.new_ones(batch_size, columns)
    if bool(later_begins(padding, position_ids).any()):
        raise ValueError(
            "position_ids begin a document after a cache that has read tokens, which 'full_attention' layers do not "
            "keep apart: give every document a row of its own, or an empty HopeCache(model.config)"
        )


def _counted_positions(hidden_states: Tensor, attention_mask: Tensor | dict | None, cache: Cache | None) -> Tensor:
    """Positions [B or 1, T] of a call that gives none: tokens are counted, and columns where no cache goes on."""
    length = hidden_states.shape[1]
    device = hidden_states.device
    if cache is not None and isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
        # padding may lie between what the cache has read and this call, as in joined caches
        is_real = attention_mask.to(device).ne(0)
        position = is_real.cumsum(dim=1) - 1
        return position.clamp(min=0)[:, -length:]
    column = torch.arange(length, device=device)
    if cache is not None:
        column = column + cache.get_seq_length()
    return column.unsqueeze(0)
