"""The parser of all programs: one spelling of each flag."""

import re
from pathlib import Path

import pytest
from transformers import GPT2Config, LlamaConfig, OPTConfig, T5Config

from hope_hf import HopeConfig
from hope_hf.chat.flags import parse_generate
from hope_hf.common.flags import ModelArguments, require_local
from hope_hf.common.models import load_config
from hope_hf.common.parser import _OURS, flag_of, nearest
from hope_hf.common.run_arguments import FLAGS as TRAINING_FLAGS
from hope_hf.convert.run import make_parser as make_convert_parser
from hope_hf.data import prepare, tokenizer
from hope_hf.data.documents import load_data_set
from hope_hf.data.vocabulary import load_tokenizer
from hope_hf.evaluation import flags as evaluation_flags
from hope_hf.evaluation.flags import FLAGS as EVALUATION_FLAGS
from hope_hf.evaluation.suites import SUITES
from hope_hf.export.run import make_parser as make_export_parser
from hope_hf.plan.parsing import FLAGS as PLAN_FLAGS
from hope_hf.plan.parsing import make_parser as make_plan_parser
from hope_hf.training import parsing as training_parsing
from hope_hf.training.checkpoints.tool import make_parser as make_checkpoints_parser

MAKE = [make_plan_parser, make_export_parser, make_convert_parser, prepare.make_parser, tokenizer.make_parser]


@pytest.mark.parametrize("make", MAKE)
def test_help_lists_one_spelling(make):
    text = make().format_help()
    assert "--" in text and not re.findall(r"--\w+-\w[\w-]*", text.split("\n\n", 1)[1])


@pytest.mark.parametrize(
    "parser, words, name, value",
    [
        (make_plan_parser(), ["--gpus-per-node=4"], "gpus_per_node", 4),
        (make_export_parser(), ["a", "--to", "b", "--push-to-hub", "o/n-m"], "push_to_hub", "o/n-m"),
        (make_checkpoints_parser(), ["consolidate", "a", "--to=b-c"], "to", "b-c"),
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


def test_the_name_of_a_flag():
    words = ("--a-b=c-d", "--a_b", "-a", "a-b", "--", "--=a")
    assert list(map(flag_of, words)) == ["a_b", "a_b", "", "", "", ""]


def suggested(name: str, known) -> str:
    return nearest(name, known).removeprefix("; did you mean ").removesuffix("?")


TRAINING, EVALUATION = ([f"--{name}" for name in flags] for flags in (TRAINING_FLAGS, EVALUATION_FLAGS))


@pytest.mark.parametrize(
    "name, training, evaluation",
    [
        ("batch_size", "per_device_train_batch_size", None),
        ("lr", "learning_rate", "learning_rate"),
        ("seq_length", "block_size", "lengths"),
        ("wandb", "report_to wandb", "report_to wandb"),
        ("resume", "resume_from_checkpoint", ""),
        ("gpu", "", "device"),
        ("n_layers", "config_overrides num_hidden_layers=N", ""),
        ("epochs", "num_train_epochs", ""),
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


def test_every_usual_name_leads_to_a_flag_or_field():
    configs = HopeConfig(), GPT2Config(), LlamaConfig(), OPTConfig(), T5Config()
    known = {*TRAINING_FLAGS, *EVALUATION_FLAGS, *PLAN_FLAGS}.union(*(config.to_dict() for config in configs))
    # Of the tokenizer and the export.
    known |= {"files", "to"}
    ours = {name.split()[0].split("=")[0] for names in _OURS.values() for name in names}
    assert ours <= known


@pytest.mark.parametrize(
    "program, words, sentence",
    [
        (training_parsing.parse, ["--output_dir", "{0}", "{1}"], "--output_dir takes one value, and '{1}' is another"),
        (evaluation_flags.parse, ["--dataset_mixture", "{0}", "{1}"], "quote the pattern (--dataset_mixture"),
        (training_parsing.parse, ["--device", "cpu"], "There is no flag --device: the launch file chooses devices"),
    ],
)
def test_a_value_too_many_and_a_folder_name_the_flag(tmp_path, program, words, sentence):
    files = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    for file in files:
        Path(file).touch()
    words = [word.format(*files, folder=tmp_path) for word in words]
    options = (SUITES,) if program is evaluation_flags.parse else ()
    with pytest.raises(ValueError, match=re.escape(sentence.format(*files, folder=tmp_path))):
        program(words, *options)


@pytest.mark.parametrize(
    "parser, words, name",
    [
        (make_export_parser(), ["~/x", "--to=b"], "dir"),
        (tokenizer.make_parser(), ["--output_dir=c", "--files=~/x"], "files"),
        (make_checkpoints_parser(), ["consolidate", "a", "--to=~/x"], "to"),
    ],
)
def test_a_tilde_is_the_users_folder_in_every_program(parser, words, name, monkeypatch):
    """Bash keeps it in `--flag=~/x`, and a folder named `~` would be made."""
    monkeypatch.setenv("HOME", "/home/me")
    assert getattr(parser.parse_args(words), name) == "/home/me/x"


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
