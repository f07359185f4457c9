"""The weights in parts (`--save_sharded`): every process writes what it holds, and no process needs the whole model.

    model-rank<r>.safetensors    flat pieces by the names of their weights

A file's metadata has, as JSON under `slices`, the shape of each whole weight, and where the piece begins in it.
Processes without a piece of their own write no file. Any number of processes, and `join`, can read these files.
"""

import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from hope_hf.cli.files import copy_rights_of_folder
from hope_hf.cli.process import MISTAKES
from hope_hf.cli.weights import PART

from ..engines.base import Engine
from .pieces import Piece, read_into, writable
from .seal import MEND, listed, read_manifest

# As much is in memory while parts are joined. Files of this size were the default of transformers for years.
JOINED_FILE = "5GB"


@dataclass(frozen=True)
class WeightPart:
    """What one process writes: 1-D tensors by name, and where each lies in the weight of this name."""

    tensors: dict[str, Tensor]
    slices: dict[str, dict]


def weight_part(engine: Engine, copied: Callable[[str, Tensor], Tensor] | None = None) -> WeightPart:
    """This process's part of the current weights; its tensors are the model's own if possible, or results of
    `copied(name, tensor)`.
    """
    left_out = {*engine.model.all_tied_weights_keys, *(engine.model._keys_to_ignore_on_save or ())}
    tensors, slices = {}, {}
    for part in engine.weight_slices():
        name = next((name for name in part.names if name not in left_out), None)
        values = part.tensors["weight"]
        if name is None or part.is_copy or not values.numel():
            continue
        tensors[name] = writable(values) if copied is None else copied(name, values)
        slices[name] = {"shape": list(part.shape), "start": part.start}
    return WeightPart(tensors, slices)


def save_weight_part(folder: Path, part: WeightPart, rank: int) -> None:
    """Write this process's part, unless it is empty."""
    if part.tensors:
        file = folder / f"model-rank{rank}.safetensors"
        # One key alone: safetensors writes several in any order.
        save_file(part.tensors, file, metadata={"slices": json.dumps(part.slices)})
        copy_rights_of_folder(file)


def part_files(folder: Path) -> list[Path]:
    """The parts that a checkpoint's manifest lists; empty where the weights are whole."""
    return [listed(folder, name) for name in sorted(read_manifest(folder)["files"]) if PART.fullmatch(name)]


class WeightParts:
    """The parts of a checkpoint, opened but not read; a context manager.

    Attributes:
        like: by name, tensors on the meta device with shape and dtype of the whole weights.

    Raises ValueError where a file is broken, or pieces of a weight are missing.
    """

    def __init__(self, folder: Path):
        self.like: dict[str, Tensor] = {}
        self._pieces: dict[str, list[Piece]] = {}
        self._folder = folder
        self._open = ExitStack()

    def __enter__(self):
        with self._open as files:
            for path in part_files(self._folder):
                try:
                    self._add(files.enter_context(safe_open(path, framework="pt")))
                except MISTAKES:
                    raise ValueError(f"{path} is no part of a model: {MEND}.") from None
            for name, pieces in self._pieces.items():
                self._check(name, pieces)
            self._open = files.pop_all()
        return self

    def __exit__(self, *exception):
        self._open.close()

    def read_into(self, into: Tensor, start: int, name: str) -> None:
        """Fill the 1-D `into` with the elements from `start` on of the flattened weight."""
        read_into(into, start, name, self._pieces[name])

    def read(self, name: str) -> Tensor:
        """A whole weight."""
        whole = torch.empty_like(self.like[name], device="cpu")
        self.read_into(whole.view(-1), 0, name)
        return whole

    def _add(self, file: safe_open) -> None:
        slices = json.loads(file.metadata()["slices"])
        for name in file.keys():
            stored, shape, start = file.get_slice(name), slices[name]["shape"], slices[name]["start"]
            if any(type(size) is not int or size < 0 for size in (*shape, start)) or len(stored.get_shape()) != 1:
                raise ValueError(name)
            like = torch.empty(shape, dtype=stored[:0].dtype, device="meta")
            known = self.like.setdefault(name, like)
            if (known.shape, known.dtype) != (like.shape, like.dtype):
                raise ValueError(name)
            self._pieces.setdefault(name, []).append(Piece(start, file))

    def _check(self, name: str, pieces: list[Piece]) -> None:
        spans = sorted((piece.start, *piece.file.get_slice(name).get_shape()) for piece in pieces)
        ends = [start + length for start, length in spans]
        if [0, *ends] != [*(start for start, _ in spans), math.prod(self.like[name].shape)]:
            raise ValueError(f"{self._folder} has not all parts of {name}: {MEND}.")


def join(folder: Path, out: Path) -> None:
    """Write the weights of a checkpoint in parts to `out` as `save_pretrained` does, in files of 5 GB at most."""
    with WeightParts(folder) as parts:
        split = split_torch_state_dict_into_shards(
            parts.like, filename_pattern="model{suffix}.safetensors", max_shard_size=JOINED_FILE
        )
        for file, names in split.filename_to_tensors.items():
            save_file({name: parts.read(name) for name in names}, out / file, metadata={"format": "pt"})
            copy_rights_of_folder(out / file)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True)
        (out / SAFE_WEIGHTS_INDEX_NAME).write_text(f"{text}\n", encoding="utf-8")
