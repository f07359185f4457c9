"""A cache as a file: tensors in safetensors with a checksum, which model wrote them, and what fits a model."""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.integrations.accelerate import load_offloaded_parameter
from transformers.modeling_utils import PreTrainedModel

CACHE_FILE = "hope_cache.safetensors"
# 1 had no checksum, 2 states of two groups of memories
_FORMAT = "3"
_AGAIN = "read the text again and save a new one"
_OVERFLOWS = "holds NaN or infinity, or values that lead to them, in"
# What says nothing about how a text is read.
_IRRELEVANT = {
    "_name_or_path", "architectures", "auto_map", "dtype", "transformers_version", "use_cache", "recompute_chunks",
    "level_periods",
}  # fmt: skip


def write_cache(folder: Path, tensors: dict[str, torch.Tensor], model: str) -> None:
    """Write the tensors of a cache; a file that is there is replaced once the new one is complete.

    Args:
        model: what tells the model that read the text.

    Raises:
        ValueError: a tensor holds NaN or infinity, or values so large that reading them overflows.
    """
    # Cloned: weights now and weights at the chunk's start can be one tensor, which safetensors refuses.
    tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        if not _stays_finite(tensor):
            raise ValueError(f"the cache {_OVERFLOWS} '{name}' and is not saved: read the text again")
    metadata = {"format": "pt", "hope_cache": _FORMAT, "model": model}
    metadata["sha256"] = _checksum(tensors, metadata)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{CACHE_FILE}.unfinished"
    # `save_file` lets nobody else read the file, whatever the umask says
    unfinished.write_bytes(save(tensors, metadata))
    unfinished.replace(folder / CACHE_FILE)


def read_cache(folder: Path) -> tuple[dict[str, torch.Tensor], str]:
    """The tensors that `write_cache` wrote, and what tells their model.

    Raises:
        ValueError: there is no such file, its format is another, or its bytes are not those that were written.
    """
    path = folder / CACHE_FILE
    if not path.is_file():
        raise ValueError(f"{folder} holds no {CACHE_FILE}: give a folder that HopeCache.save_pretrained wrote")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dictionary
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): {_AGAIN}") from None
    if metadata.get("hope_cache") != _FORMAT:
        raise ValueError(
            f"{path} has the cache format {str(metadata.get('hope_cache'))[:20]}, and this version of HOPE reads "
            f"format {_FORMAT}: {_AGAIN}"
        )
    if metadata.pop("sha256", None) != _checksum(tensors, metadata):
        raise ValueError(f"{path} is damaged (its checksum does not fit): {_AGAIN}")
    if len(metadata.get("model", "").split(" ")) != len(Fingerprint._fields):
        raise ValueError(f"{path} does not say which model wrote it: {_AGAIN}")
    return tensors, metadata["model"]


def check_tensors(folder: Path, tensors: dict[str, torch.Tensor], one_token: dict[str, torch.Tensor]) -> None:
    """ValueError unless the tensors are what a text can leave in a cache: by name, shape, dtype, value and count.

    Args:
        one_token: those that one token leaves in a cache of the model, one sequence.
    """
    problem = _first_problem(tensors, one_token)
    if problem is not None:
        raise ValueError(f"{folder / CACHE_FILE} {problem}: {_AGAIN}")


def _first_problem(tensors: dict[str, torch.Tensor], one_token: dict[str, torch.Tensor]) -> str | None:
    for name in sorted(tensors.keys() ^ one_token.keys()):
        return f"lacks the tensor '{name}'" if name in one_token else f"holds '{name}', which the model does not have"
    # the first layer of each kind tells how many sequences and tokens all must hold
    first = {name.partition(".")[2]: name for name in sorted(one_token, reverse=True)}
    for name in (first.get("keys"), first.get("slot_keys"), first.get("seen")):
        if name is not None and (tensors[name].ndim != one_token[name].ndim or 0 in tensors[name].shape):
            return f"holds '{name}' as {list(tensors[name].shape)}"
    for name, tensor in tensors.items():
        kind, shape = name.partition(".")[2], list(one_token[name].shape)
        if kind != "columns":
            shape[0] = len(tensors[first.get("seen") or first["keys"]])
        if kind in ("keys", "values"):
            shape[2] = tensors[first["keys"]].shape[2]
        if kind in ("slot_keys", "slot_values", "compressed_keys", "compressed_values"):
            # whole blocks, as many in all layers
            shape[2] *= tensors[first["slot_keys"]].shape[2] // one_token[first["slot_keys"]].shape[2]
        if list(tensor.shape) != shape or tensor.dtype != one_token[name].dtype:
            return f"holds '{name}' as {list(tensor.shape)} {tensor.dtype}, not {shape} {one_token[name].dtype}"
        if not _stays_finite(tensor):
            return f"{_OVERFLOWS} '{name}'"
        if kind == "columns":
            (columns, is_uniform), seen = tensor.tolist(), tensors[name.replace(kind, "seen")]
            possible = columns > 0 and is_uniform in (0, 1) and torch.equal(tensor, tensors[first["columns"]])
            possible = possible and ("keys" not in first or tensors[first["keys"]].shape[2] == columns)
            if not possible or seen.min() < (columns if is_uniform else 0) or seen.max() > columns:
                return f"has impossible counts of tokens in '{name}'"
    return None


def _stays_finite(tensor: torch.Tensor) -> bool:
    """Whether the squared norm of what a unit vector reads of the tensor [..., D] is finite.

    Norms square every read, in float32 at least. With entries of at most m it has D entries of at most m sqrt(D).
    """
    if not tensor.is_floating_point():
        return True
    largest = torch.finfo(torch.promote_types(tensor.dtype, torch.float32)).max ** 0.5 / tensor.shape[-1]
    # NaN is not below it
    return bool((tensor.abs().double() < largest).all())


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _checksum(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(_as_bytes(tensor).numpy())
    return digest.hexdigest()


class Fingerprint(NamedTuple):
    """Hashes of 16 hexadecimal digits."""

    # of the weights, such as torch.float32
    dtype: str
    # of every byte of the weights
    exact: str
    # of the weights rounded to bfloat16
    rounded: str

    def fits(self, other: "Fingerprint") -> bool:
        """Whether it is the same model: to the last bit, or in another precision to bfloat16's."""
        return self.exact == other.exact if self.dtype == other.dtype else self.rounded == other.rounded


def fingerprint(model: PreTrainedModel) -> Fingerprint:
    """Hashes of a model's configuration and of all weights of its trunk: heads do not change what is read.

    Loaded in bfloat16, or moved to another device, it is the same model; in float16, which is rounded otherwise, it is
    another. Every call reads every weight (0.04 s for 8 M parameters and 0.6 s for 160 M in float32, on one CPU core).
    """
    config = {key: value for key, value in model.config.to_dict().items() if key not in _IRRELEVANT}
    if not model.config.has_sparse_attention:
        config = {key: value for key, value in config.items() if not key.startswith("sparse_")}
    config = json.dumps(config, sort_keys=True, default=str)
    exact, rounded = (hashlib.sha256(config.encode()) for _ in range(2))
    for name, weight in sorted(_plain_weights(model.base_model)):
        exact.update(f"{name} {weight.dtype} {list(weight.shape)}".encode())
        exact.update(_bytes(weight))
        rounded.update(f"{name} {list(weight.shape)}".encode())
        rounded.update(_bytes(weight.bfloat16() if weight.is_floating_point() else weight))
    return Fingerprint(str(model.dtype), exact.hexdigest()[:16], rounded.hexdigest()[:16])


def _plain_weights(trunk: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight by name as plain tensors; a quantized one has several."""
    pending = [(name, weight.detach()) for name, weight in trunk.named_parameters()]
    for name, weight in pending:
        if hasattr(weight, "full_tensor"):
            # cut over processes, all of which come here
            yield name, weight.full_tensor()
        elif weight.is_meta:
            # `device_map` keeps it outside of the module: in the CPU's memory, or on disk
            yield name, load_offloaded_parameter(trunk, name)
        elif is_traceable_wrapper_subclass(weight):
            pending += [(f"{name}.{part}", getattr(weight, part)) for part in weight.__tensor_flatten__()[0]]
        else:
            yield name, weight


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(_as_bytes(tensor).cpu().numpy())


def map_state(function: Callable[[torch.Tensor], torch.Tensor], state: tuple) -> tuple:
    """`function(tensor)` in place of every tensor."""
    return type(state)(*(tuple(map(function, part)) if isinstance(part, tuple) else function(part) for part in state))


def named_tensors(state: tuple) -> dict[str, torch.Tensor]:
    """The tensors by name, for a file: `field`, or `field.0`, `field.1` where the field is a tuple."""
    tensors = {}
    for field, part in state._asdict().items():
        if isinstance(part, tuple):
            tensors |= {f"{field}.{index}": tensor for index, tensor in enumerate(part)}
        else:
            tensors[field] = part
    return tensors


def state_of_named(kind: type[tuple], tensors: dict[str, torch.Tensor]) -> tuple:
    """The inverse of `named_tensors`; a field without tensors was an empty tuple."""
    fields = dict.fromkeys(kind._fields, ())
    for name in sorted(tensors):
        field, _, index = name.partition(".")
        fields[field] = (*fields[field], tensors[name]) if index else tensors[name]
    return kind(**fields)
