"""The cache of a HOPE model: states of memories, and keys and values of softmax attention."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from .cache_file import (
    CACHE_FILE,
    Fingerprint,
    check_tensors,
    fingerprint,
    map_state,
    named_tensors,
    read_cache,
    state_of_named,
    write_cache,
)
from .chunks import Past


class KeyValues(NamedTuple):
    """Keys and values of a text [B, H, T, D], as the state of a layer."""

    keys: torch.Tensor
    values: torch.Tensor


class HopeMemoryLayer(CacheLayerMixin):
    """State of one mixer, or of the levels of one block.

    `state`, a `state_class`, is the last result of the mixer or the levels; `past` counts the tokens read. Both are
    `None` before the first token.
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
        raise RuntimeError("a self-modifying memory cannot unread tokens: take a HopeCache.snapshot() and roll back")

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply `function` to every tensor."""
        if self.state is not None:
            self.state, self.past = map_state(function, self.state), self.past.map(function)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Keep the rows `beam_idx`, in that order."""
        self.map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self.map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`."""
        self.map(lambda tensor: tensor[indices])

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
            super().update_state(state, past._replace(columns=columns, is_uniform=False))
            # Cloned, since the current weights and those of the chunk's start can be one tensor.
            self.map(lambda tensor: tensor.detach().clone())
            return
        self.past.columns.copy_(past.columns)
        held, new = (
            [*named_tensors(state).values(), past.seen, past.digest]
            for state, past in ((self.state, self.past), (state, past))
        )
        for tensor, value in zip(held, new, strict=True):
            tensor.copy_(value.detach())


def is_memory_layer(layer: CacheLayerMixin) -> bool:
    """Whether a cache layer is a `HopeMemoryLayer`, of this file or of another copy of it."""
    return hasattr(layer, "state_class")


def level_layers(config: PreTrainedConfig, is_static: bool = False) -> list[HopeMemoryLayer]:
    """Layers for the states of the blocks' levels, which follow those of the mixers; empty if levels have no state."""
    state_class = config.levels.state_class
    kind = HopeStaticMemoryLayer if is_static else HopeMemoryLayer
    return [] if state_class is None else [kind(state_class) for _ in range(config.num_hidden_layers)]


def past_of(cache: Cache | None) -> Past | None:
    """Counts of the tokens that a cache's memories have read."""
    layers = () if cache is None else cache.layers
    return next((layer.past for layer in layers if hasattr(layer, "state_class")), None)


class CarriedKeys:
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


def carried_layers(cache: Cache) -> list[HopeMemoryLayer | CarriedKeys] | None:
    """Layers of a cache into which blocks do not write, so that blocks can be recomputed; `None` if it has others."""
    layers = [CarriedKeys(layer) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    fits = not cache.is_compileable and not getattr(cache, "offloading", False)
    return layers if fits and all(hasattr(layer, "update_state") for layer in layers) else None


class HopeCache(DynamicCache):
    """Cache of a HOPE model: `past_key_values` of its `forward` and of `generate`.

    It has a `HopeMemoryLayer` for every layer with memories or sparse attention, and a growing key-value layer for
    softmax attention. If levels keep a state, a `HopeMemoryLayer` for those of every block follows. `copy.deepcopy`
    forks the cache, `snapshot` and `rollback` go back to an earlier token, `save_pretrained` and `from_pretrained`
    keep it as a file.

    Example:

    ```python
    >>> import torch
    >>> from hope_hf import HopeCache, HopeConfig, HopeForCausalLM
    >>> model = HopeForCausalLM(HopeConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2)).eval()
    >>> cache = HopeCache(model.config)
    >>> out = model(torch.tensor([[1, 2, 3]]), past_key_values=cache)
    >>> before = cache.snapshot()
    >>> logits = model(torch.tensor([[4, 5]]), past_key_values=cache).logits
    >>> cache.rollback(before).get_seq_length()
    3
    >>> torch.equal(model(torch.tensor([[4, 5]]), past_key_values=cache).logits, logits)
    True
    ```
    """

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config=config)
        self.layers += level_layers(config)

    def __deepcopy__(self, memo: dict) -> "HopeCache":
        if any(tensor.grad_fn is not None for tensor in self.state_tensors().values()):
            raise ValueError(
                "the cache carries the graph of the text it has read, which cannot be copied: read under "
                "torch.no_grad(), or call detach_() before copying"
            )
        memo[id(self)] = fork = type(self).__new__(type(self))
        fork.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return fork

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "HopeCache":
        for layer in self.layers:
            if is_memory_layer(layer):
                layer.map(function)
            elif layer.is_initialized:
                layer.keys, layer.values = function(layer.keys), function(layer.values)
        return self

    def detach_(self) -> "HopeCache":
        """Detach all tensors in place: truncated backpropagation through time."""
        return self._map(torch.Tensor.detach)

    def to(self, device: torch.device | str) -> "HopeCache":
        """Move every tensor to a device, in place."""
        for layer in self.layers:
            if layer.is_initialized:
                layer.device = torch.device(device)
        return self._map(lambda tensor: tensor.to(device))

    def snapshot(self) -> list[CacheLayerMixin]:
        """A snapshot for `rollback`. It copies no tensor, since new tokens make new tensors."""
        return [copy.copy(layer) for layer in self.layers]

    def rollback(self, snapshot: list[CacheLayerMixin]) -> "HopeCache":
        """Return to a snapshot of this cache, in place; the snapshot can be used again."""
        if [type(layer) for layer in snapshot] != [type(layer) for layer in self.layers]:
            raise ValueError("the snapshot is of a cache with other layers: roll back the cache it was taken of")
        self.layers = [copy.copy(layer) for layer in snapshot]
        return self

    @property
    def memory_layers(self) -> list[HopeMemoryLayer]:
        """The layers of self-modifying memories."""
        return [layer for layer in self.layers if is_memory_layer(layer)]

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """The cache's contents by name: batch-first tensors, and each memory's counts as two integers."""
        tensors = {}
        for index, layer in enumerate(self.layers):
            if is_memory_layer(layer):
                state = layer.named_tensors()
            else:
                state = {"keys": layer.keys, "values": layer.values} if layer.is_initialized else {}
            tensors |= {f"{index}.{name}": tensor for name, tensor in state.items()}
        return tensors

    @classmethod
    def from_state_tensors(cls, config: PreTrainedConfig, tensors: dict[str, torch.Tensor]) -> "HopeCache":
        """The cache with these `state_tensors`."""
        cache = cls(config)
        for index, layer in enumerate(cache.layers):
            prefix = f"{index}."
            state = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
            if not is_memory_layer(layer):
                if state:
                    layer.update(state["keys"], state["values"])
            elif "columns" not in state:
                raise ValueError(f"the saved memory has no layer {index}: it belongs to a model with fewer layers")
            else:
                layer.load(state)
        return cache

    def save_pretrained(self, save_directory: str | Path, model: PreTrainedModel) -> None:
        """Write `hope_cache.safetensors` into a folder: tensors, a checksum, and the model's fingerprint.

        Args:
            save_directory: created if it does not exist; a cache in it is replaced.
            model: the HOPE model of the cache. All its weights are hashed (see `cache_file.fingerprint`).

        Raises:
            ValueError: nothing was read yet, or the memories hold NaN or infinity.
        """
        if not self.get_seq_length():
            raise ValueError("the cache has read nothing: give it to the model with a text, then save it")
        write_cache(Path(save_directory), self.state_tensors(), " ".join(fingerprint(model)))

    @classmethod
    @torch.no_grad()
    def from_pretrained(cls, directory: str | Path, model: PreTrainedModel) -> "HopeCache":
        """The cache that `save_pretrained` wrote, every layer on the device where the model computes it.

        Raises:
            ValueError: there is none, its format is another version's, it is damaged, or another model wrote it.
        """
        folder = Path(directory)
        tensors, writer = read_cache(folder)
        if not fingerprint(model).fits(Fingerprint(*writer.split(" "))):
            raise ValueError(
                f"{folder / CACHE_FILE} was written by another model (or other weights of it): load it with that one"
            )
        # one token shows names, shapes and dtypes of the model's cache
        sample = cls(model.config)
        # weights that `device_map` offloads are on the meta device, and hooks move their inputs
        device = "cpu" if model.device.type == "meta" else model.device
        model.base_model(torch.zeros(1, 1, dtype=torch.long, device=device), past_key_values=sample)
        one_token = sample.state_tensors()
        check_tensors(folder, tensors, one_token)
        placed = {name: tensor.to(one_token[name].device) for name, tensor in tensors.items()}
        return cls.from_state_tensors(model.config, placed)


__all__ = ["HopeCache", "HopeMemoryLayer", "HopeStaticMemoryLayer"]
