"""What HOPE carries from one call to the next: fast weights, the convolutions' last inputs, counts of tokens."""

import torch
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING, CacheLayerMixin, DynamicCache

from .configuration_hope import HopeConfig


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
        raise RuntimeError("a self-modifying memory cannot unread tokens: keep a copy.deepcopy of the cache instead")

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


# `_layer_type` enters it among the growing layers only, but a state of constant size fits a static cache as it is
STATIC_LAYER_TYPE_MAPPING[HopeMemoryLayer._layer_type] = HopeMemoryLayer


class HopeCache(DynamicCache):
    """Cache of a HOPE model: `past_key_values` of its `forward` and of `generate`.

    Layers are of the kind that `config.layer_types` names: `HopeMemoryLayer` for self-modifying memories, a growing
    key-value layer for the attention mixer. `copy.deepcopy` forks it.

    Example:

    ```python
    >>> from hope_hf import HopeCache
    >>> cache = HopeCache(model.config)
    >>> model(first_part, past_key_values=cache)
    >>> logits = model(second_part, past_key_values=cache).logits
    ```
    """

    def __init__(self, config: HopeConfig):
        super().__init__(config=config)

    def detach_(self) -> "HopeCache":
        """Cut the gradient to the tokens read so far, in place: truncated backpropagation through time."""
        for layer in self.memory_layers:
            layer.map(torch.Tensor.detach)
        return self

    @property
    def memory_layers(self) -> list[HopeMemoryLayer]:
        """The layers of self-modifying memories."""
        return [layer for layer in self.layers if isinstance(layer, HopeMemoryLayer)]

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """All that the memories carry, by name: batch-first tensors, and each layer's counts as two integers."""
        tensors = {}
        for index, layer in enumerate(self.memory_layers):
            for name, tensor in (layer.state or {}).items():
                tensors[f"{index}.{name}"] = tensor
            tensors[f"{index}.columns"] = torch.tensor([layer.cumulative_length, int(layer.is_uniform)])
        return tensors

    @classmethod
    def from_state_tensors(cls, config: HopeConfig, tensors: dict[str, torch.Tensor]) -> "HopeCache":
        """The cache whose `state_tensors` these are."""
        cache = cls(config)
        for index, layer in enumerate(cache.memory_layers):
            prefix = f"{index}."
            state = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
            if "columns" not in state:
                raise ValueError(f"the saved memory has no layer {index}: it belongs to a model with fewer layers")
            columns, is_uniform = state.pop("columns").tolist()
            if state:
                layer.update_state(state, columns, bool(is_uniform))
        return cache


__all__ = ["HopeCache", "HopeMemoryLayer"]
