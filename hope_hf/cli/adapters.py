"""LoRA adapters of PEFT: added to a model for training, read from a checkpoint, and merged into a loaded model.

A folder of an adapter has `adapter_model.safetensors` and `adapter_config.json`, which names the model that it adapts.
"""

import importlib.util
import json
import os
import warnings
from importlib.metadata import version
from pathlib import Path

import transformers
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.integrations import peft
from transformers.utils import find_adapter_config_file

from .files import read_small

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
# Names in an adapter's file are those in a PeftModel, which wraps the model twice.
_PREFIX = "base_model.model."


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
    own = get_peft_model_state_dict(model)
    if {name: tensor.shape for name, tensor in saved.items()} != {name: tensor.shape for name, tensor in own.items()}:
        raise ValueError(f"{file} does not fit this model: repeat the flags of the run that wrote it.")
    set_peft_model_state_dict(model, saved)


def base_of_adapter(source: str) -> str | None:
    """Name or folder of the model that the adapter in a folder or on the Hub adapts; None if it is no adapter.

    Raises ValueError for what is not a LoRA adapter, or names no model.
    """
    file = find_adapter_config_file(source)
    if file is None:
        return None
    content = json.loads(read_small(Path(file)))
    base = content.get("base_model_name_or_path") if isinstance(content, dict) else None
    # megatron_config: PEFT would import the module that the file names.
    if not isinstance(base, str) or content.get("peft_type") != "LORA" or content.get("megatron_config"):
        raise ValueError(
            "it is a PEFT adapter that is not LoRA or names no model, merge it into its model (merge_and_unload) and "
            "save that"
        )
    if os.path.isdir(source) and os.path.isdir(base) and os.path.samefile(source, base):
        raise ValueError(f"its {ADAPTER_CONFIG} names itself as the model that it adapts")
    return base


def merged(model: PreTrainedModel, source: str) -> PreTrainedModel:
    """The model, on the CPU, with the adapter `source` added to its weights."""
    require_peft(f"The adapter {source}")
    from peft import PeftModel

    with warnings.catch_warnings():
        # PEFT asks transformers 5.23 for an attribute by its older name.
        warnings.filterwarnings("ignore", ".*gradient_checkpointing.* is deprecated", FutureWarning)
        found = PeftModel.from_pretrained(model, source, torch_device="cpu").merge_and_unload()
    # For an adapter of the merged model.
    found.name_or_path = source
    return found.eval()
