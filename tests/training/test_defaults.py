"""Own text without a recipe: defaults that follow its size, and what loss to expect of it."""

import json
import math
import os
import random
import re
from pathlib import Path

import pytest
import torch
from training_process import training_process
from training_runs import read_rows

from hope_hf.common import defaults
from hope_hf.common.run_arguments import Arguments
from hope_hf.data.build import unigram_loss
from hope_hf.plan.parsing import parse as plan
from hope_hf.training import main
from hope_hf.training.parsing import parse

SIZED = ("block_size", "per_device_train_batch_size", "learning_rate", "num_train_epochs")
TODAY = {name: getattr(Arguments(), name) for name in SIZED}


def text_of(size: int, folder: Path) -> str:
    """A file of that many bytes; only its size is read here."""
    file = folder / f"{size}.txt"
    file.touch()
    os.truncate(file, size)
    return str(file)


def values(words: list, folder: Path) -> dict:
    args = parse([*map(str, words), "--output_dir", str(folder / "run")])
    return {name: getattr(args, name) for name in SIZED}


@pytest.mark.parametrize("size, epochs", [(1000, 10), (300_000, 4), (1_000_000, 2), (9_000_000, 1)])
def test_a_small_text_gets_small_steps_and_several_passes(size, epochs, tmp_path):
    expected = {"block_size": 256, "per_device_train_batch_size": 4, "learning_rate": 2e-3, "num_train_epochs": epochs}
    assert values(["--train_file", text_of(size, tmp_path)], tmp_path) == expected


def test_a_wide_model_gets_a_lower_rate(tmp_path):
    small = ["--train_file", text_of(1000, tmp_path)]
    assert values([*small, "--config_name", "pilot"], tmp_path)["learning_rate"] == pytest.approx(7e-4)


def test_rows_of_a_deepspeed_json_are_given(tmp_path, monkeypatch):
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 8}')
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "ds.json"))
    assert values(["--train_file", text_of(1000, tmp_path)], tmp_path)["per_device_train_batch_size"] == 8


@pytest.mark.parametrize(
    ("size", "words", "block_size", "vocab_size"),
    [
        (1000, [], 256, defaults.VOCABULARY),
        (1000, ["--block_size", "64"], 64, defaults.VOCABULARY),
        (1000, ["--config_overrides", "vocab_size=300"], 256, 300),
        (20_000_000, [], 1024, 4096),
    ],
)
def test_the_planner_takes_the_same_values(size, words, block_size, vocab_size, tmp_path):
    words = ["--train_file", text_of(size, tmp_path), *words]
    run = parse([*words, "--output_dir", str(tmp_path / "run")])
    question = plan(words)
    # None: the trainer chooses it with the model.
    assert question.step.block_size == block_size == (run.block_size or 1024)
    assert question.step.batch_size == run.per_device_train_batch_size
    assert question.config.vocab_size == vocab_size
    assert question.defaults.items() <= run.defaults.items()


def test_the_loss_of_a_unigram_is_that_of_the_frequencies():
    train, scored = torch.tensor([6, 1, 0]), torch.tensor([3, 0, 1])
    by_hand = -(3 * math.log(7 / 10) + math.log(1 / 10)) / 4
    assert unigram_loss(train, scored) == pytest.approx(by_hand, rel=1e-12)


def test_a_large_text_a_recipe_loaded_weights_and_flags_keep_their_values(tmp_path):
    small, large = text_of(1000, tmp_path), text_of(10_000_000, tmp_path)
    (tmp_path / "recipe.yaml").write_text(f"train_file: {small}\nblock_size: 64\n")
    recipe = TODAY | {"block_size": 64}
    for words, expected in (
        (["--train_file", large], TODAY),
        (["--train_file", small, "--model_name_or_path", "m"], TODAY),
        (["--dataset_name", "synthetic"], TODAY),
        ([tmp_path / "recipe.yaml"], recipe),
        ([tmp_path / "recipe.yaml", "--train_file", small], recipe),
    ):
        assert values(words, tmp_path) == expected
    given = values(["--train_file", small, "--block_size", 128, "--learning_rate", 1e-4], tmp_path)
    assert (given["block_size"], given["learning_rate"]) == (128, 1e-4)


MODEL = "hidden_size=64,num_hidden_layers=1,level_intermediate_sizes=[64],layer_types=[full_attention]"


def test_a_run_with_default_flags_beats_a_unigram_and_says_so(tmp_path, monkeypatch, capsys):
    """On 40 KB of a language of 40 words in which each word is followed by one of two."""
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefghij", k=generator.randint(2, 7))) for _ in range(40)]
    place, documents = 0, []
    for _ in range(60):
        text = []
        for _ in range(120):
            place = (2 * place + generator.randint(0, 1)) % 40
            text.append(words[place])
        documents.append(" ".join(text))
    (tmp_path / "book.txt").write_text("\n<|endoftext|>\n".join(documents))
    flags = ["--train_file", str(tmp_path / "book.txt"), "--config_overrides", MODEL, "--cpu_threads", "1"]
    folder = tmp_path / "run"
    flags += ["--output_dir", str(folder)]
    with training_process():
        assert main(flags) == 0
    record, printed = json.loads((folder / "run.json").read_text()), capsys.readouterr().out
    expected = {"block_size": 256, "per_device_train_batch_size": 4, "learning_rate": 2e-3, "num_train_epochs": 10.0}
    assert record["defaults"] == expected | {"vocab_size": defaults.VOCABULARY}
    assert all(f"--{name} " in printed for name in expected)
    unigram = float(re.search(r"^expect\s+(?:\S+\s+){3}([\d.]+)", printed, re.MULTILINE)[1])
    loss = read_rows(folder)[-1]["eval/loss"]
    assert loss < unigram - 0.5 and f"{loss:.2f} nats per token" in printed

    # It goes on with its own values when the defaults change.
    (folder / "run.json").write_text(json.dumps(record | {"complete": False}))
    monkeypatch.setattr(defaults, "RATE", 1e-3)
    with training_process():
        assert main(flags) == 0
    assert json.loads((folder / "run.json").read_text())["identity"] == record["identity"]
