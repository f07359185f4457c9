"""Whose memory it is: hashes of all that a model computes with, its active adapters among them."""

import pytest
import torch
from peft import PeftModel
from peft_adapters import KINDS, adapted, config_of, shake

from hope_hf import HopeCache
from hope_hf.model.cache_file import fingerprint

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def of(model: PeftModel) -> tuple:
    return fingerprint(model.get_base_model())


def test_files_of_models_without_adapters_keep_their_fingerprint(tiny_model):
    """Two of files of before, from weights that no release of torch changes."""
    hybrid = dict(layer_types=["full_attention", "hope_memory"])
    for options, expected in (({}, "4a824692f403f8db"), (hybrid, "152136fe19177fd3")):
        model = tiny_model(**options)
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(torch.arange(weight.numel()).view(weight.shape) / 1024)
        assert fingerprint(model).exact == expected


@pytest.fixture
def two(tiny_model):
    """A model with the adapters a, which is active, and b."""
    model = adapted(tiny_model(), adapter="a", modules_to_save=["input_layernorm"])
    model.add_adapter("b", config_of("LORA", modules_to_save=["input_layernorm"]))
    model.set_adapter("b")
    shake(model, "b", seed=1).set_adapter("a")
    return model


def scaled(model, factor):
    for module in model.modules():
        if "a" in getattr(module, "scaling", {}):
            module.scaling["a"] *= factor


# What is done to a model whose memory was read under the adapter a.
OTHERS = {
    "b": lambda model: model.set_adapter("b"),
    "off": lambda model: model.base_model.disable_adapter_layers(),
    "three times the alpha": lambda model: scaled(model, 3),
    "one weight": lambda model: next(p for name, p in model.named_parameters() if "lora_B.a" in name).data.add_(1e-6),
    "a saved module": lambda model: next(
        p for name, p in model.named_parameters() if "modules_to_save.a" in name
    ).data.add_(1e-6),
}
SAME = {
    "nothing": lambda model: None,
    "b is gone": lambda model: model.delete_adapter("b"),
    "b is another": lambda model: [p.data.add_(1) for name, p in model.named_parameters() if ".b." in f"{name}."],
    "a does not train": lambda model: model.set_adapter("a", inference_mode=True),
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_a_memory_is_refused_where_something_else_computes(two, tmp_path, change):
    cache = HopeCache(two.config)
    two(torch.arange(9)[None], cache=cache)
    cache.save_pretrained(tmp_path, two)
    change(two)
    with pytest.raises(ValueError, match="was written by another model"):
        HopeCache.from_pretrained(tmp_path, two)


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_a_memory_is_taken_where_the_same_computes(two, tmp_path, change):
    cache = HopeCache(two.config)
    two(torch.arange(9)[None], cache=cache)
    cache.save_pretrained(tmp_path, two)
    change(two)
    assert HopeCache.from_pretrained(tmp_path, two).get_seq_length() == 9


def test_two_active_adapters_count_in_their_order(tiny_model):
    model = adapted(tiny_model(), adapter="a")
    model.add_adapter("b", config_of("LORA"))
    model.base_model.set_adapter(["a", "b"])
    first = of(model)
    model.base_model.set_adapter(["b", "a"])
    assert of(model) != first


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_adapter_is_looked_at(tiny_model, tmp_path, kind):
    """Other values are another model's, the same under another name are not, and off it is the model below."""
    base = tiny_model()
    below, model = fingerprint(base), adapted(base, kind)
    first = of(model)
    model.save_pretrained(tmp_path)
    assert of(PeftModel.from_pretrained(tiny_model(), tmp_path, adapter_name="other")) == first
    with model.disable_adapter():
        assert of(model) == below
    assert first != below and of(shake(model)) != first
