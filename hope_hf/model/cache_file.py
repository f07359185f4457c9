"""A cache as a file: tensors in safetensors, a checksum, and the fingerprint of the model that wrote them."""

import hashlib
import json
import os
import secrets
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from .fingerprint import Fingerprint, bytes_of

CACHE_FILE = "hope_cache.safetensors"
# format 1 had no checksum, format 2 stored the states of two groups of memories
_FORMAT = "3"
_AGAIN = "read the text again and save a new one"
_OVERFLOWS = "holds NaN or infinity, or values that lead to them, in"


def write_cache(
    folder: Path, tensors: dict[str, torch.Tensor], model: Fingerprint, learning: dict | None = None
) -> None:
    """Write the tensors of a cache; an existing file is replaced once the new one is complete.

    Args:
        model: fingerprint of the model that read the text.
        learning: fields of `level_learning`, if the cache holds what levels have learned.

    Raises:
        ValueError: a tensor holds NaN or infinity, or values so large that reading them overflows.
    """
    # Copied, since the current weights and those of the chunk's start can share memory, which safetensors refuses.
    tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        if not _stays_finite(tensor):
            raise ValueError(f"the cache {_OVERFLOWS} '{name}' and is not saved: read the text again")
    metadata = {"format": "pt", "hope_cache": _FORMAT, "model": " ".join(model)}
    if learning is not None:
        metadata["level_learning"] = json.dumps(learning)
    metadata["sha256"] = _checksum(tensors, metadata)
    folder.mkdir(parents=True, exist_ok=True)
    # a random name that must be new is never a link that somebody put there
    unfinished = folder / f"{CACHE_FILE}.{secrets.token_hex(8)}.unfinished"
    try:
        # not `save_file`, which ignores the umask and lets no other user read the file
        with unfinished.open("xb") as file:
            file.write(save(tensors, metadata))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(folder / CACHE_FILE)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def read_cache(folder: Path) -> tuple[dict[str, torch.Tensor], Fingerprint, dict]:
    """The tensors that `write_cache` wrote, the fingerprint of their model, and its fields of `level_learning`.

    Raises:
        ValueError: there is no such file, it has another format, or it is damaged.
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
    writer = metadata.get("model", "").split(" ")
    if len(writer) != len(Fingerprint._fields):
        raise ValueError(f"{path} does not say which model wrote it: {_AGAIN}")
    return tensors, Fingerprint(*writer), json.loads(metadata.get("level_learning", "{}"))


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


def check_tensors(folder: Path, tensors: dict[str, torch.Tensor], one_token: dict[str, torch.Tensor]) -> None:
    """ValueError unless names, shapes, dtypes, values and counts of the tensors are possible for the model.

    Args:
        one_token: tensors of the model's cache after one token of one sequence.
    """
    problem = _first_problem(tensors, one_token)
    if problem is not None:
        raise ValueError(f"{folder / CACHE_FILE} {problem}: {_AGAIN}")


def _first_problem(tensors: dict[str, torch.Tensor], one_token: dict[str, torch.Tensor]) -> str | None:
    for name in sorted(tensors.keys() ^ one_token.keys()):
        return f"lacks the tensor '{name}'" if name in one_token else f"holds '{name}', which the model does not have"
    # all layers must hold as many sequences and tokens as the first layer of each kind
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
            # the same number of blocks in all layers
            shape[2] *= tensors[first["slot_keys"]].shape[2] // one_token[first["slot_keys"]].shape[2]
        if list(tensor.shape) != shape:
            return f"holds '{name}' as {list(tensor.shape)}, not {shape}"
        if tensor.dtype != (computed := one_token[name].dtype):
            return f"holds '{name}' as {tensor.dtype}, not {computed} (a model in {tensor.dtype} can load it)"
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
    """Whether the tensor [..., D], read at a unit vector, has a finite squared norm in float32 or wider.

    If entries are at most m, a read has D entries of at most m sqrt(D).
    """
    if not tensor.is_floating_point():
        return True
    largest = torch.finfo(torch.promote_types(tensor.dtype, torch.float32)).max ** 0.5 / tensor.shape[-1]
    # false for NaN
    return bool((tensor.abs().double() < largest).all())


def _checksum(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def named_tensors(state: tuple) -> dict[str, torch.Tensor]:
    """The tensors by name, for a file: `field`, or `field.0`, `field.1` for a tuple."""
    tensors = {}
    for field, part in state._asdict().items():
        if isinstance(part, tuple):
            tensors |= {f"{field}.{index}": tensor for index, tensor in enumerate(part)}
        else:
            tensors[field] = part
    return tensors


def state_of_named(kind: type[tuple], tensors: dict[str, torch.Tensor]) -> tuple:
    """The inverse of `named_tensors`; a field without tensors is an empty tuple."""
    fields = dict.fromkeys(kind._fields, ())
    for name in sorted(tensors):
        field, _, index = name.partition(".")
        fields[field] = (*fields[field], tensors[name]) if index else tensors[name]
    return kind(**fields)
