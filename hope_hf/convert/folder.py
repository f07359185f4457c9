"""The folder of a converted model: written under a temporary name, checked, and then renamed."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from hope_hf import HopeConfig
from hope_hf.common.files import new_folder, require_new, share_weights

from .architectures import hope_config
from .card import model_card
from .changes import Changes
from .check import Agreement, check
from .source import open_source
from .weights import plan_files, write_files


@dataclass(frozen=True)
class Converted:
    """What was written.

    Attributes:
        peer: with what it was compared, in words.
        files: number of files of weights.
        dtype: of the weights.
    """

    parameters: int
    files: int
    dtype: torch.dtype
    agreement: Agreement
    peer: str


def convert_folder(
    name_or_path: str,
    out: Path,
    changes: Changes,
    gguf_file: str | None = None,
    license: str | None = None,
    adapter: str | None = None,
) -> Converted:
    """Convert a model to a HOPE, and check that it is exact.

    Args:
        name_or_path: a folder or a name on the Hub.
        out: does not exist or is empty; it appears complete and checked, or not at all.
        changes: what the HOPE has otherwise.
        gguf_file: a GGUF file in `name_or_path`, to convert instead of safetensors.
        license: the Hub's name of the weights' licence; None: the source's.
        adapter: folder or Hub name of an adapter of the model, which is merged into it.

    Raises:
        ValueError: a mistake in the arguments, a model that HOPE cannot express, or a file that cannot be read or
            written; one sentence.
        CheckFailed: the written model differs from its source.
    """
    require_new(out, "--output_dir")
    source = open_source(name_or_path, gguf_file, adapter)
    config = hope_config(source.config, source.named, changes)
    with new_folder(out, "--output_dir") as folder:
        paths, generation = source.read(folder.parent / f"{folder.name}-source")
        config.dtype = dtype = config.dtype or torch.float32
        files = plan_files(paths, config, dtype, source.named)
        _write_settings(config, generation, folder)
        parameters = write_files(files, config, dtype, folder)
        share_weights(folder)
        if source.tokenizer is not None:
            source.tokenizer.save_pretrained(folder)
        agreement = check(source.config, paths, config, folder, source.tokenizer, changes.sliding_window)
        card = model_card(source, out.name, config, parameters, agreement, license or source.license)
        card.save(folder / "README.md")
    return Converted(parameters, len(files), dtype, agreement, source.peer)


def _write_settings(config: HopeConfig, generation: GenerationConfig | None, folder: Path) -> None:
    """Write config, settings of generation and the model's code, as `save_pretrained` does, without weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    if generation is not None:
        model.generation_config = generation
    model.save_pretrained(folder, state_dict={})
    for file in folder.glob("*.safetensors"):
        file.unlink()
