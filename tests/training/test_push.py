"""`--push_to_hub`: the run ends first, and a failed upload does not change it."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from training_runs import HOPE, LLAMA

from hope_hf.export import ExportFailed
from hope_hf.training import finish

ROOT = Path(__file__).parents[2]
SHORT = ["--max_train_steps", "2"]
PUSH = [*SHORT, "--push_to_hub"]


@pytest.fixture
def unchecked(monkeypatch):
    """Leave out the check in another process: the export's own tests have it."""
    monkeypatch.setattr("hope_hf.export.folder.check_export", lambda *arguments: "")


def complete(folder: Path) -> bool:
    """Whether the run is marked as complete, its weights are there, and no part of an export is left."""
    record = json.loads((folder / "run.json").read_text())
    return record["complete"] and (folder / "model.safetensors").exists() and not list(folder.glob(".hub-*"))


def test_the_finished_run_is_uploaded(run, hub, tmp_path, corpus, capsys):
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
    card = ModelCard(sent["README.md"].decode())
    losses = json.loads((tmp_path / "a" / "all_results.json").read_text())
    assert {r.metric_type: r.metric_value for r in card.data.eval_results}["loss"] == losses["eval_loss"]
    assert "Text: train.jsonl, 256 tokens in 2 steps" in card.text
    assert str(tmp_path) not in str(card) and str(Path(corpus[1]).parent) not in str(card)


def test_a_complete_run_is_uploaded_by_the_same_command(run, hub, unchecked, tmp_path):
    assert run("a", *SHORT, model=HOPE)[0] == 0
    assert hub.requests == []
    weights = tmp_path / "a" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert run("a", *PUSH, model=HOPE)[0] == 0
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


def test_a_stopped_run_is_not_uploaded(run, hub, monkeypatch, tmp_path):
    pushed = []
    monkeypatch.setattr("hope_hf.training.trainer.push", pushed.append)
    monkeypatch.setattr("hope_hf.training.process.StopSignal.__enter__", stopped)
    assert run("a", *PUSH, model=HOPE)[0] == 0
    assert pushed == []
    assert json.loads((tmp_path / "a" / "run.json").read_text())["complete"] is False


def stopped(signal):
    signal.received, signal._previous = True, {}
    return signal


def test_a_missing_login_is_told_before_the_training(run, hub, unchecked, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.warns(UserWarning, match="finds no login: run `hf auth login` before the training ends"):
        assert run("a", *PUSH, model=HOPE)[0] == 0
    assert hub.commits[-1] == ["README.md"]


def test_a_model_that_is_no_hope_is_refused_before_the_training(run, hub, tmp_path, capsys):
    assert run("a", *PUSH, model=LLAMA)[0] == 2
    assert "--push_to_hub uploads a HOPE and this is a llama: train without it." in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


@pytest.mark.processes
def test_two_processes_without_a_network(tmp_path, corpus):
    """Only the first one tries, and reports it in a sentence; the launcher sees a success."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "0"}
    environment |= {"HF_ENDPOINT": address, "HF_TOKEN": "hf_only_for_tests", "NO_PROXY": "127.0.0.1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    small = ["--block_size", "32", "--per_device_train_batch_size", "2", "--cpu_threads", "1"]
    command = [*launcher, str(ROOT / "run_clm.py"), *HOPE, *corpus, *small, *PUSH, "--output_dir", str(tmp_path / "a")]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    assert complete(tmp_path / "a")
    warning = f"warning: --push_to_hub failed and the run in {tmp_path / 'a'} is complete: The upload to a failed: "
    (said,) = [line for line in finished.stderr.splitlines() if "--push_to_hub" in line]
    assert said.startswith(warning) and said.endswith("the same command tries again.")
    assert "Traceback" not in finished.stderr
