"""Which model computed a cache: hashes of its configuration and of every value that it computes with."""

import hashlib
import json
from collections.abc import Iterator
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.configuration_utils import PreTrainedConfig
from transformers.integrations.accelerate import load_offloaded_parameter
from transformers.modeling_utils import PreTrainedModel

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
        return self.exact == other.exact if self.dtype == other.dtype else self.rounded == other.rounded


def is_of(model: PreTrainedModel, written: Fingerprint) -> bool:
    """Whether the model, or one of the same computation, wrote a file."""
    return written.fits(fingerprint(model)) or written.fits(fingerprint(model, all_fields=True))


def fingerprint(model: PreTrainedModel, all_fields: bool = False) -> Fingerprint:
    """Hashes of a model's configuration and of all weights but the head's, which does not affect a cache.

    Of the configuration, the fields count that change a state, and none that any model of transformers has. With
    `all_fields` most others count, too, as in files of before. Of PEFT's adapters those count that are active now,
    with their scaling and in their order; a model whose adapters are off is the model below them.

    A model keeps its fingerprint in bfloat16 and on another device, but not in float16, which rounds differently. A
    call reads every weight (0.04 s for 8 M parameters and 0.6 s for 160 M in float32, on one CPU core).
    """
    left_out, unused = _IRRELEVANT, model.config.unused_fields
    if not all_fields:
        left_out = left_out | _STATELESS | PreTrainedConfig.__dataclass_fields__.keys()
    added = {key: type(model.config).__dataclass_fields__[key].default for key in _ADDED}
    fields = {
        key: value
        for key, value in (model.config.to_dict() | _GONE).items()
        if not (key in left_out or key.startswith(unused) or key in added and value == added[key])
    }
    config = json.dumps(fields, sort_keys=True, default=str)
    exact, rounded = (hashlib.sha256(config.encode()) for _ in range(2))
    for name, weight in sorted(_used(model), key=itemgetter(0)):
        if not isinstance(weight, torch.Tensor):
            for digest in (exact, rounded):
                digest.update(f"{name} {weight}".encode())
            continue
        exact.update(f"{name} {weight.dtype} {list(weight.shape)}".encode())
        exact.update(bytes_of(weight))
        rounded.update(f"{name} {list(weight.shape)}".encode())
        rounded.update(bytes_of(weight.bfloat16() if weight.is_floating_point() else weight))
    return Fingerprint(str(model.dtype), exact.hexdigest()[:16], rounded.hexdigest()[:16])


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, row by row."""
    return memoryview(tensor.contiguous().flatten().view(torch.uint8).cpu().numpy())


def _used(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor | float | str]]:
    """Every value that the trunk computes with, by name; tensors are plain, several for a quantized weight."""
    trunk, seen = model.base_model, set()
    for used in _of_module(trunk, _Place(), {*getattr(model, "peft_config", {})}):
        if not isinstance(used.value, torch.Tensor):
            yield used.name, used.value
        elif id(used.value) not in seen:
            # a weight of several modules counts once
            seen.add(id(used.value))
            yield from _plain(trunk, used)


class _Place(NamedTuple):
    """Where a module is: names that end with a dot, or are empty."""

    # in the trunk
    path: str = ""
    # in the trunk without the wrappers of its adapters
    name: str = ""

    def of(self, *names: str) -> "_Place":
        """The place of a module in this one."""
        added = "".join(f"{name}." for name in names)
        return _Place(self.path + added, self.name + added)

    def behind(self, *names: str) -> "_Place":
        """The place of a module that stands for this one."""
        return self.of(*names)._replace(name=self.name)


class _Used(NamedTuple):
    """A value that a model computes with, and its place."""

    path: str
    name: str
    # or an option of an adapter
    value: torch.Tensor | float | str


def _of_module(module: nn.Module, place: _Place, adapters: set[str]) -> Iterator[_Used]:
    """What a module computes with; `adapters` are the names of all that the model has."""
    # PEFT's wrappers of layers, which this file cannot import; models have a method of this name
    if isinstance(getattr(type(module), "active_adapters", None), property):
        yield from _of_wrapper(module, place, adapters)
        return
    for key, weight in module._parameters.items():
        if weight is not None:
            yield _Used(place.path + key, place.name + key, weight)
    for key, child in module._modules.items():
        yield from _of_module(child, place.of(key), adapters)


def _of_wrapper(wrapper: nn.Module, place: _Place, adapters: set[str]) -> Iterator[_Used]:
    """What a layer with adapters computes with: what it wraps and its active adapters, or a module instead of it."""
    parts = wrapper._modules
    active = [] if wrapper.disable_adapters else wrapper.active_adapters
    replaced = [key for key in active if key in parts.get("modules_to_save", ())]
    if replaced:
        instead = parts["modules_to_save"][replaced[0]]
        yield from _of_module(instead, place.behind("modules_to_save", replaced[0]), adapters)
        return
    wrapped = next(key for key in ("token_adapter", "base_layer", "original_module") if key in parts)
    yield from _of_module(parts[wrapped], place.behind(wrapped), adapters)
    # merged adapters are in the weights below, and no other one computes beside them
    if wrapped == "base_layer" and not wrapper.merged_adapters:
        yield from _of_adapters(wrapper, place, active, adapters - {*active})


def _of_adapters(wrapper: nn.Module, place: _Place, active: list[str], unused: set[str]) -> Iterator[_Used]:
    """The tensors and options of a layer's active adapters; `unused` are the names of the others."""
    # an adapter may have another name in another program
    position = {adapter: str(index) for index, adapter in enumerate(active)}
    for key, part in wrapper._modules.items():
        if key == "base_layer":
            continue
        for name, tensor in [*part.named_parameters(), *part.named_buffers()]:
            adapter, _, rest = name.partition(".")
            if adapter in unused:
                continue
            of_adapter = f"{key}.{position.get(adapter, adapter)}.{rest}"
            yield _Used(f"{place.path}{key}.{name}", place.name + of_adapter, tensor)
    # scaling, and what else is no tensor of a module
    for key, part in vars(wrapper).items():
        if type(part) is not dict or key.startswith("_"):
            continue
        for adapter in active:
            if adapter in part:
                name = f"{key}.{position[adapter]}"
                yield _Used(place.path + name, place.name + name, _plain_option(part[adapter]))


def _plain_option(value: object) -> torch.Tensor | float | str:
    """The value of an option, or the name of its class."""
    return value if isinstance(value, (float, int, str, torch.Tensor)) else type(value).__name__


def _plain(trunk: nn.Module, used: _Used) -> Iterator[tuple[str, torch.Tensor]]:
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
            pending += [(f"{name}.{part}", getattr(weight, part)) for part in weight.__tensor_flatten__()[0]]
        else:
            yield name, weight
