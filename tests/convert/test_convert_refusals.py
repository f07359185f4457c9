"""What HOPE cannot express, and mistakes: one sentence that names the field, flag or file, and nothing is written."""

import json

import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from hope_hf.convert import main


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
    up = "model.layers.1.mlp.up_proj.weight"
    wide = weights | {up: torch.cat([weights[up], weights[up]])}
    bytes_of_up = weights | {up: weights[up].to(torch.int8)}
    for changed, words, flags in (
        (bytes_of_up, f"a {up} of I8", []),
        (wide, f"has a {up} that becomes ", []),
        (wide, f"has a {up} that becomes ", ["--levels", "512,2048"]),
    ):
        save_file(changed, file, metadata={"format": "pt"})
        assert words in refused(source, *flags)
    file.write_bytes(file.read_bytes()[:-100])
    assert f"{file} is damaged" in refused(source)


def test_a_tied_head_is_the_embedding_where_both_are_equal(saved, refused, convert):
    _, source = saved("tied")
    file = source / "model.safetensors"
    weights = load_file(file)
    embedding = weights["model.embed_tokens.weight"]
    save_file(weights | {"lm_head.weight": embedding + 1.0}, file, metadata={"format": "pt"})
    assert "tie_word_embeddings and a lm_head.weight" in refused(source)
    # some files hold the head alone
    del weights["model.embed_tokens.weight"]
    save_file(weights | {"lm_head.weight": embedding}, file, metadata={"format": "pt"})
    made = load_file(convert(source) / "model.safetensors")
    assert torch.equal(made["model.embed_tokens.weight"], embedding) and "lm_head.weight" not in made


def test_a_source_that_is_not_there(refused, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert f"--from {tmp_path / 'none'}" in refused(tmp_path / "none")


def test_a_folder_without_a_config_is_answered_with_what_it_holds(refused, tmp_path, converted):
    folder = tmp_path / "folder"
    folder.mkdir()
    assert f"--from {folder} holds no config.json: name the folder of a model." in refused(folder)
    (folder / "model.gguf").touch()
    assert "name the folder of a model, or add --gguf_file model.gguf." in refused(folder)
    (folder / "llama").symlink_to(converted.parent / "llama")
    assert f"name the folder of a model, such as {folder / 'llama'}." in refused(folder)


def test_the_model_is_named_once_with_or_without_the_flag(converted, tmp_path, capsys):
    source = str(converted.parent / "llama")
    out = ["--output_dir", str(tmp_path / "hope")]
    assert main(out) == 2 and "model is missing" in capsys.readouterr().err
    assert main([source, "--from", source, *out]) == 2 and "--from" in capsys.readouterr().err
