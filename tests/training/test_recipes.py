"""Recipes of `recipes/`: read by run_clm.py as they are, and run with their model, batch and data made small."""

import json
import warnings

import pytest
import yaml
from training_runs import ROOT, curve, make_tokenizer

from hope_hf.training.parsing import DEMO_RECIPE, parse

RECIPES = {file.stem: file for file in sorted((ROOT / "recipes").glob("*.yaml"))}
SECOND = {"mid_4096": "mid", "target_8192": "target"}
HOPE = "hidden_size=64,num_hidden_layers=1,head_dim=32,num_attention_heads=2,num_memory_heads=2,memory_chunk_size=16"
SMALLER = {
    "hope": f"{HOPE},level_intermediate_sizes=[48,48,48],level_periods=[256,512,512]",
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
    named = {recipe["dataset_config_name"] for recipe in map(content, RECIPES) if "dataset_config_name" in recipe}
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
    if "dataset_name" in recipe:
        return [*flags, "--dataset_name", str(texts)]
    return [*flags, "--train_file", str(texts / "book.txt")]


def test_the_demo_is_one_file():
    assert RECIPES["demo"].resolve() == DEMO_RECIPE.resolve()


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


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in {*SECOND, *SECOND.values()}])
def test_a_recipe_trains(name, run, texts):
    flags = [*made_small(name, texts), "--max_train_steps", "4"]
    # Flash attention needs a GPU.
    flags += ["--attn_implementation", "sdpa"] if name == "llama_7b" else []
    status, rows = run("run", *flags, model=[str(RECIPES[name])], data=[])
    assert status == 0 and len(curve(rows)) == 4 and rows[-1]["eval/loss"] > 0


@pytest.mark.parametrize("name", SECOND)
def test_a_second_phase_begins_from_the_weights_of_the_first(name, run, texts, tmp_path):
    first, second = SECOND[name], content(name)
    assert second["model_name_or_path"] == content(first)["output_dir"]
    steps = ["--max_train_steps", "4", "--learning_rate", "1e-2"]
    _, before = run("first", *made_small(first, texts), *steps, model=[str(RECIPES[first])], data=[])
    words = made_small(name, texts, first=tmp_path / "first")
    status, after = run("second", *words, *steps, model=[str(RECIPES[name])], data=[])
    assert status == 0 and curve(after)[0] < curve(before)[0] - 0.1
