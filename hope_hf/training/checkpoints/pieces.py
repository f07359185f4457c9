"""Contiguous pieces of flattened tensors in safetensors: as a process writes them, and as any other reads them."""

from collections.abc import Iterable
from dataclasses import dataclass

from safetensors import safe_open
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """Stored elements of a flattened tensor, from `start` on, in an open file that may hold more of the same place."""

    start: int
    file: safe_open


def writable(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, as safetensors writes it: it refuses views of a larger one."""
    piece = tensor.detach().cpu()
    return piece if piece.untyped_storage().nbytes() == piece.nbytes else piece.clone()


def read_into(into: Tensor, start: int, key: str, pieces: Iterable[Piece]) -> None:
    """Fill the 1-D `into` with elements from `start` on of the flattened tensor `key`; every piece may have some.

    Raises LookupError where they do not have all.
    """
    filled = 0
    for piece in pieces:
        stored = piece.file.get_slice(key)
        low = max(start, piece.start)
        high = min(start + len(into), piece.start + stored.get_shape()[0])
        if low < high:
            into[low - start : high - start].copy_(stored[low - piece.start : high - piece.start])
            filled += high - low
    if filled != len(into):
        raise LookupError(f"{key} is not whole")
