"""Adapters of a source: merged while it is converted, and turned into adapters of the converted model."""

import pytest
import torch
from peft import PeftModel
from peft_adapters import adapted
from sources import random_ids
from transformers import AutoModelForCausalLM, AutoTokenizer

from hope_hf.common.flags import ModelArguments
from hope_hf.common.models import load_config
from hope_hf.common.weights import load_model
from hope_hf.convert import main

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
EVERYWHERE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapter_of(model, folder, place, **options):
    """Save an adapter of a source; returns the logits of the two, which nothing has merged."""
    changed = adapted(model, **options)
    changed.peft_config["default"].base_model_name_or_path = str(place)
    changed.save_pretrained(folder)
    with torch.no_grad():
        return changed(random_ids(2, 40)).logits




@pytest.mark.parametrize("levels", [(), ("--levels", "64,128,256")], ids=["one level", "three levels"])
@pytest.mark.parametrize("given", ["--adapter", "--from"])
def test_a_llama_s_adapter_is_merged_into_the_converted_model(saved, converted, tmp_path, given, levels):
    model, place = saved("tied")
    expected = adapter_of(model, tmp_path / "adapter", place, target_modules=[*EVERYWHERE, "lm_head"])
    flags = [place, "--adapter", tmp_path / "adapter"] if given == "--adapter" else [tmp_path / "adapter"]
    out = converted(*flags, *levels)
    hope = AutoModelForCausalLM.from_pretrained(out).eval()
    assert (expected - model(random_ids(2, 40)).logits).abs().max() > 0.1
    torch.testing.assert_close(hope(random_ids(2, 40)).logits, expected, rtol=0, atol=2e-5)
    assert AutoTokenizer.from_pretrained(out).get_vocab() == AutoTokenizer.from_pretrained(place).get_vocab()


def test_adapters_that_cannot_be_added_are_refused(saved, refused, tmp_path):
    model, place = saved("llama")
    (tmp_path / "empty").mkdir()
    assert "empty cannot be added to --from" in refused(place, "--adapter", tmp_path / "empty")
    adapter_of(model, tmp_path / "adapter", place, target_modules=["q_proj"])
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    assert "has no adapter_model.safetensors" in refused(place, "--adapter", tmp_path / "adapter")
    # transformers adds an adapter in the model's own folder to it
    adapter_of(model, place, place, target_modules=["q_proj"])
    assert "holds a model beside an adapter" in refused(place)


@pytest.mark.parametrize("levels", [(), ("--levels", "64,128,256")], ids=["one level", "three levels"])
def test_a_llama_s_lora_becomes_one_of_the_converted_model(saved, converted, tmp_path, levels):
    """With ranks, alphas and layers of its own, as `rank_pattern` and the rest name them."""
    model, place = saved("biases")
    patterns = {"rank_pattern": {"up_proj": 2}, "alpha_pattern": {"down_proj": 32, "layers.1.mlp.gate_proj": 5}}
    options = dict(target_modules=EVERYWHERE, layers_to_transform=[0, 1], use_rslora=True) | patterns
    expected = adapter_of(model, tmp_path / "adapter", place, **options)
    hope = converted(place, *levels)
    out = tmp_path / "converted-adapter"
    assert main(["--from", str(hope), "--adapter", str(tmp_path / "adapter"), "--output_dir", str(out)]) == 0
    ids = random_ids(2, 40)
    plain = AutoModelForCausalLM.from_pretrained(hope).eval()
    assert (expected - plain(ids).logits).abs().max() > 0.1
    torch.testing.assert_close(PeftModel.from_pretrained(plain, out)(ids).logits, expected, rtol=0, atol=2e-5)
    config = load_config(str(out), "MODEL", ModelArguments())
    torch.testing.assert_close(load_model(str(out), config, "MODEL")(ids).logits, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (dict(use_dora=True), "has use_dora"),
        (dict(bias="all"), "has biases"),
        (dict(modules_to_save=["lm_head"]), "has modules_to_save"),
        (dict(target_modules=["embed_tokens"]), "other weights than a lora_A"),
    ],
)
def test_what_is_more_than_two_matrices_is_refused(saved, converted, refused, tmp_path, options, what):
    model, place = saved("biases")
    adapter_of(model, tmp_path / "adapter", place, **dict(target_modules=["q_proj"]) | options)
    hope = converted(place)
    told = refused(hope, "--adapter", tmp_path / "adapter")
    assert what in told and "--from" in told


def test_a_lora_of_another_model_is_refused(saved, converted, refused, tmp_path):
    model, place = saved("llama", intermediate_size=40)
    adapter_of(model, tmp_path / "adapter", place, target_modules=["up_proj"])
    hope = converted(saved("llama")[1])
    assert "is of another model" in refused(hope, "--adapter", tmp_path / "adapter")
    assert "--levels is for a new model" in refused(hope, "--adapter", tmp_path / "adapter", "--levels", "64,128")
