"""Uses of a converted model: learning levels, PEFT, int8 weights, evaluation, export."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from sources import random_ids
from transformers import AutoModelForCausalLM, TorchAoConfig

from hope_hf import HopeCache
from hope_hf.evaluation import main as evaluate
from hope_hf.export import folder as export_folder
from hope_hf.export import main as export

pytestmark = [
    # Both still ask transformers 5.23 for attributes by their older names.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Calling register_constant:FutureWarning"),
]


@pytest.fixture
def hope(saved, converted):
    """The folder of a converted Qwen3, which has every new field but a bias."""
    return converted(saved("qwen3")[1])


def test_lora_trains_it(hope):
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(hope), LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    )
    ids = random_ids(2, 32)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1


def test_its_levels_learn_while_it_reads(saved, converted):
    hope = converted(saved("llama")[1], "--levels", "16,32")
    model = AutoModelForCausalLM.from_pretrained(hope).eval()
    ids = random_ids(1, 64)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    model.config.level_learning.gate = False
    learned, plain = HopeCache(model.config), HopeCache(model.config)
    report = model.learn(ids, cache=learned)
    with torch.no_grad():
        model(ids, cache=plain)
        logits = [model(ids[:, :8], cache=cache).logits for cache in (learned, plain)]
    assert report is not None and not torch.allclose(*logits)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_int8_weights(hope):
    torchao = pytest.importorskip("torchao.quantization")
    options = TorchAoConfig(torchao.Int8WeightOnlyConfig(version=2))
    quantized = AutoModelForCausalLM.from_pretrained(hope, quantization_config=options).eval()
    whole, ids = AutoModelForCausalLM.from_pretrained(hope).eval(), random_ids(1, 40)
    with torch.no_grad():
        expected, found = whole(ids).logits, quantized(ids).logits
    assert 0 < (found - expected).abs().max() < 0.05 * expected.abs().max()


def test_the_evaluation_gives_the_loss_of_the_source(saved, converted, tmp_path):
    theirs, source = saved("llama")
    hope = converted(source)
    (tmp_path / "text.txt").write_text(" ".join(f"w{index}" for index in random_ids(600).tolist()), encoding="utf-8")
    losses = []
    for place in (source, hope):
        out = tmp_path / f"{place.name}-report"
        flags = ["--suite", "perplexity", "--validation_file", str(tmp_path / "text.txt"), "--lengths", "64"]
        assert evaluate(["--model_name_or_path", str(place), *flags, "--output_dir", str(out)]) == 0
        tables = json.loads((out / "results.json").read_text())["results"]["perplexity"]["tables"]
        losses.append(next(iter(tables.values()))[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_the_export_carries_it(hope, tmp_path, monkeypatch):
    monkeypatch.setattr(export_folder, "check_export", lambda *made: "")
    assert export([str(hope), "--to", str(tmp_path / "exported")]) == 0
    ours, theirs = (load_file(place / "model.safetensors") for place in (hope, tmp_path / "exported"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
