"""The saved HOPE that is exported: model and tokenizer, read from a folder."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hope_hf.cli.flags import ModelArguments
from hope_hf.cli.models import is_hope, load_config
from hope_hf.cli.process import one_line
from hope_hf.cli.weights import load_model


def load_source(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, on the CPU, in its saved precision and in evaluation mode, and its tokenizer.

    Raises ValueError with one sentence if the folder holds no HOPE, or an incomplete one.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json: name the folder of a finished run or of another saved HOPE.")
    config = load_config(str(folder), "model_name_or_path", ModelArguments())
    if not is_hope(config):
        raise ValueError(f"{folder} holds a {config.model_type} and no HOPE: upload it with its own push_to_hub.")
    model, tokenizer = load_model(str(folder), config, str(folder), dtype="auto"), _load_tokenizer(folder)
    # The check and every user of the export run the code that these name; a model names its own when it is saved.
    model.config.auto_map = None
    tokenizer.init_kwargs.pop("auto_map", None)
    return model, tokenizer


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    # The tokenizers library raises a bare Exception for a file that it cannot read.
    except Exception as error:
        reason = one_line(error)
        if "trust_remote_code" in reason:
            reason = "its own needs code that tokenizer_config.json names, which an export does not run."
        raise ValueError(f"{folder} holds no tokenizer that loads, save one in it: {reason}") from error
