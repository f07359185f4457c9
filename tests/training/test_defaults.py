"""Own text without a recipe: defaults that follow its size, and what loss to expect of it."""

import json
import math
import os
import random
from pathlib import Path

import pytest
import torch
from training_runs import read_rows, reset_accelerate

from hope_hf.common import defaults
from hope_hf.common.run_arguments import Arguments
from hope_hf.data.build import unigram_loss
from hope_hf.plan.parsing import parse as plan
from hope_hf.training import finish, main
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
    found = values(["--train_file", text_of(size, tmp_path)], tmp_path)
    assert found == dict(zip(SIZED, (256, 4, 2e-3, epochs), strict=True))


def test_a_large_text_a_recipe_loaded_weights_and_flags_keep_their_values(tmp_path):
    small, large = text_of(1000, tmp_path), text_of(10_000_000, tmp_path)
    (tmp_path / "recipe.yaml").write_text(f"train_file: {small}\nblock_size: 64\n")
    assert values(["--train_file", large], tmp_path) == TODAY
    assert values([tmp_path / "recipe.yaml"], tmp_path) == TODAY | {"block_size": 64}
    assert values([tmp_path / "recipe.yaml", "--train_file", small], tmp_path) == TODAY | {"block_size": 64}
    assert values(["--train_file", small, "--model_name_or_path", "m"], tmp_path) == TODAY
    assert values(["--dataset_name", "synthetic"], tmp_path) == TODAY
    given = {"block_size": 128, "per_device_train_batch_size": 2, "learning_rate": 1e-4, "num_train_epochs": 3.0}
    words = [word for name, value in given.items() for word in (f"--{name}", value)]
    assert values(["--train_file", small, *words], tmp_path) == given
    args = parse(["--train_file", small, "--max_train_steps", "7", "--tokenizer_name", "t", "--output_dir", "x"])
    assert [*args.defaults] == ["block_size", "per_device_train_batch_size", "learning_rate"]


def test_a_wide_model_gets_a_lower_rate_and_rows_of_pieces_stay_long(tmp_path):
    small = ["--train_file", text_of(1000, tmp_path)]
    assert values([*small, "--config_name", "pilot"], tmp_path)["learning_rate"] == pytest.approx(7e-4)
    assert values([*small, "--level_learning", "sequence"], tmp_path)["block_size"] is None


def test_rows_of_a_deepspeed_json_are_given(tmp_path, monkeypatch):
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 8}')
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "ds.json"))
    assert values(["--train_file", text_of(1000, tmp_path)], tmp_path)["per_device_train_batch_size"] == 8


@pytest.mark.parametrize("words", [[], ["--block_size", "64"], ["--config_overrides", "vocab_size=300"]])
@pytest.mark.parametrize("size", [1000, 20_000_000])
def test_the_planner_takes_the_same_values(size, words, tmp_path):
    words = ["--train_file", text_of(size, tmp_path), *words]
    run, question = parse([*words, "--output_dir", str(tmp_path / "run")]), plan(words)
    assert question.step.block_size == run.block_size or (run.block_size, question.step.block_size) == (None, 1024)
    assert question.step.batch_size == run.per_device_train_batch_size
    chosen = run.defaults.get(defaults.VOCAB_SIZE)
    assert question.config.vocab_size == (300 if "vocab_size=300" in words else chosen.value if chosen else 4096)
    assert question.defaults.items() <= run.defaults.items()


def test_the_planner_keeps_a_recipe(tmp_path):
    (tmp_path / "recipe.yaml").write_text(f"train_file: {text_of(1000, tmp_path)}\n")
    question = plan([str(tmp_path / "recipe.yaml")])
    assert (question.step.block_size, question.step.batch_size, question.defaults) == (1024, 8, {})


@pytest.fixture
def book(tmp_path) -> Path:
    """40 KB of a language of 40 words in which each word is followed by one of two."""
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefghij", k=generator.randint(2, 7))) for _ in range(40)]
    documents = []
    for _ in range(60):
        place, text = generator.randrange(40), []
        for _ in range(120):
            place = (2 * place + generator.randint(0, 1)) % 40
            text.append(words[place])
        documents.append(" ".join(text))
    (tmp_path / "book.txt").write_text("\n<|endoftext|>\n".join(documents))
    return tmp_path / "book.txt"


@pytest.fixture
def own_text(tmp_path, book, monkeypatch, capsys):
    """`own_text(*flags)` trains on the book with default flags; the status, rows, record of the run, and output."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(finish, "SAMPLE_TOKENS", 4)
    model = "hidden_size=64,num_hidden_layers=1,level_intermediate_sizes=[64],layer_types=[full_attention]"

    def start(*flags: str):
        reset_accelerate()
        folder = tmp_path / "run"
        own = ["--train_file", str(book), "--output_dir", str(folder), "--config_overrides", model]
        status = main([*own, "--cpu_threads", "1", *flags])
        return status, read_rows(folder), json.loads((folder / "run.json").read_text()), capsys.readouterr().out

    yield start
    reset_accelerate()
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


def test_a_run_with_default_flags_beats_a_unigram_and_says_so(own_text):
    status, rows, record, out = own_text()
    assert status == 0 and record["identity"]["block_size"] == 256 and record["identity"]["learning_rate"] == 2e-3
    expected = {"block_size": 256, "per_device_train_batch_size": 4, "learning_rate": 2e-3, "num_train_epochs": 10.0}
    assert record["defaults"] == expected | {"vocab_size": defaults.VOCABULARY}
    for name in expected:
        (line,) = [line for line in out.splitlines() if f"--{name} " in line and "  " in line.strip()]
        assert len(line.split("  ")[-1]) > 15
    (unigram,) = [float(line.split()[4].strip(",")) for line in out.splitlines() if line.startswith("expect ")]
    assert rows[-1]["eval/loss"] < unigram - 0.5
    assert f"Loss {rows[-1]['eval/loss']:.2f} nats per token on the held-out text, {unigram:.2f} for a unigram" in out
    assert "Python's standard library" not in out


def test_a_run_continues_with_its_own_values(own_text, monkeypatch, tmp_path):
    _, _, first, _ = own_text("--max_train_steps", "2")
    (tmp_path / "run" / "run.json").write_text(json.dumps(first | {"complete": False}))
    monkeypatch.setattr(defaults, "RATE", 1e-3)
    status, _, again, out = own_text("--max_train_steps", "2")
    assert status == 0 and again["identity"] == first["identity"] and "from run.json" in out


def test_the_loss_of_a_unigram_is_that_of_the_frequencies():
    train, scored = torch.tensor([6, 1, 0]), torch.tensor([3, 0, 1])
    by_hand = -(3 * math.log(7 / 10) + math.log(1 / 10)) / 4
    assert unigram_loss(train, scored) == pytest.approx(by_hand, rel=1e-12)


def test_the_end_of_a_run_compares():
    assert "1.50 nats better" in finish.compared(4.0, 5.5, "--num_train_epochs")
    for length in ({}, {"max_train_steps": 5}):
        named = Arguments(**length).length_flag
        assert f"({named})" in finish.compared(5.5, 5.0, named) and ("steps" in named) == bool(length)


def test_the_sample_of_the_built_in_text_says_why_it_is_code():
    assert "standard library" in finish.sample_heading(names_text=False)
    assert "standard library" not in finish.sample_heading(names_text=True)
