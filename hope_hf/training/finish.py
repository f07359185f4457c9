"""The end of a run: model and tokenizer in the output folder, a sample, the curves, how to load it, and the upload."""

import json
import re
import shlex
import shutil
import warnings
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from hope_hf.common.files import disk_errors
from hope_hf.common.process import one_line
from hope_hf.common.results import IGNORED, draw_or_warn
from hope_hf.export import ExportFailed, export_folder, upload

from .checkpoints.manifest import read_manifest
from .checkpoints.weights import read_weights, take_shards
from .engines.base import Engine
from .watch.metrics_file import METRICS_FILE
from .watch.plot import draw_curves

# The files of `save_pretrained`; a user may keep others beside them.
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
SAMPLE_TOKENS = 96
PROMPT_TOKENS = 32


def finish(folder: Path, engine: Engine, data, evaluation: dict, checkpoint: Path | None, in_parts: bool):
    """Write weights, config, generation config, tokenizer and all_results.json.

    `checkpoint`: a checkpoint of the same weights, if there is one. With `in_parts` (`--save_sharded`) the weights
    stay there, so that no process has to hold all of them.
    """
    weights = {} if in_parts else final_weights(engine, checkpoint)
    if engine.accelerator.is_main_process:
        with disk_errors():
            if in_parts:
                # of a shorter run in this folder
                for file in folder.glob("model*.safetensors*"):
                    if WEIGHTS.fullmatch(file.name):
                        file.unlink()
            else:
                engine.save_model(folder, weights)
            data.tokenizer.save_pretrained(folder)
            results = {name.replace("/", "_"): value for name, value in evaluation.items()}
            results["perplexity"] = evaluation["eval/perplexity"]
            (folder / "all_results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    engine.accelerator.wait_for_everyone()


def show(
    folder: Path,
    engine: Engine,
    data,
    evaluation: dict,
    *,
    parts_in: Path | None,
    seed: int,
    length_flag: str,
    is_chat: bool,
    names_text: bool,
):
    """Print what was reached, a sample, how to load the model; draw loss.png. A failure is a warning: the run is
    complete.

    Args:
        parts_in: the checkpoint that has the weights in parts; None if they are whole in `folder`.
        seed: of the sample.
        length_flag: the flag that gives the run its length.
        is_chat: the model has learned an assistant's turns.
        names_text: the text is not the built-in one.
    """
    if engine.accelerator.is_main_process:
        if data.unigram_loss is not None:
            print(f"\n{compared(evaluation['eval/loss'], data.unigram_loss, length_flag)}")
        if parts_in is None:
            _show_sample(folder, engine, data, seed, sample_heading(names_text))
        picture = draw_or_warn(partial(draw_curves, [folder]), folder / "loss.png")
        if picture:
            print(f"Curves: {picture}")
        print(f"Metrics: {folder / METRICS_FILE}")
        if parts_in is not None:
            print(f"The weights are in parts in {parts_in} (--save_sharded). Join them to a folder that loads:\n")
            print(f"hope-hf checkpoints consolidate {folder} --to DIR\n", flush=True)
        else:
            if engine.model.config.model_type == "hope":
                print(use_line(is_chat, shlex.quote(str(folder))))
            print(f"Load the model:\n\n{loading_lines(engine.model, folder)}\n", flush=True)
    engine.accelerator.wait_for_everyone()


def compared(loss: float, unigram: float, length_flag: str) -> str:
    """One sentence about the final loss, beside that of a unigram model."""
    words = f"Loss {loss:.2f} nats per token on the held-out text, {unigram:.2f} for a unigram model: "
    if loss < unigram:
        return f"{words}the model predicts {unigram - loss:.2f} nats better than the frequencies of tokens."
    return (
        f"{words}the model has not learned more than the frequencies of tokens, so train longer "
        f"({length_flag}) or raise --learning_rate."
    )


def use_line(is_chat: bool, folder: str) -> str:
    """The command that talks to the model, or continues a text with it."""
    if is_chat:
        return f"Talk to it: hope-hf chat {folder}"
    return f"Continue a text: hope-hf generate {folder} --prompt TEXT"


def sample_heading(names_text: bool) -> str:
    """The line above the sample; for the built-in text, why it is code."""
    why = ""
    if not names_text:
        why = " (code, since the built-in text is Python's standard library; --train_file trains on yours)"
    return f"A sampled continuation, after '>>>'{why}:"


def _show_sample(folder: Path, engine: Engine, data, seed: int, heading: str):
    try:
        prompt, continuation = sample(engine.readable_model(folder), data, seed)
        print(f"\n{heading}\n{prompt}>>>{continuation}\n")
    # Models and tokenizers of other families may raise anything, and memory may run out.
    except Exception as error:
        warnings.warn(f"No sample of the model: {one_line(error)}.", stacklevel=2)


def final_weights(engine: Engine, checkpoint: Path | None) -> dict[str, Tensor]:
    """All weights by name on the first process; read from the checkpoint if they would have to be gathered again."""
    if not engine.shards_weights or checkpoint is None:
        return take_shards(engine).gather()
    return read_weights(read_manifest(checkpoint)) if engine.accelerator.is_main_process else {}


@torch.no_grad()
def sample(model, data, seed: int) -> tuple[str, str]:
    """The beginning of the validation text and the model's continuation; the same for the same seed."""
    batch = next(iter(data.validation))
    # of a chat, what comes before the assistant's first turn
    scored = int((batch["labels"][0] != IGNORED).int().argmax())
    start = max(0, scored - PROMPT_TOKENS)
    stop = scored if scored > 1 else PROMPT_TOKENS
    prompt = batch["input_ids"][:1, start:stop]
    prompt = prompt.to(model.device)
    model.eval()
    devices = [model.device] if model.device.type == "cuda" else []
    # A text that grows by one token at a time would be compiled anew for every length.
    with torch.random.fork_rng(devices=devices), torch.compiler.set_stance("force_eager"):
        torch.manual_seed(seed)
        tokens = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=SAMPLE_TOKENS,
            do_sample=True,
            temperature=0.8,
            top_k=50,
            pad_token_id=data.tokenizer.pad_token_id or data.tokenizer.eos_token_id,
        )
    decode = data.tokenizer.decode
    return decode(prompt[0]), decode(tokens[0, prompt.shape[1] :])


def loading_lines(model, folder: Path) -> str:
    """Three lines of Python that load the written model, for pasting."""
    modules = "hope_hf, transformers" if model.config.model_type == "hope" else "transformers"
    path = json.dumps(str(folder))
    return (
        f"import {modules}\n"
        f"tokenizer = transformers.AutoTokenizer.from_pretrained({path})\n"
        f"model = transformers.AutoModelForCausalLM.from_pretrained({path})"
    )


UPLOADED = ".hub-"
"""Begins the name of the folder for an upload, in the run's folder."""


def push(folder: Path, run_id: str, repository: str, private: bool):
    """Export the finished run in `folder` and upload it to a repository of the Hub; any failure is a warning."""
    prefix = f"{UPLOADED}{run_id}-"
    try:
        for leftover in folder.glob(f"{prefix}*"):
            # A killed process left it behind.
            shutil.rmtree(leftover, ignore_errors=True)
        with TemporaryDirectory(dir=folder, prefix=prefix) as scratch:
            out = Path(scratch) / "export"
            export_folder(folder, out, repository)
            print(f"Uploaded to {upload(out, repository, private)}", flush=True)
    except (ValueError, ExportFailed, OSError) as error:
        reason = str(error).rstrip(".")
        warnings.warn(
            f"--push_to_hub failed and the run in {folder} is complete: {reason}; the same command tries again.",
            stacklevel=2,
        )
