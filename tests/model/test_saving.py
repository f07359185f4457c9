"""Weights, configuration and code on disk: back in this process, and alone where the package is not installed."""

import copy
import re
from pathlib import Path

import pytest
import torch
from mixers import STATES, random_ids
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

import hope_hf
from hope_hf import HopeConfig, HopeForCausalLM

MODEL_FILES = sorted(path.name for path in (Path(hope_hf.__file__).parent / "model").glob("[!_]*.py"))


def assert_equal_weights(found, expected):
    torch.testing.assert_close(dict(found), dict(expected), rtol=0, atol=0)


def assert_same_model(loaded, model):
    assert_equal_weights(loaded.state_dict(), model.state_dict())
    assert torch.equal(model(random_ids(2, 19)).logits, loaded(random_ids(2, 19)).logits)


def files(folder) -> set[str]:
    return {path.name for path in Path(folder).iterdir()}


SAVED = {
    "memory": dict(level_variant="independent", memory_projections=[]),
    "attention": STATES["attention"] | dict(tie_word_embeddings=True),
    "mixed": STATES["mixed"],
    "paper": dict(memory_rule="paper", memory_projections=["k"], memory_depth=2),
}


@pytest.mark.parametrize("options", SAVED.values(), ids=SAVED)
def test_a_saved_model_loads_with_equal_weights_and_logits(tiny_model, tmp_path, options):
    model = tiny_model(**options)
    model.save_pretrained(tmp_path)
    for auto_class in (AutoModelForCausalLM, HopeForCausalLM):
        loaded, report = auto_class.from_pretrained(tmp_path, output_loading_info=True)
        assert type(loaded) is HopeForCausalLM
        assert not any(report.values()), report
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == ("tie_word_embeddings" in options)
        assert_same_model(loaded, model)
    assert type(AutoConfig.from_pretrained(tmp_path)) is HopeConfig


def test_missing_weights_are_made_as_in_a_new_model(tiny_model, tmp_path):
    """A trunk saved alone: the head is new, everything else is read and not touched."""
    model = tiny_model(hidden_size=64, vocab_size=512)
    model.model.save_pretrained(tmp_path)
    loaded, report = HopeForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(report["missing_keys"]) == {"lm_head.weight"}
    assert loaded.lm_head.weight.std().item() == pytest.approx(model.config.initializer_range, rel=0.05)
    assert_equal_weights(loaded.model.state_dict(), model.model.state_dict())


def test_an_export_holds_safetensors_and_all_code(tiny_model, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    assert files(tmp_path) == {"config.json", "generation_config.json", "model.safetensors", *MODEL_FILES}
    for name in MODEL_FILES:
        source = Path(hope_hf.__file__).parent / "model" / name
        assert (tmp_path / name).read_bytes() == source.read_bytes()


def test_model_code_is_found_by_the_expression_that_bundles_it():
    """transformers finds what to copy with a regular expression, and takes a file's name from it."""
    folder = Path(hope_hf.__file__).parent / "model"
    reached = ["configuration_hope.py", "modeling_hope.py"]
    # the list grows while it is read
    for name in reached:
        siblings = re.findall(r"^\s*from\s+\.(\S+)\s+import", (folder / name).read_text(), flags=re.MULTILINE)
        reached += [f"{sibling}.py" for sibling in dict.fromkeys(siblings) if f"{sibling}.py" not in reached]
    assert sorted(reached) == MODEL_FILES


def test_a_tag_of_one_model_is_not_in_the_cards_of_others(tiny_model):
    before = tiny_model()
    before.add_model_tags("sft")
    assert before.model_tags == ["hope", "nested-learning", "sft"]
    assert tiny_model().model_tags == HopeForCausalLM.model_tags == ["hope", "nested-learning"]


@pytest.fixture
def mesh():
    """Of two processes; nothing is sent."""
    torch.distributed.init_process_group("fake", rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


def test_a_model_that_fsdp2_has_sharded_is_saved_like_a_whole_one(tiny_model, tmp_path, mesh):
    """`fully_shard` derives a class from ours in torch's module, whose file is not the model's code."""
    model = tiny_model()
    whole, sharded = tmp_path / "whole", tmp_path / "sharded"
    weights = copy.deepcopy(model.state_dict())
    model.save_pretrained(whole)
    fully_shard(model, mesh=mesh)
    assert type(model) is not HopeForCausalLM
    model.save_pretrained(sharded, state_dict=weights)
    assert files(sharded) == files(whole)
    for name in files(whole):
        assert (sharded / name).read_bytes() == (whole / name).read_bytes(), name
