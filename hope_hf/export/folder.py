"""The folder to upload: read from a saved HOPE, written under a temporary name, checked, and then renamed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hope_hf.common.files import new_folder, require_new, share_weights
from hope_hf.common.flags import ModelArguments
from hope_hf.common.models import is_hope, load_config, place_of_tokenizer
from hope_hf.common.process import one_line
from hope_hf.common.results import RESULTS_FILE
from hope_hf.common.tokenizer_files import read_tokenizer
from hope_hf.common.weight_names import ADAPTER_CONFIG
from hope_hf.common.weights import load_model

from .card import model_card, usage_code
from .card_license import DEFAULT_LICENSE
from .facts import read_card, read_evaluation, read_training

TOLERANCE = 1e-6
# Input of the check. Longer than two memory chunks of every named size, so that memories are read after a write.
ROWS, TOKENS = 2, 160

BEFORE = """\
import sys
sys.modules["hope_hf"] = None
"""
AFTER = """
import torch
from safetensors.torch import load_file, save_file
with torch.no_grad():
    logits = model(load_file("input.safetensors")["input_ids"]).logits
save_file({"logits": logits}, "output.safetensors")
"""


class ExportFailed(RuntimeError):
    """The export did not pass its check, or the upload failed: one sentence for the user."""


def export_folder(
    source: Path, out: Path, repo_id: str, license: str | None = None, results: Path | None = None
) -> str:
    """Write weights, code, tokenizer, generation config and card of the HOPE in `source` to `out`.

    Args:
        source: a run's output folder, or another with a saved HOPE.
        out: does not exist or is empty; it appears complete and checked, or not at all.
        repo_id: the repository that the card's example names.
        license: the Hub's name of the weights' license; None: that of the card in `source`, else `DEFAULT_LICENSE`.
        results: a `results.json` of `hope-hf eval`; None: the one in `source`, if it has one.

    Returns:
        What the card's example printed.

    Raises:
        ValueError: a mistake in the arguments or a file that cannot be read or written, one sentence.
        ExportFailed: the written model does not load, or differs from the original.
    """
    require_new(out, "--to")
    if results is None and (source / RESULTS_FILE).exists():
        results = source / RESULTS_FILE
    training = read_training(source)
    card_license, base_model = read_card(source)
    license = license or card_license or DEFAULT_LICENSE
    model, tokenizer = load_source(source)
    evaluation = read_evaluation(results, model) if results else None
    with new_folder(out, "--to") as folder:
        model.save_pretrained(folder)
        share_weights(folder)
        tokenizer.save_pretrained(folder)
        model_card(model, repo_id, license, training, evaluation, base_model).save(folder / "README.md")
        return check_export(folder, repo_id, model)


def load_source(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, on the CPU, in its saved precision and in evaluation mode, and its tokenizer.

    A LoRA adapter is merged into the model that it names.

    Raises ValueError with one sentence if the folder holds no HOPE, or an incomplete one.
    """
    if not any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        raise ValueError(f"{folder} holds no config.json: name the folder of a finished run or of another saved HOPE.")
    config = load_config(str(folder), "model_name_or_path", ModelArguments())
    if not is_hope(config):
        raise ValueError(f"{folder} holds a {config.model_type} and no HOPE: upload it with its own push_to_hub.")
    model = load_model(str(folder), config, str(folder), dtype="auto")
    try:
        tokenizer = read_tokenizer(place_of_tokenizer(str(folder)))
    # The tokenizers library raises a bare Exception for a file that it cannot read.
    except Exception as error:
        reason = one_line(error)
        if "trust_remote_code" in reason:
            reason = "its own needs code that tokenizer_config.json names, which an export does not run."
        raise ValueError(f"{folder} holds no tokenizer that loads, save one in it: {reason}") from error
    # `auto_map` names code that the check and every user would run; saving the model sets it to the model's own code.
    model.config.auto_map = None
    tokenizer.init_kwargs.pop("auto_map", None)
    return model, tokenizer


def check_export(folder: Path, repo_id: str, model: PreTrainedModel) -> str:
    """Run the card's example where `hope_hf` cannot be imported, and compare the loaded model's logits with `model`'s.

    From then on `model` computes the plain way, as the copy does: small logits of an untrained model round otherwise
    in fast paths by more than is accepted.

    Returns:
        What the example printed.

    Raises:
        ExportFailed: the example does not run, or the logits differ by more than 1e-6 (relative to the largest, if
            that is above 1).
    """
    example = usage_code((folder / "README.md").read_text(encoding="utf-8"))
    example = example.replace(json.dumps(repo_id), json.dumps(str(folder.resolve())))
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(model.config.vocab_size, (ROWS, TOKENS), generator=generator)
    for module in model.modules():
        if hasattr(module, "kernels"):
            module.kernels = "plain"
    with torch.no_grad():
        expected = model(input_ids).logits.float()
    with TemporaryDirectory() as place:
        save_file({"input_ids": input_ids}, Path(place) / "input.safetensors")
        run = subprocess.run(
            [sys.executable, "-c", BEFORE + example + AFTER],
            cwd=place,
            env=_environment(place),
            # An example that waits for input must fail.
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if run.returncode:
            reason = (run.stderr.strip().splitlines() or [f"exit status {run.returncode}"])[-1]
            raise ExportFailed(f"The example on the card does not run where hope_hf is not installed: {reason}")
        logits = load_file(Path(place) / "output.safetensors")["logits"].float()
    difference = (logits - expected).abs().max().item()
    # NaN must fail, too.
    if not difference <= TOLERANCE * max(1.0, expected.abs().max().item()):
        raise ExportFailed(f"The exported model's logits differ by {difference:.1e} from those of the original.")
    return run.stdout


def _environment(cache: str) -> dict[str, str]:
    """This process's environment, but offline, with an empty cache and without paths to packages or code."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name != "PYTHONPATH" and not name.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))
    }
    # The last digits of sums depend on the number of threads.
    return kept | {"HF_HOME": cache, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(torch.get_num_threads())}
