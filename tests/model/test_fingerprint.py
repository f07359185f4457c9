"""Whose memory it is: hashes of all that a model computes with, its active adapters among them."""

import pytest
import torch
from mixers import RETAINING
from peft import PeftModel
from peft_adapters import KINDS, adapted, config_of, shake

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


def test_what_chooses_the_tokens_to_retain_counts(tiny_model):
    """It is no parameter."""
    model = tiny_model(**RETAINING)
    before = fingerprint(model)
    for scores in model.model.layers[1].mixer.scores.buffers():
        scores.add_(1e-3)
        after = fingerprint(model)
        assert after.exact != before.exact and after.rounded != before.rounded
        before = after


@pytest.fixture
def two(tiny_model):
    """A model with the adapters a, which is active, and b."""
    model = adapted(tiny_model(), adapter="a", modules_to_save=["input_layernorm"])
    model.add_adapter("b", config_of("LORA", modules_to_save=["input_layernorm"]))
    model.set_adapter("b")
    shake(model, "b", seed=1).set_adapter("a")
    return model


def add(model, part, number):
    """Add a number to the weights with this part in their names."""
    for name, weight in model.named_parameters():
        if part in f"{name}.":
            weight.data.add_(number)


def three_times_the_alpha(model):
    for module in model.modules():
        if "a" in getattr(module, "scaling", {}):
            module.scaling["a"] *= 3


# what is done to a model with the adapter a, and whether it then computes something else
CHANGES = {
    "b": (lambda model: model.set_adapter("b"), True),
    "off": (lambda model: model.base_model.disable_adapter_layers(), True),
    "three times the alpha": (three_times_the_alpha, True),
    "weights of a": (lambda model: add(model, "lora_B.a.", 1e-6), True),
    "a saved module": (lambda model: add(model, "modules_to_save.a.", 1e-6), True),
    "b is gone": (lambda model: model.delete_adapter("b"), False),
    "weights of b": (lambda model: add(model, ".b.", 1.0), False),
    "a does not train": (lambda model: model.set_adapter("a", inference_mode=True), False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_computes_something_else_is_another_model(two, name):
    change, is_another = CHANGES[name]
    first = of(two)
    change(two)
    assert (of(two) != first) == is_another


def test_two_active_adapters_count_in_their_order(tiny_model):
    model = adapted(tiny_model(), adapter="a")
    model.add_adapter("b", config_of("LORA"))
    model.base_model.set_adapter(["a", "b"])
    first = of(model)
    model.base_model.set_adapter(["b", "a"])
    assert of(model) != first


QUICK = ["IA3", "LORA", "OFT", "TRAINABLE_TOKENS", "VBLORA"]
OTHERS = [pytest.param(kind, marks=pytest.mark.long) for kind in KINDS if kind not in QUICK]


@pytest.mark.parametrize("kind", QUICK + OTHERS)
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
