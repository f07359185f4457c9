"""Hugging Face's linter of model code finds nothing, except for two rules of transformers' own repository."""

import json
import subprocess
import sys
from pathlib import Path

# A licence header in every file, and docstrings that are composed of transformers' own.
NOT_OURS = {"TRF028", "TRF057"}
MODEL = Path(__file__).parents[1] / "hope_hf" / "model"


def findings(folder: Path, report: Path) -> list[dict]:
    options = ["--no-cache", "--no-progress", "--output-json", str(report)]
    subprocess.run([sys.executable, "-m", "mlinter", *options, str(folder)], capture_output=True, timeout=120)
    return [finding for finding in json.loads(report.read_text())["findings"] if finding["rule"] not in NOT_OURS]


def test_the_model_is_written_as_transformers_wants_it(tmp_path):
    assert findings(MODEL, tmp_path / "report.json") == []
