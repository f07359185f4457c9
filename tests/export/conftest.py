"""The export of a run with results of `hope-hf eval`, and a copy of the run to be damaged."""

import shutil
from pathlib import Path

import pytest

from hope_hf import HopeForCausalLM
from hope_hf.evaluation import flags, report
from hope_hf.evaluation.result import SuiteResult
from hope_hf.evaluation.subject import Subject
from hope_hf.export import folder as export_folder
from hope_hf.export import main


@pytest.fixture
def unchecked(monkeypatch):
    """Exports are not loaded in another process, which takes seconds."""
    monkeypatch.setattr(export_folder, "check_export", lambda *arguments: "")


@pytest.fixture
def source(trained_run, tmp_path) -> Path:
    """A copy of the run's folder, to be damaged."""
    return shutil.copytree(trained_run, tmp_path / "source")


@pytest.fixture(scope="session")
def write_results(trained_run):
    """`write_results(folder, limit)` writes a report on `trained_run`; returns the path of its results.json."""
    text = str(trained_run.parent / "my books" / "held out.txt")
    row = {"n": 640, "loss": 5.5, "loss_stderr": 0.25, "perplexity": 244.7, "bits_per_byte": 2.6, "accuracy": 0.1}
    passkey = {"length": 1024, "depth": 0.5, "n": 4, "exact": 0.75, "exact_stderr": 0.25}
    results = {
        "perplexity": SuiteResult({f"Text: {text}": [row]}),
        "passkey": SuiteResult({"Passkey": [passkey]}),
        "memory": SuiteResult({"Gates": [{"layer": layer, "rate": 0.5} for layer in range(50)]}),
    }
    subject = Subject(HopeForCausalLM.from_pretrained(trained_run), None)

    def write(folder: Path, limit: int | None = None) -> Path:
        place = {"model_name_or_path": str(trained_run), "output_dir": str(folder)}
        args = flags.Arguments(validation_file=text, limit=limit, **place)
        record = report.make_record(args, subject, results, {}, 1.0)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "results.json").write_text(report.as_json(record))
        return folder / "results.json"

    return write


@pytest.fixture
def card(source, write_results, unchecked, tmp_path):
    """`card(limit)`: the card of an export of `source` with results."""
    from huggingface_hub import ModelCard

    def make(limit: int | None = None) -> ModelCard:
        write_results(source, limit)
        assert main([str(source), "--to", str(tmp_path / "small-hope"), "--license", "mit"]) == 0
        return ModelCard.load(tmp_path / "small-hope" / "README.md")

    return make
