"""The weights of a checkpoint: gathered to whole ones or written in parts, and read in either form.

    model.safetensors, or several files with an index   whole weights, as `from_pretrained` loads them
    model-rank<r>.safetensors                           `--save_sharded`: what one process holds, flat, by name

The metadata of a part has, as JSON under `slices`, the shape of each whole weight and where the slice begins in the
flattened weight. Processes that hold nothing write no file. Any number of processes, and `join`, can read these files.
"""

import json
import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import PartialState
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, distributed
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from hope_hf.common.adapters import ADAPTER_WEIGHTS, load_adapter
from hope_hf.common.files import copy_rights_of_folder
from hope_hf.common.process import MISTAKES

from ..engines.base import Engine, dtype_name
from .manifest import FIX, Manifest

# `join` holds one file in memory. Files of this size were the default of transformers for years.
JOINED_FILE = "5GB"


class HostBuffers:
    """Buffers in CPU memory, by name, that are reused: allocating memory takes longer than filling it."""

    def __init__(self):
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str, shape: torch.Size, like: Tensor) -> Tensor:
        """The buffer of this name, with old values; a new one if none has this shape and dtype."""
        kept = self._kept.get(name)
        if kept is None or kept.shape != shape or kept.dtype != like.dtype:
            kept = self._kept[name] = torch.empty(shape, dtype=like.dtype, pin_memory=like.is_cuda)
        return kept

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor's values, contiguous."""
        return self.take(name, tensor.shape, tensor).copy_(tensor)

    def clear(self) -> None:
        """Free the memory."""
        self._kept.clear()


@dataclass(frozen=True)
class TakenParts:
    """The weights of one moment, in parts."""

    whole: dict[tuple[str, ...], Tensor]
    """On the first process, by names: the tensors that `together` completes; empty on others."""
    own: list[tuple[int, Tensor]]
    """For each weight, where this process's slice begins, and the slice; empty if another process sends it."""
    group: distributed.ProcessGroup | None

    def together(self) -> dict[str, Tensor]:
        """All weights by name on the first process, tied ones sharing one tensor; empty on others.

        All processes call it, in any thread, so that the training goes on meanwhile; if one of them ends, the others
        fail.
        """
        if self.group is not None:
            self._send() if distributed.get_rank() else self._receive()
        return {name: tensor for names, tensor in self.whole.items() for name in names}

    def _send(self) -> None:
        distributed.gather_object(self._spans(), group=self.group)
        for _, values in self.own:
            if values.numel():
                distributed.send(values.cpu(), 0, self.group)

    def _receive(self) -> None:
        spans: list = [None] * distributed.get_world_size()
        distributed.gather_object(self._spans(), spans, group=self.group)
        for index, tensor in enumerate(self.whole.values()):
            held = sum(own[index][1] for own in spans)
            assert held == tensor.numel(), f"the processes hold {held} elements of {tensor.numel()}"
        for rank, own in enumerate(spans[1:], 1):
            for (start, length), tensor in zip(own, self.whole.values(), strict=True):
                if length:
                    distributed.recv(tensor.view(-1)[start : start + length], rank, self.group)

    def _spans(self) -> list[tuple[int, int]]:
        return [(start, values.numel()) for start, values in self.own]


def take_parts(engine: Engine, buffers: HostBuffers | None = None) -> TakenParts:
    """This process's slices of the current weights; all processes call it.

    The first process copies its own straight to their places in the whole weights.

    Args:
        engine: the training's engine.
        buffers: memory for copies, if the training changes weights before `together` is done; None if it waits.
    """
    whole, own = {}, []
    for held in engine.weight_slices():
        name, start, values = held.names[0], held.start, held.tensors["weight"]
        if held.is_copy:
            values = torch.empty(0)
        elif not engine.shards_weights or not PartialState().is_main_process:
            values = buffers.copy(name, values) if buffers else values
        if PartialState().is_main_process:
            tensor = values
            if engine.shards_weights:
                tensor = torch.empty(held.shape, dtype=values.dtype)
                if buffers:
                    tensor = buffers.take(name, held.shape, values)
                values = tensor.view(-1)[start : start + len(values)].copy_(values)
            whole[held.names] = tensor.view(held.shape)
        own.append((start, values))
    return TakenParts(whole, own, engine.part_group)


def weight_part(
    engine: Engine, copied: Callable[[str, Tensor], Tensor] | None = None
) -> tuple[dict[str, Tensor], dict[str, dict]]:
    """This process's part of the current weights: 1-D tensors by name, and shape and start of each.

    The tensors are the model's own if possible, or results of `copied(name, tensor)`.
    """
    left_out = {*engine.model.all_tied_weights_keys, *(engine.model._keys_to_ignore_on_save or ())}
    tensors, slices = {}, {}
    for held in engine.weight_slices():
        name = next((name for name in held.names if name not in left_out), None)
        values = held.tensors["weight"]
        if name is None or held.is_copy or not values.numel():
            continue
        tensors[name] = writable(values) if copied is None else copied(name, values)
        slices[name] = {"shape": list(held.shape), "start": held.start}
    return tensors, slices


def writable(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, copied if it is a view of a larger one, which safetensors refuses."""
    values = tensor.detach().cpu()
    return values if values.untyped_storage().nbytes() == values.nbytes else values.clone()


def save_weight_part(folder: Path, rank: int, tensors: dict[str, Tensor], slices: dict[str, dict]) -> None:
    """Write the result of `weight_part`, unless it is empty."""
    if tensors:
        file = folder / f"model-rank{rank}.safetensors"
        # A single key: safetensors writes several in any order.
        save_file(tensors, file, metadata={"slices": json.dumps(slices)})
        copy_rights_of_folder(file)


@dataclass(frozen=True)
class StoredSlice:
    """Elements of a flattened tensor, from `start` on, in an open file, under the tensor's name."""

    start: int
    file: safe_open


def read_slices(into: Tensor, start: int, key: str, stored: Iterable[StoredSlice]) -> None:
    """Fill the 1-D `into` with elements from `start` on of the flattened tensor `key`, wherever they are stored.

    Raises LookupError if some are missing.
    """
    found = 0
    for own in stored:
        values = own.file.get_slice(key)
        low = max(start, own.start)
        high = min(start + len(into), own.start + values.get_shape()[0])
        if low < high:
            into[low - start : high - start].copy_(values[low - own.start : high - own.start])
            found += high - low
    if found != len(into):
        raise LookupError(f"{key} is not whole")


class StoredWeights:
    """Weights in open files; a context manager.

    Attributes:
        like: by name, tensors on the meta device with shape and dtype of the weights.
    """

    def __init__(self):
        self.like: dict[str, Tensor] = {}
        self._open = ExitStack()

    def __exit__(self, *exception):
        self._open.close()


class WholeWeights(StoredWeights):
    """Whole weights in safetensors. `names`: their names in the files by other names; without it, as they are."""

    def __init__(self, files: Iterable[Path], names: dict[str, str] | None = None):
        super().__init__()
        self._paths, self._names = files, names or {}
        self._files: dict[str, safe_open] = {}

    def __enter__(self):
        for path in self._paths:
            try:
                file = self._open.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                raise ValueError(f"{path} is no whole safetensors file ({error}): copy it again, or {FIX}.") from None
            self._files |= dict.fromkeys(file.keys(), file)
        for name, stored in (self._names or {name: name for name in self._files}).items():
            values = self._files[stored].get_slice(stored)
            # safetensors and torch name dtypes differently.
            some = values[:0] if values.get_shape() else self.read(name)
            self.like[name] = torch.empty(values.get_shape(), dtype=some.dtype, device="meta")
        return self

    def read_into(self, into: Tensor, start: int, name: str) -> None:
        """Fill the 1-D `into` with elements from `start` on of the flattened weight; only its rows are read."""
        shape, stored = self.like[name].shape, self._names.get(name, name)
        if not len(into):
            return
        if not shape:
            into.copy_(self.read(name).view(1))
            return
        row = math.prod(shape[1:])
        first, last = start // row, -(-(start + len(into)) // row)
        rows = self._files[stored].get_slice(stored)[first:last]
        into.copy_(rows.reshape(-1)[start - first * row :][: len(into)])

    def read(self, name: str) -> Tensor:
        """A whole weight."""
        stored = self._names.get(name, name)
        return self._files[stored].get_tensor(stored)


class WeightParts(StoredWeights):
    """The parts of a checkpoint; ValueError if a file is broken, or slices of a weight are missing."""

    def __init__(self, manifest: Manifest):
        super().__init__()
        self._slices: dict[str, list[StoredSlice]] = {}
        self._manifest = manifest

    def __enter__(self):
        with self._open as files:
            for path in self._manifest.part_files():
                try:
                    self._add(files.enter_context(safe_open(path, framework="pt")))
                except MISTAKES:
                    raise ValueError(f"{path} is no part of a model: {FIX}.") from None
            for name, stored in self._slices.items():
                spans = sorted((own.start, *own.file.get_slice(name).get_shape()) for own in stored)
                ends = [start + length for start, length in spans]
                if [0, *ends] != [*(start for start, _ in spans), math.prod(self.like[name].shape)]:
                    raise ValueError(f"{self._manifest.folder} has not all parts of {name}: {FIX}.")
            self._open = files.pop_all()
        return self

    def read_into(self, into: Tensor, start: int, name: str) -> None:
        """Fill the 1-D `into` with the elements from `start` on of the flattened weight."""
        read_slices(into, start, name, self._slices[name])

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
            self._slices.setdefault(name, []).append(StoredSlice(start, file))


def stored_weights(manifest: Manifest) -> WholeWeights | WeightParts:
    """A checkpoint's weights by the model's names; tied weights are under one of their names."""
    return WeightParts(manifest) if manifest.part_files() else WholeWeights(manifest.weight_files())


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


def read_weights(manifest: Manifest) -> dict[str, Tensor]:
    """A checkpoint's weights by name; tied weights are under one of their names."""
    with stored_weights(manifest) as stored:
        return {name: stored.read(name) for name in stored.like}


@torch.no_grad()
def load_weights(model: PreTrainedModel, manifest: Manifest) -> None:
    """Copy the weights of a checkpoint into `model`, before an engine wraps it.

    Of a model with an adapter, the adapter's alone. Raises ValueError if names, shapes or dtypes differ; then nothing
    is changed.
    """
    if ADAPTER_WEIGHTS in manifest.files:
        load_adapter(model, manifest.path(ADAPTER_WEIGHTS))
        return
    own = model.state_dict()
    with stored_weights(manifest) as stored:
        check_fits(model, stored, manifest.folder)
        for name in stored.like:
            own[name].copy_(stored.read(name))


def join(manifest: Manifest, out: Path) -> None:
    """Write the weights of a checkpoint in parts to `out` as `save_pretrained` does, in files of 5 GB at most."""
    with WeightParts(manifest) as parts:
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
