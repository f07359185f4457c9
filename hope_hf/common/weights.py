"""Loads a causal language model's weights from safetensors, complete and unchanged, or raises an error.

transformers itself fills missing weights with random numbers, casts integers, and reads pickles.
"""

import hashlib
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from .adapters import base_of_adapter, merged
from .files import is_inside
from .process import MISTAKES, one_line
from .weight_names import ADAPTER_WEIGHTS, PART, Refused, parts_of

# Bytes of a weight file that are hashed at a place, and at most so many places.
_SAMPLED, _SAMPLES = 1 << 10, 1 << 10
# In the names of what layers of "retaining_attention" alone have.
_SCORES = ".mixer.scores."


def load_model(source: str, config, named: str, **options) -> PreTrainedModel:
    """The model of a folder or Hub name, on the CPU and in evaluation mode.

    Args:
        source: the folder or name.
        config: of the model.
        named: how the user named it, for error messages.
        options: for `from_pretrained`.

    Raises:
        ValueError: there are no safetensors, a file is broken, or a weight is missing, has another shape than
            the config gives, or is not of a floating-point type.
    """
    try:
        base = base_of_adapter(source)
        if base is not None:
            return with_adapter(load_model(base, config, f"{named}: its model {base}", **options), source, named)
        files = weight_files(source, getattr(config, "transformers_weights", None), named)
        with _quietly():
            model, report = AutoModelForCausalLM.from_pretrained(
                source, use_safetensors=True, ignore_mismatched_sizes=True, output_loading_info=True, **options
            )
    except Refused:
        raise
    except MISTAKES as error:
        raise Refused(f"{named} cannot be loaded: {one_line(error)}") from error
    _check_names(model, report, named)
    _check_shapes(report, named)
    _check_types(model, files, report, named)
    return model


def with_layers_of(config, model: PreTrainedModel, scores: dict[str, Tensor] | None = None) -> PreTrainedModel:
    """A HOPE in eval mode with the kinds of layers of a configuration, and the weights of a model.

    `scores` by name are those of tokens that layers retain, in place of the model's.
    """
    weights = {}
    for name, weight in model.state_dict().items():
        if _SCORES not in name:
            weights[name] = weight
    weights |= scores or {}
    made = type(model).from_pretrained(None, config=config, state_dict=weights, dtype=model.dtype)
    return made.eval()


def with_adapter(model: PreTrainedModel, source: str, named: str) -> PreTrainedModel:
    """A model, on the CPU, with the adapter of a folder or Hub name merged into it; ValueError if it cannot be."""
    if find_file(source, ADAPTER_WEIGHTS) is None:
        raise Refused(f"{named} has no {ADAPTER_WEIGHTS}, and only safetensors are read: save it again.")
    return merged(model, source)


def weights_sampled(folder: str | Path) -> str | None:
    """A hash of names, sizes and evenly spread bytes of a model's weight files; None if the folder has none.

    It tells trained models apart in milliseconds, whatever their size. It is no protection against forgery.
    """
    files = sorted(path for path in Path(folder).iterdir() if path.suffix in (".safetensors", ".bin"))
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for place in range(0, size, max(_SAMPLED, size // _SAMPLES)):
                file.seek(place)
                digest.update(file.read(_SAMPLED))
    return digest.hexdigest() if files else None


def weight_files(source: str, given: str | None, named: str) -> list[Path]:
    """The safetensors of a model; `given` is the config's name for them, instead of the usual ones."""
    if given is not None and not is_inside(given):
        raise Refused(f"{named} has a config.json whose transformers_weights is not a file of its folder: {given!r}.")
    for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME) if given is None else (given,):
        file = find_file(source, name)
        if file is None:
            continue
        if not name.endswith(".index.json"):
            return [file]
        files = []
        for part in parts_of(file):
            files.append(find_file(source, part))
            if files[-1] is None:
                raise Refused(f"{named} has no {part}, which its {name} names: save the model again.")
        return files
    if os.path.isdir(source) and any(PART.fullmatch(name) for name in os.listdir(source)):
        raise Refused(
            f"{named} holds its weights in parts (--save_sharded): join them with `python -m "
            f"hope_hf.training.checkpoints consolidate {source} --to DIR` and name DIR."
        )
    convert = f"AutoModelForCausalLM.from_pretrained({source!r}).save_pretrained({source!r})"
    raise Refused(
        f"{named} has no {given or SAFE_WEIGHTS_NAME}, and only safetensors are read: to convert a pytorch_model.bin "
        f"that you trust, run {convert} in Python."
    )


def find_file(source: str, name: str) -> Path | None:
    """A file of a folder or of the Hub; None if there is none or it is not a file."""
    path = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    return None if path is None else Path(path)


@contextmanager
def _quietly() -> Iterator[None]:
    """Hide transformers' load report and torch's warning about complex numbers: our error replaces them."""
    logger = logging.getLogger("transformers.modeling_utils")

    def keep(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    logger.addFilter(keep)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Casting complex values")
            yield
    finally:
        logger.removeFilter(keep)


def _check_names(model: PreTrainedModel, report: dict, named: str) -> None:
    missing = sorted(report["missing_keys"])
    unknown = sorted(report["unexpected_keys"])
    if missing:
        raise ValueError(
            f"{named} has no weights for {missing[0]}{_more(missing)}, which its config.json asks for: save the whole "
            "model there again, or put back the config.json that was saved with these weights."
        )
    if not unknown:
        return
    sentence = f"{named} has weights for {unknown[0]}{_more(unknown)}, which the model of its config.json lacks"
    # HOPE checkpoints have no unused weights; those of other families hold heads and buffers for other uses.
    if model.config.model_type == "hope":
        raise ValueError(f"{sentence}: put back the config.json that was saved with these weights.")
    warnings.warn(f"{sentence}: they are left out.", stacklevel=4)


def _check_shapes(report: dict, named: str) -> None:
    mismatched = sorted(report["mismatched_keys"])
    if mismatched:
        name, shape_in_file, shape = mismatched[0]
        raise ValueError(
            f"{named} has a {name} of shape {list(shape_in_file)}, and its config.json asks for "
            f"{list(shape)}{_more(mismatched)}: put back the "
            "config.json that was saved with these weights."
        )


def _check_types(model: PreTrainedModel, files: list[Path], report: dict, named: str) -> None:
    if getattr(model, "hf_quantizer", None) is not None:
        # Many of its weights are integers; the quantizer decides which.
        return
    prefix = f"{model.base_model_prefix}."
    is_float = {name: tensor.is_floating_point() for name, tensor in model.state_dict().items()}
    # A base model's own files lack the prefix.
    for name, value in list(is_float.items()):
        if name.startswith(prefix):
            is_float[name.removeprefix(prefix)] = value
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in sorted(tensors.keys()):
                dtype = tensors.get_slice(name).get_dtype()
                # Some families rename weights while loading, so the name in the file is not in the model.
                weight = is_float.get(name, name.endswith(".weight") and name not in report["unexpected_keys"])
                if weight and not dtype.startswith(("F", "BF")):
                    raise ValueError(
                        f"{named} has a {name} of {dtype}, which is no floating-point type: save the model again in "
                        "float32 or bfloat16."
                    )


def _more(names: list) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
