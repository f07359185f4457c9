"""benchmarks/synthetic.py: its tasks row by row against their definitions, scores, and a call."""

import json
import re
from itertools import permutations, product
from pathlib import Path

import pytest
import torch

from benchmarks.synthetic.formal_languages import LANGUAGES
from benchmarks.synthetic.measure import known_tasks
from benchmarks.synthetic.program import main, parse, run
from benchmarks.synthetic.state_tracking import is_even
from benchmarks.synthetic.task import Batch, chance, score

pytestmark = pytest.mark.benchmarks

SETTING = str(Path(__file__).parents[1] / "benchmarks" / "formal_languages.yaml")
# All words up to a length, and how long a prefix may be so that one of them continues it in every possible way.
IS_WORD = {
    "parity": (10, 8, lambda word: word.count("1") % 2 == 0),
    "aa": (12, 10, lambda word: re.fullmatch("(aa)*", word)),
    "abab": (16, 12, lambda word: re.fullmatch("(abab)*", word)),
    "anbn": (16, 7, lambda word: word == "a" * (len(word) // 2) + "b" * (len(word) // 2)),
    "anbncn": (12, 3, lambda word: word == "".join(symbol * (len(word) // 3) for symbol in "abc")),
    "shuffle-2": (8, 3, lambda word: balanced(word, "()") and balanced(word, "[]")),
}


def balanced(word: str, pair: str) -> bool:
    rest = "".join(symbol for symbol in word if symbol in pair)
    while pair in rest:
        rest = rest.replace(pair, "")
    return not rest


def rows_of(name: str, bin: int | None = 0, rows: int = 40) -> list[tuple[list[int], list, list[bool]]]:
    """Samples of a task as lists: ids, targets and mask of each."""
    batch = known_tasks()[name].draw(rows, torch.Generator().manual_seed(0), bin)
    return list(zip(batch.input_ids.tolist(), batch.targets.tolist(), batch.mask.tolist(), strict=True))


@pytest.mark.parametrize("name", LANGUAGES)
def test_next_symbols_are_those_of_the_words_that_continue_the_prefix(name):
    longest, prefix_length, is_word = IS_WORD[name]
    language = LANGUAGES[name]
    words = []
    for length in range(1, longest + 1):
        words += filter(is_word, map("".join, product(language.alphabet, repeat=length)))
    prefixes = {word[:length] for word in words for length in range(1, prefix_length + 1)}
    assert len(prefixes) > 4
    for prefix in prefixes:
        longer = [word for word in words if word.startswith(prefix) and len(word) > len(prefix)]
        continued = {word[len(prefix)] for word in longer}
        expected = [symbol in continued for symbol in language.alphabet] + [prefix in words]
        ids = torch.tensor([language.alphabet.index(symbol) for symbol in prefix])
        assert language.next_symbols(ids)[-1].tolist() == expected, prefix
    # samples are words of the bins' lengths with their sets
    for bin, lengths in {None: range(2, 51), 1: range(51, 101)}.items():
        for ids, sets, mask in rows_of(name, bin):
            length = sum(mask)
            word = "".join(language.alphabet[i] for i in ids[:length])
            assert length in lengths and is_word(word)
            assert sets[:length] == language.next_symbols(torch.tensor(ids[:length])).tolist()


@pytest.mark.parametrize(("name", "things", "count"), [("s3", 3, 6), ("a5", 5, 60)])
def test_targets_are_what_a_row_of_things_has_become(name, things, count):
    elements = list(permutations(range(things)))
    if name == "a5":
        elements = list(filter(is_even, elements))
    assert len(elements) == count
    for word, targets, _ in rows_of(name, bin=1):
        state = list(range(things))
        for symbol, target in zip(word, targets, strict=True):
            state = [elements[symbol][thing] for thing in state]
            assert tuple(state) == elements[target]


def test_sets_are_right_as_a_whole_and_symbols_by_their_share():
    sets = torch.tensor([[[1, 0], [0, 1], [1, 1]], [[0, 1], [1, 0], [0, 0]]]).bool()
    batch = Batch(torch.zeros(2, 3, dtype=torch.long), sets, torch.tensor([[1, 1, 1], [1, 1, 0]]).bool())
    logits = torch.where(sets, 10.0, -10.0)
    # what is not scored may be wrong
    logits[1, 2] = 10
    assert score(logits, batch).tolist() == [1, 1]
    logits[0, 0, 0] = 0
    assert score(logits, batch).tolist() == [0, 1]
    # three sets of two symbols, and two
    assert chance(batch, 2) == (1 / 64 + 1 / 16) / 2
    targets = torch.tensor([[0, 1, -100]])
    symbols = Batch(targets, targets, targets >= 0)
    logits = torch.tensor([[[1.0, 2.0], [0.0, 3.0], [9.0, 9.0]]])
    assert score(logits, symbols).item() == chance(symbols, 2) == 0.5


def test_a_call_prints_a_row_per_length_and_keeps_it(tmp_path, capsys):
    flags = ["--tasks", "mqar-4,aa", "--max_train_steps", "2", "--limit", "4", "--num_seeds", "2", "--device", "cpu"]
    small = "hidden_size=16,head_dim=16,num_hidden_layers=1,memory_chunk_size=16"
    flags += ["--config_overrides", small, "--cpu_threads", "1"]
    assert main([*flags, "--results", str(tmp_path / "rows.jsonl")]) == 0
    rows = list(map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines()))
    assert [(row["task"], row["length"]) for row in rows] == [("mqar-4", "32"), ("aa", "2-50"), ("aa", "51-100")]
    assert all(row["n"] == 8 and row["steps"] == 2 and row["accuracy"] <= row["best"] for row in rows)
    assert "| mqar-4 |" in capsys.readouterr().out
    again = run(parse(flags))
    assert [row["accuracy"] for row in again] == [row["accuracy"] for row in rows]


def test_mistakes_are_one_sentence(capsys):
    for flags, words in (
        (["--tasks", "aa,paritty"], "--tasks paritty"),
        (["--tasks", "aa", "--lengths", "20,100"], "--lengths"),
        (["--learning_rate", "2"], "--learning_rate"),
        (["none.yaml"], "none.yaml"),
    ):
        assert main(flags) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1


def accuracies(language: str, *flags: str) -> list[float]:
    """Of words of up to 50 and up to 100 symbols, after training one model with the setting and more flags."""
    rows = run(parse([SETTING, "--tasks", language, "--num_seeds", "1", "--seed", "0", *flags, "--device", "cpu"]))
    return [row["accuracy"] for row in rows][:2]


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """The setting names a results file."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.long
@pytest.mark.usefixtures("own_folder")
def test_a_language_that_needs_a_sign_to_flip_is_learned_in_a_few_steps_through_the_memory():
    assert accuracies("aa", "--max_train_steps", "75") == [1, 1]
    # the control: the convolutions of two layers see six symbols back, so no longer word is right
    setting = {"conv_kernel_size": 4, "memory_learning_rate_max": 0}
    assert accuracies("aa", "--max_train_steps", "75", "--config_overrides", json.dumps(setting))[1] == 0


@pytest.mark.long
@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize("language", LANGUAGES)
def test_one_setting_learns_every_language(language):
    assert accuracies(language) == [1, 1]
