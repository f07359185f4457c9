"""A model whose maps are cut over two processes computes what the whole one does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mixers import MIXED
from safetensors.torch import load_file

from hope_hf.model.layers import HopeRMSNorm

MAPS = (torch.nn.Linear, torch.nn.Embedding)
OPTIONS = MIXED | dict(attention_bias=True, use_qk_norm=True, mlp_bias=True)
SCRIPT = Path(__file__).with_name("tensor_parallel.py")


@pytest.mark.parametrize("options", [OPTIONS, {"level_variant": "independent"}, {"tie_word_embeddings": True}])
def test_the_plan_names_maps_that_exist(tiny_model, options):
    model = tiny_model(**options)
    plan = model.config.base_model_tp_plan
    modules = {re.sub(r"\.\d+", ".*", name): module for name, module in model.model.named_modules()}
    assert "layers.*.mixer.q_proj" in plan
    for name in plan:
        assert isinstance(modules[name], HopeRMSNorm if name.endswith("_norm") else MAPS)
    assert "base_model_tp_plan" not in model.config.to_dict()


@pytest.mark.processes
@pytest.mark.usefixtures("warm_python")
def test_a_model_in_two_parts_computes_what_the_whole_one_does(tiny_model, tmp_path):
    model = tiny_model(**OPTIONS)
    for name, parameter in model.named_parameters():
        if name.endswith("proj.bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "model")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    command = [*launch, str(SCRIPT), str(tmp_path / "model"), str(tmp_path / "made")]
    subprocess.run(command, check=True, timeout=300)
    made = load_file(tmp_path / "made")
    ids = torch.arange(38).view(2, 19)
    out = model(ids, labels=ids)
    out.loss.backward()
    torch.testing.assert_close(made["logits"], out.logits.detach(), rtol=1e-5, atol=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(made[f"grad.{name}"], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
    assert torch.equal(made["tokens"], model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=63))
    # every map of the blocks but the gates' small one is held by halves
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    maps = {name for name in sizes if name.endswith("_proj.weight") and "gates" not in name}
    cut = {name.removeprefix("cut.") for name in made if name.startswith("cut.")}
    halves = {name for name in cut if not name.endswith((".bias", "_norm.weight"))}
    assert maps < halves and all(2 * made[f"cut.{name}"].item() == sizes[name] for name in halves)
