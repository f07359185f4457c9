"""The cache of a HOPE model: states of memories, and keys and values of softmax attention."""

import copy
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.deprecation import deprecate_kwarg

from .cache_file import (
    CACHE_FILE,
    check_tensors,
    checksum_in,
    named_tensors,
    read_cache,
    state_of_named,
    write_cache,
)
from .cache_rows import CacheRows, Rows, is_memory_layer
from .chunks import Past
from .fingerprint import fingerprint, is_of
from .level_learning import LEVEL_DTYPES, LevelState, loaded_state

# What this transformers calls a cache in calls and outputs: `past_key_values` before 5.24.
CACHE_NAME = "cache" if hasattr(BaseModelOutputWithPast, "cache") else "past_key_values"
# A function that takes `cache` takes `past_key_values`, too: in silence where that is transformers' own name.
takes_cache = deprecate_kwarg("past_key_values", "5.40.0" if CACHE_NAME == "cache" else "5.0.0", new_name="cache")
# Prefix of the names of what levels have learned.
_OF_LEVELS = "levels."


class KeyValues(NamedTuple):
    """Keys and values of a text [B, H, T, D], as the state of a layer."""

    keys: torch.Tensor
    values: torch.Tensor


def map_state(function: Callable[[torch.Tensor], torch.Tensor], state: tuple) -> tuple:
    """The state with `function` applied to every tensor."""
    mapped = []
    for part in state:
        if isinstance(part, tuple):
            mapped.append(tuple(function(tensor) for tensor in part))
        else:
            mapped.append(function(part))
    return type(state)(*mapped)


class HopeMemoryLayer(Rows, CacheLayerMixin):
    """State of one mixer.

    `state`, a `state_class`, is the mixer's last result; `past` counts the tokens read. Both are `None` before the
    first token.
    """

    is_compileable = False
    is_croppable = False
    supports_early_init = False
    is_sliding = False

    def __init__(self, state_class: type[tuple], **kwargs):
        super().__init__()
        self.state_class = state_class
        self.reset()

    def reset(self) -> None:
        """Return to the state before the first token."""
        self.state: tuple | None = None
        self.past: Past | None = None
        self.is_initialized = False

    def update_state(self, state: tuple, past: Past) -> None:
        """Replace the state; `past` counts the tokens read."""
        self.state, self.past = state, past
        self.device = past.seen.device
        self.is_initialized = True

    def update(self, *args, **kwargs):
        raise RuntimeError("a self-modifying memory keeps no keys and values")

    lazy_initialization = update

    def get_seq_length(self) -> int:
        """Number of columns read, including padding: `generate` slices its inputs by it."""
        return 0 if self.past is None else self.past.columns

    def get_max_length(self) -> int:
        """-1: the state does not grow."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the attention mask for the next `query_length` tokens."""
        return self.get_seq_length() + query_length, 0

    def crop(self, *args) -> None:
        raise RuntimeError("a layer's state cannot unread tokens: take a HopeCache.snapshot() and roll back")

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply `function` to every tensor."""
        if self.state is not None:
            self.state, self.past = map_state(function, self.state), self.past.map(function)

    def offload(self) -> None:
        """Move the state to the CPU."""
        self.map(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move the state back to its device."""
        self.map(lambda tensor: tensor.to(self.device, non_blocking=True))

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """The layer's contents by name: batch-first tensors, and its counts `columns` as two integers."""
        if self.past is None:
            return {"columns": torch.tensor([0, 1])}
        columns, is_uniform, seen, digest = self.past
        counts = {"columns": torch.tensor([columns, int(is_uniform)]), "seen": seen, "digest": digest}
        return named_tensors(self.state) | counts

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Restore the result of `named_tensors`."""
        columns, is_uniform = tensors.pop("columns").tolist()
        if tensors:
            past = Past(columns, bool(is_uniform), tensors.pop("seen"), tensors.pop("digest"))
            self.update_state(state_of_named(self.state_class, tensors), past)


class HopeStaticMemoryLayer(HopeMemoryLayer):
    """State of one layer in transformers' `StaticCache`, for compiled generation.

    The next token overwrites the state and the counts in place, so no gradient goes through them.
    """

    is_compileable = True

    def update_state(self, state: tuple, past: Past) -> None:
        """Copy the state and the counts into the layer's tensors."""
        if self.state is None:
            # A Python number would become a constant of the compiled graph, and every token would compile another.
            columns = torch.tensor(past.columns, device=past.seen.device)
            super().update_state(state, Past(columns, False, past.seen, past.digest))
            # Cloned, since the current weights and those of the chunk's start can be one tensor.
            self.map(lambda tensor: tensor.detach().clone())
            return
        self.past.columns.copy_(past.columns)
        self.past.seen.copy_(past.seen)
        self.past.digest.copy_(past.digest)
        new = named_tensors(state)
        for name, tensor in named_tensors(self.state).items():
            tensor.copy_(new[name].detach())


def past_of(cache: Cache | None) -> Past | None:
    """Counts of the tokens that a cache's memories have read."""
    layers = () if cache is None else cache.layers
    return next((layer.past for layer in layers if is_memory_layer(layer)), None)


class FunctionalKeys:
    """A layer of keys and values with the interface of `HopeMemoryLayer`."""

    def __init__(self, layer: DynamicLayer):
        self.layer = layer

    @property
    def state(self) -> KeyValues | None:
        """Keys and values of the layer."""
        return KeyValues(self.layer.keys, self.layer.values) if self.layer.is_initialized else None

    def update_state(self, state: KeyValues, past: Past | None) -> None:
        """Replace keys and values."""
        if not self.layer.is_initialized:
            self.layer.update(*state)
        self.layer.keys, self.layer.values = state


def functional_layers(cache: Cache) -> list[HopeMemoryLayer | FunctionalKeys] | None:
    """Layers of a cache into which blocks do not write, so that blocks can be recomputed; `None` if it has others."""
    if cache.is_compileable or getattr(cache, "offloading", False):
        return None
    layers = []
    for layer in cache.layers:
        if type(layer) is DynamicLayer:
            layer = FunctionalKeys(layer)
        if not hasattr(layer, "update_state"):
            return None
        layers.append(layer)
    return layers


def _levels_of(tensors: dict[str, torch.Tensor]) -> LevelState | None:
    """What levels have learned, of the tensors of a cache; `None` if they hold nothing of it."""
    named = _with_prefix(tensors, _OF_LEVELS)
    return LevelState.of_named(named) if named else None


def _with_prefix(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The tensors whose names have a prefix, by the names behind it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


class Snapshot(NamedTuple):
    """What `HopeCache.rollback` needs."""

    layers: list[CacheLayerMixin]
    levels: LevelState | None


class HopeCache(CacheRows, DynamicCache):
    """Cache of a HOPE model: `cache` of its `forward` and of `generate`, which transformers below 5.24 calls
    `past_key_values`.

    It has a `HopeMemoryLayer` for every layer with memories or sparse attention, and a growing key-value layer for
    softmax attention. `levels` is what levels have learned from each row's text, `None` before they learn.
    `copy.deepcopy` forks the cache, `snapshot` and `rollback` go back to an earlier token, `joined` and `split` make a
    batch of several caches and caches of a batch, `save_pretrained` and `from_pretrained` keep it as a file.

    Example:

    ```python
    >>> import torch
    >>> from hope_hf import HopeCache, HopeConfig, HopeForCausalLM
    >>> model = HopeForCausalLM(HopeConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2)).eval()
    >>> cache = HopeCache(model.config)
    >>> out = model(torch.tensor([[1, 2, 3]]), cache=cache)
    >>> before = cache.snapshot()
    >>> logits = model(torch.tensor([[4, 5]]), cache=cache).logits
    >>> cache.rollback(before).get_seq_length()
    3
    >>> torch.equal(model(torch.tensor([[4, 5]]), cache=cache).logits, logits)
    True
    ```
    """

    # the folder of the file that this cache was read from or written to, and that file's checksum
    _read_from: tuple[Path, str | None] | None = None

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config=config)
        self.levels: LevelState | None = None

    def __deepcopy__(self, memo: dict) -> "HopeCache":
        if any(tensor.grad_fn is not None for tensor in self.state_tensors().values()):
            raise ValueError(
                "the cache carries the graph of the text it has read, which cannot be copied: read under "
                "torch.no_grad(), or call detach_() before copying"
            )
        memo[id(self)] = fork = type(self).__new__(type(self))
        fork.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return fork

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "HopeCache":
        """Apply `function` to every tensor, in place."""
        for layer in self.layers:
            if is_memory_layer(layer):
                layer.map(function)
            elif layer.is_initialized:
                layer.keys, layer.values = function(layer.keys), function(layer.values)
        self.levels = None if self.levels is None else self.levels.map(function)
        return self

    def detach_(self) -> "HopeCache":
        """Detach all tensors in place: truncated backpropagation through time."""
        return self.map(torch.Tensor.detach)

    def to(self, device: torch.device | str | int | None) -> "HopeCache":
        """Move every tensor to a device, in place; `None`, as accelerate's hooks call it, moves nothing."""
        if device is None:
            return self
        for layer in self.layers:
            if layer.is_initialized:
                layer.device = torch.device(device)
        return self.map(lambda tensor: tensor.to(device))

    def snapshot(self) -> Snapshot:
        """A snapshot for `rollback`. It copies no tensor, since new tokens make new tensors."""
        return Snapshot([copy.copy(layer) for layer in self.layers], self.levels)

    def rollback(self, snapshot: Snapshot) -> "HopeCache":
        """Return to a snapshot of this cache, in place; the snapshot can be used again."""
        if [type(layer) for layer in snapshot.layers] != [type(layer) for layer in self.layers]:
            raise ValueError("the snapshot is of a cache with other layers: roll back the cache it was taken of")
        self.layers = [copy.copy(layer) for layer in snapshot.layers]
        self.levels = snapshot.levels
        return self

    def reset(self) -> None:
        """Return to the state before the first token."""
        super().reset()
        for layer in self.layers:
            if not is_memory_layer(layer):
                # releases such as 5.17 set keys and values to zero, and keep them
                layer.keys = layer.values = None
                layer.is_initialized = False
        self.levels = None

    def crop(self, *args) -> None:
        """As in transformers; RuntimeError, before anything is cropped, if a layer keeps a state."""
        # layers with a state first, since they raise
        for layer in sorted(self.layers, key=lambda layer: not is_memory_layer(layer)):
            layer.crop(*args)

    def reset_levels(self) -> "HopeCache":
        """Drop what levels have learned; the text stays read."""
        self.levels = None
        return self

    def _copied(self) -> "HopeCache":
        """Another cache with the same tensors."""
        copied = copy.copy(self)
        return copied.rollback(self.snapshot())

    @property
    def num_sequences(self) -> int:
        """Sequences that the cache holds; 0 before the first token."""
        tensors = self.state_tensors()
        # of `columns` every layer has two, whatever the number of rows
        return next((len(tensor) for name, tensor in tensors.items() if not name.endswith(".columns")), 0)

    @property
    def level_bytes(self) -> int:
        """Bytes of what levels have learned."""
        return 0 if self.levels is None else self.levels.nbytes

    @property
    def memory_layers(self) -> list[HopeMemoryLayer]:
        """The layers of self-modifying memories."""
        return [layer for layer in self.layers if is_memory_layer(layer)]

    def state_tensors(self, level_dtype: str = "float32") -> dict[str, torch.Tensor]:
        """The cache's contents by name: batch-first tensors, and each memory's counts as two integers.

        `level_dtype` is that of what levels have learned (`LevelState.named`).
        """
        tensors = {}
        if self.levels is not None:
            for name, tensor in self.levels.named(level_dtype).items():
                tensors[f"{_OF_LEVELS}{name}"] = tensor
        for index, layer in enumerate(self.layers):
            state = {}
            if is_memory_layer(layer):
                state = layer.named_tensors()
            elif layer.is_initialized:
                state = {"keys": layer.keys, "values": layer.values}
            for name, tensor in state.items():
                tensors[f"{index}.{name}"] = tensor
        return tensors

    @classmethod
    def from_state_tensors(cls, config: PreTrainedConfig, tensors: dict[str, torch.Tensor]) -> "HopeCache":
        """The cache with these `state_tensors`."""
        cache = cls(config)
        cache.levels = _levels_of(tensors)
        for index, layer in enumerate(cache.layers):
            state = _with_prefix(tensors, f"{index}.")
            if not is_memory_layer(layer):
                if state:
                    layer.update(state["keys"], state["values"])
            elif "columns" not in state:
                raise ValueError(f"the saved memory has no layer {index}: it belongs to a model with fewer layers")
            else:
                layer.load(state)
        return cache

    def save_pretrained(
        self, save_directory: str | Path, model: PreTrainedModel, level_dtype: str = "float32"
    ) -> None:
        """Write `hope_cache.safetensors` into a folder: tensors, a checksum, and the model's fingerprint.

        Args:
            save_directory: created if it does not exist; a cache in it is replaced, unless it was
                replaced since this one was read from there.
            model: the HOPE model of the cache, also in a `PeftModel`, with the adapters active that read the text. The
                weights that it computes with are hashed, and those adapters (see `fingerprint.fingerprint`).
            level_dtype: of what levels have learned: "float32" stores it as it is, "bfloat16" and "int8" take a half
                and a quarter of the space.

        Raises:
            ValueError: nothing was read yet, the memories hold NaN or infinity, another dtype, or the file in the
                folder is not the one that this cache was read from.
        """
        model = _without_peft(model)
        if not self.get_seq_length():
            raise ValueError("the cache has read nothing: give it to the model with a text, then save it")
        if level_dtype not in LEVEL_DTYPES:
            raise ValueError(f"level_dtype is '{level_dtype}': choose one of {', '.join(LEVEL_DTYPES)}")
        if self.levels is not None and model.config.level_learning is None:
            raise ValueError("the cache holds what levels have learned, and `level_learning` is None: set it back")
        folder = Path(save_directory)
        place, known = self._read_from or (None, None)
        if folder.resolve() == place and checksum_in(folder) not in (None, known):
            raise ValueError(
                f"{folder / CACHE_FILE} was replaced since this cache was read from it: save to another folder"
            )
        fields = None if self.levels is None else asdict(model.config.level_learning)
        write_cache(folder, self.state_tensors(level_dtype), fingerprint(model), fields)
        self._read_from = folder.resolve(), checksum_in(folder)

    @staticmethod
    def checksum_in(directory: str | Path) -> str | None:
        """The checksum of the cache that `save_pretrained` wrote into a folder; `None` if there is none.

        It tells whether the file has been replaced, and its tensors are not read.
        """
        return checksum_in(Path(directory))

    @classmethod
    @torch.no_grad()
    def from_pretrained(cls, directory: str | Path, model: PreTrainedModel) -> "HopeCache":
        """The cache that `save_pretrained` wrote, every layer on the device where the model computes it.

        Raises:
            ValueError: there is none, its format is another version's, it is damaged, or another model wrote it.
        """
        folder, model = Path(directory), _without_peft(model)
        checksum = checksum_in(folder)
        tensors, writer, fields = read_cache(folder)
        if not is_of(model, writer):
            raise ValueError(
                f"{folder / CACHE_FILE} was written by another model (or other weights of it): load it with that one"
            )
        # one token shows names, shapes and dtypes of the model's cache
        sample = cls(model.config)
        # weights that `device_map` offloads are on the meta device, and hooks move their inputs
        device = "cpu" if model.device.type == "meta" else model.device
        model.base_model(torch.zeros(1, 1, dtype=torch.long, device=device), cache=sample)
        one_token = sample.state_tensors()
        learned = _with_prefix(tensors, _OF_LEVELS)
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(_OF_LEVELS)}
        check_tensors(folder, tensors, one_token)
        placed = {name: tensor.to(one_token[name].device) for name, tensor in tensors.items()}
        cache = cls.from_state_tensors(model.config, placed)
        if learned:
            try:
                cache.levels = loaded_state(LevelState.of_named(learned), fields, model, cache.num_sequences)
            except (KeyError, ValueError) as error:
                raise ValueError(f"{folder / CACHE_FILE} {error}") from None
        cache._read_from = folder.resolve(), checksum
        return cache


def _without_peft(model: PreTrainedModel) -> PreTrainedModel:
    """The model in a `PeftModel`, with its adapters in place."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


__all__ = ["HopeCache", "HopeMemoryLayer", "HopeStaticMemoryLayer"]
