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

from hope_hf.common.adapters import load_adapter
from hope_hf.common.files import copy_rights_of_folder
from hope_hf.common.process import MISTAKES
from hope_hf.common.weight_names import ADAPTER_WEIGHTS

from ..engines.base import Engine, dtype_name
from .manifest import FIX, Manifest

# `join` holds one file in memory. Files of this size were the default of transformers for years.
JOINED_FILE = "5GB"


class HostBuffers:
    """Buffers in CPU memory, by name, that are reused: allocating memory takes longer than filling it."""

    def __init__(self):
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: torch.Size, like: Tensor) -> Tensor:
        """The buffer of this name, with old values; a new one if none has this shape and dtype."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != shape or buffer.dtype != like.dtype:
            buffer = torch.empty(shape, dtype=like.dtype, pin_memory=like.is_cuda)
            self._buffers[name] = buffer
        return buffer

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor's values, contiguous."""
        return self.take(name, tensor.shape, tensor).copy_(tensor)

    def clear(self) -> None:
        """Free the memory."""
        self._buffers.clear()


@dataclass(frozen=True)
class WeightShards:
    """The weights of one moment, in slices.

    Attributes:
        whole: on the first process, by names: the tensors that `gather` completes; empty on others.
        slices: for each weight, where this process's slice begins, and the slice; it is empty if another process
            sends it.
        group: the processes that exchange slices; None if the first one has all weights.
    """

    whole: dict[tuple[str, ...], Tensor]
    slices: list[tuple[int, Tensor]]
    group: distributed.ProcessGroup | None

    def gather(self) -> dict[str, Tensor]:
        """All weights by name on the first process, tied ones sharing one tensor; empty on others.

        All processes call it, in any thread, so that the training goes on meanwhile; if one of them ends, the others
        fail.
        """
        if self.group is not None and distributed.get_rank() == 0:
            self._receive()
        elif self.group is not None:
            self._send()
        weights = {}
        for names, tensor in self.whole.items():
            weights |= dict.fromkeys(names, tensor)
        return weights

    def _send(self) -> None:
        distributed.gather_object(self._spans(), group=self.group)
        for _, values in self.slices:
            if values.numel():
                distributed.send(values.cpu(), 0, self.group)

    def _receive(self) -> None:
        spans_of_ranks: list = [None] * distributed.get_world_size()
        distributed.gather_object(self._spans(), spans_of_ranks, group=self.group)
        counts = [0] * len(self.whole)
        for rank, spans in enumerate(spans_of_ranks):
            for index, tensor in enumerate(self.whole.values()):
                start, length = spans[index]
                counts[index] += length
                # The first process has copied its own slices.
                if rank and length:
                    part = tensor.view(-1)[start : start + length]
                    distributed.recv(part, rank, self.group)
        assert counts == [tensor.numel() for tensor in self.whole.values()], "the processes do not have all elements"

    def _spans(self) -> list[tuple[int, int]]:
        return [(start, values.numel()) for start, values in self.slices]


def take_shards(engine: Engine, buffers: HostBuffers | None = None) -> WeightShards:
    """This process's slices of the current weights; all processes call it.

    The first process copies its own straight to their places in the whole weights.

    Args:
        engine: the training's engine.
        buffers: memory for copies, if the training changes weights before `gather` is done; None if it waits.
    """
    is_first = PartialState().is_main_process
    whole: dict[tuple[str, ...], Tensor] = {}
    slices = []
    for part in engine.weight_slices():
        name = part.names[0]
        values = part.tensors["weight"]
        if part.is_copy:
            values = torch.empty(0)
        if is_first and engine.shards_weights:
            if buffers is None:
                weight = torch.empty(part.shape, dtype=values.dtype)
            else:
                weight = buffers.take(name, part.shape, values)
            stop = part.start + len(values)
            place = weight.view(-1)[part.start : stop]
            values = place.copy_(values)
            whole[part.names] = weight
        else:
            if buffers is not None and not part.is_copy:
                values = buffers.copy(name, values)
            if is_first:
                whole[part.names] = values.view(part.shape)
        slices.append((part.start, values))
    return WeightShards(whole, slices, engine.part_group)


@dataclass(frozen=True)
class WeightPart:
    """A process's part of the weights: 1-D tensors by name, and the whole shape and the start of each."""

    tensors: dict[str, Tensor]
    slices: dict[str, dict]


def weight_part(engine: Engine, copied: Callable[[str, Tensor], Tensor] | None = None) -> WeightPart:
    """This process's part; the tensors are the model's own if possible, or results of `copied(name, tensor)`."""
    left_out = set(engine.model.all_tied_weights_keys)
    left_out.update(engine.model._keys_to_ignore_on_save or ())
    tensors: dict[str, Tensor] = {}
    slices: dict[str, dict] = {}
    for part in engine.weight_slices():
        values = part.tensors["weight"]
        if part.is_copy or not values.numel():
            continue
        for name in part.names:
            if name not in left_out:
                tensors[name] = writable(values) if copied is None else copied(name, values)
                slices[name] = {"shape": list(part.shape), "start": part.start}
                # tied weights are written once
                break
    return WeightPart(tensors, slices)


def writable(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, copied if it is a view of a larger one, which safetensors refuses."""
    values = tensor.detach().cpu()
    is_view = values.untyped_storage().nbytes() != values.nbytes
    return values.clone() if is_view else values


def save_weight_part(folder: Path, rank: int, part: WeightPart) -> None:
    """Write a process's part, unless it is empty."""
    if part.tensors:
        file = folder / f"model-rank{rank}.safetensors"
        # A single key: safetensors writes several in any order.
        save_file(part.tensors, file, metadata={"slices": json.dumps(part.slices)})
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
    stop = start + len(into)
    count = 0
    for part in stored:
        values = part.file.get_slice(key)
        stop_of_part = part.start + values.get_shape()[0]
        low = max(start, part.start)
        high = min(stop, stop_of_part)
        if low < high:
            place = into[low - start : high - start]
            place.copy_(values[low - part.start : high - part.start])
            count += high - low
    if count != len(into):
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
        self._paths = files
        self._names = names
        self._files: dict[str, safe_open] = {}

    def __enter__(self):
        for path in self._paths:
            try:
                file = self._open.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                raise ValueError(f"{path} is no whole safetensors file ({error}): copy it again, or {FIX}.") from None
            self._files |= dict.fromkeys(file.keys(), file)
        if self._names is None:
            self._names = {name: name for name in self._files}
        for name, stored in self._names.items():
            values = self._files[stored].get_slice(stored)
            shape = values.get_shape()
            # safetensors and torch name dtypes differently, and a scalar has no slices.
            example = values[:0] if shape else self.read(name)
            self.like[name] = torch.empty(shape, dtype=example.dtype, device="meta")
        return self

    def read_into(self, into: Tensor, start: int, name: str) -> None:
        """Fill the 1-D `into` with elements from `start` on of the flattened weight; only its rows are read."""
        shape = self.like[name].shape
        length = len(into)
        if not length:
            return
        if not shape:
            into.copy_(self.read(name).view(1))
            return
        row = math.prod(shape[1:])
        first = start // row
        last = math.ceil((start + length) / row)
        stored = self._names[name]
        rows = self._files[stored].get_slice(stored)[first:last]
        offset = start - first * row
        values = rows.reshape(-1)[offset : offset + length]
        into.copy_(values)

    def read(self, name: str) -> Tensor:
        """A whole weight."""
        stored = self._names[name]
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
                self._require_whole(name, stored)
            self._open = files.pop_all()
        return self

    def _require_whole(self, name: str, stored: list[StoredSlice]) -> None:
        end = 0
        for part in sorted(stored, key=lambda part: part.start):
            if part.start != end:
                break
            end += part.file.get_slice(name).get_shape()[0]
        else:
            if end == self.like[name].numel():
                return
        raise ValueError(f"{self._manifest.folder} has not all parts of {name}: {FIX}.")

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
            stored = file.get_slice(name)
            shape = slices[name]["shape"]
            start = slices[name]["start"]
            is_flat = len(stored.get_shape()) == 1
            if not is_flat or not all(map(_is_size, (*shape, start))):
                raise ValueError(name)
            like = torch.empty(shape, dtype=stored[:0].dtype, device="meta")
            known = self.like.setdefault(name, like)
            if known.shape != like.shape or known.dtype != like.dtype:
                raise ValueError(name)
            slices_of_weight = self._slices.setdefault(name, [])
            slices_of_weight.append(StoredSlice(start, file))


def _is_size(number) -> bool:
    """Whether a number of a file's metadata is a whole one from 0; True is none."""
    return type(number) is int and number >= 0


def stored_weights(manifest: Manifest) -> WholeWeights | WeightParts:
    """A checkpoint's weights by the model's names; tied weights are under one of their names."""
    return WeightParts(manifest) if manifest.part_files() else WholeWeights(manifest.weight_files())


def check_fits(model: PreTrainedModel, stored: StoredWeights, folder: Path) -> None:
    """ValueError unless names, shapes and dtypes of all weights match those of a model that is not sharded."""
    weights = model.state_dict(keep_vars=True)
    differences = []
    # Tied weights are in the file once.
    present = set()
    for name, tensor in stored.like.items():
        weight = weights.get(name)
        if weight is None:
            differences.append(f"{name} is only in the checkpoint")
            continue
        present.add(id(weight))
        theirs = _describe(tensor)
        ours = _describe(weight)
        if theirs != ours:
            differences.append(f"{name} is {theirs} in the checkpoint and {ours} in the model")
    for name, tensor in weights.items():
        if id(tensor) not in present:
            differences.append(f"{name} is only in the model")
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
    weights = model.state_dict()
    with stored_weights(manifest) as stored:
        check_fits(model, stored, manifest.folder)
        for name in stored.like:
            weights[name].copy_(stored.read(name))


def join(manifest: Manifest, out: Path) -> None:
    """Write the weights of a checkpoint in parts to `out` as `save_pretrained` does, in files of 5 GB at most."""
    with WeightParts(manifest) as parts:
        split = split_torch_state_dict_into_shards(
            parts.like, filename_pattern="model{suffix}.safetensors", max_shard_size=JOINED_FILE
        )
        for name_of_file, names in split.filename_to_tensors.items():
            file = out / name_of_file
            # without a name: else the weights of two files are held at a time
            save_file({name: parts.read(name) for name in names}, file, metadata={"format": "pt"})
            copy_rights_of_folder(file)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True)
        (out / SAFE_WEIGHTS_INDEX_NAME).write_text(f"{text}\n", encoding="utf-8")
