"""Repositories of the Hub on a machine without the package: `remote_code.py` loads, computes, trains."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import remote_code
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from hope_hf import HopeForCausalLM
from hope_hf.convert import main as convert
from hope_hf.export import folder as export_folder
from hope_hf.export import main as export
from hope_hf.training import main as train

KINDS = ["hope_memory", "full_attention", "window_attention", "sparse_attention"]
EVERY_KIND = dict(num_hidden_layers=4, layer_types=KINDS, sliding_window=6, attention_sinks=2)


@pytest.fixture
def folders(tiny_model, word_tokenizer, tmp_path, monkeypatch) -> dict[str, Path]:
    """What the programs write: an export, a checkpoint and its run, a converted model, and a head of its own."""
    monkeypatch.setattr(export_folder, "check_export", lambda *arguments: "")
    tiny_model(**EVERY_KIND).save_pretrained(tmp_path / "hope")
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path / "llama")
    for name in ("hope", "llama"):
        word_tokenizer.save_pretrained(tmp_path / name)
    (tmp_path / "text.txt").write_text(" ".join(f"w{index * 7 % 62}" for index in range(2000)))
    made = {name: tmp_path / name for name in ("exported", "run", "converted")}
    assert export([str(tmp_path / "hope"), "--to", str(made["exported"])]) == 0
    text, model = ["--train_file", str(tmp_path / "text.txt")], ["--model_name_or_path", str(tmp_path / "hope")]
    steps = ["--max_train_steps", "1", "--checkpointing_steps", "1", "--block_size", "16", "--cpu_threads", "1"]
    # accelerate keeps its state in the process
    AcceleratorState._reset_state(True)
    threads = torch.get_num_threads()
    assert train([*model, *text, *steps, "--output_dir", str(made["run"])]) == 0
    AcceleratorState._reset_state(True)
    torch.set_num_threads(threads)
    assert convert(["--from", str(tmp_path / "llama"), "--output_dir", str(made["converted"])]) == 0
    return made | {"checkpoint": made["run"] / "checkpoint-1"}


@pytest.mark.processes
def test_what_is_on_the_hub_works_without_the_package(folders, tmp_path):
    place = tmp_path / "elsewhere"
    for name, folder in folders.items():
        remote_code.upload(folder, place / "cache", name)
    shutil.copytree(folders["exported"], place / "local")
    ids = torch.randint(62, (2, 19), generator=torch.Generator().manual_seed(1))
    save_file({"ids": ids}, place / "ids.safetensors")
    environment = remote_code.environment(place)
    repositories = [f"owner/{name}" for name in folders]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", remote_code.__file__, "alone", *repositories],
        cwd=place, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    for name, folder in folders.items():
        model = HopeForCausalLM.from_pretrained(folder).eval()
        found = load_file(place / f"{name}.safetensors")
        torch.testing.assert_close(found["logits"], model(ids).logits, rtol=0, atol=1e-5)
        assert torch.equal(found["generated"], model.generate(ids, **remote_code.GENERATE))
    told = json.loads((place / "told.json").read_text())
    assert told["backend"] == "causal" and told["warned"] == []
    expected = smoothed(HopeForCausalLM.from_pretrained(folders["exported"]), ids)
    assert told["losses"] == pytest.approx({"plain": expected, "lora": expected}, abs=1e-5)


def smoothed(model, ids: torch.Tensor) -> float:
    """The mean over next tokens of nine tenths of their loss and a tenth of that of a token drawn at random."""
    with torch.no_grad():
        log = model(ids).logits[:, :-1].log_softmax(-1)
    of_next = log.gather(-1, ids[:, 1:, None])
    return float(-0.9 * of_next.mean() - 0.1 * log.mean())
