"""What a call of the model is given: tokens, masks, labels, caches, and a sentence for what does not fit."""

from collections.abc import Iterable

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from .cache_hope import is_memory_layer, level_layers, past_of
from .configuration_hope import HopeConfig
from .continuum import keeps_state
from .memory_scan import ScanState
from .sparse_attention import SparseState


def check_inputs(
    config: HopeConfig, input_ids: torch.Tensor | None = None, inputs_embeds: torch.Tensor | None = None
) -> None:
    """ValueError unless exactly one of them is given and is a text: tokens [B, T] or embeddings [B, T, hidden_size].

    Whether tokens are in the vocabulary is seen on the CPU only, where looking at them does not wait for a device.
    """
    if not torch.compiler.is_compiling():
        transforms = torch._C._functorch.get_interpreter_stack() or ()
        if any(transform.key() == torch._C._functorch.TransformType.Vmap for transform in transforms):
            raise ValueError("torch.func.vmap cannot go over a HOPE model: give the texts as rows of input_ids")
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
    if input_ids is None:
        if inputs_embeds.ndim != 3 or inputs_embeds.shape[2] != config.hidden_size:
            raise ValueError(
                f"inputs_embeds has the shape {tuple(inputs_embeds.shape)}, and (batch, tokens, {config.hidden_size}) "
                "is needed"
            )
    elif input_ids.ndim != 2:
        raise ValueError(
            f"input_ids has the shape {tuple(input_ids.shape)}, and (batch, tokens) is needed: give a single text as "
            "input_ids[None]"
        )
    if (inputs_embeds if input_ids is None else input_ids).shape[1] == 0:
        raise ValueError("the text has no tokens: give at least one, for instance the tokenizer's bos_token_id")
    if input_ids is None:
        return
    if input_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"input_ids holds {input_ids.dtype}: give tokens as torch.int64")
    if input_ids.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = input_ids[(input_ids < 0) | (input_ids >= config.vocab_size)]
        if len(wrong):
            raise ValueError(f"input_ids hold {int(wrong[0])}: give tokens from 0 to {config.vocab_size - 1}")


def check_mask(attention_mask: torch.Tensor, batch_size: int, query_length: int, seen: int) -> None:
    """ValueError for a mask that does not have one column per token, read ones included."""
    shape, expected = tuple(attention_mask.shape), (batch_size, seen + query_length)
    if not isinstance(attention_mask, torch.Tensor) or len(shape) != 2:
        raise ValueError(
            f"attention_mask has the shape {shape}, and layers that keep a state read no such masks: give {expected}, "
            "with 1 for a token (or the number of its document) and 0 for padding"
        )
    if shape != expected:
        raise ValueError(
            f"attention_mask has the shape {shape}, and {expected} is needed: one row per sequence, one column for "
            f"each of the {seen} tokens read before and the {query_length} of this call"
        )


def create_generation_masks(
    config: HopeConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    past_key_values: Cache | None = None,
    position_ids: torch.Tensor | None = None,
    **_,
) -> dict[str, torch.Tensor | None]:
    """Masks by kind of layer, of one shape for every generated token: `generate` makes them for caches of fixed shape.

    Of memories, the columns [B, T] that belong to `inputs_embeds` [B, T, ...]; of attention, transformers' own.
    """
    masks = {}
    if keeps_state(config):
        # A slice has the strides of the mask that grows, and each would compile a graph of its own.
        local = None if attention_mask is None else attention_mask[:, -inputs_embeds.shape[1] :]
        masks["hope_memory"] = None if local is None else local.clone(memory_format=torch.contiguous_format)
    if config.has_attention:
        layer = config.layer_types.index("full_attention")
        masks["full_attention"] = create_causal_mask(
            config, inputs_embeds, attention_mask, past_key_values, position_ids, layer_idx=layer
        )
    return masks


def check_labels(labels: torch.Tensor, vocab_size: int) -> None:
    """ValueError for labels that are no tokens; on the CPU only, where looking at them does not wait for a device."""
    if labels.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = labels[(labels != -100) & ((labels < 0) | (labels >= vocab_size))]
        if len(wrong):
            raise ValueError(
                f"labels hold {int(wrong[0])}: give tokens from 0 to {vocab_size - 1}, or -100 to skip one"
            )


def check_cache(cache: Cache, config: HopeConfig, hidden_states: torch.Tensor) -> None:
    """Refuse a cache that is not of this model, or not of these rows; give an empty `DynamicCache()` its layers.

    Args:
        hidden_states: [B, T, hidden_size], what is read next.

    Raises:
        ValueError: other layers, another number of rows, another shape or dtype of the memories.
    """
    layers = getattr(cache, "layers", None)
    if layers == [] and getattr(cache, "layer_class_to_replicate", None) is not None:
        # made without a config, it would append layers for keys and values
        layers.extend(DynamicCache(config=config).layers)
        cache.layer_class_to_replicate = None
    # compared, as the tracer of torch 2.11 breaks its graph at `bool(layers)`
    has_layers = layers is not None and len(layers) > 0
    of_levels = level_layers(config, is_static=has_layers and cache.is_compileable)
    if of_levels and has_layers and len(layers) == config.num_hidden_layers and not cache.get_seq_length():
        layers.extend(of_levels)
    if layers is None or len(layers) != config.num_hidden_layers + len(of_levels):
        held = "no layers" if layers is None else f"{len(layers)} layers"
        raise ValueError(
            f"past_key_values is a {type(cache).__name__} of {held}, and the model has {config.num_hidden_layers}: "
            "give a HopeCache(model.config)"
        )
    for layer, kind in zip(layers, config.layer_types, strict=False):
        if not _is_of_kind(layer, kind):
            raise ValueError(
                f"past_key_values is a {type(cache).__name__} with a {type(layer).__name__} where this model has a "
                f"layer of type '{kind}': give a HopeCache(model.config)"
            )
        if kind == "hope_memory" and layer.state is not None:
            _check_memories(layer.state, config, hidden_states.dtype)
        if kind == "sparse_attention" and layer.state is not None:
            _check_sparse(layer.state, config)
    past = past_of(cache)
    if past is not None and len(past.seen) != len(hidden_states):
        raise ValueError(
            f"past_key_values holds {len(past.seen)} sequences, and the input {len(hidden_states)}: choose rows with "
            "batch_select_indices or batch_repeat_interleave"
        )


def check_recomputing(cache: Cache, is_carried: bool, blocks: Iterable[GradientCheckpointingLayer]) -> None:
    """ValueError where blocks that are run again in the backward pass would not find what they read the first time.

    Args:
        is_carried: whether blocks take from the cache, and return, all that they read and write.
        blocks: of a model in training.
    """
    recomputing = [block._gradient_checkpointing_func for block in blocks if block.gradient_checkpointing]
    if recomputing and not is_carried:
        raise ValueError(
            f"past_key_values is a {type(cache).__name__} that is overwritten before gradient checkpointing reads it "
            "again: give a HopeCache(model.config)"
        )
    if any(getattr(function, "keywords", {}).get("use_reentrant") for function in recomputing):
        raise ValueError(
            "gradient checkpointing with use_reentrant=True cuts the gradient that goes through past_key_values: give "
            "use_reentrant=False"
        )


# of the states of a layer, whichever copy of the code made it
_STATES = {"hope_memory": ScanState.__name__, "sparse_attention": SparseState.__name__}


def _is_of_kind(layer: CacheLayerMixin, kind: str) -> bool:
    if not is_memory_layer(layer):
        return kind not in _STATES
    return layer.state_class.__name__ == _STATES.get(kind)


def _check_sparse(state: SparseState, config: HopeConfig) -> None:
    (_, heads, slots, width), (blocks, strides) = state.slot_keys.shape, state.compressed_keys.shape[2:4]
    held = (heads, width, slots // blocks, slots // (blocks * strides), state.conv_tail.shape[1] + 1)
    ours = (
        config.num_key_value_heads, config.head_dim, config.sparse_block_size, config.sparse_compress_stride,
        config.conv_kernel_size,
    )  # fmt: skip
    if held != ours:
        layout = "{} heads of width {}, blocks of {}, strides of {} and convolutions of {} tokens"
        raise ValueError(
            f"past_key_values holds sparse attention with {layout.format(*held)}, and this model's has "
            f"{layout.format(*ours)}: it is the cache of another model"
        )


def _check_memories(state: ScanState, config: HopeConfig, dtype: torch.dtype) -> None:
    tail, heads, width = state.conv_tail, config.num_memory_heads, config.head_dim
    memories = len(config.memory_projections) + 1
    held = state.current[0][0].numel() // (tail.shape[1] * width**2)
    if tuple(tail.shape[1:]) != (heads, config.conv_kernel_size - 1, 3 * width) or held != memories:
        raise ValueError(
            f"past_key_values holds {tail.shape[1]} heads of {held} memories of width {tail.shape[3] // 3}, and this "
            f"model's have {heads} of {memories} of width {width}: it is the cache of another model"
        )
    dtype = torch.promote_types(dtype, torch.float32)
    if tail.dtype != dtype:
        raise ValueError(
            f"past_key_values holds {tail.dtype} memories, and this model computes them in {dtype}: read the text "
            "with the model as it is now"
        )
