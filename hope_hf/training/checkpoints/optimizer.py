"""The optimizer's state on disk: every process writes the slices it holds, and reads those it needs.

    optimizer.json                          the groups: hyperparameters, and the names of their parameters
    optimizer_rank_<r>.{json,safetensors}   flat slices of the state's tensors, and where each begins in its parameter

With every engine a process holds contiguous slices of flattened parameters, so any engine on any number of processes
can read these files. (torch's own distributed checkpoints cannot hold ZeRO's slices, and use pickle.)
"""

import copy
import fnmatch
import json
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hope_hf.common.files import copy_rights
from hope_hf.optim import STRUCTURE, recounted, require_same_groups

from ..engines.base import Engine, Slice, dtype_name
from ..engines.guard import OneSidedError
from .manifest import FIX, Manifest
from .state_files import not_of_a_run, read_json
from .weights import StoredSlice, read_slices, writable

SECOND_MOMENT = "exp_avg_sq"


@dataclass(frozen=True)
class OptimizerPart:
    """A process's part of the optimizer's state.

    Attributes:
        tensors: on the CPU, 1-D, by "<parameter>:<key>".
        index: by parameter: where its slice begins, its number of elements, and its scalars.
        groups: of all parameters, with their names.
    """

    tensors: dict[str, Tensor]
    index: dict[str, dict]
    groups: list[dict]


def optimizer_part(engine: Engine, copied: Callable[[str, Tensor], Tensor] | None = None) -> OptimizerPart:
    """This process's part; the tensors are the optimizer's own if possible, or results of `copied(name, tensor)`."""
    tensors: dict[str, Tensor] = {}
    index: dict[str, dict] = {}
    for part, scalars in engine.optimizer_slices():
        is_empty = all(tensor.numel() == 0 for tensor in part.tensors.values())
        if part.is_copy or is_empty:
            continue
        (parameter,) = part.names
        index[parameter] = {
            "start": part.start,
            "numel": part.shape.numel(),
            "scalars": {key: value.item() for key, value in scalars.items()},
        }
        for key, tensor in part.tensors.items():
            name = f"{parameter}:{key}"
            tensors[name] = writable(tensor) if copied is None else copied(name, tensor.detach())
    return OptimizerPart(tensors, index, copy.deepcopy(_groups(engine)))


def save_optimizer(folder: Path, rank: int, part: OptimizerPart) -> None:
    """Write a process's part; rank 0 writes the groups as well."""
    stem = folder / f"optimizer_rank_{rank}"
    stem.with_suffix(".json").write_text(json.dumps(part.index), encoding="utf-8")
    if part.tensors:
        save_file(part.tensors, stem.with_suffix(".safetensors"))
        copy_rights(stem.with_suffix(".json"), stem.with_suffix(".safetensors"))
    if rank == 0:
        (folder / "optimizer.json").write_text(json.dumps(part.groups), encoding="utf-8")


@torch.no_grad()
def load_optimizer(manifest: Manifest, engine: Engine, same_settings: bool = True) -> None:
    """Load the state in a checkpoint into the engine's optimizer.

    Without `same_settings` rates, decays and the steps of the levels' periods may be others than the checkpoint's.

    Raises ValueError if the state has other levels, rules, periods, parameters or settings, or values that no step
    leaves.
    """
    file = manifest.path("optimizer.json")
    saved = read_json(file, list)
    try:
        groups = _groups(engine)
        _require_groups(saved, groups, file, STRUCTURE if same_settings else ("level", "optimizer"))
        if same_settings:
            _require_same_settings(saved, engine, file)
        # The schedule, which is loaded next, compares them with its own.
        rates = [group["lr"] for group in saved]
        _load_states(manifest, engine, _periods(saved), _periods(groups))
    # Errors of names, types and shapes that this program does not write.
    except (LookupError, TypeError, AttributeError) as error:
        raise not_of_a_run(file, error) from None
    for group, rate in zip(engine.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _load_states(manifest: Manifest, engine: Engine, before: dict[str, int], now: dict[str, int]) -> None:
    """Read this process's slices; `before` and `now`: steps between two updates of each parameter."""
    keys = set()
    with ExitStack() as opened:
        files = _StateFiles(manifest, opened)
        for part, scalars in engine.optimizer_slices():
            keys |= part.tensors.keys()
            (name,) = part.names
            if before[name] == now[name]:
                files.read_into(part, scalars)
            else:
                _read_other_period(files, part, scalars, before[name], now[name])
        files.require_only(keys)


def _read_other_period(files: "_StateFiles", part: Slice, scalars: dict[str, Tensor], before: int, now: int) -> None:
    """Read a slice of a level whose period had `before` steps and has `now`: only longer ones have a clock."""
    stored_tensors, stored_scalars = dict(part.tensors), dict(scalars)
    if before == 1:
        stored_tensors.pop("gradient_sum", None)
        stored_scalars.pop("tick", None)
    files.read_into(replace(part, tensors=stored_tensors), stored_scalars)
    if now == 1:
        return
    tick, gradient_sum = scalars["tick"], part.tensors["gradient_sum"]
    if before == 1 or int(tick) == 0:
        tick.zero_()
        gradient_sum.zero_()
        return
    calls = recounted(int(tick), before, now)
    gradient_sum.mul_(calls / int(tick))
    tick.fill_(calls)


def _require_groups(saved: list, groups: list[dict], file: Path, keys: tuple[str, ...]) -> None:
    try:
        require_same_groups(saved, groups, keys)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _periods(groups: list[dict]) -> dict[str, int]:
    """Steps between two updates of each parameter, by its name."""
    periods = {}
    for group in groups:
        periods |= dict.fromkeys(group["params"], group["period_steps"])
    return periods


def _require_same_settings(saved: list[dict], engine: Engine, file: Path) -> None:
    """ValueError if decay rates and other settings of the groups are not those that the run's flags give."""
    for theirs, group in zip(saved, engine.optimizer.param_groups, strict=True):
        for name, ours in group.items():
            # JSON has no tuples.
            value = list(ours) if name == "betas" else ours
            if name not in ("params", "lr") and theirs.get(name) != value:
                raise ValueError(
                    f"{file} has {name} {theirs.get(name)} and this run {value}: {FIX}, or put back the settings "
                    "(--level_optimizers) that it was written with."
                )


def _groups(engine: Engine) -> list[dict]:
    """The optimizer's groups, with the names of parameters in place of the parameters."""
    groups = []
    for names, group in zip(engine.groups, engine.optimizer.param_groups, strict=True):
        groups.append(group | {"params": names})
    return groups


class _StateFiles:
    """The slices of all processes, opened in `opened` but not read."""

    def __init__(self, manifest: Manifest, opened: ExitStack):
        self._folder = manifest.folder
        # By parameter: its slices, the scalars of its state, and the files that hold them.
        self._slices: dict[str, list[StoredSlice]] = {}
        self._scalars: dict[str, dict] = {}
        self._sources: dict[str, list[str]] = {}
        # A file by the key of each state tensor.
        self._keys: dict[str, Path] = {}
        for index in sorted(fnmatch.filter(manifest.files, "optimizer_rank_*.json")):
            entries = read_json(self._folder / index, dict)
            if entries:
                self._open(manifest.path(index.replace(".json", ".safetensors")), entries, opened)

    def _open(self, path: Path, entries: dict[str, dict], opened: ExitStack) -> None:
        """Open the tensors of one process; ValueError unless each lies within the parameter of an entry."""
        try:
            file = opened.enter_context(safe_open(path, framework="pt"))
        except SafetensorError as error:
            raise not_of_a_run(path, error) from None
        for name, entry in entries.items():
            try:
                self._slices.setdefault(name, []).append(StoredSlice(entry["start"], file))
                self._scalars.setdefault(name, entry["scalars"])
            except (LookupError, TypeError) as error:
                raise not_of_a_run(path.with_suffix(".json"), error) from None
            self._sources.setdefault(name, []).append(f"{path.stem}.*")
        for stored in file.keys():
            parameter, _, key = stored.rpartition(":")
            shape = file.get_slice(stored).get_shape()
            if parameter not in entries or not _lies_within(entries[parameter], shape):
                raise not_of_a_run(path, f"it has a tensor {stored} of shape {shape}")
            self._keys[key] = path

    def require_only(self, keys: Collection[str]) -> None:
        """ValueError for a tensor that this run's optimizer does not have."""
        for key, path in self._keys.items():
            # Of a level whose period has changed.
            if keys and key not in {*keys, "gradient_sum"}:
                raise not_of_a_run(path, f"it has tensors {key}")

    def read_into(self, part: Slice, scalars: dict[str, Tensor]) -> None:
        """Fill the tensors and the scalars of a process's slice of a parameter."""
        (parameter,) = part.names
        if parameter not in self._slices:
            raise not_of_a_run(self._folder / "optimizer_rank_<r>.json", f"none of them has {parameter}")
        for key, scalar in scalars.items():
            value = self._scalars[parameter].get(key)
            if type(value) not in (int, float) or not 0 <= value < 2**53:
                raise self._impossible(parameter, key)
            scalar.fill_(value)
        for key, tensor in part.tensors.items():
            self._read_tensor(tensor, part.start, parameter, key)

    def _read_tensor(self, tensor: Tensor, start: int, parameter: str, key: str) -> None:
        name, stored = f"{parameter}:{key}", self._slices[parameter]
        try:
            for part in stored:
                if part.file.get_slice(name)[:0].dtype != tensor.dtype:
                    raise TypeError(f"{name} is not of {dtype_name(tensor.dtype)}")
            read_slices(tensor, start, name, stored)
        except (LookupError, SafetensorError, TypeError) as error:
            raise not_of_a_run(self._file_of(parameter), error) from None
        # The squares of all gradients were finite, so those of their means must be finite, too.
        squares = tensor if key == SECOND_MOMENT else tensor.float().square()
        if not squares.isfinite().all() or bool((squares < 0).any()):
            raise self._impossible(parameter, key)

    def _impossible(self, parameter: str, key: str) -> OneSidedError:
        return OneSidedError(f"{self._file_of(parameter)} holds a {key} of {parameter} that no step has left: {FIX}.")

    def _file_of(self, parameter: str) -> Path:
        """The files of one process, or of all that hold a part of the parameter."""
        return self._folder / ", ".join(self._sources[parameter])


def _lies_within(entry: dict, shape: list[int]) -> bool:
    """Whether a tensor of this shape is a slice of the flat parameter that an entry of an index describes."""
    if len(shape) != 1:
        return False
    last_start = entry["numel"] - shape[0]
    return 0 <= entry["start"] <= last_start
