"""The softmax mixer of Hope-Attention: transformers' own attention with rotary positions.

Kernels (sdpa, eager, flash where installed) and the key-value cache come through transformers' attention interface.
"""

from transformers.models.llama.modeling_llama import LlamaAttention


class HopeAttention(LlamaAttention):
    """Causal multi-head attention with rotary positions; `forward` takes and gives what `LlamaAttention` does."""
