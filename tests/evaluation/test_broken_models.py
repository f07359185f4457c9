"""Models that do not load as they were saved: one sentence that names the weight or the file, and no results.

`run_clm.py` loads with the same functions; its tests check that it calls them.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from hope_hf.common.weights import load_model
from hope_hf.evaluation.flags import Arguments
from hope_hf.evaluation.subject import load_subject

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DEEP = "[" * 100_000
MEMORY, ATTENTION = ["hope_memory"], ["full_attention"]


@pytest.fixture
def broken(folders, tmp_path):
    """`broken(kind)`: a copy of a saved model, to be damaged."""
    return lambda kind="hope": Path(shutil.copytree(folders[kind], tmp_path / "models" / kind))


def refused(folder: Path) -> str:
    """The sentence with which the model in a folder is refused."""
    with pytest.raises(ValueError) as error:
        load_subject(Arguments(model_name_or_path=str(folder), device="cpu"))
    sentence = str(error.value)
    assert "\n" not in sentence and str(folder) in sentence
    return sentence


def change(file: Path, **fields):
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def change_weights(folder: Path, **weights: torch.Tensor | None):
    """Replace weights by name; None leaves one out."""
    found = load_file(folder / WEIGHTS) | weights
    found = {name: weight for name, weight in found.items() if weight is not None}
    save_file(found, folder / WEIGHTS, metadata={"format": "pt"})


def test_a_config_that_is_not_the_weights_own(broken):
    folders = {kind: broken(kind) for kind in ("hope", "gpt2", "llama")}
    for kind, fields, words in (
        ("hope", {"num_hidden_layers": 3}, "`layer_types` has 2 entries"),
        ("hope", {"num_hidden_layers": 3, "layer_types": MEMORY * 3}, "no weights for model.layers.2."),
        ("gpt2", {"n_layer": 2}, "no weights for transformer.h.1."),
        ("hope", {"num_hidden_layers": 1, "layer_types": MEMORY}, "has weights for model.layers.1."),
        ("hope", {"layer_types": ATTENTION * 2}, "has weights for model.layers.0.mixer."),
        ("hope", {"level_intermediate_sizes": [48]}, "of shape [32, 32], and its config.json asks for [32, 48]"),
        ("llama", {"vocab_size": 400}, "of shape [300, 32], and its config.json asks for [400, 32]"),
        ("llama", {"dtype": "float7"}, "dtype 'float7'"),
        ("llama", {"dtype": "int8"}, "dtype 'int8'"),
        ("llama", {"transformers_weights": "../a.safetensors"}, "'../a.safetensors'"),
    ):
        file = folders[kind] / "config.json"
        whole = file.read_text()
        change(file, **fields)
        assert words in refused(folders[kind])
        file.write_text(whole)


@pytest.mark.parametrize(
    "kind, name", [("hope", "model.norm.weight"), ("llama", "lm_head.weight"), ("gpt2", "transformer.wpe.weight")]
)
def test_weights_that_are_missing_or_no_floating_point_numbers(broken, kind, name):
    folder = broken(kind)
    weight = load_file(folder / WEIGHTS)[name]
    for dtype, shown in {torch.int8: "I8", torch.complex64: "C64", torch.bool: "BOOL"}.items():
        change_weights(folder, **{name: weight.to(dtype)})
        assert f"has a {name} of {shown}" in refused(folder)
    change_weights(folder, **{name: None})
    assert f"no weights for {name}" in refused(folder)


def test_weights_of_other_families_that_are_left_over(broken):
    """They carry heads and buffers for other uses: a warning names them."""
    folder = broken("llama")
    change_weights(folder, **{"value_head.weight": torch.ones(2)})
    with pytest.warns(UserWarning, match="has weights for value_head.weight, "):
        load_model(str(folder), AutoConfig.from_pretrained(folder), "DIR")


def test_integers_under_other_names_than_the_models(broken):
    """Files of a base model lack the head's prefix."""
    folder = broken("gpt2")
    AutoModelForCausalLM.from_pretrained(folder).transformer.save_pretrained(folder)
    whole = load_file(folder / WEIGHTS)
    # Buffers of old releases, which GPT-2 ignores.
    change_weights(folder, **{"h.0.attn.bias": torch.ones(1, 1, 4, 4).to(torch.uint8)})
    config = AutoConfig.from_pretrained(folder)
    assert torch.equal(load_model(str(folder), config, "DIR").transformer.wte.weight, whole["wte.weight"])
    change_weights(folder, **{"ln_f.weight": whole["ln_f.weight"].int()})
    with pytest.raises(ValueError, match="DIR has a ln_f.weight of I32"):
        load_model(str(folder), config, "DIR")


def test_only_safetensors_are_read(broken):
    folder = broken("llama")
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    complaint = refused(folder)
    assert f"has no {WEIGHTS}" in complaint
    # The command in the error message works.
    exec("from transformers import AutoModelForCausalLM\n" + complaint.split(", run ")[1].split(" in Python")[0])
    load_model(str(folder), AutoConfig.from_pretrained(folder), "DIR")


def test_an_adapter_that_cannot_be_merged(broken, folders):
    folder = broken()
    adapter = folder / "adapter_config.json"
    content = {"base_model_name_or_path": folders["llama"], "peft_type": "LORA"}
    adapter.write_text(json.dumps(content))
    assert "beside an adapter" in refused(folder)
    (folder / WEIGHTS).unlink()
    for wrong in ({"peft_type": "XLORA"}, {"base_model_name_or_path": None}, {"megatron_config": {"a": 1}}):
        adapter.write_text(json.dumps(content | wrong))
        assert "PEFT adapter" in refused(folder)
    adapter.write_text(json.dumps(content))
    assert "no adapter_model.safetensors" in refused(folder)
    adapter.write_text(json.dumps(content | {"base_model_name_or_path": str(folder)}))
    assert "names itself" in refused(folder)


def test_an_index_stays_in_its_folder(broken):
    folder = broken()
    outside = folder.parent / "evil.safetensors"
    names = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).rename(outside)

    def point_to(file):
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, file)}))

    for file in ("../evil.safetensors", str(outside), "part.bin", 5):
        point_to(file)
        assert f"{INDEX} names {file!r}" in refused(folder)
    point_to("part.safetensors")
    assert "has no part.safetensors" in refused(folder)
    os.mkfifo(folder / "part.safetensors")
    assert "has no part.safetensors" in refused(folder)
    (folder / "part.safetensors").unlink()
    shutil.copy(outside, folder / "part.safetensors")
    load_model(str(folder), AutoConfig.from_pretrained(folder), "DIR")


def test_a_file_that_is_none(broken):
    folder = broken()
    weights = (folder / WEIGHTS).read_bytes()
    for file, contents in (
        ("config.json", ["", "null", "5", DEEP, '{"model_type": 5}', '{"model_type": "llama", ']),
        ("generation_config.json", ["null", "[]", DEEP]),
        ("tokenizer.json", ["", '{"version": "1', "null", "[]", DEEP, '{"added_tokens": [5]}']),
        ("tokenizer_config.json", ["", "null", "[]", DEEP, '{"eos_token": 5}', '{"tokenizer_class": 5}']),
        ("special_tokens_map.json", ["", "null", "5", DEEP]),
        (INDEX, ["", "null", "{}", DEEP, '{"weight_map": {"a": "a.safetensors"}}']),
        (INDEX, ['{"metadata": {}, "weight_map": []}', '{"metadata": {}, "weight_map": {"a": []}}']),
    ):
        whole = (folder / file).read_text() if (folder / file).exists() else None
        if file == INDEX:
            (folder / WEIGHTS).unlink()
        for content in contents:
            (folder / file).write_text(content)
            refused(folder)
        (folder / file).unlink()
        if whole is not None:
            (folder / file).write_text(whole)
        (folder / WEIGHTS).write_bytes(weights)
