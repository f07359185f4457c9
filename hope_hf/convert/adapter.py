"""A LoRA of the source as one of the converted HOPE: other names, and matrices cut as the levels are."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hope_hf import HopeConfig, HopeForCausalLM
from hope_hf.common.adapters import alpha_of, base_of_adapter, require_peft
from hope_hf.common.files import copy_rights, new_folder, require_new
from hope_hf.common.process import MISTAKES, one_line
from hope_hf.common.weight_names import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from hope_hf.common.weights import find_file

from .weights import parts_of

_PREFIX = "base_model.model."
# Options with which a LoRA is more than two matrices beside each map; they stand in the file where they are not used.
_BEYOND_LORA = (
    "use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "target_parameters", "layer_replication",
    "alora_invocation_tokens", "fan_in_fan_out", "use_qalora",
)  # fmt: skip
# Options that choose modules by patterns: the new adapter names each of its maps.
_CHOICES = ("layers_to_transform", "layers_pattern", "exclude_modules", "auto_mapping")
_MERGE = "name the source with --from to merge the adapter into it"


def convert_adapter(adapter: str, model: str, config: HopeConfig, out: Path) -> int:
    """Write the adapter of a converted model that does to it what a LoRA does to the source.

    Args:
        adapter: folder or Hub name of the LoRA.
        model: folder or Hub name of the converted model.
        config: of the converted model.
        out: does not exist or is empty; it appears complete, or not at all.

    Returns:
        How many linear maps it adapts.

    Raises:
        ValueError: it is no LoRA of two matrices for each map, or the converted model lacks one of the maps.
    """
    require_peft("--adapter")
    require_new(out, "--output_dir")
    flag = f"--adapter {adapter}"
    options, tensors = _read(adapter, flag)
    with torch.device("meta"):
        weights = HopeForCausalLM(config).state_dict()
    matrices: dict[str, Tensor] = {}
    # map of the converted model -> map of the source
    sources: dict[str, str] = {}
    for source in sorted({_module_of(name) for name in tensors}):
        a = tensors.get(_name("A", source))
        b = tensors.get(_name("B", source))
        if a is None or b is None:
            raise ValueError(f"{flag} has other weights than a lora_A and a lora_B for {source}: {_MERGE}.")
        parts = parts_of(f"{source}.weight", config)
        if not parts:
            raise ValueError(f"{flag} adapts {source}, which {model} has not: {_MERGE}.")
        for part in parts:
            module = part.name.removesuffix(".weight")
            # a part of the columns is one of A's, a part of the rows one of B's
            part_of_a = a[part.slices] if part.axis == 1 else a
            part_of_b = b if part.axis == 1 else b[part.slices]
            weight = weights.get(part.name)
            if weight is None or weight.shape != (part_of_b.shape[0], part_of_a.shape[1]):
                raise ValueError(f"{flag} is of another model than {model}: its {source} does not fit {module}.")
            sources[module] = source
            matrices[_name("A", module)] = part_of_a.clone(memory_format=torch.contiguous_format)
            matrices[_name("B", module)] = part_of_b.clone(memory_format=torch.contiguous_format)
    options = _new_options(options, sources, matrices) | {"base_model_name_or_path": model}
    with new_folder(out, "--output_dir") as folder:
        (folder / ADAPTER_CONFIG).write_text(json.dumps(options, indent=2) + "\n", "utf-8")
        save_file(matrices, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        copy_rights(folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS)
    return len(sources)


def _name(letter: str, module: str) -> str:
    return f"{_PREFIX}{module}.lora_{letter}.weight"


def _module_of(name: str) -> str:
    return name.removeprefix(_PREFIX).rpartition(".lora_")[0]


def _read(adapter: str, flag: str) -> tuple[dict, dict[str, Tensor]]:
    """Options and tensors of a LoRA; ValueError if it cannot be read, or is more than that."""
    try:
        if base_of_adapter(adapter) is None:
            raise ValueError(f"it holds no {ADAPTER_CONFIG}")
        file = find_file(adapter, ADAPTER_WEIGHTS)
        if file is None:
            raise ValueError(f"it has no {ADAPTER_WEIGHTS}, and only safetensors are read")
        options = json.loads(find_file(adapter, ADAPTER_CONFIG).read_text("utf-8"))
        tensors = load_file(file)
    except MISTAKES as error:
        raise ValueError(f"{flag} cannot be read: {one_line(error).rstrip('.')}.") from error
    beyond = [name for name in _BEYOND_LORA if options.get(name)]
    if beyond:
        raise ValueError(f"{flag} has {', '.join(beyond)}: {_MERGE}.")
    if options["peft_type"] != "LORA" or options.get("bias", "none") != "none":
        raise ValueError(f"{flag} has biases, or is no LoRA: {_MERGE}.")
    return options, tensors


def _new_options(options: dict, sources: dict[str, str], matrices: dict[str, Tensor]) -> dict:
    """The options of the new adapter, which name the rank and the scale of each of its maps."""
    ranks = {}
    alphas = {}
    for module, source in sources.items():
        ranks[module] = matrices[_name("A", module)].shape[0]
        alphas[module] = alpha_of(source, options)
    names = {"target_modules": sorted(sources), "rank_pattern": ranks, "alpha_pattern": alphas}
    return options | dict.fromkeys(_CHOICES) | names
