"""The model to convert: a folder or a name on the Hub with safetensors, or a GGUF file."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import is_gguf_available

from hope_hf.cli.flags import ModelArguments, is_hub_name
from hope_hf.cli.models import card_metadata, load_config
from hope_hf.cli.process import MISTAKES, one_line
from hope_hf.cli.weights import find_file, weight_files


@dataclass(frozen=True)
class Source:
    """What is known of the model before its weights are read.

    Attributes:
        named: how error messages name it.
        name: how a card names it, without folders of this machine.
        is_public: whether `name` is one on the Hub.
        place: its folder or name on the Hub.
        gguf_file: the GGUF file in it, if that is converted.
        license: the Hub's name of its licence, if its card or file has one.
    """

    named: str
    name: str
    is_public: bool
    place: str
    gguf_file: str | None
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase | None
    license: str | None

    def read(self, folder: Path) -> tuple[list[Path], GenerationConfig | None]:
        """The files of its weights, and its settings of generation; the weights of a GGUF are written to `folder`."""
        if self.gguf_file is None:
            return weight_files(self.place, None, self.named), _generation(self.place)
        try:
            model = AutoModelForCausalLM.from_pretrained(self.place, gguf_file=self.gguf_file, dtype=torch.float32)
            folder.mkdir()
            # `save_pretrained` refuses a model that was read from a GGUF
            tied = {"lm_head.weight"} if self.config.tie_word_embeddings else set()
            weights = {name: weight for name, weight in model.state_dict().items() if name not in tied}
            save_torch_state_dict(weights, folder, max_shard_size="2GB")
        except MISTAKES as error:
            raise ValueError(f"{self.named} cannot be read: {one_line(error)}") from error
        generation = model.generation_config
        del model, weights
        return weight_files(str(folder), None, self.named), generation


def open_source(place: str, gguf_file: str | None) -> Source:
    """The model of `--from` and `--gguf_file`. ValueError that names the flag if it cannot be opened."""
    if gguf_file is None:
        named, options = f"--from {place}", {}
        config = load_config(place, "from", ModelArguments())
    else:
        named, options = f"--gguf_file {gguf_file}", {"gguf_file": gguf_file}
        if not is_gguf_available():
            raise ValueError(f"{named} needs the package gguf: pip install 'hope_hf[gguf]'.")
        try:
            config = AutoConfig.from_pretrained(place, gguf_file=gguf_file)
        except MISTAKES as error:
            raise ValueError(f"{named} cannot be read in --from {place}: {one_line(error)}") from error
        config.dtype = torch.float32
    is_public = is_hub_name(place)
    name = place if is_public else Path(place).resolve().name
    licence = _gguf_license(place, gguf_file) if gguf_file else None
    if licence is None and (page := find_file(place, "README.md")):
        licence = card_metadata(page).license
    return Source(named, name, is_public, place, gguf_file, config, _tokenizer(place, options), licence)


def _tokenizer(place: str, options: dict) -> PreTrainedTokenizerBase | None:
    """None for a model that has none."""
    try:
        return AutoTokenizer.from_pretrained(place, trust_remote_code=False, **options)
    # The tokenizers library raises a bare Exception for a file that it cannot read.
    except Exception as error:
        if not options and not any(find_file(place, name) for name in ("tokenizer.json", "tokenizer_config.json")):
            return None
        raise ValueError(f"--from {place} has a tokenizer that does not load: {one_line(error)}") from error


def _generation(place: str) -> GenerationConfig | None:
    if not find_file(place, "generation_config.json"):
        return None
    try:
        return GenerationConfig.from_pretrained(place)
    except MISTAKES as error:
        reason = one_line(error).rstrip(".")
        raise ValueError(f"--from {place}: generation_config.json cannot be read, correct it: {reason}.") from error


def _gguf_license(place: str, gguf_file: str) -> str | None:
    from gguf import GGUFReader

    field = GGUFReader(find_file(place, gguf_file)).get_field("general.license")
    found = None if field is None else str(field.contents())
    return found if found and re.fullmatch(r"[\w.-]+", found) else None
