"""The cache of a HOPE model: states of memories, and keys and values of softmax attention."""

import copy
from pathlib import Path

import torch
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    STATIC_LAYER_TYPE_MAPPING,
    CacheLayerMixin,
    DynamicCache,
)
from transformers.modeling_utils import PreTrainedModel

from .cache_file import CACHE_FILE, Fingerprint, check_tensors, fingerprint, read_cache, write_cache
from .chunk_layout import Past
from .configuration_hope import HopeConfig
from .memory_state import MemoryState


class HopeMemoryLayer(CacheLayerMixin):
    """State of one layer of memories, of constant size.

    `state` is what `SelfModifyingTitans` returned last, `None` before the first token. `cumulative_length` counts the
    columns seen, padding included, as `generate` slices its inputs by it. `is_uniform` says that all rows have read
    that many real tokens of one document, so that they can be cut into chunks alike.
    """

    is_compileable = False
    is_croppable = False
    supports_early_init = False
    is_sliding = False

    def __init__(self, **kwargs):
        super().__init__()
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.state: MemoryState | None = None
        self.cumulative_length = 0
        self.is_uniform = True
        self.is_initialized = False

    @property
    def past(self) -> Past | None:
        """What was read, or `None` before the first token."""
        if self.state is None:
            return None
        return Past(self.cumulative_length, self.is_uniform, self.state.seen, self.state.digest)

    def update_state(self, state: MemoryState, num_new_tokens: int, is_uniform: bool) -> None:
        """Replace the state by the one after `num_new_tokens` more columns."""
        self.state = state
        self.cumulative_length += num_new_tokens
        self.is_uniform = self.is_uniform and is_uniform
        self.device = state.conv_tail.device
        self.is_initialized = True

    def lazy_initialization(self, key_states, value_states) -> None:
        raise RuntimeError("a self-modifying memory keeps no keys and values")

    def update(self, *args, **kwargs):
        raise RuntimeError("a self-modifying memory keeps no keys and values")

    def get_seq_length(self) -> int:
        """Columns seen, padding included."""
        return self.cumulative_length

    def get_max_length(self) -> int:
        """-1: the state does not grow."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the attention mask that goes with the next `query_length` tokens."""
        return self.cumulative_length + query_length, 0

    def crop(self, *args) -> None:
        raise RuntimeError("a self-modifying memory cannot unread tokens: take a HopeCache.snapshot() and roll back")

    def map(self, function) -> None:
        """Replace every tensor by `function(tensor)`."""
        if self.state is not None:
            self.state = self.state.map(function)

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


class HopeStaticMemoryLayer(HopeMemoryLayer):
    """A memory of transformers' `StaticCache`, for compiled generation: written in place, counted in a tensor.

    For inference: no gradient goes through a state that the next token overwrites.
    """

    is_compileable = True

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        # A Python value would become part of the compiled graph, and the next token compile another one.
        self.cumulative_length = torch.tensor(0)
        self.is_uniform = False

    def update_state(self, state: MemoryState, num_new_tokens: int, is_uniform: bool) -> None:
        """Copy the state after `num_new_tokens` more columns into the tensors that hold it."""
        if self.state is None:
            # Cloned: weights now and weights at the chunk's start can be one tensor.
            super().update_state(state.map(lambda tensor: tensor.detach().clone()), 0, is_uniform)
            self.cumulative_length = self.cumulative_length.to(self.device)
        else:
            held = self.state.named()
            for name, tensor in state.named().items():
                held[name].copy_(tensor.detach())
        self.cumulative_length.add_(num_new_tokens)


# transformers makes the layers of its caches by the names in `HopeConfig.layer_types`. Every copy of this file (each
# model loaded with `trust_remote_code` brings one) comes here, and the first serves the models of all.
DYNAMIC_LAYER_TYPE_MAPPING.setdefault("hope_memory", HopeMemoryLayer)
STATIC_LAYER_TYPE_MAPPING.setdefault("hope_memory", HopeStaticMemoryLayer)


def is_memory_layer(layer: CacheLayerMixin) -> bool:
    """Whether a layer of a cache is a `HopeMemoryLayer`: of this file, or of another copy of it."""
    return any(kind.__name__ == HopeMemoryLayer.__name__ for kind in type(layer).__mro__)


class HopeCache(DynamicCache):
    """Cache of a HOPE model: `past_key_values` of its `forward` and of `generate`.

    Layers are of the kind that `config.layer_types` names: `HopeMemoryLayer` for self-modifying memories, a growing
    key-value layer for softmax attention. `copy.deepcopy` forks it, `snapshot` and `rollback` go back to an earlier
    token, `save_pretrained` and `from_pretrained` keep it as a file.

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

    def __init__(self, config: HopeConfig):
        super().__init__(config=config)

    def __deepcopy__(self, memo: dict) -> "HopeCache":
        if any(tensor.grad_fn is not None for tensor in self.state_tensors().values()):
            raise ValueError(
                "the cache carries the graph of the text it has read, which cannot be copied: read under "
                "torch.no_grad(), or call detach_() before copying"
            )
        memo[id(self)] = fork = type(self).__new__(type(self))
        fork.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return fork

    def detach_(self) -> "HopeCache":
        """Cut the gradient to the tokens read so far, in place: truncated backpropagation through time."""
        for layer in self.layers:
            if is_memory_layer(layer):
                layer.map(torch.Tensor.detach)
            elif layer.is_initialized:
                layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
        return self

    def to(self, device: torch.device | str) -> "HopeCache":
        """Move every tensor to a device, in place."""
        for layer in self.layers:
            if is_memory_layer(layer):
                layer.map(lambda tensor: tensor.to(device))
            elif layer.is_initialized:
                layer.keys, layer.values = layer.keys.to(device), layer.values.to(device)
            if layer.is_initialized:
                layer.device = torch.device(device)
        return self

    def snapshot(self) -> list[CacheLayerMixin]:
        """What `rollback` needs to come back to this token. Nothing is copied: new tokens make new tensors."""
        return [copy.copy(layer) for layer in self.layers]

    def rollback(self, snapshot: list[CacheLayerMixin]) -> "HopeCache":
        """Forget, in place, all that was read since `snapshot` was taken of this cache; it can be used again."""
        if [type(layer) for layer in snapshot] != [type(layer) for layer in self.layers]:
            raise ValueError("the snapshot is of a cache with other layers: roll back the cache it was taken of")
        self.layers = [copy.copy(layer) for layer in snapshot]
        return self

    @property
    def memory_layers(self) -> list[HopeMemoryLayer]:
        """The layers of self-modifying memories."""
        return [layer for layer in self.layers if is_memory_layer(layer)]

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """All that the cache holds, by name: batch-first tensors, and each memory's counts as two integers."""
        tensors = {}
        for index, layer in enumerate(self.layers):
            if is_memory_layer(layer):
                state = {} if layer.state is None else layer.state.named()
                state["columns"] = torch.tensor([layer.cumulative_length, int(layer.is_uniform)])
            else:
                state = {"keys": layer.keys, "values": layer.values} if layer.is_initialized else {}
            tensors |= {f"{index}.{name}": tensor for name, tensor in state.items()}
        return tensors

    @classmethod
    def from_state_tensors(cls, config: HopeConfig, tensors: dict[str, torch.Tensor]) -> "HopeCache":
        """The cache whose `state_tensors` these are."""
        cache = cls(config)
        for index, layer in enumerate(cache.layers):
            prefix = f"{index}."
            state = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
            if not is_memory_layer(layer):
                if state:
                    layer.update(state["keys"], state["values"])
                continue
            if "columns" not in state:
                raise ValueError(f"the saved memory has no layer {index}: it belongs to a model with fewer layers")
            columns, is_uniform = state.pop("columns").tolist()
            if state:
                layer.update_state(MemoryState.of_named(state), columns, bool(is_uniform))
        return cache

    def save_pretrained(self, save_directory: str | Path, model: PreTrainedModel) -> None:
        """Write `hope_cache.safetensors` into a folder: what was read, a checksum, and which model read it.

        Args:
            save_directory: made where it does not exist; a cache in it is replaced.
            model: the HOPE model whose cache this is. The first time, all its weights are hashed
                (`cache_file.fingerprint` says what that costs).

        Raises:
            ValueError: nothing was read yet, or the memories hold NaN or infinity.
        """
        if not self.get_seq_length():
            raise ValueError("the cache has read nothing: give it to the model with a text, then save it")
        write_cache(Path(save_directory), self.state_tensors(), " ".join(fingerprint(model)))

    @classmethod
    @torch.no_grad()
    def from_pretrained(cls, directory: str | Path, model: PreTrainedModel) -> "HopeCache":
        """The cache that `save_pretrained` wrote, on the model's device.

        Raises:
            ValueError: there is none, its format is another version's, it is damaged, or another model wrote it.
        """
        folder = Path(directory)
        tensors, writer = read_cache(folder)
        if not fingerprint(model).fits(Fingerprint(*writer.split(" "))):
            raise ValueError(
                f"{folder / CACHE_FILE} was written by another model (or other weights of it): load it with that one"
            )
        # One token is read to see the names, shapes and dtypes of all that this model keeps.
        sample = cls(model.config)
        model.base_model(torch.zeros(1, 1, dtype=torch.long, device=model.device), past_key_values=sample)
        check_tensors(folder, tensors, sample.state_tensors())
        return cls.from_state_tensors(model.config, tensors).to(model.device)


__all__ = ["HopeCache", "HopeMemoryLayer", "HopeStaticMemoryLayer"]
