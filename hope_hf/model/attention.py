"""The softmax mixer of Hope-Attention: transformers' own attention with rotary positions.

transformers' attention interface provides the kernels (sdpa, eager, flash if installed) and the key-value cache.
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
    """A cache for transformers' attention that concatenates a call's keys and values to a state, in new tensors.

    The given state does not change, so that a block recomputed in the backward pass reads the same state.
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
            state: keys and values of the text so far, unless a cache is given.
            need_state: whether to return the state after the last token.
            cache: cache to write into; no state is then read or returned. Not called `past_key_values`, since
                transformers removes that argument from recomputed blocks.
            context: arguments of `LlamaAttention`: mask, rotary positions, and options of the kernels.
        """
        extension = _Extension(state) if need_state and cache is None else None
        written = cache if extension is None else extension
        output, weights = super().forward(hidden_states, past_key_values=written, **context)
        return output, None if extension is None else extension.state, weights
