"""`hope-hf checkpoints info|verify|consolidate DIR`."""

import re

import pytest
import torch
from checkpoint_run import truncate
from transformers import AutoModelForCausalLM

from hope_hf.training.checkpoints.tool import main

pytestmark = pytest.mark.usefixtures("one_cpu_process")


def test_info_shows_what_the_manifest_and_the_trainer_say(output_dir, capsys):
    assert main(["info", str(output_dir)]) == 0
    shown = capsys.readouterr().out
    assert f"{output_dir / 'checkpoint-5'}\n" in shown
    for name, value in (("step", "5"), ("num_processes", "1"), ("loss_sum", str(0.1 + 0.2)), ("size", ".* files")):
        assert re.search(rf"\| {name} *\| {value} *\|", shown), name


def test_verify_reads_every_byte(output_dir, capsys):
    assert main(["verify", str(output_dir / "checkpoint-3")]) == 0
    assert "is whole: step 3," in capsys.readouterr().out
    truncate(output_dir / "checkpoint-3" / "model.safetensors")
    assert main(["verify", str(output_dir / "checkpoint-3")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "model.safetensors has" in error and error.count("\n") == 1


def test_consolidate_makes_a_folder_that_loads(output_dir, tmp_path, capsys):
    out = tmp_path / "model"
    assert main(["consolidate", str(output_dir), "--to", str(out)]) == 0
    ours, theirs = (AutoModelForCausalLM.from_pretrained(folder) for folder in (out, output_dir / "checkpoint-5"))
    for name, weight in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], weight), name
    assert (out / "tokenizer.json").exists()
    assert not [path.name for path in out.iterdir() if path.name.startswith(("optimizer", "rank", "trainer", "mani"))]
    assert main(["consolidate", str(output_dir), "--to", str(out)]) == 2
    assert "exists: name a new folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["info", "nowhere"], "nowhere is not a folder"),
        (["info", "."], "is not a finished checkpoint"),
        (["verify", "."], "has no manifest.json"),
        (["consolidate", "."], "--to"),
        # Before the checkpoint is read.
        (["consolidate", ".", "--to", "."], "--to . exists: name a new folder"),
        (["burn", "."], "invalid choice"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, monkeypatch, capsys, words, sentence):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
