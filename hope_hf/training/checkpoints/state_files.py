"""Nested tensors and plain values as two files that cannot hold code: safetensors and JSON."""

import json
import random
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hope_hf.common.files import copy_rights, read_small
from hope_hf.common.process import one_line

from ..engines.guard import OneSidedError
from .manifest import FIX, Manifest

LARGEST_STATE = 1 << 30
"""Bytes of the largest JSON file: every parameter has a line, and streams keep the documents that they shuffle."""
SHARED_STATE = ("scheduler", "trainer")
"""State that all processes share, written by the first; each also writes "rank_<r>"."""


def save_state(stem: Path, state: object) -> None:
    """Write `state` to `<stem>.json` and, if it holds tensors, to `<stem>.safetensors`.

    `state`: dicts (any plain keys), lists, tuples, tensors, None, bool, int, float, str, nested in any way. Numbers
    come back bit for bit.
    """
    tensors: dict[str, Tensor] = {}
    structure = _pack(state, "state", tensors, set())
    written = stem.with_name(f"{stem.name}.json")
    written.write_text(json.dumps(structure), encoding="utf-8")
    if tensors:
        save_file(tensors, written.with_suffix(".safetensors"))
        copy_rights(written, written.with_suffix(".safetensors"))


def load_state(manifest: Manifest, name: str) -> dict:
    """What `save_state` wrote under this name into a checkpoint; tensors on the CPU.

    Raises ValueError that names the file if it is no dict of `save_state`.
    """
    file, stored = manifest.path(f"{name}.json"), f"{name}.safetensors"
    structure = read_json(file, dict)
    try:
        tensors = load_file(manifest.path(stored)) if stored in manifest.files else {}
    except SafetensorError as error:
        raise not_of_a_run(file.with_name(stored), error) from None
    try:
        return _unpack(structure, tensors)
    except (LookupError, TypeError, ValueError) as error:
        raise not_of_a_run(file, error) from None


def read_json(file: Path, kind: type) -> dict | list:
    """The content of a checkpoint's JSON file; ValueError that names the file if it is none, or not of this `kind`."""
    try:
        content = json.loads(read_small(file, LARGEST_STATE))
        if not isinstance(content, kind):
            raise ValueError(f"it holds no {kind.__name__}")
    # RecursionError: thousands of nested brackets.
    except (OSError, ValueError, RecursionError) as error:
        raise not_of_a_run(file, error) from None
    return content


def not_of_a_run(file: Path, error: Exception | str) -> OneSidedError:
    """The error for a checkpoint's file that holds what no run writes; each process has files of its own."""
    reason = error if isinstance(error, str) else one_line(error)
    return OneSidedError(f"{file} is no state of this run ({reason}): {FIX}.")


def _pack(value: object, name: str, tensors: dict[str, Tensor], storages: set[int]) -> object:
    """`value` as JSON, whose tensors go into `tensors` under names that begin with `name`."""
    if isinstance(value, Tensor):
        # safetensors refuses tensors that share memory; a view would keep all of the larger tensor in memory.
        storage = value.untyped_storage()
        shared = storage.data_ptr() in storages or storage.nbytes() != value.nbytes
        storages.add(storage.data_ptr())
        values = value.detach().clone() if shared else value.detach()
        tensors[name] = values.cpu().contiguous()
        return {"$tensor": name}
    if isinstance(value, dict):
        items = {}
        for key, item in value.items():
            items[key] = _pack(item, f"{name}.{key}", tensors, storages)
        for key in items:
            if not isinstance(key, str) or key.startswith("$"):
                return {"$dict": list(items.items())}
        return items
    if isinstance(value, list | tuple):
        items = value
        # The state of a random generator has hundreds of numbers.
        if not set(map(type, value)) <= {int, float}:
            items = []
            for index, item in enumerate(value):
                items.append(_pack(item, f"{name}.{index}", tensors, storages))
        return items if isinstance(value, list) else {"$tuple": items}
    assert value is None or isinstance(value, bool | int | float | str), f"{name} is a {type(value)}"
    return value


def _unpack(value: object, tensors: dict[str, Tensor]) -> object:
    match value:
        case {"$tensor": name}:
            return tensors[name]
        case {"$tuple": items}:
            return tuple(_unpack(items, tensors))
        case {"$dict": pairs}:
            return {key: _unpack(item, tensors) for key, item in pairs}
        case dict():
            return {key: _unpack(item, tensors) for key, item in value.items()}
        case list() if not {dict, list}.isdisjoint(map(type, value)):
            return [_unpack(item, tensors) for item in value]
    return value


def rng_state() -> dict:
    """The states of this process's random generators (Python, NumPy, torch, the current CUDA device)."""
    numpy_state = np.random.get_state(legacy=False)
    numpy_state["state"]["key"] = numpy_state["state"]["key"].tolist()
    return {
        "python": random.getstate(),
        "numpy": numpy_state,
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_rng(state: dict) -> None:
    """Set this process's random generators as they were at `rng_state()`."""
    random.setstate(state["python"])
    numpy_state = state["numpy"]
    inner = numpy_state["state"]
    key = np.array(inner["key"], dtype=np.uint32)
    np.random.set_state(numpy_state | {"state": inner | {"key": key}})
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
