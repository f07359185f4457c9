"""Adapters of PEFT in a loaded model: its logits are those of the two, for every kind and for tied weights."""

import pytest
import torch
from peft import PeftModel
from peft_adapters import KINDS, LAYERS, adapted
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hope_hf.common.adapters import MERGED_KINDS
from hope_hf.common.flags import ModelArguments
from hope_hf.common.models import load_config
from hope_hf.common.weights import load_model
from hope_hf.data import load_tokenizer
from hope_hf.export.folder import load_source

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
IDS = torch.arange(1, 20)[None]
# Kinds that do not adapt our head, beside which they stay tied.
NO_HEAD = {"LN_TUNING", "TRAINABLE_TOKENS", "GLORA"}
# One of each way to change a layer; the others are tried in the long tests.
QUICK = {"LORA", "IA3", "OFT", "LOHA", "LN_TUNING", "TRAINABLE_TOKENS", "VBLORA", "LILY"}


@pytest.fixture
def tied(tiny_model, tmp_path):
    """A model that ties embedding and head, and its folder."""
    model = tiny_model(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "base")
    return model, tmp_path / "base"


def load(folder, **options):
    return load_model(str(folder), load_config(str(folder), "MODEL", ModelArguments()), "MODEL", **options)


def save(model: PeftModel, base, folder) -> torch.Tensor:
    """Write the adapter; returns the logits of the model with the adapter beside its weights."""
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(folder)
    with torch.no_grad():
        return model(IDS).logits


def check(found, expected, folder):
    """Compare the logits of a merged model, and of its own folder, with those of the model and its adapter."""
    with torch.no_grad():
        largest = 1e-6 * max(1.0, expected.abs().max().item())
        torch.testing.assert_close(found(IDS).logits, expected, rtol=0, atol=largest)
        found.save_pretrained(folder)
        saved = AutoModelForCausalLM.from_pretrained(folder)
        torch.testing.assert_close(saved(IDS).logits, found(IDS).logits, rtol=0, atol=0)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.long) for kind in KINDS]
)
def test_every_kind_that_peft_lists_is_merged_or_refused(tied, tmp_path, kind):
    model, base = tied
    targets = {} if kind in NO_HEAD else {"target_modules": [*LAYERS, "lm_head"]}
    expected = save(adapted(model, kind, **targets), base, tmp_path / "adapter")
    assert (expected - model(IDS).logits).abs().max() > 1e-3, "the adapter makes no difference"
    if kind not in MERGED_KINDS:
        with pytest.raises(ValueError, match="PEFT adapter that cannot be merged"):
            load(tmp_path / "adapter")
        return
    found = load(tmp_path / "adapter")
    assert found.config.tie_word_embeddings == (kind in NO_HEAD)
    check(found, expected, tmp_path / "saved")


# Options of LoRA, and whether embedding and head stay the same.
TIED = {
    "head": (dict(target_modules=["lm_head"]), False),
    "both": (dict(target_modules=["embed_tokens", "lm_head"]), False),
    "embedding, tied": (dict(target_modules=["embed_tokens"], ensure_weight_tying=True), True),
    "DoRA, tied": (dict(target_modules=["embed_tokens"], use_dora=True, ensure_weight_tying=True), False),
    "saved head": (dict(modules_to_save=["lm_head"]), False),
    "saved head, tied": (dict(modules_to_save=["lm_head"], ensure_weight_tying=True), True),
    "tokens": (dict(trainable_token_indices=[3, 5]), True),
    "tokens of both": (dict(trainable_token_indices={"embed_tokens": [3], "lm_head": [4]}), False),
    "a parameter": (dict(target_modules=[], target_parameters=["embed_tokens.weight"]), False),
    "neither": (dict(target_modules="all-linear", bias="all"), True),
}


@pytest.mark.parametrize(("options", "stays"), TIED.values(), ids=TIED)
def test_an_adapter_of_one_end_of_tied_weights_leaves_the_other(tied, tmp_path, options, stays):
    model, base = tied
    expected = save(adapted(model, **options), base, tmp_path / "adapter")
    assert (expected - model(IDS).logits).abs().max() > 1e-3, "the adapter makes no difference"
    found = load(tmp_path / "adapter")
    assert all(weight.requires_grad for weight in found.parameters()), "it can be trained on"
    assert found.config.tie_word_embeddings is stays
    assert (found.lm_head.weight is found.model.embed_tokens.weight) is stays
    check(found, expected, tmp_path / "saved")


def test_biases_of_an_adapter_are_merged_where_a_layer_has_one(tiny_model, tmp_path):
    """And refused by name where it has none, as that of the head."""
    model = tiny_model(layer_types=["full_attention"] * 2, attention_bias=True)
    model.save_pretrained(tmp_path / "base")
    changed = adapted(model, target_modules=["q_proj"], lora_bias=True)
    expected = save(changed, tmp_path / "base", tmp_path / "adapter")
    check(load(tmp_path / "adapter"), expected, tmp_path / "saved")
    save(adapted(model, target_modules=["lm_head"], lora_bias=True), tmp_path / "base", tmp_path / "other")
    with pytest.raises(ValueError, match="MODEL cannot be loaded: .*base layer has no bias"):
        load(tmp_path / "other")


def test_a_layer_adapted_in_two_ways_is_refused(tied, tmp_path):
    model, base = tied
    save(adapted(model, trainable_token_indices=[3], target_modules=["lm_head"]), base, tmp_path / "adapter")
    with pytest.raises(ValueError, match="MODEL cannot be loaded: the adapter .* in two ways"):
        load(tmp_path / "adapter")


def test_an_adapter_of_another_model_is_refused(tied, tmp_path):
    """PEFT would leave its matrices as they begin, which add nothing, with a warning."""
    model, base = tied
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
    llama = adapted(LlamaForCausalLM(LlamaConfig(**sizes)), target_modules=["q_proj"])
    save(llama, base, tmp_path / "adapter")
    with pytest.raises(ValueError, match="MODEL cannot be loaded: the adapter .* is of another model"):
        load(tmp_path / "adapter")


def test_an_adapter_without_a_tokenizer_has_that_of_its_model(tied, tmp_path, word_tokenizer):
    model, base = tied
    word_tokenizer.save_pretrained(base)
    expected = save(adapted(model, target_modules=["lm_head"]), base, tmp_path / "adapter")
    assert load_tokenizer(str(tmp_path / "adapter")).get_vocab() == word_tokenizer.get_vocab()
    found, tokenizer = load_source(tmp_path / "adapter")
    assert tokenizer.get_vocab() == word_tokenizer.get_vocab()
    check(found, expected, tmp_path / "saved")
    # its own is preferred
    word_tokenizer.add_tokens(["more"])
    word_tokenizer.save_pretrained(tmp_path / "adapter")
    assert "more" in load_tokenizer(str(tmp_path / "adapter")).get_vocab()
