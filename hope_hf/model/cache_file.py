"""A cache as a file: tensors in safetensors with a checksum, and what they must be before a model continues them."""

import hashlib
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

CACHE_FILE = "hope_cache.safetensors"
# 1 had no checksum, 2 states of two groups of memories
_FORMAT = "3"
_AGAIN = "read the text again and save a new one"


def write_cache(folder: Path, tensors: dict[str, torch.Tensor], model: str) -> None:
    """Write the tensors of a cache; a file that is there is replaced once the new one is complete.

    Args:
        model: what tells the model that read the text.

    Raises:
        ValueError: a tensor holds NaN or infinity.
    """
    # Cloned: weights now and weights at the chunk's start can be one tensor, which safetensors refuses.
    tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        if not _is_finite(tensor):
            raise ValueError(f"the cache holds NaN or infinity in '{name}' and is not saved: read the text again")
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
            f"{path} has the cache format {metadata.get('hope_cache')}, and this version of HOPE reads "
            f"format {_FORMAT}: {_AGAIN}"
        )
    if metadata.pop("sha256", None) != _checksum(tensors, metadata):
        raise ValueError(f"{path} is damaged (its checksum does not fit): {_AGAIN}")
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
    for name in (first.get("keys"), first.get("seen")):
        if name is not None and (tensors[name].ndim != one_token[name].ndim or 0 in tensors[name].shape):
            return f"holds '{name}' as {list(tensors[name].shape)}"
    for name, tensor in tensors.items():
        kind, shape = name.partition(".")[2], list(one_token[name].shape)
        if kind != "columns":
            shape[0] = len(tensors[first.get("seen") or first["keys"]])
        if kind in ("keys", "values"):
            shape[2] = tensors[first["keys"]].shape[2]
        if list(tensor.shape) != shape or tensor.dtype != one_token[name].dtype:
            return f"holds '{name}' as {list(tensor.shape)} {tensor.dtype}, not {shape} {one_token[name].dtype}"
        if not _is_finite(tensor):
            return f"holds NaN or infinity in '{name}'"
        if kind == "columns":
            (columns, is_uniform), seen = tensor.tolist(), tensors[name.replace(kind, "seen")]
            possible = columns > 0 and is_uniform in (0, 1) and torch.equal(tensor, tensors[first["columns"]])
            possible = possible and ("keys" not in first or tensors[first["keys"]].shape[2] == columns)
            if not possible or seen.min() < (columns if is_uniform else 0) or seen.max() > columns:
                return f"has impossible counts of tokens in '{name}'"
    return None


def _is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def _checksum(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
