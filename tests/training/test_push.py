"""`--push_to_hub`: the run ends first, and a failed upload does not change it."""

import json
from pathlib import Path

import pytest
from training_runs import EVERY_FOURTH, HOPE, LLAMA

from hope_hf.export import ExportFailed
from hope_hf.training import finish

ROOT = Path(__file__).parents[2]
PUSH = ["--max_train_steps", "2", "--push_to_hub"]


@pytest.fixture
def unchecked(monkeypatch):
    """Leave out the check in another process: the export's own tests have it."""
    monkeypatch.setattr("hope_hf.export.folder.check_export", lambda *arguments: "")


def complete(folder: Path) -> bool:
    """Whether the run is marked as complete, its weights are there, and no part of an export is left."""
    record = json.loads((folder / "run.json").read_text())
    return record["complete"] and (folder / "model.safetensors").exists() and not list(folder.glob(".hub-*"))


def test_the_finished_run_is_uploaded(run, hub, unchecked, tmp_path, corpus, capsys):
    flags = ["--hub_model_id", "owner/books", "--hub_private_repo"]
    status, _ = run("a", *PUSH, *flags, model=HOPE)
    assert status == 0 and complete(tmp_path / "a")
    assert f"Uploaded to {hub.address}/owner/books" in capsys.readouterr().out
    assert hub.created[0]["visibility"] == "private"
    sent = hub.repositories["owner/books"]
    assert sent["model.safetensors"] == (tmp_path / "a" / "model.safetensors").read_bytes()
    assert {"modeling_hope.py", "config.json", "tokenizer.json", "generation_config.json"} <= set(sent)
    assert not {"run.json", "metrics.jsonl", "loss.png"} & set(sent)
    assert hub.commits[-1] == ["README.md"]
    card = sent["README.md"].decode()
    assert "Text: train.jsonl, 256 tokens in 2 steps" in card
    assert str(tmp_path) not in card and str(Path(corpus[1]).parent) not in card


def test_a_complete_run_is_uploaded_by_the_same_command(run, trained, hub, unchecked, tmp_path):
    weights = trained("hope").copy(tmp_path / "a") / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert run("a", *EVERY_FOURTH, "--push_to_hub", model=HOPE)[0] == 0
    assert hub.commits[-1] == ["README.md"] and list(hub.repositories) == ["owner/a"]
    assert weights.stat().st_mtime_ns == before


@pytest.mark.parametrize("error", [ExportFailed("The upload failed."), ValueError("It is wrong."), OSError("disk")])
def test_whatever_fails_is_a_warning(monkeypatch, tmp_path, error):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(finish, "export_folder", fail)
    with pytest.warns(UserWarning) as caught:
        finish.push(tmp_path, "ab", "books", private=False)
    (warning,) = caught
    reason = str(error).rstrip(".")
    assert f"--push_to_hub failed and the run in {tmp_path} is complete: {reason};" in str(warning.message)
    assert list(tmp_path.iterdir()) == []


def test_what_can_be_told_before_the_training(run, hub, unchecked, monkeypatch, tmp_path, capsys):
    """A model that is no HOPE, and a missing login; a run that stops is not uploaded."""
    assert run("a", *PUSH, model=LLAMA)[0] == 2
    assert "--push_to_hub uploads a HOPE" in capsys.readouterr().err and not (tmp_path / "a").exists()
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.warns(UserWarning, match="finds no login: run `hf auth login`"):
        assert run("a", *PUSH, "--stop_after", "1", model=HOPE)[0] == 0
    assert hub.commits == []
