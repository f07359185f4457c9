"""The softmax mixer of Hope-Attention: transformers' own attention with rotary positions.

Kernels (sdpa, eager, flash where installed) and the key-value cache come through transformers' attention interface.
"""

import torch
from transformers.models.llama.modeling_llama import LlamaAttention


class HopeAttention(LlamaAttention):
    """Causal multi-head attention with rotary positions."""

    def forward(
        self, hidden_states: torch.Tensor, state: None = None, *, plan=None, need_state: bool = False, **context
    ) -> tuple[torch.Tensor, None, torch.Tensor | None]:
        """[B, T, hidden_size]; no state, as the cache keeps keys and values; weights [B, H, T, T] of eager attention.

        `context` is what `LlamaAttention` takes: mask, rotary positions, the cache, and options of the kernels.
        """
        output, weights = super().forward(hidden_states, **context)
        return output, None, weights
