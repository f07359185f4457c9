"""Which columns of a padding mask the tokens of one call need."""

import torch
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask

from .configuration_hope import HopeConfig


def local_padding_mask(attention_mask: torch.Tensor | None, query_length: int) -> torch.Tensor | None:
    """The columns of a 2-D padding mask that belong to this call's tokens; `None` where they hold no padding.

    Unlike transformers' own mask for recurrent models, a call of one token may be padding, too: a chunked prefill can
    end on it. In a compiled or exported graph, which must serve every mask, any may be.
    """
    if attention_mask is None or attention_mask.ndim != 2:
        return None
    local = attention_mask[:, -query_length:]
    return None if not torch.compiler.is_compiling() and bool(local.all()) else local


def create_generation_masks(
    config: HopeConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    past_key_values: Cache | None,
    position_ids: torch.Tensor | None = None,
    **kwargs,
) -> dict[str, torch.Tensor | None]:
    """Masks by kind of layer, of one shape for every generated token: `generate` makes them for caches of fixed shape.

    Of memories, the columns [B, T] that belong to `inputs_embeds` [B, T, ...]; of attention, transformers' own.
    `kwargs` are what `generate` has for other models.
    """
    masks = {}
    if config.has_attention:
        layer = config.layer_types.index("full_attention")
        masks["full_attention"] = create_causal_mask(
            config, inputs_embeds, attention_mask, past_key_values, position_ids, layer_idx=layer
        )
    if config.has_memories:
        # A slice has the strides of the mask that grows, and each would compile a graph of its own.
        local = None if attention_mask is None else attention_mask[:, -inputs_embeds.shape[1] :]
        masks["hope_memory"] = None if local is None else local.clone(memory_format=torch.contiguous_format)
    return masks
