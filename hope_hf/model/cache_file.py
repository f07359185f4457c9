"""A cache as a file: tensors in safetensors, a checksum, and the fingerprint of the model that wrote them."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.configuration_utils import PreTrainedConfig
from transformers.integrations.accelerate import load_offloaded_parameter
from transformers.modeling_utils import PreTrainedModel

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


def write_cache(
    folder: Path, tensors: dict[str, torch.Tensor], model: "Fingerprint", learning: dict | None = None
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
    unfinished = folder / f"{CACHE_FILE}.unfinished"
    # not `save_file`, which ignores the umask and lets no other user read the file
    unfinished.write_bytes(save(tensors, metadata))
    unfinished.replace(folder / CACHE_FILE)


def read_cache(folder: Path) -> tuple[dict[str, torch.Tensor], "Fingerprint", dict]:
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


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().flatten().view(torch.uint8).cpu().numpy())


def _checksum(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


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
    `all_fields` most others count, too, as in files of before.

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
    for name, weight in sorted(_plain_weights(model.base_model)):
        exact.update(f"{name} {weight.dtype} {list(weight.shape)}".encode())
        exact.update(_bytes(weight))
        rounded.update(f"{name} {list(weight.shape)}".encode())
        rounded.update(_bytes(weight.bfloat16() if weight.is_floating_point() else weight))
    return Fingerprint(str(model.dtype), exact.hexdigest()[:16], rounded.hexdigest()[:16])


def _plain_weights(trunk: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight by name as plain tensors, several for a quantized weight."""
    pending = [(name, weight.detach()) for name, weight in trunk.named_parameters()]
    for name, weight in pending:
        if hasattr(weight, "full_tensor"):
            # sharded over processes, all of which call this function
            yield name, weight.full_tensor()
        elif weight.is_meta:
            # `device_map` keeps it in the CPU's memory or on disk
            yield name, load_offloaded_parameter(trunk, name)
        elif is_traceable_wrapper_subclass(weight):
            pending += [(f"{name}.{part}", getattr(weight, part)) for part in weight.__tensor_flatten__()[0]]
        else:
            yield name, weight


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
