"""What HOPE carries from one call to the next: fast weights, the convolutions' last inputs, counts of tokens."""

import copy
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING, CacheLayerMixin, DynamicCache
from transformers.modeling_utils import PreTrainedModel

from .cache_fingerprint import fingerprint
from .configuration_hope import HopeConfig

CACHE_FILE = "hope_cache.safetensors"
_FORMAT = "1"


class HopeMemoryLayer(CacheLayerMixin):
    """State of one self-modifying layer, of constant size: a dictionary of tensors whose first axis is the batch.

    `state` is what `SelfModifyingTitans` returned last, `None` before the first token. `cumulative_length` counts the
    columns seen, padding included, as `generate` slices its inputs by it. `is_uniform` says that all rows have read
    that many real tokens of one document, so that they can be cut into chunks alike.
    """

    # registers the class with transformers' caches under the name in `HopeConfig.layer_types`
    _layer_type = "hope_memory"
    is_compileable = False
    is_croppable = False
    supports_early_init = False
    is_sliding = False

    def __init__(self, **kwargs):
        super().__init__()
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.state: dict[str, torch.Tensor] | None = None
        self.cumulative_length = 0
        self.is_uniform = True
        self.is_initialized = False

    def update_state(self, state: dict[str, torch.Tensor], num_new_tokens: int, is_uniform: bool) -> None:
        """Replace the state by the one after `num_new_tokens` more columns."""
        self.state = state
        self.cumulative_length += num_new_tokens
        self.is_uniform = self.is_uniform and is_uniform
        self.device = next(iter(state.values())).device
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
            self.state = {name: function(tensor) for name, tensor in self.state.items()}

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

    _layer_type = None
    is_compileable = True

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        # A Python value would become part of the compiled graph, and the next token compile another one.
        self.cumulative_length = torch.tensor(0)
        self.is_uniform = False

    def update_state(self, state: dict[str, torch.Tensor], num_new_tokens: int, is_uniform: bool) -> None:
        """Copy the state after `num_new_tokens` more columns into the tensors that hold it."""
        if self.state is None:
            # Cloned: weights now and weights at the chunk's start can be one tensor.
            state = {name: tensor.detach().clone() for name, tensor in state.items()}
            super().update_state(state, 0, is_uniform)
            self.cumulative_length = self.cumulative_length.to(self.device)
        else:
            for name, tensor in state.items():
                self.state[name].copy_(tensor.detach())
        self.cumulative_length.add_(num_new_tokens)


# `_layer_type` enters a class among the layers of growing caches only
STATIC_LAYER_TYPE_MAPPING[HopeMemoryLayer._layer_type] = HopeStaticMemoryLayer


class HopeCache(DynamicCache):
    """Cache of a HOPE model: `past_key_values` of its `forward` and of `generate`.

    Layers are of the kind that `config.layer_types` names: `HopeMemoryLayer` for self-modifying memories, a growing
    key-value layer for the attention mixer. `copy.deepcopy` forks it, `snapshot` and `rollback` go back to an earlier
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

    def detach_(self) -> "HopeCache":
        """Cut the gradient to the tokens read so far, in place: truncated backpropagation through time."""
        for layer in self.memory_layers:
            layer.map(torch.Tensor.detach)
        return self

    def to(self, device: torch.device | str) -> "HopeCache":
        """Move every tensor to a device, in place."""
        for layer in self.layers:
            if isinstance(layer, HopeMemoryLayer):
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
        return [layer for layer in self.layers if isinstance(layer, HopeMemoryLayer)]

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """All that the cache holds, by name: batch-first tensors, and each memory's counts as two integers."""
        tensors = {}
        for index, layer in enumerate(self.layers):
            if isinstance(layer, HopeMemoryLayer):
                state = dict(layer.state or {})
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
            if not isinstance(layer, HopeMemoryLayer):
                if state:
                    layer.update(state["keys"], state["values"])
                continue
            if "columns" not in state:
                raise ValueError(f"the saved memory has no layer {index}: it belongs to a model with fewer layers")
            columns, is_uniform = state.pop("columns").tolist()
            if state:
                layer.update_state(state, columns, bool(is_uniform))
        return cache

    def save_pretrained(self, save_directory: str | Path, model: PreTrainedModel) -> None:
        """Write `hope_cache.safetensors` into a folder: what was read, with a fingerprint of the model that read it.

        Args:
            save_directory: made where it does not exist; a cache in it is replaced.
            model: the HOPE model whose cache this is.
        """
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        # Cloned: weights now and weights at the chunk's start can be one tensor, which safetensors refuses.
        tensors = {
            name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in self.state_tensors().items()
        }
        metadata = {"format": "pt", "hope_cache": _FORMAT, "model": fingerprint(model)}
        unfinished = folder / f"{CACHE_FILE}.unfinished"
        save_file(tensors, unfinished, metadata)
        unfinished.replace(folder / CACHE_FILE)

    @classmethod
    def from_pretrained(cls, directory: str | Path, model: PreTrainedModel) -> "HopeCache":
        """The cache that `save_pretrained` wrote, on the model's device.

        Raises:
            ValueError: there is none, it is damaged, or another model wrote it.
        """
        path = Path(directory) / CACHE_FILE
        if not path.is_file():
            raise ValueError(f"{directory} holds no {CACHE_FILE}: give a folder that HopeCache.save_pretrained wrote")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dictionary
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}): read the text again and save a new one") from None
        if metadata.get("hope_cache") != _FORMAT:
            raise ValueError(f"{path} is no cache of this version of HOPE: read the text again and save a new one")
        if metadata["model"] != fingerprint(model):
            raise ValueError(f"{path} was written by another model (or other weights of it): load it with that one")
        return cls.from_state_tensors(model.config, tensors).to(model.device)


__all__ = ["HopeCache", "HopeMemoryLayer", "HopeStaticMemoryLayer"]
