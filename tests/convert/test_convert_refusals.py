"""What HOPE cannot express, and mistakes: one sentence that names the field, flag or file, and nothing is written."""

import json

import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from hope_hf.convert import main
from hope_hf.convert import source as source_module


def test_a_field_that_changes_the_logits_is_named(saved, refused):
    _, source = saved("llama")
    config = json.loads((source / "config.json").read_text())
    for fields, words in (
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        ({"chunk_size_feed_forward": 2}, "chunk_size_feed_forward=2"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}, "auto_map"),
        ({"hidden_act": "swish1"}, "hidden_act"),
        ({"dtype": "int8"}, "'int8'"),
    ):
        (source / "config.json").write_text(json.dumps(config | fields))
        assert words in refused(source)


def test_other_architectures_are_named_with_what_works(tmp_path, refused, converted):
    config = GPT2Config(n_embd=8, n_head=1, n_layer=1, vocab_size=9, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    complaint = refused(tmp_path / "gpt2")
    assert "is a gpt2" in complaint and "llama, mistral, qwen2, qwen3" in complaint
    assert "is a HOPE already" in refused(converted)


def test_files_that_do_not_fit_the_config(saved, refused):
    _, source = saved("llama")
    file = source / "model.safetensors"
    weights = load_file(file)
    up, bias = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.bias"
    wide = torch.cat([weights[up], weights[up]])
    for change, words, flags in (
        ({up: None}, f"no weights for {up.replace('mlp', 'continuum.levels.0')}", []),
        ({bias: torch.zeros(48)}, f"has weights for {bias}", []),
        ({up: weights[up].to(torch.int8)}, f"a {up} of I8", []),
        ({up: wide}, f"has a {up} that becomes ", []),
        ({up: wide}, f"has a {up} that becomes ", ["--levels", "512,2048"]),
    ):
        changed = {name: weight for name, weight in (weights | change).items() if weight is not None}
        save_file(changed, file, metadata={"format": "pt"})
        assert words in refused(source, *flags)
    file.write_bytes(file.read_bytes()[:-100])
    assert f"{file} is damaged" in refused(source)
    file.unlink()
    assert "only safetensors" in refused(source)


def test_a_tied_head_alone_is_the_embedding(saved, convert):
    theirs, source = saved("tied")
    weights = load_file(source / "model.safetensors")
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    made = load_file(convert(source, "--levels", "512,2048") / "model.safetensors")
    assert torch.equal(made["model.embed_tokens.weight"], theirs.lm_head.weight) and "lm_head.weight" not in made


def test_a_head_of_its_own_beside_a_tied_one(saved, refused, convert):
    _, source = saved("tied")
    weights = load_file(source / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    save_file(weights | {"lm_head.weight": embedding + 1.0}, source / "model.safetensors", metadata={"format": "pt"})
    assert "tie_word_embeddings and a lm_head.weight" in refused(source)
    save_file(weights | {"lm_head.weight": embedding + 0.0}, source / "model.safetensors", metadata={"format": "pt"})
    assert "lm_head.weight" not in load_file(convert(source) / "model.safetensors")


def test_flags_that_are_wrong(converted, refused):
    for flag, value in (
        ("--levels", "0,512"),
        ("--levels", "2048,512"),
        ("--levels", "512,,2048"),
        ("--levels", "512,512"),
        ("--sliding_window", "8"),
        ("--attention_sinks", "4"),
        ("--memory_layers", "1,3"),
        ("--memory_layers", "-1"),
        ("--gguf_file", "none.gguf"),
        ("--license", " "),
        ("--out", "x"),
    ):
        assert flag in refused(converted.parent / "llama", flag, value), (flag, value)


def test_more_levels_than_hidden_units(saved, refused):
    _, source = saved("llama", intermediate_size=2)
    assert "--levels has 3 periods for 2 hidden units" in refused(source, "--levels", "2,4,8")


def test_a_second_window(saved, refused):
    _, source = saved("mistral", sliding_window=100)
    assert "sliding_window of 100 already" in refused(source, "--sliding_window", "64")


def test_an_output_folder_that_is_in_use(converted, refused, tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "mine.txt").write_text("mine")
    assert "--output_dir" in refused(converted.parent / "llama")


def test_a_source_that_is_not_there(refused, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert f"--from {tmp_path / 'none'}" in refused(tmp_path / "none")


def test_a_gguf_without_its_package(converted, refused, monkeypatch):
    monkeypatch.setattr(source_module, "is_gguf_available", lambda: False)
    assert "hope_hf[gguf]" in refused(converted.parent / "llama", "--gguf_file", "model.gguf")


def test_the_model_is_named_once_with_or_without_the_flag(converted, tmp_path, capsys):
    source = str(converted.parent / "llama")
    out = ["--output_dir", str(tmp_path / "hope")]
    assert main(out) == 2 and "model is missing" in capsys.readouterr().err
    assert main([source, "--from", source, *out]) == 2 and "--from" in capsys.readouterr().err
    assert main([source, *out]) == 0 and (tmp_path / "hope" / "config.json").exists()
