"""Weights, configuration and code on disk: back in this process, and alone where the package is not installed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mixers import STATES
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import hope_hf
from hope_hf import HopeConfig, HopeForCausalLM

MODEL_FILES = sorted(path.name for path in (Path(hope_hf.__file__).parent / "model").glob("[!_]*.py"))

# Runs in a folder of exports, one for each kind of model, where `hope_hf` is not to be found.
ALONE = """
import sys
sys.modules["hope_hf"] = None
try:
    import hope_hf
except ImportError:
    pass
else:
    raise AssertionError("hope_hf can be imported")

import torch
from pathlib import Path
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

try:
    AutoModelForCausalLM.from_pretrained("attention", trust_remote_code=False)
except ValueError as error:
    assert "trust_remote_code=True" in str(error), error
else:
    raise AssertionError("code that nobody trusts was run")
assert not any(name.startswith("transformers_modules.") for name in sys.modules)

expected, results, models = load_file("expected.safetensors"), {}, {}
for kind in sys.argv[1:]:
    for again in ("", "-again"):
        # the second time from the copy that the code itself has written
        folder = kind + again
        config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        assert type(model).__module__.startswith("transformers_modules.")
        assert type(config) is type(model.config)
        with torch.no_grad():
            results[folder + ".logits"] = model(expected["ids"]).logits
            results[folder + ".generated"] = model.generate(
                expected["ids"], max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0
            )
            base = AutoModel.from_pretrained(folder, trust_remote_code=True)
            results[folder + ".hidden"] = base(expected["ids"]).last_hidden_state
        assert type(base).__name__ == "HopeModel"
        if not again:
            model.save_pretrained(kind + "-again")
        models[folder] = model

# each folder brought a copy of the code, and all of them go on working, also with a cache of another's
for folder, model in models.items():
    for implementation in (None, "static"):
        results[folder + f".{implementation}.generated"] = model.generate(
            expected["ids"], max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0,
            cache_implementation=implementation,
        )
    with torch.no_grad():
        cache = model(expected["ids"][:, :5], use_cache=True)[1]
    other = models[folder.removesuffix("-again") if folder.endswith("-again") else folder + "-again"]
    results[folder + ".continued.generated"] = other.generate(
        expected["ids"], cache=cache, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0
    )
assert not [name for name, module in sys.modules.items() if name.split(".")[0] == "hope_hf" and module is not None]
save_file(results, "results.safetensors")
"""


def text(*shape):
    return torch.randint(64, shape, generator=torch.Generator().manual_seed(3))


def assert_equal_weights(found, expected):
    torch.testing.assert_close(dict(found), dict(expected), rtol=0, atol=0)


def assert_same_model(loaded, model):
    assert_equal_weights(loaded.state_dict(), model.state_dict())
    assert torch.equal(model(text(2, 19)).logits, loaded(text(2, 19)).logits)


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


def test_weights_in_several_files(tiny_model, tmp_path):
    model = tiny_model(tie_word_embeddings=True)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert len(shards) > 2
    assert shards == {name for name in files(tmp_path) if name.endswith(".safetensors")}
    assert_same_model(HopeForCausalLM.from_pretrained(tmp_path), model)


def test_a_model_can_be_loaded_in_bfloat16(tiny_model, tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    loaded = HopeForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert_equal_weights(loaded.state_dict(), model.to(torch.bfloat16).state_dict())
    loaded.save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16


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
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == {
        "AutoConfig": "configuration_hope.HopeConfig",
        "AutoModel": "modeling_hope.HopeModel",
        "AutoModelForCausalLM": "modeling_hope.HopeForCausalLM",
        "AutoModelForQuestionAnswering": "modeling_hope.HopeForQuestionAnswering",
        "AutoModelForSequenceClassification": "modeling_hope.HopeForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_hope.HopeForTokenClassification",
    }


def test_model_code_is_found_by_the_expression_that_bundles_it():
    """transformers finds what to copy with a regular expression, and takes a file's name from it."""
    folder = Path(hope_hf.__file__).parent / "model"
    assert [path.name for path in folder.iterdir() if path.is_dir() and path.name != "__pycache__"] == []
    reached, queue = set(), ["configuration_hope", "modeling_hope"]
    while queue:
        name = queue.pop()
        if f"{name}.py" not in reached:
            reached.add(f"{name}.py")
            source = (folder / f"{name}.py").read_text()
            queue += re.findall(r"^\s*from\s+\.(\S+)\s+import", source, flags=re.MULTILINE)
            assert not re.search(r"^\s*(import\s+\.|from\s+\.\s+import)", source, flags=re.MULTILINE)
    assert sorted(reached) == MODEL_FILES


@pytest.mark.long
@pytest.mark.processes
def test_an_export_works_where_the_package_is_not_installed(tiny_model, tmp_path):
    """In the quick suite the check of an export loads one model so: `tests/export`."""
    ids = text(2, 19)
    expected = {}
    for kind, options in STATES.items():
        model = tiny_model(**options, tie_word_embeddings=kind == "attention")
        model.save_pretrained(tmp_path / kind)
        with torch.no_grad():
            expected[f"{kind}.logits"] = model(ids).logits
            expected[f"{kind}.hidden"] = model.model(ids).last_hidden_state
            expected[f"{kind}.generated"] = model.generate(
                ids, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0
            )
    save_file({"ids": ids}, tmp_path / "expected.safetensors")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", ALONE, *STATES],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    results = load_file(tmp_path / "results.safetensors")
    for name, tensor in expected.items():
        kind, what = name.split(".")
        for folder in (kind, f"{kind}-again"):
            torch.testing.assert_close(results[f"{folder}.{what}"], tensor, rtol=1e-6, atol=1e-6)
            if what == "generated":
                for cache in ("None", "static", "continued"):
                    assert torch.equal(results[f"{folder}.{cache}.generated"], tensor)
    assert files(tmp_path / "memory-again") == files(tmp_path / "memory")


def test_a_tag_of_one_model_is_not_in_the_cards_of_others(tiny_model):
    before = tiny_model()
    before.add_model_tags("sft")
    assert before.model_tags == ["hope", "nested-learning", "sft"]
    assert tiny_model().model_tags == HopeForCausalLM.model_tags == ["hope", "nested-learning"]
