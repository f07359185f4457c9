"""One call of the trunk: its arguments are checked, and made into what every block reads.

`prepare_call` is entered once a call. A block reads hidden states, its layer's state, and the arguments that its mixer
names (`Mixer.needs`); the model writes the cache.

Axes: B row, T token of the call.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention import attention_arguments, check_reach
from .cache_hope import HopeCache, layers_written_after, past_of
from .chunks import Past, plan_chunks, plan_slots
from .configuration_hope import HopeConfig
from .documents import Documents, boundaries_of, mask_of_call, read_documents
from .level_learning import deltas_by_block
from .loss import IGNORED
from .mixers import MIXERS
from .retaining_plan import Sizes, plan_retaining, retaining_angles
from .window_plan import WindowSizes, plan_window, window_angles

# The models that this thread (or asynchronous task) reads with frozen memories.
_FROZEN: ContextVar[frozenset[nn.Module]] = ContextVar("frozen_memories", default=frozenset())

# Options of a language model, and what reads them; its trunk, also below another head, would not.
_READERS = {
    "learn": "HopeForCausalLM",
    "skip_logits": "HopeForCausalLM",
    "learn_generated": "generate of HopeForCausalLM",
    "recall": "generate of HopeForCausalLM",
}


@dataclass
class Call:
    """What the blocks of a trunk read of one call."""

    # embeddings of the call's tokens [B, T, hidden_size]
    hidden_states: Tensor
    # each block's layer is written after the block, that of softmax attention inside of it unless there are gradients;
    # `None` if none is given and none is asked for
    cache: Cache | None
    # of the cache, by block: states come from them and go back to them; empty without a cache
    cache_layers: list
    # counts of tokens after the call; `None` without layers that keep a state
    counts_after: Past | None
    # the arguments of every mixer, see `Mixer.needs`
    context: dict
    # what the text so far has taught the levels of each block
    deltas: dict[int, dict]
    # blocks below this one are read without gradients
    graph_from: int


def prepare_call(
    trunk: nn.Module,
    input_ids: Tensor | None,
    attention_mask: Tensor | dict | None,
    position_ids: Tensor | None,
    cache: Cache | None,
    inputs_embeds: Tensor | None,
    use_cache: bool | None,
    freeze_memories: bool | None,
    options: Mapping,
) -> Call:
    """The call with these arguments of `HopeModel.forward`; `options` are its further keywords.

    Raises:
        ValueError: the arguments do not fit the model, the cache or the tokens.
    """
    config = trunk.config
    check_inputs(config, input_ids, inputs_embeds)
    for option, reader in _READERS.items():
        if options.get(option):
            raise ValueError(f"{option}=True is read by {reader} alone: leave it out here")
    hidden_states = trunk.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
    counts_before = counts_after = None
    if cache is not None:
        counts_before = check_cache(cache, config, hidden_states)
    elif use_cache:
        cache = HopeCache(config)
    columns = mask_of_call(attention_mask, hidden_states.shape[:2], cache, trunk.has_state)
    documents = read_documents(columns, position_ids, boundaries_of(options), hidden_states, cache)
    context = {"need_state": cache is not None}
    if trunk.has_state:
        plans = plan_tokens(trunk, hidden_states, documents, counts_before)
        counts_after = next(iter(plans.values())).after
        if "chunks" in plans:
            plans["chunks"].is_frozen = reads_frozen(trunk, freeze_memories)
        context |= plans
    # CODEPATH: 'full_attention' layers alone and in hybrids.
    if "mask" in trunk.needs:
        context |= options
        context |= attention_arguments(config, trunk.rotary_emb, hidden_states, attention_mask, documents, cache)
    cache_layers = [] if cache is None else cache.layers
    if cache is not None and torch.is_grad_enabled():
        written_after = layers_written_after(cache)
        if trunk.training:
            check_recomputing(cache, written_after is not None, trunk.layers)
        if written_after is not None:
            # a recomputed block would write keys and values into the cache again
            cache_layers = written_after
            context["cache"] = None
    archive = getattr(cache, "archive", None)
    if archive is not None:
        archive.add(input_ids, hidden_states, documents.padding, documents.position_ids)
    levels = getattr(cache, "levels", None)
    return Call(
        hidden_states=hidden_states,
        cache=cache,
        cache_layers=cache_layers,
        counts_after=counts_after,
        context=context,
        deltas={} if levels is None else deltas_by_block(config, levels.deltas),
        graph_from=getattr(levels, "graph_from", 0),
    )


def plan_tokens(
    trunk: nn.Module,
    hidden_states: Tensor,
    documents: Documents,
    past: Past | None,
) -> dict:
    """Chunks, blocks and windows of a call's tokens, and their rotary angles, by the names of `Mixer.needs`.

    Args:
        hidden_states: [B, T, hidden_size].
        past: counts before the call, or `None` at a text's start.
    """
    config = trunk.config
    arguments = {
        "shape": hidden_states.shape[:2],
        "device": hidden_states.device,
        "past": past,
        "padding_mask": documents.padding,
        "position_ids": documents.position_ids,
    }
    plans = {}
    if "chunks" in trunk.needs:
        plans["chunks"] = plan_chunks(config, **arguments)
    # CODEPATH: 'sparse_attention' layers alone and in hybrids.
    if "blocks" in trunk.needs:
        blocks = plan_slots(config.sparse_block_size, grows=True, **arguments)
        check_reach(config, blocks.positions(), blocks.after.columns)
        plans["blocks"] = blocks
        plans["block_angles"] = trunk.rotary_emb(hidden_states, position_ids=blocks.positions())
    # CODEPATH: 'window_attention' layers alone and in hybrids.
    if "window" in trunk.needs:
        window = plan_window(WindowSizes.of(config), hidden_states.dtype, **arguments)
        plans["window"] = window
        plans["window_angles"] = window_angles(config, trunk.rotary_emb, hidden_states, window)
    # CODEPATH: 'retaining_attention' layers alone and in hybrids.
    if "retained" in trunk.needs:
        retained = plan_retaining(Sizes.of(config), hidden_states.dtype, **arguments)
        plans["retained"] = retained
        plans["retained_angles"] = retaining_angles(config, trunk.rotary_emb, hidden_states, retained)
    return plans


def reads_frozen(trunk: nn.Module, freeze_memories: bool | None = None) -> bool:
    """Whether a call of a trunk is frozen: by its argument `freeze_memories`, else inside `frozen_memories`."""
    # the tracer cannot read a context variable
    if freeze_memories is not None or torch.compiler.is_compiling():
        return bool(freeze_memories)
    return trunk in _FROZEN.get()


class FreezesMemories:
    """Models whose memories can stay as they are during a call."""

    @contextmanager
    def frozen_memories(self) -> Iterator[None]:
        """Inside, this thread reads with frozen memories; other threads do not. See `hope_hf.frozen_memories`."""
        token = _FROZEN.set(_FROZEN.get() | {self.base_model})
        try:
            yield
        finally:
            _FROZEN.reset(token)


def check_inputs(config: HopeConfig, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None) -> None:
    """ValueError unless exactly one is given: tokens [B, T] or embeddings [B, T, hidden_size] with T > 0.

    The values of tokens are checked on the CPU only, where the check does not wait for a device.
    """
    if not torch.compiler.is_compiling():
        _check_transforms()
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
    if inputs_embeds is not None and (inputs_embeds.ndim != 3 or inputs_embeds.shape[2] != config.hidden_size):
        raise ValueError(
            f"inputs_embeds has the shape {tuple(inputs_embeds.shape)}, and (batch, tokens, {config.hidden_size}) "
            "is needed"
        )
    if input_ids is not None and input_ids.ndim != 2:
        raise ValueError(
            f"input_ids has the shape {tuple(input_ids.shape)}, and (batch, tokens) is needed: give a single text as "
            "input_ids[None]"
        )
    inputs = inputs_embeds if input_ids is None else input_ids
    if 0 in inputs.shape[:2]:
        raise ValueError("the text has no tokens: give at least one, for instance the tokenizer's bos_token_id")
    if input_ids is not None:
        _check_tokens(input_ids, config.vocab_size)


def _check_transforms() -> None:
    """ValueError inside of `torch.func.vmap` and `torch.jit.trace`."""
    transforms = torch._C._functorch.get_interpreter_stack() or ()
    vmap = torch._C._functorch.TransformType.Vmap
    if any(transform.key() == vmap for transform in transforms):
        raise ValueError("torch.func.vmap cannot go over a HOPE model: give the texts as rows of input_ids")
    if torch.jit.is_tracing():
        raise ValueError("torch.jit.trace cannot read a HOPE model: use torch.export.export or torch.compile")


def _check_tokens(input_ids: Tensor, vocab_size: int) -> None:
    """ValueError for another dtype than those of tokens, and on the CPU for numbers that are no tokens."""
    if input_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"input_ids holds {input_ids.dtype}: give tokens as torch.int64")
    if input_ids.device.type != "cpu" or torch.compiler.is_compiling():
        return
    least, most = map(int, input_ids.aminmax())
    if least < 0 or most >= vocab_size:
        wrong = input_ids[(input_ids < 0) | (input_ids >= vocab_size)]
        raise ValueError(f"input_ids hold {int(wrong[0])}: give tokens from 0 to {vocab_size - 1}")


def check_labels(labels: Tensor, vocab_size: int) -> None:
    """ValueError for labels that are no tokens; on the CPU only, where the check does not wait for a device."""
    if labels.device.type == "cpu" and not torch.compiler.is_compiling():
        is_token = (labels >= 0) & (labels < vocab_size)
        wrong = labels[~is_token & (labels != IGNORED)]
        if len(wrong):
            raise ValueError(
                f"labels hold {int(wrong[0])}: give tokens from 0 to {vocab_size - 1}, or -100 to skip one"
            )


def check_cache(cache: Cache, config: HopeConfig, hidden_states: Tensor) -> Past | None:
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
        contents = "no layers" if layers is None else f"{number} layers"
        raise ValueError(
            f"the cache is a {type(cache).__name__} of {contents}, and the model has {config.num_hidden_layers}: "
            "give a HopeCache(model.config)"
        )
    # kinds of layers, of which one has been checked
    checked = set()
    for layer, kind in zip(layers, config.layer_types, strict=True):
        state_class = getattr(layer, "state_class", None)
        expected = MIXERS[kind].state_class
        # compared by name, since another copy of the code may have made the cache
        if state_class is not expected and _name(state_class) != _name(expected):
            raise ValueError(
                f"the cache is a {type(cache).__name__} with a {type(layer).__name__} where this model has a "
                f"layer of type '{kind}': give a HopeCache(model.config)"
            )
        if kind not in checked and _check_layer(layer, kind, config, hidden_states):
            checked.add(kind)
    past = past_of(cache)
    if past is not None:
        check_rows(len(past.seen), hidden_states)
    return past


def _check_layer(layer: CacheLayerMixin, kind: str, config: HopeConfig, hidden_states: Tensor) -> bool:
    """Whether a layer of a cache holds something to check; ValueError if the model cannot go on with it."""
    mixer = MIXERS[kind]
    if mixer.state_class is not None:
        if layer.state is None:
            return False
        mixer.check_state(layer.state, config, hidden_states.dtype)
        return True
    # a layer that quantises its keys may hold none of them as they are
    if not layer.is_initialized or layer.keys is None or not layer.keys.numel():
        return False
    check_rows(len(layer.keys), hidden_states)
    _check_keys(layer.keys.dtype, hidden_states)
    return True


def _name(state_class: type[tuple] | None) -> str | None:
    return None if state_class is None else state_class.__name__


def check_rows(cached_rows: int, inputs: Tensor) -> None:
    """ValueError if a cache has another number of rows than inputs [B, ...]."""
    if cached_rows != len(inputs):
        raise ValueError(
            f"the cache holds {cached_rows} sequences, and the input {len(inputs)}: choose rows with "
            "batch_select_indices or batch_repeat_interleave"
        )


def _check_keys(dtype: torch.dtype, hidden_states: Tensor) -> None:
    # under autocast keys have other dtypes than hidden states
    if dtype != hidden_states.dtype and not torch.is_autocast_enabled(hidden_states.device.type):
        raise ValueError(
            f"the cache holds {dtype} keys, and this model computes them in {hidden_states.dtype}: read the text with "
            "the model as it is now"
        )


def check_recomputing(cache: Cache, is_written_after: bool, blocks: Iterable[GradientCheckpointingLayer]) -> None:
    """ValueError if blocks that are recomputed in the backward pass would read another cache than the first time.

    Args:
        is_written_after: whether blocks take states from the cache and return them, and do not write the cache.
        blocks: blocks of a model in training.
    """
    for block in blocks:
        if not block.gradient_checkpointing:
            continue
        if not is_written_after:
            raise ValueError(
                f"the cache is a {type(cache).__name__} that is overwritten before gradient checkpointing reads it "
                "again: give a HopeCache(model.config)"
            )
        options = getattr(block._gradient_checkpointing_func, "keywords", {})
        if options.get("use_reentrant"):
            raise ValueError(
                "gradient checkpointing with use_reentrant=True cuts the gradient that goes through the cache: give "
                "use_reentrant=False"
            )
