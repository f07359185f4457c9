"""A LoRA of the source as one of the converted HOPE: other names, and matrices cut as the levels are."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file

from hope_hf import HopeConfig, HopeForCausalLM
from hope_hf.common.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, alpha_of, base_of_adapter, require_peft
from hope_hf.common.files import copy_rights
from hope_hf.common.process import MISTAKES, one_line
from hope_hf.common.weights import find_file

from .weights import parts_of

_PREFIX = "base_model.model."
# Options with which a LoRA is more than two matrices beside each map; they stand in the file where they are not used.
_MORE = (
    "use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "target_parameters", "layer_replication",
    "alora_invocation_tokens", "fan_in_fan_out", "use_qalora",
)  # fmt: skip


def convert_adapter(adapter: str, place: str, config: HopeConfig, out: Path) -> int:
    """Write the adapter of a converted model that does to it what a LoRA does to the source.

    Args:
        adapter: folder or Hub name of the LoRA.
        place: folder or Hub name of the converted model.
        config: of the converted model.
        out: does not exist or is empty; it appears complete, or not at all.

    Returns:
        How many linear maps it adapts.

    Raises:
        ValueError: it is no LoRA of two matrices for each map, or the converted model lacks one of the maps.
    """
    require_peft("--adapter")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--output_dir {out} exists and is not an empty folder: name a new one.")
    named = f"--adapter {adapter}"
    options, tensors = _read(adapter, named)
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in HopeForCausalLM(config).state_dict().items()}
    weights, modules = {}, {}
    for module in sorted({name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in tensors}):
        a, b = (tensors.get(f"{_PREFIX}{module}.lora_{letter}.weight") for letter in "AB")
        if a is None or b is None:
            raise ValueError(f"{named} has other weights than a lora_A and a lora_B for {module}: {_MERGE}.")
        parts = parts_of(f"{module}.weight", config)
        if not parts:
            raise ValueError(f"{named} adapts {module}, which {place} has not: {_MERGE}.")
        for part in parts:
            new = part.name.removesuffix(".weight")
            # a part of the rows is one of B's, a part of the columns one of A's
            cut = {"A": a, "B": b}
            side = "A" if part.axis else "B"
            cut[side] = cut[side][part.slices]
            if shapes.get(part.name) != (cut["B"].shape[0], cut["A"].shape[1]):
                raise ValueError(f"{named} is of another model than {place}: its {module} does not fit {new}.")
            modules[new] = module
            for letter, matrix in cut.items():
                weights[f"{_PREFIX}{new}.lora_{letter}.weight"] = matrix.clone(memory_format=torch.contiguous_format)
    _write(out, _options(options, modules, weights, place), weights)
    return len(modules)


_MERGE = "name the source with --from to merge the adapter into it"


def _read(adapter: str, named: str) -> tuple[dict, dict[str, torch.Tensor]]:
    try:
        if base_of_adapter(adapter) is None:
            raise ValueError(f"it holds no {ADAPTER_CONFIG}")
        file = find_file(adapter, ADAPTER_WEIGHTS)
        if file is None:
            raise ValueError(f"it has no {ADAPTER_WEIGHTS}, and only safetensors are read")
        options, tensors = json.loads(find_file(adapter, ADAPTER_CONFIG).read_text("utf-8")), load_file(file)
    except MISTAKES as error:
        raise ValueError(f"{named} cannot be read: {one_line(error).rstrip('.')}.") from error
    more = [name for name in _MORE if options.get(name)]
    if options["peft_type"] != "LORA" or options.get("bias", "none") != "none" or more:
        what = ", ".join(more) or "biases, or is no LoRA"
        raise ValueError(f"{named} has {what}: {_MERGE}.")
    return options, tensors


def _options(options: dict, modules: dict[str, str], weights: dict[str, torch.Tensor], place: str) -> dict:
    """The options of the new adapter, each of whose maps is named."""
    ranks = {name: weights[f"{_PREFIX}{name}.lora_A.weight"].shape[0] for name in modules}
    alphas = {name: alpha_of(module, options) for name, module in modules.items()}
    own = {"target_modules": sorted(modules), "rank_pattern": ranks, "alpha_pattern": alphas}
    none = dict.fromkeys(("layers_to_transform", "layers_pattern", "exclude_modules", "auto_mapping"))
    return options | none | own | {"base_model_name_or_path": place}


def _write(out: Path, options: dict, weights: dict[str, torch.Tensor]) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
            folder = Path(scratch) / out.name
            folder.mkdir()
            (folder / ADAPTER_CONFIG).write_text(json.dumps(options, indent=2) + "\n", "utf-8")
            save_file(weights, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
            copy_rights(folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS)
            folder.rename(out)
    except OSError as error:
        raise ValueError(f"--output_dir {out} cannot be written: {error.strerror or error}.") from error
