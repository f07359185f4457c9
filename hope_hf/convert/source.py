"""The model to convert: a folder or a name on the Hub with safetensors, or a GGUF file."""

from dataclasses import dataclass
from pathlib import Path

from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import is_gguf_available

from hope_hf.common.adapters import base_of_adapter
from hope_hf.common.flags import ModelArguments, is_hub_name
from hope_hf.common.models import card_metadata, load_config, place_of_tokenizer
from hope_hf.common.process import MISTAKES, one_line
from hope_hf.common.tokenizer_files import read_tokenizer
from hope_hf.common.weight_names import ADAPTER_CONFIG
from hope_hf.common.weights import find_file, load_model, weight_files, with_adapter

from .gguf_file import GgufFile


@dataclass(frozen=True)
class Source:
    """What is known of the model before its weights are read.

    Attributes:
        named: how error messages name it.
        name: how a card names it, without folders of this machine.
        is_public: whether `name` is one on the Hub.
        name_or_path: its folder or name on the Hub.
        gguf: the GGUF file in it, if that is converted.
        merged: the model with the adapters that were added to it, if there are any.
        license: the Hub's name of its licence, if its card or file has one.
    """

    named: str
    name: str
    is_public: bool
    name_or_path: str
    gguf: GgufFile | None
    merged: PreTrainedModel | None
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase | None
    license: str | None

    @property
    def peer(self) -> str:
        """With what a conversion is compared, in words."""
        model = f"transformers' {self.config.model_type}"
        if self.merged is not None:
            return f"{model} with the source's own config and weights, and the adapter merged into them"
        if self.gguf is None:
            return f"{model} with the source's own config and weights"
        return (
            f"{model} with the fields and tensors of {self.gguf.name}, not as transformers reads the file; its "
            "positions are those that llama.cpp computes from these fields"
        )

    def read(self, folder: Path) -> tuple[list[Path], GenerationConfig | None]:
        """The files of its weights, and its settings of generation; others than its own are written to `folder`."""
        if self.merged is not None:
            # several GB are as many files, as the conversion holds one
            self.merged.save_pretrained(folder, max_shard_size="2GB")
            return weight_files(str(folder), None, self.named), self.merged.generation_config
        if self.gguf is None:
            return weight_files(self.name_or_path, None, self.named), _generation(self.name_or_path)
        special = {name: getattr(self.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        return self.gguf.write(folder), GenerationConfig(**special)


def open_source(name_or_path: str, gguf_file: str | None, adapter: str | None = None) -> Source:
    """The model of `--from`, `--gguf_file` and `--adapter`. ValueError that names the flag if it cannot be opened."""
    gguf = merged = None
    if gguf_file is not None:
        named = f"--gguf_file {gguf_file}"
        gguf = _open_gguf(name_or_path, gguf_file, named)
        config = gguf.config
        tokenizer = _gguf_tokenizer(name_or_path, gguf)
    else:
        named = f"--from {name_or_path}"
        config = load_config(name_or_path, "from", ModelArguments())
        tokenizer = _tokenizer(place_of_tokenizer(name_or_path))
        if adapter is not None or base_of_adapter(name_or_path) is not None:
            merged = _merged(name_or_path, config, named, adapter)
            config = merged.config
    is_public = is_hub_name(name_or_path)
    return Source(
        named=named,
        name=name_or_path if is_public else Path(name_or_path).resolve().name,
        is_public=is_public,
        name_or_path=name_or_path,
        gguf=gguf,
        merged=merged,
        config=config,
        tokenizer=tokenizer,
        license=_license(name_or_path, gguf),
    )


def _license(name_or_path: str, gguf: GgufFile | None) -> str | None:
    """What the file or the card says."""
    if gguf is not None and gguf.license is not None:
        return gguf.license
    page = find_file(name_or_path, "README.md")
    return None if page is None else card_metadata(page).license


def _merged(name_or_path: str, config: PreTrainedConfig, named: str, adapter: str | None) -> PreTrainedModel:
    """The model with its own adapter and that of `--adapter`, in the dtype of its weights."""
    model = load_model(name_or_path, config, named, dtype="auto")
    if adapter is None:
        return model
    of_flag = f"--adapter {adapter}"
    try:
        if base_of_adapter(adapter) is None:
            raise ValueError(f"it holds no {ADAPTER_CONFIG}")
        return with_adapter(model, adapter, of_flag)
    except MISTAKES as error:
        raise ValueError(f"{of_flag} cannot be added to {named}: {one_line(error).rstrip('.')}.") from error


def _open_gguf(name_or_path: str, gguf_file: str, named: str) -> GgufFile:
    if not is_gguf_available():
        raise ValueError(f"{named} needs the package gguf: pip install 'hope_hf[gguf]'.")
    try:
        path = find_file(name_or_path, gguf_file)
    except MISTAKES as error:
        raise ValueError(f"--from {name_or_path} cannot be opened: {one_line(error)}") from error
    if path is None:
        raise ValueError(f"{named} is no file of --from {name_or_path}.")
    try:
        return GgufFile(path, named)
    except MISTAKES as error:
        reason = one_line(error)
        raise ValueError(
            reason if reason.startswith(named) else f"{named} cannot be read, it may be damaged: {reason}"
        ) from error


def _gguf_tokenizer(name_or_path: str, gguf: GgufFile) -> PreTrainedTokenizerBase | None:
    """The original's tokenizer where its files lie beside the GGUF, or that of the file's vocabulary."""
    try:
        beside = _tokenizer(name_or_path)
    except ValueError:
        beside = None
    if beside is not None and gguf.spells(beside):
        return beside
    return gguf.tokenizer()


def _tokenizer(name_or_path: str) -> PreTrainedTokenizerBase | None:
    """None for a model that has none."""
    try:
        return read_tokenizer(name_or_path)
    # The tokenizers library raises a bare Exception for a file that it cannot read.
    except Exception as error:
        if not any(find_file(name_or_path, name) for name in ("tokenizer.json", "tokenizer_config.json")):
            return None
        raise ValueError(f"--from {name_or_path} has a tokenizer that does not load: {one_line(error)}") from error


def _generation(name_or_path: str) -> GenerationConfig | None:
    if not find_file(name_or_path, "generation_config.json"):
        return None
    try:
        return GenerationConfig.from_pretrained(name_or_path)
    except MISTAKES as error:
        reason = one_line(error).rstrip(".")
        raise ValueError(
            f"--from {name_or_path}: generation_config.json cannot be read, correct it: {reason}."
        ) from error
