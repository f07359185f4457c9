"""The memories a run carries from one step to the next (`--document_boundary carry`)."""

import torch
from torch import Tensor

from hope_hf import HopeCache, HopeConfig


class CarriedMemory:
    """Passes the model's cache from batch to batch, detached from the graph; does nothing without a config."""

    def __init__(self, config: HopeConfig | None):
        self._config = config
        self._cache = None
        self.restart()

    def inputs(self) -> dict:
        """Arguments of the next forward pass."""
        return {"use_cache": False} if self._cache is None else {"past_key_values": self._cache}

    def hand_over(self):
        """After backward: keep the memories after the forward pass, without their gradient."""
        if self._cache is not None:
            self._cache.detach_()

    def restart(self):
        """Reset the memories: after a non-finite step they may be non-finite, too."""
        if self._config is not None:
            self._cache = HopeCache(self._config)

    def state_tensors(self) -> dict[str, Tensor]:
        """The memories by name, on the CPU, for a checkpoint; empty where none are carried."""
        tensors = {} if self._cache is None else self._cache.state_tensors()
        return {name: tensor.cpu() for name, tensor in tensors.items()}

    def load(self, tensors: dict[str, Tensor], device: torch.device):
        """Continue with the memories of a checkpoint."""
        if self._config is not None and tensors:
            tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
            self._cache = HopeCache.from_state_tensors(self._config, tensors)
