"""The parser of all programs: one spelling of each flag."""

from argparse import ArgumentTypeError
from pathlib import Path

import pytest
from transformers import GPT2Config, HfArgumentParser

from hope_hf import HopeConfig
from hope_hf.chat.flags import GROUPS, TextArguments, parse_generate
from hope_hf.common.flags import ModelArguments, require_local
from hope_hf.common.models import load_config
from hope_hf.common.parser import Parser, nearest
from hope_hf.common.run_arguments import FLAGS as TRAINING_FLAGS
from hope_hf.common.run_arguments import GROUPS as TRAINING_GROUPS
from hope_hf.data.documents import load_data_set
from hope_hf.data.vocabulary import load_tokenizer
from hope_hf.evaluation import flags as evaluation_flags
from hope_hf.evaluation.flags import FLAGS as EVALUATION_FLAGS
from hope_hf.evaluation.flags import GROUPS as EVALUATION_GROUPS
from hope_hf.evaluation.suites import SUITES
from hope_hf.export.run import make_parser as make_export_parser
from hope_hf.plan.flags import GROUPS as PLAN_GROUPS
from hope_hf.plan.flags import make_parser as make_plan_parser
from hope_hf.training import parsing as training_parsing


@pytest.mark.parametrize(
    "parser, words, name, value",
    [
        (make_plan_parser(), ["--gpus-per-node=4"], "gpus_per_node", 4),
        (make_export_parser(), ["a", "--to", "b", "--push-to-hub", "o/n-m"], "push_to_hub", "o/n-m"),
    ],
)
def test_dashes_are_read_as_underscores_in_every_program(parser, words, name, value):
    assert getattr(parser.parse_args(words), name) == value


def test_dashes_are_read_as_underscores_by_the_run_and_the_evaluation(tmp_path):
    run = training_parsing.parse([f"--output-dir={tmp_path}/r", "--checkpoint-hook", "a-b", "--no-tf32"])
    assert (run.output_dir, run.checkpoint_hook, run.tf32) == (f"{tmp_path}/r", "a-b", False)
    assert evaluation_flags.parse(["--model-name-or-path", "a-b"], SUITES).model_name_or_path == "a-b"


@pytest.mark.parametrize("words", [["--gpus-per-node", "x"], ["--gpus-per-node=--"]])
def test_an_error_names_one_spelling_and_two_dashes_are_no_value(words):
    with pytest.raises(ValueError, match="Argument --gpus_per_node: "):
        make_plan_parser().parse_args(words)


CHAT_GROUPS = (TextArguments, *GROUPS)


@pytest.mark.parametrize("groups", [TRAINING_GROUPS, EVALUATION_GROUPS, PLAN_GROUPS, CHAT_GROUPS])
def test_flags_are_read_as_transformers_reads_them(groups):
    def facts(action):
        kind = action.type
        words = ["1", "0", "true", "no", "x"]
        read = [_read(kind, word) for word in words] if kind else None
        return action.dest, action.nargs, action.const, action.default, action.required, action.choices, read

    own = {action.option_strings[0]: action for action in Parser(groups)._actions}
    theirs = {action.option_strings[0]: action for action in HfArgumentParser(groups)._actions}
    assert list(own) == list(theirs)
    for name, action in own.items():
        assert facts(action) == facts(theirs[name]), name


def _read(kind, word: str):
    try:
        return kind(word)
    except (ValueError, ArgumentTypeError):
        return ValueError


def suggested(name: str, known) -> str:
    return nearest(name, known).removeprefix("; did you mean ").removesuffix("?")


TRAINING = [f"--{name}" for name in TRAINING_FLAGS]
EVALUATION = [f"--{name}" for name in EVALUATION_FLAGS]


@pytest.mark.parametrize(
    "name, training, evaluation",
    [
        ("batch_size", "per_device_train_batch_size", None),
        ("lr", "learning_rate", "learning_rate"),
        ("wandb", "report_to wandb", "report_to wandb"),
        ("resume", "resume_from_checkpoint", ""),
        ("gpu", "", "device"),
        ("n_layers", "config_overrides num_hidden_layers=N", ""),
        ("outptu_dir", "output_dir", "output_dir"),
    ],
)
def test_a_usual_name_is_answered_with_the_programs_own(name, training, evaluation):
    assert suggested(f"--{name}", TRAINING) == (training and f"--{training}")
    if evaluation is not None:
        assert suggested(f"--{name}", EVALUATION) == (evaluation and f"--{evaluation}")
    # As in a recipe.
    assert suggested(name, TRAINING_FLAGS) == training


@pytest.mark.parametrize(
    "name, hope, gpt2",
    [("n_layers", "num_hidden_layers", "n_layer"), ("dim", "hidden_size", "n_embd"), ("hidden_size", "", "n_embd")],
)
def test_a_usual_name_is_answered_with_the_models_own_field(name, hope, gpt2):
    for config, field in ((HopeConfig(), hope), (GPT2Config(), gpt2)):
        known = config.to_dict()
        assert (suggested(name, known) if name not in known else "") == field


def test_a_value_too_many_names_the_flag(tmp_path):
    """A shell makes several values of an unquoted pattern."""
    files = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    for file in files:
        Path(file).touch()
    with pytest.raises(ValueError, match=f"--output_dir takes one value, and '{files[1]}'"):
        training_parsing.parse(["--output_dir", *files])
    with pytest.raises(ValueError, match="quote the pattern .--dataset_mixture"):
        evaluation_flags.parse(["--dataset_mixture", *files], SUITES)


def test_a_tilde_in_recipes_and_lists_and_not_in_words(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "r.yaml").write_text("output_dir: ~/runs\ntrain_file: [~/a.txt, b.txt]\ncheckpoint_hook: ~/hook.sh\n")
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("text")
    monkeypatch.chdir(tmp_path)
    args = training_parsing.parse(["~/r.yaml", "--run_name=~/x"])
    assert (args.output_dir, args.train_file) == (f"{tmp_path}/runs", [f"{tmp_path}/a.txt", "b.txt"])
    # A shell reads the hook.
    assert (args.checkpoint_hook, args.run_name) == ("~/hook.sh", "~/x")
    assert parse_generate(["m", "--prompt=~/x"]).prompt == "~/x"


@pytest.mark.parametrize("name", ["./a", "~/a", "runs/dmeo"])
def test_a_mistyped_path_is_not_looked_for_on_the_hub(tmp_path, monkeypatch, name):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"--model_name_or_path {name} does not exist"):
        load_config(name, "model_name_or_path", ModelArguments())
    with pytest.raises(ValueError, match=f"--tokenizer_name {name} does not exist"):
        load_tokenizer(name)
    with pytest.raises(ValueError, match=f"--dataset_name {name} "):
        load_data_set(f"--dataset_name {name}", name, None)


def test_a_name_of_the_hub_and_a_path_that_exists_are_not_refused(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("owner/model", "gpt2", "runs", "./runs", str(tmp_path / "runs")):
        require_local(name, "--model_name_or_path")
