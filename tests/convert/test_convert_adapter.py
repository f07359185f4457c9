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


def test_a_llama_s_adapter_is_merged_into_the_converted_model(saved, convert, tmp_path):
    model, place = saved("tied")
    adapter = tmp_path / "adapter"
    expected = adapter_of(model, adapter, place, target_modules=[*EVERYWHERE, "lm_head"])
    # the adapter names its model
    out = convert(adapter, "--levels", "64,128,256")
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


def test_a_llama_s_lora_becomes_one_of_the_converted_model(saved, convert, tmp_path):
    """With ranks, alphas and layers of its own, as `rank_pattern` and the rest name them."""
    model, place = saved("biases")
    patterns = {"rank_pattern": {"up_proj": 2}, "alpha_pattern": {"down_proj": 32, "layers.1.mlp.gate_proj": 5}}
    options = dict(target_modules=EVERYWHERE, layers_to_transform=[0, 1], use_rslora=True) | patterns
    expected = adapter_of(model, tmp_path / "adapter", place, **options)
    hope = convert(place, "--levels", "64,128,256")
    out = tmp_path / "converted-adapter"
    assert main(["--from", str(hope), "--adapter", str(tmp_path / "adapter"), "--output_dir", str(out)]) == 0
    ids = random_ids(2, 40)
    plain = AutoModelForCausalLM.from_pretrained(hope).eval()
    assert (expected - plain(ids).logits).abs().max() > 0.1
    torch.testing.assert_close(PeftModel.from_pretrained(plain, out)(ids).logits, expected, rtol=0, atol=2e-5)
    config = load_config(str(out), "MODEL", ModelArguments())
    torch.testing.assert_close(load_model(str(out), config, "MODEL")(ids).logits, expected, rtol=0, atol=2e-5)


def test_loras_that_the_converted_model_cannot_have_are_refused(converted, refused, saved, tmp_path):
    place = converted.parent / "llama"
    model = AutoModelForCausalLM.from_pretrained(place).eval()
    for options, words in (
        (dict(use_dora=True), "has use_dora"),
        (dict(bias="all"), "has biases"),
        (dict(modules_to_save=["lm_head"]), "has modules_to_save"),
        (dict(target_modules=["embed_tokens"]), "other weights than a lora_A"),
    ):
        adapter = tmp_path / next(iter(options))
        adapter_of(model, adapter, place, **dict(target_modules=["q_proj"]) | options)
        assert words in refused(converted, "--adapter", adapter)
    other, _ = saved("llama", intermediate_size=40)
    adapter_of(other, tmp_path / "other", place, target_modules=["up_proj"])
    assert "is of another model" in refused(converted, "--adapter", tmp_path / "other")
