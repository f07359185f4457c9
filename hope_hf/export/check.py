"""The check of an export: its card's own example, in a process where `hope_hf` cannot be imported."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from .card import usage_code
from .errors import ExportFailed

TOLERANCE = 1e-6
# Longer than two memory chunks of every named size, so that the model reads what it wrote.
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


def check_export(folder: Path, repo_id: str, model: PreTrainedModel) -> str:
    """Run the example on the card in `folder`, and compare the logits of the loaded model with those of `model`.

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
