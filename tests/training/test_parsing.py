"""Command line and recipe files: their order of precedence, and one sentence for each mistake."""

import os
import re
import warnings
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from hope_hf.common import process
from hope_hf.common.flags import TEXT_SOURCES
from hope_hf.common.recipe import MODELS, read_recipe
from hope_hf.common.recompute import parse_recomputed
from hope_hf.common.run_arguments import FLAGS, Arguments
from hope_hf.common.run_recipe import INSTEAD, NO_EFFECT
from hope_hf.optim import build_optimizer
from hope_hf.training.parsing import parse, repo_id
from hope_hf.training.schedule import schedule_of

# The flags that the project promises, besides --output_dir and --document_boundary.
PROMISED = """
model_name_or_path model_type config_name config_overrides tokenizer_name trust_remote_code attn_implementation
dataset_mixture train_shards level_learning level_learning_period
dataset_name dataset_config_name train_file validation_file validation_split_percentage max_train_samples
text_column on_bad_rows assistant_only_loss long_chats lora_rank lora_alpha
max_eval_samples streaming shuffle_buffer_size preprocessing_num_workers block_size per_device_train_batch_size
gradient_accumulation_steps learning_rate vector_learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon
train_only max_grad_norm max_train_steps num_train_epochs lr_scheduler_type num_warmup_steps optimizer level_optimizers
gradient_checkpointing torch_compile sync_each_batch fsdp_reduce_dtype fsdp_limit_all_gathers fsdp_prefetch tf32
cpu_threads logging_steps eval_steps checkpointing_steps save_total_limit async_save save_only_model
save_sharded init checkpoint_hook dry_run
resume_from_checkpoint ignore_data_skip stop_after keep_best keep_every eval_on_start lr_scheduler_kwargs
lr_scheduler_steps seed ddp_timeout watchdog_seconds ram_report_steps profile_steps
report_to run_name project_name dataloader_num_workers dataloader_pin_memory push_to_hub
hub_model_id hub_private_repo
""".split()


def test_flags_are_exactly_the_promised_ones():
    assert sorted(FLAGS) == sorted([*PROMISED, "output_dir", "document_boundary"])


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
    assert parse([str(recipe), "--output_dir", "x", "--max_train_steps", "5"]).max_train_steps == 5


@pytest.mark.parametrize(
    "recipe, words, files",
    [
        ("", ["--train_file", "a"], ("a", None)),
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
    "words, meaning",
    [
        ([], ("none", 1)),
        (["--gradient_checkpointing"], ("block", 1)),
        (["--gradient_checkpointing", "True"], ("block", 1)),
        (["--gradient_checkpointing", "False"], ("none", 1)),
        (["--gradient_checkpointing", "mixer"], ("mixer", 1)),
        (["--gradient_checkpointing=every:3"], ("block", 3)),
        ({"gradient_checkpointing": "true"}, ("block", 1)),
        ({"gradient_checkpointing": "none"}, ("none", 1)),
        ({"gradient_checkpointing": "every:2"}, ("block", 2)),
    ],
)
def test_what_is_recomputed_has_a_name_and_was_a_switch(words, meaning, tmp_path):
    if isinstance(words, dict):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text("".join(f"{key}: {value}\n" for key, value in words.items()))
        words = [str(recipe)]
    found = parse_recomputed(parse([*words, "--output_dir", "x"]).gradient_checkpointing)
    assert (found.part, found.every) == meaning


def test_demo_applies_only_where_neither_model_nor_data_is_named():
    demo = parse(["--output_dir", "x", "--learning_rate", "0.5"])
    assert demo.demo and demo.config_name == "tiny" and demo.max_train_steps >= 320 and demo.learning_rate == 0.5
    for named in (["--model_type", "llama"], ["--dataset_name", "synthetic"]):
        args = parse(["--output_dir", "x", *named])
        assert not args.demo and args.config_name is None and args.max_train_steps is None


@pytest.mark.parametrize("name", get_args(get_type_hints(Arguments)["lr_scheduler_type"]))
def test_schedules_need_no_setting_without_a_flag(name, tiny_model):
    options = dict(learning_rate=1.0, weight_decay=0.0, betas=(0.9, 0.9), eps=1e-8, tokens_per_step=1)
    optimizer = build_optimizer(tiny_model(), "adamw", **options)
    schedule = schedule_of(Arguments(lr_scheduler_type=name, num_warmup_steps=2), 10)
    schedule.check(1.0)
    scheduler = LambdaLR(optimizer, schedule.fractions(1.0))
    assert optimizer.param_groups[0]["lr"] == (1.0 if name == "constant" else 0.0)
    optimizer.step()
    scheduler.step()


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


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--num_train_epochs", "2", "--max_train_steps", "9"], "--num_train_epochs is ignored"),
        (["--run_name", "mine"], "--run_name is ignored"),
        (["--shuffle_buffer_size", "9"], "--shuffle_buffer_size is ignored: only --streaming has one"),
        (["--hub_model_id", "me/model"], "--hub_model_id is ignored: --push_to_hub is not given"),
        (["--hub_private_repo"], "--hub_private_repo is ignored"),
        (["--lora_alpha", "8"], "--lora_alpha is ignored: --lora_rank is not given"),
        (["--text_column", "body"], "--text_column is ignored: no flag names a text"),
        (["--dataset_name", "a", "--on_bad_rows", "skip"], "--on_bad_rows is ignored: it is for rows of files"),
        (["--dataset_mixture", "a", "--text_column", "b"], "--text_column is ignored: the mixture has text_column"),
        (
            ["--train_file", "a.txt", "--validation_file", "b", "--validation_split_percentage", "9"],
            "--validation_split",
        ),
    ],
)
def test_an_ignored_flag_warns(words, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("some text")
    with pytest.warns(UserWarning, match=sentence):
        parse([*words, "--output_dir", "x"])


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--learnin_rate", "1"], "no flag --learnin_rate; did you mean --learning_rate?"),
        (["--learnin-rate=1"], "did you mean --learning_rate?"),
        (["--max_train_step", "1"], "did you mean --max_train_steps?"),
        (["--seed", "1", "more"], "Unexpected argument 'more'"),
        (["--seed", "one"], "--seed"),
        (["--optimizer", "sgd"], "--optimizer"),
        (["--lr_scheduler_type", "cosin"], "--lr_scheduler_type"),
        (["--lr_scheduler_type", "reduce_lr_on_plateau"], "--lr_scheduler_type"),
        (["--push_to_hub", "--hub_model_id", "a/b/c"], "--hub_model_id 'a/b/c' is not a name of a repository"),
        (["--push_to_hub", "--save_sharded"], "--save_sharded saves parts: give only one of them"),
        (["--block_size", "0"], "--block_size is 0"),
        (["--gradient_checkpointing", "all"], "is 'all': give none, block, mixer or every:N with N from 1 to 10,000"),
        (["--gradient_checkpointing", "every:0"], "--gradient_checkpointing is 'every:0'"),
        (["--gradient_checkpointing", "every:-2"], "--gradient_checkpointing is 'every:-2'"),
        (["--per_device_train_batch_size", "0"], "--per_device_train_batch_size is 0"),
        (["--learning_rate", "nan"], "--learning_rate is nan"),
        (["--vector_learning_rate", "0"], "--vector_learning_rate is 0.0: give a number above 0."),
        (["--adam_beta2", "1"], "--adam_beta2 is 1.0"),
        (["--model_name_or_path", "m", "--config_name", "tiny"], "--config_name shapes a new model"),
        (["--dataset_name", "d", "--streaming"], "give --max_train_steps"),
        (["missing.yaml"], "missing.yaml cannot be read"),
    ],
)
def test_one_sentence_for_a_wrong_command_line(words, sentence):
    with pytest.raises(ValueError) as caught:
        parse([*words, "--output_dir", "x"])
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_own_warnings_are_sentences_and_others_keep_their_place():
    own, foreign = (str(Path(module.__file__)) for module in (process, torch))
    assert process._as_sentence("Mind this.", UserWarning, own, 7) == "warning: Mind this.\n"
    assert f"{foreign}:7" in process._as_sentence("Mind this.", UserWarning, foreign, 7)
    assert f"{own}:7" in process._as_sentence("Mind this.", DeprecationWarning, own, 7)


def test_the_upload_is_named_after_the_folder_or_by_its_flag(tmp_path):
    words = ["--output_dir", str(tmp_path / "books"), "--push_to_hub"]
    assert repo_id(parse(words)) == "books"
    assert repo_id(parse([*words, "--hub_model_id", "me/model"])) == "me/model"
    with pytest.raises(ValueError, match="--hub_model_id 'my books' is not a name of a repository"):
        parse(["--output_dir", str(tmp_path / "my books"), "--push_to_hub"])


def test_output_dir_is_needed():
    with pytest.raises(ValueError, match="--output_dir is missing"):
        parse(["--seed", "1"])


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("learnin_rate: 1\n", "unknown key 'learnin_rate'; did you mean learning_rate?"),
        ("- a list\n", "must hold lines of the form"),
        ("seed: [1, 2\n", "cannot be read"),
        ("seed: many\n", "--seed"),
        ("seed: 1\nblock_size: 8\nseed: 2\n", "the key 'seed' comes twice"),
        ("level_optimizers: {0: {lr_factor: 1, lr_factor: 2}}\n", "the key 'lr_factor' comes twice"),
        ("run_name: &a [x]\nproject_name: *a\n", "write *a out"),
        ("run_name: " + "[" * 5000, "cannot be read"),
        ("level_optimizers: {0: 2020-01-01}\n", "has a value of level_optimizers that is not JSON"),
        ("seed: \x00\n", "cannot be read"),
        ("a: " * 9 + "[" * 100_000, "cannot be read"),
        ("[a]: 1\n", "cannot be read: a key is a list or a mapping"),
        ("<<: {seed: 1}\n", "cannot be read: write what << merges out"),
        ("seed: !!int ''\n", "has seed: '', give it one value or leave it out."),
        ("seed: [1, 2]\n", "has seed: ['1', '2'], give it one value or leave it out."),
        ("seed:\n", "has seed: None, give it one value or leave it out."),
        ("run_name: {a: 1}\n", "has run_name: {'a': 1}, give it one value or leave it out."),
        ("run_name: !!set {a}\n", "has run_name: {'a'}, give it one value or leave it out."),
        ('gradient_checkpointing: "--dry_run"\n', "has gradient_checkpointing: '--dry_run', give it one value"),
        ('gradient_checkpointing: "-x"\n', "--gradient_checkpointing is '-x'"),
        ("run_name: ' '\n", "has run_name: ' ', give it one value or leave it out."),
        ('run_name: "a\\0b"\n', "--run_name 'a\\x00b' is not UTF-8 text"),
        ("weight_decay: .inf\n", "--weight_decay is inf: give a number of 0 or more."),
        ("bf16: true\n", "There is no flag --bf16: set mixed_precision: bf16 in the launch file"),
    ],
)
def test_one_sentence_for_a_wrong_recipe(tmp_path, text, sentence):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    with pytest.raises(ValueError) as caught:
        parse([str(recipe), "--output_dir", "x"])
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


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


def test_what_is_no_recipe_says_what_it_may_be(tmp_path):
    (tmp_path / "book.txt").write_text("a: b: c")
    for name, told in {
        f"{tmp_path}/book.txt": "name a text with --train_file",
        "pilott": "did you mean pilot.yaml?",
    }.items():
        with pytest.raises(ValueError, match=re.escape(told)):
            read_recipe(name, FLAGS)


def test_a_recipe_that_is_no_text(tmp_path):
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"#" * (1 << 21))
    named = {
        "binary": "can't decode byte",
        ".": "Is a directory",
        "n" * 300: "File name too long",
        "pipe": "it is not a regular file",
        "large": "it has more than 1,048,576 bytes",
    }
    for name, reason in named.items():
        with pytest.raises(ValueError, match=f"The recipe .* cannot be read: .*{reason}"):
            parse([str(tmp_path / name), "--output_dir", "x"])


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--weight_decay", "inf"], "--weight_decay is inf: give a number of 0 or more."),
        (["--watchdog_seconds", "1e300"], "--watchdog_seconds is 1e+300: give a number from 0 to 1,000,000,000."),
        (["--cpu_threads", "100000"], "--cpu_threads is 100000: give a whole number from 1 to 1,024."),
        (["--adam_beta1", "nan"], "--adam_beta1 is nan: give a number of 0 or more and below 1."),
        (["--validation_split_percentage", "100"], "is 100.0: give a number above 0 and below 100."),
        (["--seed", "4294967296"], "--seed is 4294967296: give a whole number from 0 to 4,000,000,000."),
        (["--run_name", ""], "--run_name is '': give a value, or leave it out."),
        (["--max_steps", "5"], "There is no flag --max_steps: use --max_train_steps."),
        (["--fp16=True"], "There is no flag --fp16: set mixed_precision"),
    ],
)
def test_every_value_is_checked_with_one_kind_of_sentence(words, sentence):
    with pytest.raises(ValueError) as caught:
        parse(["--output_dir", "x", *words])
    assert str(caught.value).startswith(sentence) or str(caught.value).endswith(sentence)


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


def test_no_foreign_flag_is_one_of_ours():
    assert not {*NO_EFFECT, *INSTEAD} & set(FLAGS)


def test_a_polynomial_schedule_below_its_end_is_refused():
    with pytest.raises(ValueError, match="--lr_scheduler_type polynomial ends at a rate of 1e-07"):
        parse(["--output_dir", "x", "--lr_scheduler_type", "polynomial", "--learning_rate", "1e-8"])


def test_an_output_folder_that_cannot_be():
    for path, reason in (("n" * 300, "File name too long"), (f"{__file__}/x", "is a file or read-only")):
        with pytest.raises(ValueError, match=f"--output_dir .* cannot be written: .*{reason}"):
            parse(["--output_dir", path])
