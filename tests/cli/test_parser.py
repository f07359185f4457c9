"""The parser of all programs: one spelling of each flag."""

import re

import pytest

from hope_hf.cli.parser import flag_of
from hope_hf.data import prepare, tokenizer
from hope_hf.evaluation import parsing as evaluation_parsing
from hope_hf.evaluation.suites import SUITES
from hope_hf.export.run import make_parser as make_export_parser
from hope_hf.plan.parsing import make_parser as make_plan_parser
from hope_hf.training import parsing as training_parsing
from hope_hf.training.checkpoints.tool import make_parser as make_checkpoints_parser


@pytest.mark.parametrize("make", [make_plan_parser, make_export_parser, prepare.make_parser, tokenizer.make_parser])
def test_help_lists_one_spelling(make):
    text = make().format_help()
    assert "--" in text and not re.findall(r"--\w+-\w[\w-]*", text.split("\n\n", 1)[1])


@pytest.mark.parametrize(
    "parser, words, name, value",
    [
        (make_plan_parser(), ["--gpus-per-node=4"], "gpus_per_node", 4),
        (make_plan_parser(), ["--no-simulate"], "simulate", False),
        (make_export_parser(), ["a", "--to", "b", "--push-to-hub", "o/n-m"], "push_to_hub", "o/n-m"),
        (prepare.make_parser(), ["--tokenizer-name", "a-b", "--output-dir=c-d"], "output_dir", "c-d"),
        (tokenizer.make_parser(), ["--output-dir=c", "--files", "a-b", "--vocab-size", "300"], "vocab_size", 300),
        (make_checkpoints_parser(), ["consolidate", "a", "--to=b-c"], "to", "b-c"),
    ],
)
def test_dashes_are_read_as_underscores_in_every_program(parser, words, name, value):
    assert getattr(parser.parse_args(words), name) == value


def test_dashes_are_read_as_underscores_by_the_run_and_the_evaluation(tmp_path):
    run = training_parsing.parse([f"--output-dir={tmp_path}/r", "--checkpoint-hook", "a-b", "--no-tf32"])
    assert (run.output_dir, run.checkpoint_hook, run.tf32) == (f"{tmp_path}/r", "a-b", False)
    assert evaluation_parsing.parse(["--model-name-or-path", "a-b"], SUITES).model_name_or_path == "a-b"


def test_an_error_names_one_spelling():
    with pytest.raises(ValueError, match="Argument --gpus_per_node: "):
        make_plan_parser().parse_args(["--gpus-per-node", "x"])


@pytest.mark.parametrize(
    "word, flag", [("--a-b=c-d", "a_b"), ("--a_b", "a_b"), ("-a", ""), ("a-b", ""), ("--", ""), ("--=a", "")]
)
def test_the_name_of_a_flag(word, flag):
    assert flag_of(word) == flag
