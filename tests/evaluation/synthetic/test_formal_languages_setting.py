"""The one setting for all six formal languages, `benchmarks/formal_languages.yaml`."""

import json
from pathlib import Path

import pytest

from hope_hf.evaluation.flags import parse
from hope_hf.evaluation.suites import SUITES
from hope_hf.evaluation.synthetic.suite import synthetic

SETTING = Path(__file__).parents[3] / "benchmarks" / "formal_languages.yaml"


def accuracies(language: str, *flags: str) -> list[float]:
    """Of words of up to 50 and up to 100 symbols, after training one model with the setting and more flags."""
    args = parse([str(SETTING), "--tasks", language, "--num_seeds", "1", "--seed", "0", *flags], SUITES)
    return [row["accuracy"] for row in synthetic(args).tables["Synthetic tasks"]][:2]


@pytest.mark.parametrize("language", ["aa", "abab"])
def test_languages_that_need_a_sign_to_flip_are_learned_in_a_few_steps(language):
    assert accuracies(language, "--max_train_steps", "75") == [1, 1]


def test_without_memories_they_are_not():
    """The control: the convolutions of two layers see six symbols back, so no longer word is right."""
    setting = {"conv_kernel_size": 4, "memory_learning_rate_max": 0}
    assert accuracies("aa", "--max_train_steps", "75", "--config_overrides", json.dumps(setting))[1] == 0


@pytest.mark.long
@pytest.mark.parametrize("language", ["parity", "aa", "abab", "anbn", "anbncn", "shuffle-2"])
def test_one_setting_learns_every_language(language):
    assert accuracies(language) == [1, 1]
