"""The softmax mixer of Hope-Attention: transformers' own attention with rotary positions.

Kernels (sdpa, eager, flash where installed) and the key-value cache come through transformers' attention interface.
"""

from typing import NamedTuple

import torch
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask, packed_sequence_mask_function
from transformers.models.llama.modeling_llama import LlamaAttention

from .configuration_hope import HopeConfig
from .documents import Documents, later_begins


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


def create_attention_mask(
    config: HopeConfig,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None,
    documents: Documents,
    position_ids: torch.Tensor,
    cache: Cache | None,
) -> torch.Tensor | None:
    """The mask that the kernels of `config` take (a `BlockMask` of flex attention is given and returned as it is).

    Args:
        hidden_states: [B, T, hidden_size].
        attention_mask: as given to the model: [B, columns seen + T], or 4-D, which is all there is to know.
        documents: what was told of this call.
        position_ids: [B or 1, T].

    Raises:
        ValueError: these kernels cannot keep such a mask.
    """
    if attention_mask is not None and attention_mask.ndim != 2:
        is_flash = "flash" in config._attn_implementation
        if attention_mask.ndim != 4 or is_flash:
            raise ValueError(
                f"attention_mask has the shape {tuple(attention_mask.shape)}, and {config._attn_implementation} takes "
                f"{'(batch, tokens)' if is_flash else '(batch, tokens) or four dimensions'}"
            )
        if not isinstance(attention_mask, torch.Tensor) or attention_mask.is_floating_point():
            return attention_mask
        # what eager attention adds to its scores
        masked = torch.finfo(hidden_states.dtype).min
        return hidden_states.new_zeros(attention_mask.shape).masked_fill(~attention_mask.bool(), masked)
    # transformers finds packed documents in the positions only where there is no cache and no mask: hide an empty
    # cache, and a mask without padding
    if cache is not None and not cache.is_compileable and not cache.get_seq_length():
        cache = None
    only_tokens = None
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
            only_tokens = packed_sequence_mask_function(begins.cumsum(1))
    return create_causal_mask(
        config=config,
        inputs_embeds=hidden_states,
        attention_mask=attention_mask,
        past_key_values=cache,
        position_ids=position_ids,
        and_mask_function=only_tokens,
        layer_idx=config.layer_types.index("full_attention"),
    )
