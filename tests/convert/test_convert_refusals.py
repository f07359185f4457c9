"""What HOPE cannot express, and mistakes: one sentence that names the field, flag or file, and nothing is written."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from hope_hf import HopeConfig, HopeForCausalLM
from hope_hf.convert import main
from hope_hf.convert import source as source_module


def edited(folder, **fields):
    """The folder, with fields of its config changed."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


@pytest.mark.parametrize(
    ("kind", "fields", "named"),
    [
        ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        ("llama", {"chunk_size_feed_forward": 2}, "chunk_size_feed_forward=2"),
        ("llama", {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}, "auto_map"),
        ("llama", {"hidden_act": "swish1"}, "hidden_act"),
        ("llama", {"dtype": "int8"}, "'int8'"),
    ],
)  # fmt: skip
def test_a_field_that_changes_the_logits_is_named(kind, fields, named, saved, refused):
    _, source = saved(kind)
    assert named in refused(edited(source, **fields))


def test_fields_of_other_programs_are_no_obstacle(saved, converted):
    _, source = saved("llama")
    converted(edited(source, rope_interleaved=False, is_llama_config=True, pretraining_tp=2, torch_dtype="float32"))


def test_other_architectures_are_named_with_what_works(tmp_path, refused):
    config = GPT2Config(n_embd=8, n_head=1, n_layer=1, vocab_size=9, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    sentence = "is a gpt2, which HOPE cannot express: what works is llama, mistral, qwen2, qwen3."
    assert sentence in refused(tmp_path / "gpt2")
    sizes = dict(vocab_size=64, hidden_size=16, num_hidden_layers=1, head_dim=8)
    HopeForCausalLM(HopeConfig(**sizes)).save_pretrained(tmp_path / "hope")
    assert "is a HOPE already" in refused(tmp_path / "hope")


def test_files_that_do_not_fit_the_config(saved, refused):
    _, source = saved("llama")
    weights = load_file(source / "model.safetensors")

    def rewritten(**changes):
        kept = {name: weight for name, weight in (weights | changes).items() if weight is not None}
        save_file(kept, source / "model.safetensors", metadata={"format": "pt"})
        return source

    up, bias = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.bias"
    assert f"no weights for {up.replace('mlp', 'continuum.levels.0')}" in refused(rewritten(**{up: None}))
    assert f"has weights for {bias}" in refused(rewritten(**{bias: torch.zeros(48)}))
    assert f"a {up} of I8" in refused(rewritten(**{up: weights[up].to(torch.int8)}))
    wide = torch.cat([weights[up]] * 2)
    for flags in ([], ["--levels", "512,2048"]):
        assert f"has a {up} that becomes " in refused(rewritten(**{up: wide}), *flags)
    (source / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:-100])
    assert f"{source / 'model.safetensors'} is damaged" in refused(source)
    (source / "model.safetensors").unlink()
    assert "has no model.safetensors, and only safetensors are read" in refused(source)


def test_a_tied_head_alone_is_the_embedding(saved, converted):
    theirs, source = saved("tied")
    weights = load_file(source / "model.safetensors")
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    made = load_file(converted(source, "--levels", "512,2048") / "model.safetensors")
    assert torch.equal(made["model.embed_tokens.weight"], theirs.lm_head.weight) and "lm_head.weight" not in made


def test_a_head_of_its_own_beside_a_tied_one(saved, refused, converted):
    _, source = saved("tied")
    weights = load_file(source / "model.safetensors")
    for change, accepted in ((1.0, False), (0.0, True)):
        head = {"lm_head.weight": weights["model.embed_tokens.weight"] + change}
        save_file(weights | head, source / "model.safetensors", metadata={"format": "pt"})
        if accepted:
            assert "lm_head.weight" not in load_file(converted(source) / "model.safetensors")
        else:
            assert "tie_word_embeddings and a lm_head.weight that is not its embedding" in refused(source)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--levels", "0,512"], "--levels is '0,512'"),
        (["--levels", "2048,512"], "--levels 2048,512 is not fast to slow in multiples"),
        (["--sliding_window", "8"], "--sliding_window is 8: give a whole number of 64 or more"),
        (["--attention_sinks", "4"], "--attention_sinks needs a window"),
        (["--levels", "512,,2048"], "--levels is '512,,2048'"),
        (["--levels", "512,512"], "a number twice"),
        (["--memory_layers", "1,3"], "--memory_layers has 3, and the layers of"),
        (["--memory_layers", "-1"], "--memory_layers"),
        (["--gguf_file", "none.gguf"], "--gguf_file none.gguf"),
        (["--license", " "], "--license"),
        (["--out", "x"], "--out"),
    ],
)
def test_flags_that_are_wrong(flags, named, saved, refused):
    _, source = saved("llama")
    assert named in refused(source, *flags)


def test_more_levels_than_hidden_units(saved, refused):
    _, source = saved("llama", intermediate_size=2)
    assert "--levels has 3 periods for 2 hidden units" in refused(source, "--levels", "2,4,8")


def test_a_second_window(saved, refused):
    _, source = saved("mistral", sliding_window=100)
    assert "has a sliding_window of 100 already: leave --sliding_window out" in refused(
        source, "--sliding_window", "64"
    )


def test_an_output_folder_that_is_in_use(saved, refused, tmp_path):
    _, source = saved("llama")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "mine.txt").write_text("mine")
    assert "exists and is not an empty folder: name a new one" in refused(source)


def test_a_source_that_is_not_there(refused, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert f"--from {tmp_path / 'none'}" in refused(tmp_path / "none")


def test_a_gguf_without_its_package(saved, refused, monkeypatch):
    _, source = saved("llama")
    monkeypatch.setattr(source_module, "is_gguf_available", lambda: False)
    assert "--gguf_file model.gguf needs the package gguf: pip install 'hope_hf[gguf]'." in refused(
        source, "--gguf_file", "model.gguf"
    )


def test_the_model_is_named_once_with_or_without_the_flag(saved, tmp_path, capsys):
    _, source = saved("llama")
    out = ["--output_dir", str(tmp_path / "hope")]
    assert main(out) == 2 and "The model is missing" in capsys.readouterr().err
    assert main([str(source), "--from", str(source), *out]) == 2 and "--from" in capsys.readouterr().err
    assert main([str(source), *out]) == 0 and (tmp_path / "hope" / "config.json").exists()
