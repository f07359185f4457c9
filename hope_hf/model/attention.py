"""The softmax mixer of Hope-Attention: transformers' own attention with rotary positions.

Kernels (sdpa, eager, flash where installed) and the key-value cache come through transformers' attention interface.
"""

from typing import NamedTuple

import torch
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaAttention


class KeyValues(NamedTuple):
    """Keys and values of a text [B, H, T, D], as the state of a layer."""

    keys: torch.Tensor
    values: torch.Tensor


class _Extension:
    """What transformers' attention takes for a cache: it adds a call's keys and values to a state, and keeps the sum.

    The state itself stays as it is, so that a block that is run again in the backward pass finds it.
    """

    def __init__(self, state: KeyValues | None):
        self.state = state

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args) -> KeyValues:
        if self.state is not None:
            keys, values = (torch.cat(pair, dim=-2) for pair in zip(self.state, (keys, values), strict=True))
        self.state = KeyValues(keys, values)
        return self.state


class HopeAttention(LlamaAttention):
    """Causal multi-head attention with rotary positions."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        state: KeyValues | None = None,
        *,
        plan=None,
        need_state: bool = False,
        cache: Cache | None = None,
        **context,
    ) -> tuple[torch.Tensor, KeyValues | None, torch.Tensor | None]:
        """[B, T, hidden_size]; the state after the call; weights [B, H, T, T] of eager attention.

        Args:
            hidden_states: [B, T, hidden_size].
            state: keys and values of the text so far, where no cache is given.
            need_state: whether to return the state after the last token.
            cache: to write into instead: a state is then neither read nor returned. Not under transformers' name:
                from blocks that are recomputed it takes the cache of that name away.
            context: what `LlamaAttention` takes: mask, rotary positions, and options of the kernels.
        """
        extension = _Extension(state) if need_state and cache is None else None
        written = cache if extension is None else extension
        output, weights = super().forward(hidden_states, past_key_values=written, **context)
        return output, None if extension is None else extension.state, weights
