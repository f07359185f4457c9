"""Recipes of `recipes/`: read by run_clm.py as they are, and run with their model, batch and data made small."""

import json
import re
import warnings

import pytest
import yaml
from training_runs import ROOT, curve, make_tokenizer

from hope_hf import HopeConfig
from hope_hf.training import initial, setup
from hope_hf.training.parsing import parse
from hope_hf.training.preflight import run as preflight
from hope_hf.training.preflight.checks import CHECKS
from hope_hf.training.preflight.facts import FreeMemory

# `chat` continues any model: tests/training/test_instruction_tuning.py.
RECIPES = {file.stem: file for file in sorted((ROOT / "recipes").glob("*.yaml")) if file.stem != "chat"}
SECOND = {"mid_4096": "mid", "target_8192": "target"}
FOR_A_CPU = ["demo", "gpt2_4_layers_shakespeare"]
SMALLER = {
    "hope": "hidden_size=64,num_hidden_layers=1,head_dim=32,num_attention_heads=2,num_memory_heads=2,"
    "memory_chunk_size=16,level_intermediate_sizes=[48,48,48],level_periods=[256,512,512]",
    "llama": "hidden_size=64,num_hidden_layers=1,intermediate_size=96,num_attention_heads=2,num_key_value_heads=2",
    "gpt2": "n_layer=1,n_embd=64,n_head=2",
}


def content(name: str) -> dict:
    return yaml.safe_load(RECIPES[name].read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder like a data set of the Hub, with the configurations that the recipes name, and a tokenizer for it."""
    folder = tmp_path_factory.mktemp("texts")
    documents = [f"{number} times {number + 1} are {number * (number + 1)}, " * 9 for number in range(300)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents)
    (folder / "train.jsonl").write_text(lines, encoding="utf-8")
    (folder / "book.txt").write_text("\n\n".join(documents), encoding="utf-8")
    named = {content(name).get("dataset_config_name") for name in RECIPES} - {None}
    configs = [{"config_name": name, "data_files": "train.jsonl"} for name in sorted(named)]
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n", encoding="utf-8")
    make_tokenizer(documents).save_pretrained(folder / "tokenizer")
    return folder


def made_small(name: str, texts, first=None) -> list[str]:
    """Flags after the recipe: the same run with a small model, batch and text."""
    recipe = content(name)
    flags = ["--block_size", "64" if first else "32", "--gradient_accumulation_steps", "2"]
    flags += ["--checkpointing_steps", "2", "--eval_steps", "2", "--max_eval_samples", "4", "--num_warmup_steps", "1"]
    flags += ["--dataloader_num_workers", "1"] if "dataloader_num_workers" in recipe else []
    if first:
        flags += ["--model_name_or_path", str(first)]
    else:
        flags += ["--config_overrides", SMALLER[recipe.get("model_type", "hope")]]
        flags += ["--tokenizer_name", str(texts / "tokenizer")]
    return [*flags, *own_text(name, texts)]


def own_text(name: str, texts) -> list[str]:
    """Flags that replace a recipe's text by one of the same kind."""
    recipe = content(name)
    if "dataset_name" not in recipe:
        return ["--train_file", str(texts / "book.txt")]
    config = recipe["dataset_config_name"]
    return ["--dataset_name", str(texts), "--dataset_config_name", config, "--streaming", str(recipe["streaming"])]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_read_without_a_warning_and_names_what_matters(name):
    words = [str(RECIPES[name])] + (["--output_dir", "runs/demo"] if name == "demo" else [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        args = parse(words)
    assert args.output_dir == f"runs/{name}"
    own = set(content(name))
    assert {"block_size", "per_device_train_batch_size", "max_train_steps", "learning_rate"} <= own
    if args.config_name in ("pilot", "mid", "target") or name in SECOND:
        assert (args.optimizer, args.gradient_checkpointing) == ("muon", "block")
    # A data set whose code would have to run on this machine is not named.
    assert not args.trust_remote_code


@pytest.mark.parametrize("name", [*FOR_A_CPU, "pilot"])
def test_a_recipe_trains(name, run, texts):
    flags = [*made_small(name, texts), "--max_train_steps", "2"]
    status, rows = run("run", *flags, model=[str(RECIPES[name])], data=[])
    assert status == 0 and len(curve(rows)) == 2 and rows[-1]["eval/loss"] > 0


@pytest.mark.parametrize("name", SECOND)
def test_a_second_phase_begins_from_the_weights_of_the_first(name, run, texts, tmp_path):
    first, second = SECOND[name], content(name)
    assert second["model_name_or_path"] == content(first)["output_dir"]
    steps = ["--max_train_steps", "4", "--learning_rate", "1e-2"]
    _, before = run("first", *made_small(first, texts), *steps, model=[str(RECIPES[first])], data=[])
    words = made_small(name, texts, first=tmp_path / "first")
    status, after = run("second", *words, *steps, model=[str(RECIPES[name])], data=[])
    assert status == 0 and curve(after)[0] < curve(before)[0] - 0.1


def own_shape(name: str, texts, first) -> list[str]:
    """Flags that give a recipe its own batch and length, a vocabulary of a real size and a small text."""
    recipe = {"gradient_accumulation_steps": 1} | content(name)
    flags = ["--dataloader_num_workers", "0", "--tokenizer_name", str(texts / "tokenizer"), *own_text(name, texts)]
    # So that a block of validation is full.
    flags += ["--validation_split_percentage", "50"]
    for key in ("block_size", "per_device_train_batch_size", "gradient_accumulation_steps", "max_train_steps"):
        flags += [f"--{key}", str(recipe[key])]
    if name in SECOND:
        HopeConfig.from_preset(SECOND[name], vocab_size=32_000).save_pretrained(first)
        return [*flags, "--model_name_or_path", str(first)]
    # Flash attention needs a GPU.
    flags += ["--attn_implementation", "sdpa"] if name == "llama_7b" else []
    sizes = recipe.get("config_overrides", "")
    return [*flags, "--config_overrides", f"{sizes},vocab_size=32000".lstrip(",")]


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in FOR_A_CPU])
def test_the_dry_run_of_a_large_recipe_up_to_its_step(name, run, capsys, texts, tmp_path, monkeypatch):
    """Data, model, optimizer and checks in full size, on a machine that does not hold the model.

    tests/plan/test_memory.py simulates steps of the presets.
    """
    monkeypatch.setattr(initial, "free_memory", lambda device: 2**20)
    room = FreeMemory(device=2**30, host=2**30, disk=2**44)
    monkeypatch.setattr(preflight, "read_free_memory", lambda *run: room)
    if name in SECOND:
        monkeypatch.setattr(setup, "built_bytes", lambda *run: 2**30)
    flags = own_shape(name, texts, tmp_path / "first")
    status, _ = run("dry", *flags, "--dry_run", model=[str(RECIPES[name])], data=[])
    printed = capsys.readouterr().out
    levels = {check: level for level, check in re.findall(r"^(ok|warn|fail) +(\w+) +", printed, re.MULTILINE)}
    assert status == 1 and [*levels] == [*CHECKS, "step"] and not (tmp_path / "dry").exists()
    # The text is none for the steps of a real one.
    del levels["data"]
    assert {check for check, level in levels.items() if level == "ok"} == levels.keys() - {"host", "memory", "step"}
    assert (levels["host"], levels["memory"], levels["step"]) == ("fail", "fail", "warn"), printed
    assert f"begins at step 0 of {content(name)['max_train_steps']:,}" in printed
    assert int(re.search(r", ([\d,]+) parameters", printed)[1].replace(",", "")) > 10**8
