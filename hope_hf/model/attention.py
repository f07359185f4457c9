"""Softmax attention as Llama, Mistral, Qwen2 and Qwen3 have it, with transformers' own kernels."""

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, eager_attention_forward

from .cache_hope import KeyValues
from .layers import HopeRMSNorm, Mixer


class HopeAttention(Mixer, LlamaAttention):
    """Causal multi-head attention with rotary positions.

    With `use_qk_norm`, queries and keys are normalised over the head width before they are rotated, as in Qwen3.
    """

    needs = frozenset({"mask", "rotary"})
    heads = ("num_attention_heads", "num_key_value_heads")
    input_readers = 3
    name = "softmax attention"

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        if config.attention_out_bias not in (None, config.attention_bias):
            self.o_proj = nn.Linear(self.o_proj.in_features, self.o_proj.out_features, config.attention_out_bias)
        self.q_norm = self.k_norm = None
        if config.use_qk_norm:
            self.q_norm, self.k_norm = (HopeRMSNorm(self.head_dim, config.rms_norm_eps) for _ in range(2))

    def forward(
        self,
        hidden_states: torch.Tensor,
        state: KeyValues | None = None,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        plan=None,
        need_state: bool = False,
        cache: Cache | None = None,
        **options,
    ) -> tuple[torch.Tensor, KeyValues | None, torch.Tensor | None]:
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
        after = None
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx)
        elif need_state:
            if state is not None:
                # in new tensors: a block that is recomputed in the backward pass reads the same state again
                keys, values = (torch.cat(pair, dim=-2) for pair in zip(state, (keys, values), strict=True))
            after = KeyValues(keys, values)
        kernel = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.attention_dropout if self.training else 0.0
        reads, weights = kernel(
            self, queries, keys, values, attention_mask, dropout=dropout, scaling=self.scaling, **options
        )
        output = self.o_proj(reads.reshape(*reads.shape[:-2], -1).contiguous())
        return output, after, weights

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [B, H, T, head_dim], keys and values [B, key heads, T, head_dim], without positions."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        queries, keys, values = (
            projection(hidden_states).view(shape) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
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

    @staticmethod
    def kept_bytes(config: PreTrainedConfig, batch_size: int, length: int, low: int) -> int:
        """Queries, keys, values and reads, and the sum of every query's softmax in fp32; what norms keep in fp32."""
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        # the norms keep their input and the normalised input
        normed = 8 * (heads + groups) if config.use_qk_norm else 0
        return batch_size * length * ((low * (2 * heads + 2 * groups) + normed) * config.head_dim + 4 * heads)
