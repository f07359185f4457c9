"""Mask, positions and cache of softmax attention, from the arguments of a call.

Axes: B row, T token of the call.
"""

import torch
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask, packed_sequence_mask_function

from .cache_hope import CACHE_NAME
from .configuration_hope import HopeConfig
from .documents import Documents, later_begins
from .rotary import check_reach


def attention_arguments(
    config: HopeConfig,
    rotary: torch.nn.Module,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | dict | None,
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
    seen = 0 if cache is None else cache.get_seq_length()
    position_ids = documents.position_ids
    if position_ids is None:
        position_ids = _counted_positions(hidden_states, attention_mask, cache)
    check_reach(config, position_ids, seen + hidden_states.shape[1])
    if isinstance(attention_mask, dict):
        mask = attention_mask["attention"]
    elif attention_mask is None or getattr(attention_mask, "ndim", None) == 2:
        mask = _mask_of_tokens(config, hidden_states, attention_mask, documents, position_ids, cache)
    else:
        mask = _given_mask(config, hidden_states, attention_mask)
    return {
        "attention_mask": mask,
        # kernels without a mask find documents in the positions
        "position_ids": position_ids,
        "position_embeddings": rotary(hidden_states, position_ids=position_ids),
        "cache": cache,
    }


def _given_mask(config: HopeConfig, hidden_states: torch.Tensor, attention_mask):
    """A mask of four dimensions, or a `BlockMask` of flex attention, as the kernels take it; it stands for documents.

    Raises:
        ValueError: the kernels do not support the mask.
    """
    kernels = config._attn_implementation
    if not isinstance(attention_mask, torch.Tensor):
        if kernels != "flex_attention":
            raise ValueError(
                f"attention_mask is a {type(attention_mask).__name__}, which {kernels} does not take: set "
                "attn_implementation to flex_attention"
            )
        return attention_mask
    if attention_mask.ndim != 4 or "flash" in kernels:
        shapes = "(batch, tokens)" if "flash" in kernels else "(batch, tokens) or four dimensions"
        raise ValueError(
            f"attention_mask has the shape {tuple(attention_mask.shape)}, and {kernels} takes {shapes}"
        )
    if attention_mask.is_floating_point():
        return attention_mask
    # eager attention adds the mask to its scores
    lowest = torch.finfo(hidden_states.dtype).min
    return hidden_states.new_zeros(attention_mask.shape).masked_fill(~attention_mask.bool(), lowest)


def _mask_of_tokens(
    config: HopeConfig,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None,
    documents: Documents,
    position_ids: torch.Tensor,
    cache: Cache | None,
) -> torch.Tensor | None:
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
    attention_mask: torch.Tensor | None, position_ids: torch.Tensor, shape: tuple[int, int], cache: Cache
) -> None:
    """ValueError if a document begins in a row [B, T] of which a cache of keys holds tokens.

    Left out in a graph, and for a single token on a device, since `generate` would wait for every token.
    """
    waits = shape[1] == 1 and position_ids.device.type != "cpu"
    if torch.compiler.is_compiling() or cache.is_compileable or waits or not bool((position_ids == 0).any()):
        return
    padding = attention_mask
    if padding is None:
        padding = position_ids.new_ones(shape[0], int(cache.get_seq_length()) + shape[1])
    if bool(later_begins(padding, position_ids).any()):
        raise ValueError(
            "position_ids begin a document after a cache that has read tokens, which 'full_attention' layers do not "
            "keep apart: give every document a row of its own, or an empty HopeCache(model.config)"
        )


def _counted_positions(hidden_states: torch.Tensor, attention_mask: torch.Tensor | dict | None, cache: Cache | None):
    """Positions [B or 1, T] of a call that gives none: tokens are counted, and columns where no cache goes on."""
    length, device = hidden_states.shape[1], hidden_states.device
    if cache is None:
        return torch.arange(length, device=device).unsqueeze(0)
    if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
        # padding may lie between what the cache has read and this call, as in joined caches
        real = attention_mask.to(device).ne(0)
        return (real.cumsum(dim=1) - 1).clamp(min=0)[:, -length:]
    return (torch.arange(length, device=device) + cache.get_seq_length()).unsqueeze(0)
