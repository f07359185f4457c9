"""Adapters of PEFT: LoRA for training and from a checkpoint, and all that can be merged into a loaded model.

A folder of an adapter has `adapter_model.safetensors` and `adapter_config.json`, which names the model that it adapts.
"""

import importlib.util
import json
import os
import warnings
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations import peft
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, find_adapter_config_file

from .files import read_small
from .weight_names import ADAPTER_CONFIG

# Names in an adapter's file are those in a PeftModel, which wraps the model twice.
_PREFIX = "base_model.model."
# Kinds that PEFT merges exactly; learned prompts cannot be merged, and the files of XLORA name other folders.
MERGED_KINDS = {
    "ADALORA", "ADAMSS", "BOFT", "C3A", "DEFT", "DELORA", "FOURIERFT", "FROD", "GLORA", "GRALORA", "HIRA", "HRA",
    "IA3", "LN_TUNING", "LOHA", "LOKR", "LORA", "MISS", "OFT", "OSF", "PEANUT", "PSOFT", "PVERA", "RANDLORA", "ROAD",
    "SHIRA", "SUPERTUNING", "TINYLORA", "TRAINABLE_TOKENS", "UNILORA", "VBLORA", "VERA", "WAVEFT",
}  # fmt: skip


def require_peft(what: str) -> None:
    """Raise ValueError that begins with `what` if PEFT is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise ValueError(f"{what} needs PEFT: pip install peft.")


def require_peft_for_training() -> None:
    """Raise ValueError if PEFT is not installed, or is older than this transformers wants for models with adapters."""
    require_peft("--lora_rank")
    try:
        peft.check_peft_version(peft.MIN_PEFT_VERSION)
    except ValueError:
        raise ValueError(
            f"--lora_rank needs PEFT {peft.MIN_PEFT_VERSION} beside transformers {transformers.__version__}, and "
            f"{version('peft')} is installed: pip install -U peft. While there is no such release, pip install "
            "'transformers<5.24'."
        ) from None


def add_lora(model: PreTrainedModel, rank: int, alpha: float | None, base: str) -> None:
    """Freeze a model and put LoRA matrices A [rank, in] and B [out, rank] beside all linear layers but the head's.

    The output of a layer gets alpha / rank * B A x added (Hu et al. 2021, arXiv 2106.09685); B begins as 0.

    Args:
        alpha: None: twice the rank.
        base: name or folder of the model, for the adapter's config.
    """
    from peft import LoraConfig

    scale = 2 * rank if alpha is None else alpha
    config = LoraConfig(r=rank, lora_alpha=scale, target_modules="all-linear", task_type="CAUSAL_LM")
    model.add_adapter(config)
    config.base_model_name_or_path = base


def load_adapter(model: PreTrainedModel, file: Path) -> None:
    """Copy the matrices of a file into the adapter of a model; ValueError if names or shapes differ."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    saved = {name.removeprefix(_PREFIX): tensor for name, tensor in load_file(file).items()}
    if _shapes(saved) != _shapes(get_peft_model_state_dict(model)):
        raise ValueError(f"{file} does not fit this model: repeat the flags of the run that wrote it.")
    set_peft_model_state_dict(model, saved)


def _shapes(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def alpha_of(module: str, options: dict) -> float:
    """The alpha of one map, by its name, in the options of a LoRA's config."""
    from peft.utils.other import get_pattern_key

    patterns = options.get("alpha_pattern") or {}
    return patterns.get(get_pattern_key(patterns.keys(), module), options["lora_alpha"])


def base_of_adapter(source: str) -> str | None:
    """Name or folder of the model that the adapter in a folder or on the Hub adapts; None if it is no adapter.

    Raises ValueError for an adapter that cannot be merged, or names no model.
    """
    file = find_adapter_config_file(source)
    if file is None:
        return None
    content = json.loads(read_small(Path(file)))
    if any(os.path.isfile(os.path.join(source, name)) for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)):
        # transformers adds it to these weights, also if it names another model
        raise ValueError(f"it holds a model beside an adapter: move the adapter and its {ADAPTER_CONFIG} elsewhere")
    base = content.get("base_model_name_or_path") if isinstance(content, dict) else None
    # megatron_config: PEFT would import the module that the file names.
    if not isinstance(base, str) or content.get("peft_type") not in MERGED_KINDS or content.get("megatron_config"):
        raise ValueError(
            "it is a PEFT adapter that cannot be merged here, or that names no model: merge it into its model "
            "(merge_and_unload) and save that"
        )
    if os.path.isdir(source) and os.path.isdir(base) and os.path.samefile(source, base):
        raise ValueError(f"its {ADAPTER_CONFIG} names itself as the model that it adapts")
    return base


def merged(model: PreTrainedModel, source: str) -> PreTrainedModel:
    """The model, on the CPU, with the adapter `source` in its weights: it has the logits of the two.

    Where the adapter changes embedding and head differently, a model that ties them no longer does.

    Raises ValueError if PEFT is not installed, or if the adapter is of another model or cannot be merged.
    """
    require_peft(f"The adapter {source}")
    from peft import PeftModel

    shared = model.get_input_embeddings().weight
    with warnings.catch_warnings():
        # PEFT asks transformers 5.23 for an attribute by its older name.
        warnings.filterwarnings("ignore", ".*gradient_checkpointing.* is deprecated", FutureWarning)
        # It also says that tied weights cannot be merged.
        warnings.filterwarnings("ignore", ".*tie_word_embeddings", UserWarning)
        warnings.filterwarnings("error", ".*missing adapter keys", UserWarning)
        try:
            adapted = PeftModel.from_pretrained(model, source, torch_device="cpu")
        except UserWarning:
            raise ValueError(
                f"the adapter {source} has no weights for layers that it adapts: it is of another model, name that in "
                f"its {ADAPTER_CONFIG}"
            ) from None
        # After loading: PEFT reads some adapters as tied ones, where the model is tied.
        is_tied = _untie(model, shared)
        whole = adapted.merge_and_unload()
    # Tokens that are trained beside a LoRA of the same layer.
    if any(type(module).__module__.startswith("peft.") for module in whole.modules()):
        raise ValueError(
            f"the adapter {source} adapts a layer in two ways, of which PEFT can merge one: train one of the two"
        )
    if is_tied:
        _tie_if_equal(whole)
    # For an adapter of the merged model.
    whole.name_or_path = source
    # PEFT has frozen the weights, and a run may go on to train them.
    return whole.requires_grad_(True).eval()


def _untie(model: PreTrainedModel, shared: nn.Parameter) -> bool:
    """Give each module but the first that holds the weight `shared` a copy; returns whether there were several.

    PEFT adds an adapter of one end to the weight of both.
    """
    owners = [module for module in model.modules() if module._parameters.get("weight") is shared]
    for owner in owners[1:]:
        owner.weight = nn.Parameter(shared.detach().clone(), shared.requires_grad)
    return len(owners) > 1


def _tie_if_equal(model: PreTrainedModel) -> None:
    """Tie embedding and head again, or note that they differ."""
    same = torch.equal(model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    # PEFT has noted that they are two
    model.config.tie_word_embeddings = same
    if same:
        model.tie_weights()
    else:
        # what `save_pretrained` leaves out
        model.all_tied_weights_keys = {}
