"""The weights of a checkpoint, whole or in parts, read piece by piece; and whether they fit a model."""

import math
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from ..engines.base import dtype_name
from .seal import weight_files
from .weight_parts import WeightParts, part_files


class StoredWeights(Protocol):
    """Weights in open files.

    Attributes:
        like: by name, tensors on the meta device with shape and dtype of the weights.
    """

    like: dict[str, Tensor]

    def read_into(self, into: Tensor, start: int, name: str) -> None:
        """Fill the 1-D `into` with elements from `start` on of the flattened weight."""

    def read(self, name: str) -> Tensor:
        """A whole weight."""


class WholeWeights:
    """`StoredWeights` in safetensors of whole weights; a context manager.

    `names`: their names in the files by other names; without it, as they are.
    """

    def __init__(self, files: Iterable[Path], names: dict[str, str] | None = None):
        self.like: dict[str, Tensor] = {}
        self._paths, self._names = files, names
        self._files: dict[str, safe_open] = {}
        self._open = ExitStack()

    def __enter__(self):
        for path in self._paths:
            file = self._open.enter_context(safe_open(path, framework="pt"))
            self._files |= dict.fromkeys(file.keys(), file)
        for name, stored in (self._names or dict(zip(self._files, self._files, strict=True))).items():
            values = self._files[stored].get_slice(stored)
            # The dtype has a name here that is not torch's.
            some = values[:0] if values.get_shape() else self._files[stored].get_tensor(stored)
            self.like[name] = torch.empty(values.get_shape(), dtype=some.dtype, device="meta")
        return self

    def __exit__(self, *exception):
        self._open.close()

    def read_into(self, into: Tensor, start: int, name: str) -> None:
        """Fill the 1-D `into` with elements from `start` on of the flattened weight; only its rows are read."""
        shape, stored = self.like[name].shape, (self._names or {}).get(name, name)
        row = math.prod(shape[1:])
        if not len(into):
            return
        if not shape:
            into.copy_(self._files[stored].get_tensor(stored).view(1))
            return
        first, last = start // row, -(-(start + len(into)) // row)
        rows = self._files[stored].get_slice(stored)[first:last]
        into.copy_(rows.reshape(-1)[start - first * row :][: len(into)])

    def read(self, name: str) -> Tensor:
        """A whole weight."""
        stored = (self._names or {}).get(name, name)
        return self._files[stored].get_tensor(stored)


def stored_weights(folder: Path) -> WholeWeights | WeightParts:
    """A checkpoint's weights by the model's names; tied weights are under one of their names."""
    return WeightParts(folder) if part_files(folder) else WholeWeights(weight_files(folder))


def check_fits(model: PreTrainedModel, stored: StoredWeights, folder: Path) -> None:
    """ValueError unless names, shapes and dtypes of all weights match those of a model that is not sharded."""
    saved, own = stored.like, model.state_dict(keep_vars=True)
    # Tied weights are in the file once.
    present = {id(own[name]) for name in saved if name in own}
    differences = [f"{name} is only in the checkpoint" for name in saved if name not in own]
    differences += [
        f"{name} is only in the model" for name in own if name not in saved and id(own[name]) not in present
    ]
    differences += [
        f"{name} is {_describe(saved[name])} in the checkpoint and {_describe(own[name])} in the model"
        for name in saved
        if name in own and _describe(saved[name]) != _describe(own[name])
    ]
    if differences:
        more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
        raise ValueError(
            f"{folder} does not fit this model, {differences[0]}{more}: repeat the flags of the run that wrote it."
        )


def _describe(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
