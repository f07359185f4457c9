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
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from hope_hf.common.weights import load_model
from hope_hf.evaluation import main

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DEEP = "[" * 100_000


@pytest.fixture
def broken(folders, tmp_path):
    """`broken(kind)`: a copy of a saved model, to be damaged."""
    return lambda kind="hope": Path(shutil.copytree(folders[kind], tmp_path / "models" / kind))


@pytest.fixture
def refused(text_file, capsys):
    """`refused(folder)` evaluates the model in it and expects one sentence on standard error; returns it."""

    def evaluate(folder) -> str:
        capsys.readouterr()
        threads = torch.get_num_threads()
        flags = ["--model_name_or_path", str(folder), "--validation_file", text_file, "--cpu_threads", "1"]
        assert main([*flags, "--device", "cpu", "--suite", "perplexity", "--lengths", "128"]) == 2
        torch.set_num_threads(threads)
        shown = capsys.readouterr()
        assert shown.err.startswith("error: ") and shown.err.count("\n") == 1, shown.err
        assert shown.out == ""
        return shown.err

    return evaluate


def change_config(folder: Path, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def change_weights(folder: Path, change):
    """`change` takes the weights by name, and changes them in place."""
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


MEMORY, ATTENTION = ["hope_memory"], ["full_attention"]


def write_index(folder: Path, file: str, **fields):
    names = load_file(folder / WEIGHTS) if (folder / WEIGHTS).exists() else ["lm_head.weight"]
    (folder / WEIGHTS).unlink(missing_ok=True)
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, file)}
    (folder / INDEX).write_text(json.dumps(index | fields))


@pytest.mark.parametrize("kind", ["hope", "llama", "gpt2", "mamba2"])
def test_a_missing_weight_is_not_made_up(folders, broken, refused, kind):
    folder = broken(kind)
    name = next(name for name in load_file(folder / WEIGHTS) if name.endswith("norm.weight") or "ln_f.weight" in name)
    change_weights(folder, lambda weights: weights.pop(name))
    sentence = f"--model_name_or_path {folder} has no weights for {name}, which its config.json asks for"
    assert sentence in refused(folder)
    change_weights(folder, dict.clear)
    assert " more), which its config.json asks for" in refused(folder)


@pytest.mark.parametrize(
    "kind, fields, sentence",
    [
        ("hope", {"num_hidden_layers": 3}, "`layer_types` has 2 entries, and `num_hidden_layers` is 3"),
        ("hope", {"num_hidden_layers": 3, "layer_types": MEMORY * 3}, "has no weights for model.layers.2."),
        ("llama", {"num_hidden_layers": 3}, "has no weights for model.layers.2."),
        ("gpt2", {"n_layer": 2}, "has no weights for transformer.h.1."),
        ("hope", {"num_hidden_layers": 1, "layer_types": MEMORY}, "has weights for model.layers.1."),
        ("hope", {"layer_types": ATTENTION * 2}, "has weights for model.layers.0.mixer."),
        ("hope", {"memory_rule": "paper"}, "has no weights for model.layers.0.mixer.initial_memory.outer"),
        ("hope", {"level_intermediate_sizes": [48]}, "of shape [32, 32], and its config.json asks for [32, 48]"),
        ("hope", {"hidden_size": 48, "head_dim": 16}, "of shape [300, 32], and its config.json asks for [300, 48]"),
        ("llama", {"vocab_size": 400}, "of shape [300, 32], and its config.json asks for [400, 32] (and 1 more)"),
        ("llama", {"dtype": "float7"}, "its config.json has the dtype 'float7', write one like \"float32\""),
        ("llama", {"dtype": "int8"}, "its config.json has the dtype 'int8'"),
        ("llama", {"dtype": ["float32"]}, "its config.json has the dtype ['float32']"),
        ("llama", {"transformers_weights": "../a.safetensors"}, "is not a file of its folder: '../a.safetensors'"),
    ],
)
def test_a_config_that_is_not_the_weights_own(broken, refused, kind, fields, sentence):
    folder = broken(kind)
    change_config(folder, **fields)
    assert sentence in refused(folder)


def test_weights_of_other_families_that_are_left_over(broken):
    """They carry heads and buffers for other uses: a warning names them."""
    folder = broken("llama")
    change_weights(folder, lambda weights: weights.update({"value_head.weight": torch.ones(2)}))
    with pytest.warns(UserWarning, match="has weights for value_head.weight, .*: they are left out"):
        load_model(str(folder), AutoConfig.from_pretrained(folder), "DIR")


@pytest.mark.parametrize("dtype, shown", [(torch.int8, "I8"), (torch.complex64, "C64"), (torch.bool, "BOOL")])
def test_weights_that_are_no_floating_point_numbers(broken, refused, dtype, shown):
    for kind, name in (("hope", "model.norm.weight"), ("llama", "lm_head.weight"), ("gpt2", "transformer.wpe.weight")):
        folder = broken(kind)
        change_weights(folder, lambda weights, name=name: weights.update({name: weights[name].to(dtype)}))
        assert f"has a {name} of {shown}, which is no floating-point type" in refused(folder)


def test_integers_under_other_names_than_the_models(broken, tmp_path):
    """Files of a base model lack the head's prefix; other families rename what they load."""
    folder = broken("gpt2")
    AutoModelForCausalLM.from_pretrained(folder).transformer.save_pretrained(folder)
    whole = load_file(folder / WEIGHTS)
    # Buffers of old releases, which GPT-2 ignores.
    change_weights(folder, lambda weights: weights.update({"h.0.attn.bias": torch.ones(1, 1, 4, 4).to(torch.uint8)}))
    config = AutoConfig.from_pretrained(folder)
    assert torch.equal(load_model(str(folder), config, "DIR").transformer.wte.weight, whole["wte.weight"])
    change_weights(folder, lambda weights: weights.update({"ln_f.weight": weights["ln_f.weight"].int()}))
    with pytest.raises(ValueError, match="DIR has a ln_f.weight of I32"):
        load_model(str(folder), config, "DIR")

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 9}
    config = MixtralConfig(num_attention_heads=2, num_key_value_heads=2, num_local_experts=2, **sizes)
    MixtralForCausalLM(config).save_pretrained(tmp_path / "mixtral")
    load_model(str(tmp_path / "mixtral"), config, "DIR")
    expert = next(name for name in load_file(tmp_path / "mixtral" / WEIGHTS) if "experts.0.w1" in name)
    change_weights(tmp_path / "mixtral", lambda weights: weights.update({expert: weights[expert].int()}))
    with pytest.raises(ValueError, match=f"DIR has a {expert} of I32"):
        load_model(str(tmp_path / "mixtral"), config, "DIR")


def test_only_safetensors_are_read(broken, refused):
    folder = broken("llama")
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    complaint = refused(folder)
    assert f"has no {WEIGHTS}, and only safetensors are read" in complaint
    # The command in the error message works.
    exec("from transformers import AutoModelForCausalLM\n" + complaint.split(", run ")[1].split(" in Python")[0])
    load_model(str(folder), AutoConfig.from_pretrained(folder), "DIR")


def test_an_adapter_that_cannot_be_merged(broken, refused, folders, monkeypatch):
    folder = broken()
    content = {"base_model_name_or_path": folders["llama"], "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    assert "holds a model beside an adapter" in refused(folder)
    (folder / WEIGHTS).unlink()
    for wrong in ({"peft_type": "XLORA"}, {"base_model_name_or_path": None}, {"megatron_config": {"a": 1}}):
        (folder / "adapter_config.json").write_text(json.dumps(content | wrong))
        assert f"--model_name_or_path {folder} cannot be loaded: it is a PEFT adapter that" in refused(folder)
    (folder / "adapter_config.json").write_text(json.dumps(content))
    assert f"--model_name_or_path {folder} has no adapter_model.safetensors, and only safetensors" in refused(folder)
    (folder / "adapter_config.json").write_text(json.dumps(content | {"base_model_name_or_path": str(folder)}))
    assert "names itself as the model that it adapts" in refused(folder)


def test_an_index_stays_in_its_folder(broken, refused):
    folder = broken()
    (folder / WEIGHTS).rename(folder.parent / "evil.safetensors")
    for file in ("../evil.safetensors", str(folder.parent / "evil.safetensors"), "part.bin", 5):
        write_index(folder, file)
        assert f"{INDEX} names {file!r}, which is not a safetensors file inside its folder" in refused(folder)
    write_index(folder, "part.safetensors")
    assert f"has no part.safetensors, which its {INDEX} names" in refused(folder)
    os.mkfifo(folder / "part.safetensors")
    assert f"has no part.safetensors, which its {INDEX} names" in refused(folder)
    (folder / "part.safetensors").unlink()
    shutil.copy(folder.parent / "evil.safetensors", folder / "part.safetensors")
    load_model(str(folder), AutoConfig.from_pretrained(folder), "DIR")


@pytest.mark.parametrize(
    "content",
    ["", "null", "[]", "{}", DEEP, '{"weight_map": {"a": "a.safetensors"}}', '{"metadata": {}, "weight_map": {}}',
     '{"metadata": {}, "weight_map": []}', '{"metadata": {}, "weight_map": {"a": []}}'],
)  # fmt: skip
def test_an_index_that_is_none(broken, refused, content):
    folder = broken()
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(content)
    assert f"{INDEX} cannot be read: save the model there again." in refused(folder)


@pytest.mark.parametrize("content", ["", "null", "[]", "5", DEEP, '{"model_type": 5}', '{"model_type": "llama", '])
def test_a_config_that_is_none(broken, refused, content):
    folder = broken()
    (folder / "config.json").write_text(content)
    assert f"--model_name_or_path {folder} cannot be loaded: " in refused(folder)


@pytest.mark.parametrize("content", ["null", "[]", DEEP])
def test_a_generation_config_that_is_none(broken, refused, content):
    folder = broken()
    (folder / "generation_config.json").write_text(content)
    assert f"--model_name_or_path {folder} cannot be loaded: " in refused(folder)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", ["", '{"version": "1', "null", "[]", "5", DEEP])
def test_a_tokenizer_file_that_is_none(broken, refused, file, content):
    folder = broken()
    (folder / file).write_text(content)
    assert f"--tokenizer_name {folder} holds no tokenizer that can be loaded: " in refused(folder)


@pytest.mark.parametrize(
    "file, fields",
    [
        ("tokenizer.json", {"model": {"type": "BPE", "vocab": 5}}),
        ("tokenizer.json", {"model": {"type": "Zap"}}),
        ("tokenizer.json", {"added_tokens": [5]}),
        ("tokenizer.json", {"pre_tokenizer": {"type": "ByteLevel"}}),
        ("tokenizer_config.json", {"eos_token": 5}),
        ("tokenizer_config.json", {"tokenizer_class": 5}),
        ("tokenizer_config.json", {"model_max_length": "many"}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"a": 1}}),
        ("tokenizer_config.json", {"extra_special_tokens": 5}),
    ],
)
def test_a_tokenizer_of_wrong_types(broken, refused, file, fields):
    folder = broken()
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | fields))
    assert f"--tokenizer_name {folder} holds no tokenizer that can be loaded: " in refused(folder)
