"""The state of a mixer of memories: what it carries from one call to the next."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from .chunk_layout import Past
from .memory_scan import ScanState


class MemoryState(NamedTuple):
    """Batch-first tensors. The weights have the form that their rule gives them, [B, H, ...] each."""

    # the memories' weights now, and at the start of the current chunk
    current: tuple[torch.Tensor, ...]
    chunk_start: tuple[torch.Tensor, ...]
    # last inputs of the convolutions on k, v and q side by side [B, H, K - 1, 3 D]
    conv_tail: torch.Tensor
    # real tokens of each row's document, and the digest of the row's tokens [B]
    seen: torch.Tensor
    digest: torch.Tensor

    @classmethod
    def of_scan(cls, state: ScanState, heads: int, past: Past) -> "MemoryState":
        """The state after a call, from what its scan left."""

        def split(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.unflatten(0, (-1, heads))

        weights = (tuple(map(split, part)) for part in (state.current, state.chunk_start))
        return cls(*weights, split(state.conv_tail), past.seen, past.digest)

    def to_scan(self) -> ScanState:
        """What the scan of the next call begins with."""
        weights = (tuple(weight.flatten(0, 1) for weight in part) for part in (self.current, self.chunk_start))
        return ScanState(*weights, self.conv_tail.flatten(0, 1))

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "MemoryState":
        """`function(tensor)` in place of every tensor."""
        current, chunk_start, *rest = self
        return MemoryState(
            tuple(map(function, current)), tuple(map(function, chunk_start)), *(function(tensor) for tensor in rest)
        )

    def named(self) -> dict[str, torch.Tensor]:
        """The tensors by name, for a file."""
        weights = {
            f"{field}.{layer}": weight
            for field in ("current", "chunk_start")
            for layer, weight in enumerate(getattr(self, field))
        }
        return weights | {field: getattr(self, field) for field in ("conv_tail", "seen", "digest")}

    @classmethod
    def of_named(cls, tensors: dict[str, torch.Tensor]) -> "MemoryState":
        """The inverse of `named`."""

        def layers(field: str) -> tuple[torch.Tensor, ...]:
            return tuple(tensors[name] for name in sorted(tensors) if name.startswith(f"{field}."))

        return cls(layers("current"), layers("chunk_start"), tensors["conv_tail"], tensors["seen"], tensors["digest"])
