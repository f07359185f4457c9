"""A cache as a file: tensors in safetensors, a checksum, and the fingerprint of the model that wrote them.

A fingerprint hashes the configuration and every value that the model computes with.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.configuration_utils import PreTrainedConfig
from transformers.integrations.accelerate import load_offloaded_parameter
from transformers.modeling_utils import PreTrainedModel

from .cache_parts import GROWING, NamedTensors

CACHE_FILE = "hope_cache.safetensors"
# format 1 had no checksum, format 2 stored the states of two groups of memories
_FORMAT = "3"
_AGAIN = "read the text again and save a new one"
_OVERFLOWS = "holds NaN or infinity, or values that lead to them, in"
# Fields of the configuration that do not affect a cache.
_IRRELEVANT = {
    "_name_or_path", "architectures", "auto_map", "dtype", "transformers_version", "use_cache", "recompute_chunks",
    "level_periods", "level_learning",
}  # fmt: skip
# Fields of `HopeConfig` that change no state, in files of today.
_STATELESS = {
    "attention_dropout", "initializer_range", "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings"
}  # fmt: skip
# Fields that are younger than format 3: left at their defaults, they are no part of a fingerprint.
_ADDED = {"hidden_act", "mlp_bias", "attention_out_bias", "use_qk_norm", "memory_erase_bias", "memory_depth"}
# A field that is gone, as it was under the delta rule.
_GONE = {"paper_rule": None}


class Fingerprint(NamedTuple):
    """Hashes of a model, of 16 hexadecimal digits each."""

    # dtype of the weights, such as torch.float32
    dtype: str
    # hash of every byte of the weights
    exact: str
    # hash of the weights rounded to bfloat16
    rounded: str

    def fits(self, other: "Fingerprint") -> bool:
        """Whether the models are the same: equal bits or, in another dtype, equal weights rounded to bfloat16."""
        if self.dtype == other.dtype:
            return self.exact == other.exact
        return self.rounded == other.rounded


def write_cache(folder: Path, tensors: NamedTensors, model: Fingerprint, learning: dict | None = None) -> None:
    """Write the tensors of a cache; an existing file is replaced once the new one is complete.

    Args:
        model: fingerprint of the model that read the text.
        learning: fields of `level_learning`, if the cache holds what levels have learned.

    Raises:
        ValueError: a tensor holds NaN or infinity, or values so large that reading them overflows.
    """
    copies = {}
    for name, tensor in tensors.items():
        if not _stays_finite(tensor):
            raise ValueError(f"the cache {_OVERFLOWS} '{name}' and is not saved: read the text again")
        # the current weights and those of the chunk's start can share memory, which safetensors refuses
        copied = tensor.detach().to("cpu", copy=True)
        copies[name] = copied.contiguous()
    metadata = {"format": "pt", "hope_cache": _FORMAT, "model": " ".join(model)}
    if learning is not None:
        metadata["level_learning"] = json.dumps(learning)
    metadata["sha256"] = _checksum(copies, metadata)
    folder.mkdir(parents=True, exist_ok=True)
    # a random name that must be new is never a link that somebody put there
    unfinished = folder / f"{CACHE_FILE}.{secrets.token_hex(8)}.unfinished"
    try:
        # not `save_file`, which ignores the umask and lets no other user read the file
        with unfinished.open("xb") as file:
            file.write(save(copies, metadata))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(folder / CACHE_FILE)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def read_cache(folder: Path) -> tuple[NamedTensors, Fingerprint, dict]:
    """The tensors that `write_cache` wrote, the fingerprint of their model, and its fields of `level_learning`.

    Raises:
        ValueError: there is no such file, it has another format, or it is damaged.
    """
    path = folder / CACHE_FILE
    if not path.is_file():
        raise ValueError(f"{folder} holds no {CACHE_FILE}: give a folder that HopeCache.save_pretrained wrote")
    tensors = {}
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            for name in file.keys():  # noqa: SIM118  not a dictionary
                tensors[name] = file.get_tensor(name)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): {_AGAIN}") from None
    version = metadata.get("hope_cache")
    if version != _FORMAT:
        raise ValueError(
            f"{path} has the cache format {str(version)[:20]}, and this version of HOPE reads format {_FORMAT}: "
            f"{_AGAIN}"
        )
    if metadata.pop("sha256", None) != _checksum(tensors, metadata):
        raise ValueError(f"{path} is damaged (its checksum does not fit): {_AGAIN}")
    hashes = metadata.get("model", "").split(" ")
    if len(hashes) != len(Fingerprint._fields):
        raise ValueError(f"{path} does not say which model wrote it: {_AGAIN}")
    learning = json.loads(metadata.get("level_learning", "{}"))
    return tensors, Fingerprint(*hashes), learning


def checksum_in(folder: Path) -> str | None:
    """The checksum that the file of a cache states, without reading its tensors; None if there is no such file."""
    path = folder / CACHE_FILE
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("sha256")
    except SafetensorError:
        return "damaged"


def _checksum(tensors: NamedTensors, metadata: dict[str, str]) -> str:
    """A hash of everything in the file."""
    header = json.dumps(metadata, sort_keys=True)
    digest = hashlib.sha256(header.encode())
    for name, tensor in sorted(tensors.items()):
        kind = f"{name} {tensor.dtype} {list(tensor.shape)}"
        digest.update(kind.encode())
        digest.update(_bytes_of(tensor))
    return digest.hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, row by row."""
    flat = tensor.contiguous().flatten()
    return memoryview(flat.view(torch.uint8).cpu().numpy())


def check_tensors(folder: Path, tensors: NamedTensors, one_token: NamedTensors) -> None:
    """ValueError unless names, shapes, dtypes, values and counts of the layers' tensors are possible for the model.

    Args:
        one_token: tensors of the model's cache after one token of one sequence.
    """
    problem = _problem_of_names(tensors, one_token)
    if problem is None:
        problem = _problem_of_tensors(tensors, one_token)
    if problem is not None:
        raise ValueError(f"{folder / CACHE_FILE} {problem}: {_AGAIN}")


def _problem_of_names(tensors: NamedTensors, one_token: NamedTensors) -> str | None:
    """What a message says of the first tensor that is missing, or that the model does not have."""
    for name in sorted(tensors.keys() ^ one_token.keys()):
        if name in one_token:
            return f"lacks the tensor '{name}'"
        return f"holds '{name}', which the model does not have"
    return None


def _problem_of_tensors(tensors: NamedTensors, one_token: NamedTensors) -> str | None:
    """What a message says of the first tensor that no text leaves in a cache of this model."""
    # all layers must hold as many sequences and tokens as the first layer of each kind
    first = {}
    for name in sorted(one_token):
        first.setdefault(_kind(name), name)
    for kind in ("keys", "slot_keys", "seen"):
        if kind in first:
            name = first[kind]
            shape = list(tensors[name].shape)
            if len(shape) != one_token[name].ndim or 0 in shape:
                return f"holds '{name}' as {shape}"
    for name, tensor in tensors.items():
        shape = list(tensor.shape)
        needed = _needed_shape(name, tensors, one_token, first)
        if shape != needed:
            return f"holds '{name}' as {shape}, not {needed}"
        computed = one_token[name].dtype
        if tensor.dtype != computed:
            return f"holds '{name}' as {tensor.dtype}, not {computed} (a model in {tensor.dtype} can load it)"
        if not _stays_finite(tensor):
            return f"{_OVERFLOWS} '{name}'"
        if _kind(name) == "columns" and not _are_possible_counts(name, tensors, first):
            return f"has impossible counts of tokens in '{name}'"
    return None


def _kind(name: str) -> str:
    """The name of a tensor in its layer."""
    return name.partition(".")[2]


def _needed_shape(name: str, tensors: NamedTensors, one_token: NamedTensors, first: dict[str, str]) -> list[int]:
    """The shape of a tensor in a cache of as many sequences and tokens as the first layer of each kind has."""
    kind = _kind(name)
    shape = list(one_token[name].shape)
    if kind != "columns":
        by_sequence = first.get("seen") or first["keys"]
        shape[0] = len(tensors[by_sequence])
    if kind in ("keys", "values"):
        shape[2] = tensors[first["keys"]].shape[2]
    if kind in GROWING:
        # the same number of blocks in all layers
        slots = tensors[first["slot_keys"]].shape[2]
        slots_of_block = one_token[first["slot_keys"]].shape[2]
        shape[2] *= slots // slots_of_block
    return shape


def _are_possible_counts(name: str, tensors: NamedTensors, first: dict[str, str]) -> bool:
    """Whether a layer's `columns`, two integers, fit its `seen` [B] and those of the other layers."""
    counts = tensors[name].tolist()
    columns, is_uniform = counts
    if columns <= 0 or is_uniform not in (0, 1):
        return False
    if counts != tensors[first["columns"]].tolist():
        return False
    if "keys" in first and columns != tensors[first["keys"]].shape[2]:
        return False
    seen = tensors[name.replace("columns", "seen")]
    least, most = map(int, seen.aminmax())
    return most <= columns and least >= (columns if is_uniform else 0)


def _stays_finite(tensor: Tensor) -> bool:
    """Whether the tensor [..., D], read at a unit vector, has a finite squared norm in float32 or wider.

    If entries are at most m, a read has D entries of at most m sqrt(D).
    """
    if not tensor.is_floating_point():
        return True
    wide_dtype = torch.promote_types(tensor.dtype, torch.float32)
    width = tensor.shape[-1]
    largest = torch.finfo(wide_dtype).max ** 0.5 / width
    # false for NaN
    is_small = tensor.abs().double() < largest
    return bool(is_small.all())


def is_of(model: PreTrainedModel, written: Fingerprint) -> bool:
    """Whether the model, or one of the same computation, wrote a file."""
    if written.fits(fingerprint(model)):
        return True
    # files of before
    return written.fits(fingerprint(model, all_fields=True))


def fingerprint(model: PreTrainedModel, all_fields: bool = False) -> Fingerprint:
    """Hashes of a model's configuration and of all weights but the head's, which does not affect a cache.

    Of the configuration, the fields count that change a state, and none that any model of transformers has. With
    `all_fields` most others count, too, as in files of before. Of PEFT's adapters those count that are active now,
    with their scaling and in their order; a model whose adapters are off is the model below them.

    A model keeps its fingerprint in bfloat16 and on another device, but not in float16, which rounds differently. A
    call reads every weight (0.04 s for 8 M parameters and 0.6 s for 160 M in float32, on one CPU core).
    """
    fields = _fields_of_state(model.config, all_fields)
    header = json.dumps(fields, sort_keys=True, default=str)
    exact = hashlib.sha256(header.encode())
    rounded = exact.copy()
    for name, value in sorted(_values_in_use(model), key=itemgetter(0)):
        if not isinstance(value, Tensor):
            option = f"{name} {value}".encode()
            exact.update(option)
            rounded.update(option)
            continue
        shape = list(value.shape)
        kind = f"{name} {value.dtype} {shape}"
        exact.update(kind.encode())
        exact.update(_bytes_of(value))
        if value.is_floating_point():
            value = value.bfloat16()
        kind = f"{name} {shape}"
        rounded.update(kind.encode())
        rounded.update(_bytes_of(value))
    dtype = str(model.dtype)
    return Fingerprint(dtype, exact.hexdigest()[:16], rounded.hexdigest()[:16])


def _fields_of_state(config: PreTrainedConfig, all_fields: bool) -> dict:
    """The fields of the configuration that count in a fingerprint."""
    left_out = _IRRELEVANT
    if not all_fields:
        left_out = left_out | _STATELESS | PreTrainedConfig.__dataclass_fields__.keys()
    fields = {}
    for name, value in (config.to_dict() | _GONE).items():
        if name in left_out or name.startswith(config.unused_fields):
            continue
        if name in _ADDED:
            default = type(config).__dataclass_fields__[name].default
            if value == default:
                continue
        fields[name] = value
    return fields


class _ModulePath(NamedTuple):
    """Where a module is: names that end with a dot, or are empty."""

    # in the trunk
    full: str = ""
    # in the trunk without the wrappers of its adapters
    short: str = ""

    def child(self, name: str) -> "_ModulePath":
        """The path of a module in this one."""
        return _ModulePath(f"{self.full}{name}.", f"{self.short}{name}.")

    def wrapped(self, *names: str) -> "_ModulePath":
        """The path of a module that stands for this one."""
        path = self
        for name in names:
            path = path.child(name)
        return path._replace(short=self.short)


class _Value(NamedTuple):
    """A value that a model computes with."""

    # its path in the trunk, and its name in the hash
    path: str
    name: str
    # or an option of an adapter
    value: Tensor | float | str


def _values_in_use(model: PreTrainedModel) -> Iterator[tuple[str, Tensor | float | str]]:
    """Every value that the trunk computes with, by name; tensors are plain, several for a quantized weight."""
    trunk = model.base_model
    hashed = set()
    for used in _values_of_module(trunk, _ModulePath(), {*getattr(model, "peft_config", {})}):
        if not isinstance(used.value, Tensor):
            yield used.name, used.value
        elif id(used.value) not in hashed:
            # a weight of several modules counts once
            hashed.add(id(used.value))
            yield from _plain_tensors(trunk, used)


def _values_of_module(module: nn.Module, path: _ModulePath, adapters: set[str]) -> Iterator[_Value]:
    """What a module computes with; `adapters` are the names of all that the model has."""
    # PEFT's wrappers of layers, which this file cannot import; models have a method of this name
    if isinstance(getattr(type(module), "active_adapters", None), property):
        yield from _values_of_wrapper(module, path, adapters)
        return
    for name, value in chain(module._parameters.items(), module._buffers.items()):
        # what is not saved follows from the configuration
        if value is not None and name not in module._non_persistent_buffers_set:
            yield _Value(path.full + name, path.short + name, value)
    for name, child in module._modules.items():
        yield from _values_of_module(child, path.child(name), adapters)


def _values_of_wrapper(wrapper: nn.Module, path: _ModulePath, adapters: set[str]) -> Iterator[_Value]:
    """What a layer with adapters computes with: what it wraps and its active adapters, or a module instead of it."""
    modules = wrapper._modules
    replacements = modules.get("modules_to_save", {})
    active = [] if wrapper.disable_adapters else wrapper.active_adapters
    for adapter in active:
        if adapter in replacements:
            replacement_path = path.wrapped("modules_to_save", adapter)
            yield from _values_of_module(replacements[adapter], replacement_path, adapters)
            return
    wrapped = next(name for name in ("token_adapter", "base_layer", "original_module") if name in modules)
    yield from _values_of_module(modules[wrapped], path.wrapped(wrapped), adapters)
    # merged adapters are in the weights below, and no other one computes beside them
    if wrapped == "base_layer" and not wrapper.merged_adapters:
        # an adapter may have another name in another program
        position = {adapter: str(index) for index, adapter in enumerate(active)}
        yield from _tensors_of_adapters(wrapper, path, position, unused=adapters - position.keys())
        yield from _options_of_adapters(wrapper, path, position)


def _tensors_of_adapters(
    wrapper: nn.Module, path: _ModulePath, position: dict[str, str], unused: set[str]
) -> Iterator[_Value]:
    """The tensors of a layer's active adapters, whose `position` is given; `unused` are the names of the others."""
    for key, module in wrapper._modules.items():
        if key == "base_layer":
            continue
        inside = path.child(key)
        for name, tensor in chain(module.named_parameters(), module.named_buffers()):
            adapter, _, rest = name.partition(".")
            if adapter not in unused:
                index = position.get(adapter, adapter)
                hashed_name = f"{inside.short}{index}.{rest}"
                yield _Value(inside.full + name, hashed_name, tensor)


def _options_of_adapters(wrapper: nn.Module, path: _ModulePath, position: dict[str, str]) -> Iterator[_Value]:
    """The scaling of a layer's active adapters, and what else is no tensor of a module."""
    for key, by_adapter in vars(wrapper).items():
        if type(by_adapter) is not dict or key.startswith("_"):
            continue
        for adapter, index in position.items():
            if adapter not in by_adapter:
                continue
            option = by_adapter[adapter]
            if not isinstance(option, (float, int, str, Tensor)):
                option = type(option).__name__
            name = f"{key}.{index}"
            yield _Value(path.full + name, path.short + name, option)


def _plain_tensors(trunk: nn.Module, used: _Value) -> Iterator[tuple[str, Tensor]]:
    """A tensor by name as plain tensors."""
    pending = [(used.name, used.value.detach())]
    for name, weight in pending:
        if hasattr(weight, "full_tensor"):
            # sharded over processes, all of which call this function
            yield name, weight.full_tensor()
        elif weight.is_meta:
            # `device_map` keeps it in the CPU's memory or on disk
            yield name, load_offloaded_parameter(trunk, used.path)
        elif is_traceable_wrapper_subclass(weight):
            fields, _ = weight.__tensor_flatten__()
            for field in fields:
                pending.append((f"{name}.{field}", getattr(weight, field)))
        else:
            yield name, weight
