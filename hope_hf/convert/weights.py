"""The weights on their way from file to file: other names, and hidden units cut into levels.

At most one file is held at a time, tensor by tensor, so that no memory map outlives the tensor that it was read for.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hope_hf import HopeConfig, HopeForCausalLM

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_FIRST_OF_LAYER = re.compile(r"model\.layers\.(\d+)\.input_layernorm\.weight")
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FLOATS = ("F64", "F32", "F16", "BF16")


class Part(NamedTuple):
    """A weight of the converted model: a tensor of the checkpoint, from `start` to `stop` along an axis."""

    name: str
    axis: int = 0
    start: int | None = None
    stop: int | None = None

    @property
    def slices(self) -> tuple[slice, ...]:
        """For a tensor or a slice of safetensors."""
        return (slice(None),) * self.axis + (slice(self.start, self.stop),)


def parts_of(name: str, config: HopeConfig) -> list[Part]:
    """The weights that a tensor of the checkpoint becomes; none for one that the converted model does without."""
    if name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == HEAD):
        return []
    match = _LAYER.fullmatch(name)
    if match is None or int(match[1]) >= config.num_hidden_layers:
        return [Part(name)]
    layer = int(match[1])
    block = f"model.layers.{layer}"
    module, _, rest = match[2].partition(".")
    if module == "self_attn":
        is_replaced = config.layer_types[layer] == "hope_memory"
        return [] if is_replaced else [Part(f"{block}.mixer.{rest}")]
    levels = [f"{block}.continuum.levels.{level}" for level in range(len(config.level_periods))]
    if module == "post_attention_layernorm":
        return [Part(f"{level}.norm.{rest}") for level in levels]
    if module != "mlp":
        return [Part(name)]
    if rest == "down_proj.bias":
        return [Part(f"{levels[0]}.{rest}")]
    axis = 1 if rest == "down_proj.weight" else 0
    parts = []
    start = 0
    for level, units in zip(levels, config.level_intermediate_sizes, strict=True):
        stop = start + units
        parts.append(Part(f"{level}.{rest}", axis, start, stop))
        start = stop
    # the last level has no end, so that units that the config lacks change its shape and are found
    parts[-1] = parts[-1]._replace(stop=None)
    return parts


def new_weights(config: HopeConfig, layer: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of a block for which its checkpoint has none; together they change nothing.

    Parallel levels are added up with weights of 1, and one of them has the bias of the sum. Memories start as in a new
    model, but with an output map of zeros.
    """
    block = f"model.layers.{layer}"
    weights = {}
    levels = len(config.level_periods)
    if levels > 1:
        weights[f"{block}.continuum.mix.weight"] = torch.ones(levels, dtype=dtype)
    if config.mlp_bias:
        for level in range(1, levels):
            weights[f"{block}.continuum.levels.{level}.down_proj.bias"] = torch.zeros(config.hidden_size, dtype=dtype)
    if config.layer_types[layer] == "hope_memory":
        for name, weight in _new_mixer(config, seed=layer).state_dict().items():
            weights[f"{block}.mixer.{name}"] = weight.to(dtype)
    return weights


def _new_mixer(config: HopeConfig, seed: int) -> nn.Module:
    """A new mixer of memories that adds nothing, from a model with as little else as possible."""
    small = deepcopy(config)
    small.num_hidden_layers = 1
    small.layer_types = ["hope_memory"]
    small.vocab_size = 1
    small.level_intermediate_sizes = [1] * len(config.level_periods)
    small.pad_token_id = small.bos_token_id = small.eos_token_id = None
    small.level_learning = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        mixer = HopeForCausalLM(small).model.layers[0].mixer
    nn.init.zeros_(mixer.o_proj.weight)
    return mixer


class File(NamedTuple):
    """What becomes of a file of the checkpoint."""

    path: Path
    # tensor of the checkpoint -> weights of the converted model
    parts: dict[str, list[Part]]
    # layers whose new weights are written beside it
    layers: list[int]

    def weights(self, config: HopeConfig, dtype: torch.dtype) -> dict[str, Tensor]:
        """All weights of the new file by name, copied one after the other."""
        weights = {}
        for name, parts in self.parts.items():
            with safe_open(self.path, framework="pt") as tensors:
                for part in parts:
                    cut = tensors.get_slice(name)[part.slices]
                    weights[part.name] = cut.clone(memory_format=torch.contiguous_format)
        for layer in self.layers:
            weights |= new_weights(config, layer, dtype)
        return weights


def read_names(paths: list[Path]) -> dict[str, Path]:
    """The file of every tensor. ValueError if two files hold one."""
    names = {}
    for path in paths:
        with _opened(path) as tensors:
            for name in tensors.keys():  # noqa: SIM118  not a dictionary
                if name in names:
                    raise ValueError(f"{path} holds {name}, which {names[name]} holds, too: save the model again.")
                names[name] = path
    return names


@contextmanager
def _opened(path: Path) -> Iterator:
    """`safe_open`, but ValueError for a damaged file."""
    try:
        with safe_open(path, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): save or download the model again.") from None


def plan_files(paths: list[Path], config: HopeConfig, dtype: torch.dtype, named: str) -> list[File]:
    """What becomes of each file; files that hold nothing for the converted model are left out.

    Raises ValueError that begins with `named` unless the tensors are those of the config.
    """
    names = read_names(paths)
    with torch.device("meta"):
        weights = HopeForCausalLM(config).state_dict()
    if config.tie_word_embeddings:
        del weights[HEAD]
        _check_tied(names, named)
    files = [_plan_file(path, names, config, named) for path in paths]
    planned = {}
    for file in files:
        planned |= _planned_shapes(file, config, dtype)
    needed = {name: list(weight.shape) for name, weight in weights.items()}
    _compare(planned, needed, named)
    return [file for file in files if file.parts]


def _plan_file(path: Path, names: dict[str, Path], config: HopeConfig, named: str) -> File:
    """What becomes of a file, from the names and dtypes of its tensors."""
    file = File(path, {}, [])
    with _opened(path) as tensors:
        for name in tensors.keys():  # noqa: SIM118  not a dictionary
            parts = parts_of(name, config)
            if config.tie_word_embeddings and name == HEAD and TABLE not in names:
                # one of the two is enough where they are tied, and here the embedding is written
                parts = [Part(TABLE)]
            kind = tensors.get_slice(name).get_dtype()
            if parts and kind not in FLOATS:
                raise ValueError(
                    f"{named} has a {name} of {kind}: convert a model whose weights are float32, bfloat16 or float16."
                )
            if parts:
                file.parts[name] = parts
            layer = _FIRST_OF_LAYER.fullmatch(name)
            if layer is not None and int(layer[1]) < config.num_hidden_layers:
                file.layers.append(int(layer[1]))
    return file


def _planned_shapes(file: File, config: HopeConfig, dtype: torch.dtype) -> dict[str, tuple[str, list[int]]]:
    """The tensor, and the shape, of each weight that a file becomes; no weight is read."""
    planned = {}
    with _opened(file.path) as tensors:
        for name, parts in file.parts.items():
            for part in parts:
                shape = tensors.get_slice(name).get_shape()
                taken = range(shape[part.axis])[part.start : part.stop]
                shape[part.axis] = len(taken)
                planned[part.name] = name, shape
    with torch.device("meta"):
        for layer in file.layers:
            for name, weight in new_weights(config, layer, dtype).items():
                planned[name] = "a new weight", list(weight.shape)
    return planned


def _check_tied(names: dict[str, Path], named: str) -> None:
    """ValueError for a head of its own: transformers ties it to the embedding only where both are the same."""
    if TABLE not in names or HEAD not in names:
        return
    with _opened(names[TABLE]) as file:
        table = file.get_tensor(TABLE)
    with _opened(names[HEAD]) as file:
        head = file.get_tensor(HEAD)
    if not torch.equal(table, head):
        raise ValueError(
            f"{named} has tie_word_embeddings and a lm_head.weight that is not its embedding: set tie_word_embeddings "
            "to false in its config.json."
        )


def _compare(planned: dict[str, tuple[str, list[int]]], expected: dict[str, list[int]], named: str) -> None:
    for name in sorted(expected.keys() - planned.keys()):
        raise ValueError(
            f"{named} has no weights for {name} of the converted model: save the whole model there again."
        )
    for name in sorted(planned.keys() - expected.keys()):
        raise ValueError(f"{named} has weights for {planned[name][0]}, which its config.json does not ask for.")
    for name, (tensor, shape) in sorted(planned.items()):
        if shape != expected[name]:
            raise ValueError(
                f"{named} has a {tensor} that becomes {name} of shape {shape}, and its config.json asks for "
                f"{expected[name]}: put back the config.json that was saved with these weights."
            )


def write_files(files: list[File], config: HopeConfig, dtype: torch.dtype, folder: Path) -> int:
    """Write the converted model's weights, one file for each, and their index if there are several.

    Returns:
        The number of parameters.
    """
    index = {}
    size = parameters = 0
    for number, file in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        if len(files) == 1:
            name = SAFE_WEIGHTS_NAME
        weights = file.weights(config, dtype)
        save_file(weights, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(weights, name)
        for weight in weights.values():
            size += weight.nbytes
            parameters += weight.numel()
        # before the next file is read
        del weights, weight
    if len(files) > 1:
        content = {"metadata": {"total_parameters": parameters, "total_size": size}, "weight_map": index}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return parameters
