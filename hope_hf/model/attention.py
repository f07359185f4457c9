"""The softmax mixer of Hope-Attention: transformers' own attention with rotary positions.

Kernels (sdpa, eager, flash where installed) and the key-value cache come through transformers' attention interface.
"""

import torch
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaAttention


class HopeAttention(LlamaAttention):
    """Causal multi-head attention with rotary positions."""

    def forward(
        self, hidden_states: torch.Tensor, past_key_values: Cache | None = None, **kwargs
    ) -> tuple[torch.Tensor, None, torch.Tensor | None]:
        """[B, T, hidden_size]; no state, as the cache keeps keys and values; weights [B, H, T, T] of eager attention.

        `kwargs` are those of `LlamaAttention`: mask, rotary positions, and what the kernels take.
        """
        output, weights = super().forward(hidden_states, past_key_values=past_key_values, **kwargs)
        return output, None, weights
