"""Command line and recipe files: their order of precedence, and one sentence for each mistake."""

import os
import warnings
from pathlib import Path

import pytest

from hope_hf.common.flags import TEXT_SOURCES
from hope_hf.common.recipe import MODELS, read_recipe
from hope_hf.common.recompute_flag import parse_recomputed
from hope_hf.common.run_arguments import FLAGS
from hope_hf.training.parsing import parse, repo_id


def test_flags_override_the_recipe_and_the_recipe_the_defaults(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model_type: llama\nlearning_rate: 1e-2\nmax_train_steps: 7\ntf32: false\nlr_scheduler_type: linear\n"
        "level_optimizers: {'0': {lr_factor: 2.0}}\n"
    )
    args = parse([str(recipe), "--max_train_steps", "9", "--output_dir", "x"])
    assert (args.learning_rate, args.max_train_steps, args.tf32, args.seed) == (1e-2, 9, False, 42)
    assert args.lr_scheduler_type == "linear"
    assert args.level_optimizers == '{"0": {"lr_factor": 2.0}}'


OF_THE_HUB = (
    "config_name: pilot\nconfig_overrides: vocab_size=32000\ntokenizer_name: theirs\ndataset_name: a/b\n"
    "dataset_config_name: large\nstreaming: true\nvalidation_split_percentage: 1\nmax_train_steps: 7\n"
)


OF_FILES = "train_file: a.txt\nvalidation_file: b.txt\nmax_train_samples: 9\ntokenizer_name: theirs\n"


@pytest.mark.parametrize("text", [OF_THE_HUB, OF_FILES])
@pytest.mark.parametrize("flag", TEXT_SOURCES)
def test_another_text_replaces_all_that_the_recipe_says_about_its_own(tmp_path, text, flag):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        args = parse([str(recipe), f"--{flag}", "mine", "--output_dir", "x", "--max_eval_samples", "3"])
    assert {name: getattr(args, name) for name in TEXT_SOURCES} == dict.fromkeys(TEXT_SOURCES) | {flag: "mine"}
    assert (args.dataset_config_name, args.validation_file, args.max_train_samples) == (None, None, None)
    assert (args.streaming, args.validation_split_percentage, args.max_eval_samples) == (False, 5.0, 3)
    # Shards have their own.
    assert args.tokenizer_name == (None if flag == "train_shards" else "theirs")


@pytest.mark.parametrize(
    "recipe, words, files",
    [
        ("", ["--train_file", "a", "b", "--train_file=c"], (["a", "b", "c"], None)),
        ("train_file: [a, b]\nvalidation_file: [c]\n", [], (["a", "b"], "c")),
        ("train_file: [a, b]\nvalidation_file: c\n", ["--validation_file", "d"], (["a", "b"], "d")),
        ("train_file: [a, b]\nvalidation_file: c\n", ["--train-file", "d"], ("d", None)),
    ],
)
def test_files_are_one_name_or_several(tmp_path, recipe, words, files):
    (tmp_path / "recipe.yaml").write_text(f"seed: 1\n{recipe}")
    args = parse([str(tmp_path / "recipe.yaml"), "--output_dir", "x", *words])
    assert (args.train_file, args.validation_file) == files


@pytest.mark.parametrize("flag, value", [("model_type", "llama"), ("model_name_or_path", "m"), ("config_name", "mid")])
def test_another_model_replaces_all_that_the_recipe_says_about_its_own(tmp_path, flag, value):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(OF_THE_HUB)
    args = parse([str(recipe), f"--{flag}", value, "--output_dir", "x"])
    assert {name: getattr(args, name) for name in MODELS} == dict.fromkeys(MODELS) | {flag: value}
    assert args.config_overrides is None and args.dataset_name == "a/b"
    kept = parse([str(recipe), "--config_overrides", "vocab_size=300", "--output_dir", "x"])
    assert (kept.config_name, kept.config_overrides) == ("pilot", "vocab_size=300")


@pytest.mark.parametrize(
    "recipe, words, meaning",
    [
        ("", [], ("none", 1)),
        ("", ["--gradient_checkpointing"], ("block", 1)),
        ("", ["--gradient_checkpointing", "mixer"], ("mixer", 1)),
        ("gradient_checkpointing: true", ["--gradient_checkpointing", "False"], ("none", 1)),
        ("gradient_checkpointing: every:2", [], ("block", 2)),
    ],
)
def test_what_is_recomputed_has_a_name_and_was_a_switch(recipe, words, meaning, tmp_path):
    (tmp_path / "recipe.yaml").write_text(f"seed: 1\n{recipe}\n")
    args = parse([str(tmp_path / "recipe.yaml"), *words, "--output_dir", "x"])
    recomputed = parse_recomputed(args.gradient_checkpointing)
    assert (recomputed.part, recomputed.every) == meaning


def test_demo_applies_only_where_neither_model_nor_data_is_named():
    demo = parse(["--output_dir", "x", "--learning_rate", "0.5"])
    assert demo.demo and demo.config_name == "tiny" and demo.max_train_steps >= 320 and demo.learning_rate == 0.5
    for named in (["--model_type", "llama"], ["--dataset_name", "synthetic"]):
        args = parse(["--output_dir", "x", *named])
        assert not args.demo and args.config_name is None and args.max_train_steps is None


def test_epochs_replace_the_steps_of_the_demo():
    args = parse(["--output_dir", "x", "--num_train_epochs", "2"])
    assert args.demo and args.max_train_steps is None and args.num_train_epochs == 2


@pytest.mark.parametrize(
    "recipe, words, length",
    [
        ("num_train_epochs: 3", ["--max_train_steps", "9"], (9, 1.0)),
        ("max_train_steps: 9", ["--num_train_epochs=3"], (None, 3.0)),
        ("max_train_steps: 9", ["--max_train_steps", "5"], (5, 1.0)),
        ("num_train_epochs: 3", [], (None, 3.0)),
    ],
)
def test_a_length_of_the_command_line_replaces_that_of_the_recipe(tmp_path, recipe, words, length):
    (tmp_path / "recipe.yaml").write_text(recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        args = parse([str(tmp_path / "recipe.yaml"), "--output_dir", "x", *words])
    assert (args.max_train_steps, args.num_train_epochs) == length


IGNORED = [
    ["--num_train_epochs", "2", "--max_train_steps", "9"],
    ["--run_name", "mine"],
    ["--shuffle_buffer_size", "9"],
    ["--hub_private_repo"],
    ["--lora_alpha", "8"],
    ["--text_column", "body"],
    ["--on_bad_rows", "skip", "--dataset_name", "a"],
    ["--text_column", "b", "--dataset_mixture", "a"],
    ["--validation_split_percentage", "9", "--train_file", "a.txt", "--validation_file", "b.txt"],
]


@pytest.mark.parametrize("words", IGNORED, ids=lambda words: words[0])
def test_an_ignored_flag_warns(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt"):
        Path(name).write_text("some text")
    with pytest.warns(UserWarning, match=f"{words[0]} is ignored"):
        parse([*words, "--output_dir", "x"])


# The words of a command line, and what the sentence names.
WRONG = [
    (["--learnin-rate=1"], "did you mean --learning_rate?"),
    (["--max_steps", "5"], "use --max_train_steps"),
    (["--fp16=True"], "mixed_precision"),
    (["--seed", "1", "more"], "Unexpected argument 'more'"),
    (["--seed", "one"], "--seed"),
    (["--seed", "4294967296"], "--seed is 4294967296"),
    (["--optimizer", "sgd"], "--optimizer"),
    (["--lr_scheduler_type", "polynomial", "--learning_rate", "1e-8"], "--lr_scheduler_type polynomial"),
    (["--push_to_hub", "--hub_model_id", "a/b/c"], "--hub_model_id 'a/b/c'"),
    (["--push_to_hub", "--save_sharded"], "--save_sharded"),
    (["--block_size", "0"], "--block_size is 0"),
    (["--gradient_checkpointing", "every:0"], "--gradient_checkpointing is 'every:0'"),
    (["--learning_rate", "nan"], "--learning_rate is nan"),
    (["--adam_beta2", "1"], "--adam_beta2 is 1.0"),
    (["--watchdog_seconds", "1e300"], "--watchdog_seconds is 1e+300"),
    (["--validation_split_percentage", "100"], "is 100.0"),
    (["--run_name", ""], "--run_name is ''"),
    (["--model_name_or_path", "m", "--config_name", "tiny"], "--config_name"),
    (["--dataset_name", "d", "--streaming"], "--max_train_steps"),
    (["missing.yaml"], "missing.yaml cannot be read"),
    (["--output_dir", "n" * 300], "--output_dir"),
    (["--output_dir", f"{__file__}/x"], "--output_dir"),
]


def refused(words: list[str]) -> str:
    with pytest.raises(ValueError) as caught:
        parse(words if "--output_dir" in words else [*words, "--output_dir", "x"])
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("words, named", WRONG)
def test_one_sentence_for_a_wrong_command_line(words, named):
    assert named in refused(words)


def test_the_upload_is_named_after_the_folder_or_by_its_flag(tmp_path):
    words = ["--output_dir", str(tmp_path / "books"), "--push_to_hub"]
    assert repo_id(parse(words)) == "books"
    assert repo_id(parse([*words, "--hub_model_id", "me/model"])) == "me/model"
    assert "--hub_model_id" in refused(["--output_dir", str(tmp_path / "my books"), "--push_to_hub"])


def test_output_dir_is_needed():
    with pytest.raises(ValueError, match="--output_dir is missing"):
        parse(["--seed", "1"])


ONE_VALUE = "give it one value or leave it out"
RECIPES = [
    ("learnin_rate: 1", "did you mean learning_rate?"),
    ("- a list", "must hold lines of the form"),
    ("seed: [1, 2", "cannot be read"),
    ("seed: 1\nblock_size: 8\nseed: 2", "'seed' comes twice"),
    ("run_name: &a [x]\nproject_name: *a", "write *a out"),
    ("level_optimizers: {0: 2020-01-01}", "level_optimizers that is not JSON"),
    ("seed: \x00", "cannot be read"),
    ("a: " * 9 + "[" * 100_000, "cannot be read"),
    ("[a]: 1", "cannot be read"),
    ("<<: {seed: 1}", "<<"),
    ("seed:", ONE_VALUE),
    ("run_name: !!set {a}", ONE_VALUE),
    ('gradient_checkpointing: "--dry_run"', ONE_VALUE),
    ('run_name: "a\\0b"', "--run_name"),
    ("bf16: true", "mixed_precision: bf16"),
]


@pytest.mark.parametrize("text, named", RECIPES)
def test_one_sentence_for_a_wrong_recipe(tmp_path, text, named):
    (tmp_path / "recipe.yaml").write_text(f"{text}\n")
    assert named in refused([str(tmp_path / "recipe.yaml")])


@pytest.mark.parametrize("written", ["2026_11_28", "no", "1:30", "2026-11-28", ".5", "1_000"])
def test_a_recipe_keeps_words_as_they_are_written(tmp_path, written):
    """YAML 1.1 would make 20261128 of the first, False of the second and 90 of the third."""
    (tmp_path / "a.yaml").write_text(f"output_dir: {written}\ntrain_file: [{written}, b]\n")
    words = read_recipe(tmp_path / "a.yaml", ["output_dir", "train_file"])
    assert words == [f"--output_dir={written}", f"--train_file={written}", "--train_file=b"]
    (tmp_path / "a.yaml").write_text("output_dir: ~\n")
    with pytest.raises(ValueError, match="has output_dir: None, give it one value or leave it out"):
        read_recipe(tmp_path / "a.yaml", ["output_dir"])


def test_forms_of_yaml_that_flags_cannot_read_are_values(tmp_path):
    (tmp_path / "a.yaml").write_text("torch_compile: on\nstreaming: off\nmax_grad_norm: .inf\nseed: 0x10\n")
    words = read_recipe(tmp_path / "a.yaml", FLAGS)
    assert words == ["--torch_compile=True", "--streaming=False", "--max_grad_norm=inf", "--seed=16"]


def test_what_is_no_recipe(tmp_path):
    (tmp_path / "book.txt").write_text("a: b: c")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"#" * (1 << 21))
    for name, named in {
        "book.txt": "--train_file",
        "binary": "cannot be read",
        ".": "Is a directory",
        "pipe": "not a regular file",
        "large": "1,048,576 bytes",
    }.items():
        assert named in refused([str(tmp_path / name)])
    assert "did you mean pilot.yaml?" in refused(["pilott"])


def test_flags_of_the_scripts_of_transformers_that_have_no_effect_warn(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("do_eval: true\nseed: 7\n")
    words = ["--do-train", "--per_device_eval_batch_size", "4", "--max_train_steps", "3", "--overwrite_cache=True"]
    with pytest.warns(UserWarning) as warned:
        args = parse([str(recipe), "--output_dir", "x", *words])
    assert (args.seed, args.max_train_steps) == (7, 3)
    said = [str(warning.message).split(":")[0] for warning in warned]
    assert said == [
        f"--{name} has no effect" for name in ("do_eval", "do_train", "per_device_eval_batch_size", "overwrite_cache")
    ]
