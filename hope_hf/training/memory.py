"""The memories a run carries from one step to the next (`--document_boundary carry`)."""

from torch import Tensor


class CarriedMemory:
    """Hands the model's cache from batch to batch, cut from the graph; without carrying it does nothing."""

    def __init__(self, carries: bool):
        self._carries = carries
        self._cache = None

    def inputs(self) -> dict:
        """Arguments of the next forward pass."""
        return {"past_key_values": self._cache, "use_cache": True} if self._carries else {"use_cache": False}

    def hand_over(self, output):
        """Keep the memories of a finished forward pass; gradients end here."""
        if self._carries:
            self._cache = output.past_key_values
            self._cache.detach_()

    def restart(self):
        """Forget everything: after a non-finite step the memories may be non-finite, too."""
        self._cache = None

    def state_tensors(self) -> dict[str, Tensor]:
        """The memories by name, for a checkpoint; empty where there are none."""
        return {} if self._cache is None else self._cache.state_tensors()

    def load(self, cache):
        """Continue with the memories of a checkpoint."""
        self._cache = cache
