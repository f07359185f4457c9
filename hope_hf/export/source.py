"""The saved HOPE that is exported: model and tokenizer, read from a folder."""

from pathlib import Path

from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hope_hf.cli.arguments import ModelArguments
from hope_hf.cli.models import MISTAKES, is_hope, load_config, one_line


def load_source(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, on the CPU in the precision it was saved in and in evaluation mode, and its tokenizer.

    Raises ValueError with one sentence where the folder holds no HOPE, or not all of it.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json: name the folder of a finished run or of another saved HOPE.")
    config = load_config(str(folder), "model_name_or_path", ModelArguments())
    if not is_hope(config):
        raise ValueError(f"{folder} holds a {config.model_type} and no HOPE: upload it with its own push_to_hub.")
    return _load_model(folder), _load_tokenizer(folder)


def _load_model(folder: Path) -> PreTrainedModel:
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", use_safetensors=True, output_loading_info=True
        )
    except (*MISTAKES, SafetensorError, RuntimeError) as error:
        raise ValueError(f"The weights in {folder} cannot be loaded, save them again: {one_line(error)}") from error
    # A part that was not saved would be exported as random numbers.
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(f"{folder} has no weights for {missing[0]}: name a folder with a whole HopeForCausalLM.")
    return model.eval()


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(folder)
    except MISTAKES as error:
        raise ValueError(f"{folder} holds no tokenizer that loads, save one in it: {one_line(error)}") from error
