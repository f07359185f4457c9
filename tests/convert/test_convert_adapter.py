"""Adapters of a source: merged while it is converted, and turned into adapters of the converted model."""

import pytest
import torch
from peft_adapters import adapted
from sources import random_ids
from transformers import AutoModelForCausalLM, AutoTokenizer

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
