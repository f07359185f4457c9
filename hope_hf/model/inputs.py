"""The arguments of a call: tokens, masks, documents, labels and caches, with an error for arguments that do not fit.

Documents that share a row are given as `position_ids` that restart at 0, as numbers in the attention mask (1, 1, 2, 2,
0: padding), or as packing collators give them: `cu_seq_lens_q` and `cu_seq_lens_k` of flash attention, `cu_seqlens` of
fla, `seq_idx` of Mamba-2. All layers read positions, so the other forms are converted to positions.

Axes: B row, T token of the call.
"""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import NamedTuple

import torch
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask, packed_sequence_mask_function
from transformers.modeling_layers import GradientCheckpointingLayer

from .cache_hope import CACHE_NAME, past_of
from .chunks import Past
from .configuration_hope import HopeConfig
from .mixers import MIXERS
from .rotary import check_reach

BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx")


class Documents(NamedTuple):
    """Padding and documents of a call, for every layer."""

    # 0 for padding [B, T], or `None` without padding
    padding: torch.Tensor | None
    # [B or 1, T], 0 at the first token of a document; `None` if the call gives neither positions nor documents
    position_ids: torch.Tensor | None


def boundaries_of(arguments: Mapping) -> dict[str, torch.Tensor]:
    """The `BOUNDARIES` of documents among the arguments, by name."""
    return {name: arguments[name] for name in BOUNDARIES if arguments.get(name) is not None}


def check_mask_values(mask: torch.Tensor) -> bool:
    """Whether a mask [B, T] numbers documents; ValueError if it holds other values than whole numbers from 0.

    The call waits for the device.
    """
    least, most = (float(value) for value in mask.to(torch.float64).aminmax())
    is_whole = not mask.is_floating_point() or bool((mask == mask.round()).all())
    if least < 0 or not is_whole:
        raise ValueError(
            f"attention_mask holds values from {least:g} to {most:g}: give 1 for tokens and 0 for padding, or the "
            "number of every token's document, from 1"
        )
    return most > 1


def read_documents(
    attention_mask: torch.Tensor | dict | None,
    position_ids: torch.Tensor | None,
    arguments: Mapping,
    hidden_states: torch.Tensor,
    cache: Cache | None,
    has_state: bool,
) -> Documents:
    """Padding and positions of a call.

    Args:
        attention_mask: [B, columns seen + T], a mask of another shape for softmax attention, or the masks that
            `generate` makes for a cache of fixed length.
        position_ids: [B or 1, T].
        arguments: the call's other arguments, with `BOUNDARIES` of documents among them.
        hidden_states: [B, T, hidden_size].
        cache: the cache before the call.
        has_state: whether layers keep a state and need a mask of columns.

    Raises:
        ValueError: the arguments do not fit the call, or contradict each other.
    """
    shape, device = hidden_states.shape[:2], hidden_states.device
    if position_ids is not None and (position_ids.ndim != 2 or position_ids.shape[1] != shape[1]):
        raise ValueError(
            f"position_ids has the shape {tuple(position_ids.shape)}, and (batch, {shape[1]}) is needed: give those "
            "of a single text as position_ids[None]"
        )
    boundaries = boundaries_of(arguments) if arguments else {}
    padding = numbered = None
    if isinstance(attention_mask, dict):
        attention_mask = attention_mask.get("columns")
    elif attention_mask is not None and has_state:
        check_mask(attention_mask, *shape, 0 if cache is None else cache.get_seq_length())
    elif getattr(attention_mask, "ndim", None) != 2:
        attention_mask = None
    if attention_mask is not None:
        # Unlike in transformers' mask for recurrent models, a single token may be padding, on which a chunked prefill
        # can end. A compiled or exported graph must work for every mask.
        padding = attention_mask[:, -shape[1] :]
        if torch.compiler.is_compiling():
            # the graph has no documents; the mask of a generated token comes from `generate`
            if shape[1] > 1 and padding.dtype != torch.bool:
                fits = ((padding == 0) | (padding == 1)).all()
                torch._assert_async(fits, "attention_mask must hold 0 and 1 alone in a compiled graph")
        elif bool((padding == 1).all()):
            padding = None
        elif padding.dtype != torch.bool and check_mask_values(padding):
            numbered = padding
            padding = None if bool((numbered > 0).all()) else numbered > 0
    if numbered is None and not boundaries:
        return Documents(padding, position_ids)
    if cache is not None and (cache.is_compileable or cache.get_seq_length()):
        told = " and ".join([*boundaries, *["attention_mask"] * (numbered is not None)])
        raise ValueError(
            f"{told} cannot tell documents to a cache that has read tokens, or is a {type(cache).__name__} of fixed "
            "length: give position_ids that restart at 0, or an empty HopeCache(model.config)"
        )
    valid = torch.ones(shape, dtype=torch.bool, device=device) if padding is None else padding.bool()
    begins = {name: _begins(name, torch.as_tensor(value), shape).to(device) for name, value in boundaries.items()}
    if numbered is not None:
        begins["attention_mask"] = _begins_of_numbers(numbered)
    positions = {name: _positions(begin, valid) for name, begin in begins.items()}
    first, told = next(iter(positions.items()))
    if not torch.compiler.is_compiling():
        starts = (told == 0) & valid
        wrong = {name: starts != ((other == 0) & valid) for name, other in positions.items() if name != first}
        if position_ids is not None:
            # positions may also go on through all documents of a row
            wrong["position_ids"] = (position_ids == 0) & valid & ~starts
        for name, tokens in wrong.items():
            if bool(tokens.any()):
                row, column = tokens.nonzero()[0].tolist()
                raise ValueError(
                    f"{first} and {name} disagree on whether a document begins at token {column} of row {row}: give "
                    "one of them"
                )
    return Documents(padding, told)


def later_begins(padding: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Whether a document begins with a token [B, T] that is not the first of its row; see `Documents`.

    `padding` [B, C] may also hold columns before those of `position_ids` [B or 1, T].
    """
    real = padding.bool()
    return (position_ids == 0) & (real & (real.cumsum(1) > 1))[:, -position_ids.shape[1] :]


def _begins(name: str, value: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Whether a document begins with a token [B, T], from boundaries of the given name."""
    rows, length = shape
    if name == "seq_idx":
        if value.ndim != 2 or value.shape[1] != length or value.shape[0] not in (1, rows):
            raise ValueError(f"seq_idx has the shape {tuple(value.shape)}, and {tuple(shape)} is needed")
        value = value.expand(shape)
        return torch.cat([torch.ones_like(value[:, :1], dtype=torch.bool), value.diff(dim=1) != 0], dim=1)
    if value.ndim != 1 or value.is_floating_point():
        raise ValueError(
            f"{name} is a {value.dtype} tensor of shape {tuple(value.shape)}: give whole numbers, 0 and the tokens up "
            "to the end of every document"
        )
    if not torch.compiler.is_compiling():
        ends = value.tolist()
        if ends[:1] != [0] or ends[-1] != rows * length or any(a > b for a, b in pairwise(ends)):
            raise ValueError(
                f"{name} goes from {ends[:1]} to {ends[-1:]}, and it must grow from 0 to {rows * length}, the number "
                "of tokens of the input"
            )
        if not set(range(0, rows * length, length)) <= set(ends):
            raise ValueError(f"{name} has a document that goes on from one row to the next: give a single row")
    # one more entry for the end of the last document
    begins = torch.zeros(rows * length + 1, dtype=torch.bool, device=value.device)
    return begins.scatter(0, value.long(), torch.ones_like(value, dtype=torch.bool))[:-1].view(shape)


def _begins_of_numbers(numbers: torch.Tensor) -> torch.Tensor:
    """Whether a document begins with a token [B, T]: its number differs from that of the real token before it."""
    column = torch.arange(numbers.shape[1], device=numbers.device)
    real = numbers > 0
    last = torch.where(real, column, -1).cummax(1).values
    before = torch.nn.functional.pad(last, (1, 0), value=-1)[:, :-1]
    return real & ((before < 0) | (numbers.gather(1, before.clamp(min=0)) != numbers))


def _positions(begins: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Number of real tokens of its document before each token [B, T]; a document may begin with padding."""
    before = valid.cumsum(1) - valid.long()
    return before - torch.where(begins, before, 0).cummax(1).values


def check_inputs(
    config: HopeConfig, input_ids: torch.Tensor | None = None, inputs_embeds: torch.Tensor | None = None
) -> None:
    """ValueError unless exactly one is given: tokens [B, T] or embeddings [B, T, hidden_size] with T > 0.

    The values of tokens are checked on the CPU only, where the check does not wait for a device.
    """
    if not torch.compiler.is_compiling():
        transforms = torch._C._functorch.get_interpreter_stack() or ()
        if any(transform.key() == torch._C._functorch.TransformType.Vmap for transform in transforms):
            raise ValueError("torch.func.vmap cannot go over a HOPE model: give the texts as rows of input_ids")
        if torch.jit.is_tracing():
            raise ValueError("torch.jit.trace cannot read a HOPE model: use torch.export.export or torch.compile")
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
    if 0 in (inputs_embeds if input_ids is None else input_ids).shape[:2]:
        raise ValueError("the text has no tokens: give at least one, for instance the tokenizer's bos_token_id")
    if input_ids is None:
        return
    if input_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"input_ids holds {input_ids.dtype}: give tokens as torch.int64")
    if input_ids.device.type == "cpu" and not torch.compiler.is_compiling():
        least, most = map(int, input_ids.aminmax())
        if least < 0 or most >= config.vocab_size:
            wrong = input_ids[(input_ids < 0) | (input_ids >= config.vocab_size)]
            raise ValueError(f"input_ids hold {int(wrong[0])}: give tokens from 0 to {config.vocab_size - 1}")


def check_mask(attention_mask: torch.Tensor, batch_size: int, query_length: int, seen: int) -> None:
    """ValueError unless a mask has one column per token, including the `seen` tokens of earlier calls."""
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


def check_labels(labels: torch.Tensor, vocab_size: int) -> None:
    """ValueError for labels that are no tokens; on the CPU only, where the check does not wait for a device."""
    if labels.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = labels[(labels != -100) & ((labels < 0) | (labels >= vocab_size))]
        if len(wrong):
            raise ValueError(
                f"labels hold {int(wrong[0])}: give tokens from 0 to {vocab_size - 1}, or -100 to skip one"
            )


def check_cache(cache: Cache, config: HopeConfig, hidden_states: torch.Tensor) -> Past | None:
    """Counts of the tokens that layers with a state have read; an empty `DynamicCache()` gets its layers.

    Args:
        hidden_states: the call's embeddings [B, T, hidden_size].

    Raises:
        ValueError: other layers, another number of rows, another shape or dtype of the memories, or dtype of the keys.
    """
    layers = getattr(cache, "layers", None)
    if layers == [] and getattr(cache, "layer_class_to_replicate", None) is not None:
        # a cache made without a configuration would append layers for keys and values
        layers.extend(DynamicCache(config=config).layers)
        cache.layer_class_to_replicate = None
    number = -1 if layers is None else len(layers)
    if number != config.num_hidden_layers:
        held = "no layers" if layers is None else f"{len(layers)} layers"
        raise ValueError(
            f"the cache is a {type(cache).__name__} of {held}, and the model has {config.num_hidden_layers}: "
            "give a HopeCache(model.config)"
        )
    # kinds of layers, of which one has been checked
    checked = set()
    for layer, kind in zip(layers, config.layer_types, strict=True):
        mixer = MIXERS[kind]
        held, expected = getattr(layer, "state_class", None), mixer.state_class
        # compared by name, since another copy of the code may have made the cache
        if held is not expected and getattr(held, "__name__", None) != getattr(expected, "__name__", None):
            raise ValueError(
                f"the cache is a {type(cache).__name__} with a {type(layer).__name__} where this model has a "
                f"layer of type '{kind}': give a HopeCache(model.config)"
            )
        if kind in checked:
            continue
        if held is not None and layer.state is not None:
            mixer.check_state(layer.state, config, hidden_states.dtype)
            checked.add(kind)
        # a layer that quantises its keys may hold none of them as they are
        elif held is None and layer.is_initialized and layer.keys is not None and layer.keys.numel():
            _check_rows(len(layer.keys), hidden_states)
            _check_keys(layer.keys.dtype, hidden_states)
            checked.add(kind)
    past = past_of(cache)
    if past is not None:
        _check_rows(len(past.seen), hidden_states)
    return past


def _check_rows(held: int, hidden_states: torch.Tensor) -> None:
    if held != len(hidden_states):
        raise ValueError(
            f"the cache holds {held} sequences, and the input {len(hidden_states)}: choose rows with "
            "batch_select_indices or batch_repeat_interleave"
        )


def _check_keys(held: torch.dtype, hidden_states: torch.Tensor) -> None:
    # under autocast keys have other dtypes than hidden states
    if held != hidden_states.dtype and not torch.is_autocast_enabled(hidden_states.device.type):
        raise ValueError(
            f"the cache holds {held} keys, and this model computes them in {hidden_states.dtype}: read the text with "
            "the model as it is now"
        )


def check_recomputing(cache: Cache, is_carried: bool, blocks: Iterable[GradientCheckpointingLayer]) -> None:
    """ValueError if blocks that are recomputed in the backward pass would read another cache than the first time.

    Args:
        is_carried: whether blocks take states from the cache and return them, and do not write the cache.
        blocks: blocks of a model in training.
    """
    recomputing = [block._gradient_checkpointing_func for block in blocks if block.gradient_checkpointing]
    if recomputing and not is_carried:
        raise ValueError(
            f"the cache is a {type(cache).__name__} that is overwritten before gradient checkpointing reads it "
            "again: give a HopeCache(model.config)"
        )
    if any(getattr(function, "keywords", {}).get("use_reentrant") for function in recomputing):
        raise ValueError(
            "gradient checkpointing with use_reentrant=True cuts the gradient that goes through the cache: give "
            "use_reentrant=False"
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


def create_attention_mask(
    config: HopeConfig,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None,
    documents: Documents,
    position_ids: torch.Tensor,
    cache: Cache | None,
) -> torch.Tensor | None:
    """The mask for the attention kernels of `config`; a `BlockMask` of flex attention is returned unchanged.

    Args:
        hidden_states: [B, T, hidden_size].
        attention_mask: the model's argument: [B, columns seen + T], or 4-D, which replaces `documents`.
        documents: padding and documents of the call.
        position_ids: [B or 1, T].

    Raises:
        ValueError: the kernels do not support the mask.
    """
    if attention_mask is not None and not isinstance(attention_mask, torch.Tensor):
        if config._attn_implementation != "flex_attention":
            raise ValueError(
                f"attention_mask is a {type(attention_mask).__name__}, which {config._attn_implementation} does not "
                "take: set attn_implementation to flex_attention"
            )
        return attention_mask
    if attention_mask is not None and attention_mask.ndim != 2:
        is_flash = "flash" in config._attn_implementation
        if attention_mask.ndim != 4 or is_flash:
            raise ValueError(
                f"attention_mask has the shape {tuple(attention_mask.shape)}, and {config._attn_implementation} takes "
                f"{'(batch, tokens)' if is_flash else '(batch, tokens) or four dimensions'}"
            )
        if attention_mask.is_floating_point():
            return attention_mask
        # eager attention adds the mask to its scores
        masked = torch.finfo(hidden_states.dtype).min
        return hidden_states.new_zeros(attention_mask.shape).masked_fill(~attention_mask.bool(), masked)
    # transformers finds packed documents in the positions only without a cache and a mask: an empty cache and a mask
    # without padding are left out
    if cache is not None and not cache.is_compileable and not cache.get_seq_length():
        cache = None
    only_tokens = None
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
            only_tokens = packed_sequence_mask_function(begins.cumsum(1))
    return create_causal_mask(
        config=config,
        inputs_embeds=hidden_states,
        attention_mask=attention_mask,
        position_ids=position_ids,
        and_mask_function=only_tokens,
        layer_idx=config.attention_layer,
        **{CACHE_NAME: cache},
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


def attention_arguments(
    config: HopeConfig,
    rotary: torch.nn.Module,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | dict | None,
    documents: Documents,
    cache: Cache | None,
) -> dict:
    """Mask, positions and cache of softmax attention, from the arguments of a call (see `create_attention_mask`).

    Args:
        rotary: makes cosines and sines of positions.
        attention_mask: the model's argument, or the masks that `generate` makes for a cache of fixed length.
    """
    seen = 0 if cache is None else cache.get_seq_length()
    position_ids = documents.position_ids
    if position_ids is None:
        position_ids = _counted_positions(hidden_states, attention_mask, cache)
    check_reach(config, position_ids, seen + hidden_states.shape[1])
    if isinstance(attention_mask, dict):
        mask = attention_mask["attention"]
    else:
        mask = create_attention_mask(config, hidden_states, attention_mask, documents, position_ids, cache)
    return {
        "attention_mask": mask,
        # kernels without a mask find documents in the positions
        "position_ids": position_ids,
        "position_embeddings": rotary(hidden_states, position_ids=position_ids),
        "cache": cache,
    }
