"""benchmarks/synthetic.py: its tasks row by row against their definitions, scores, training, and a call."""

import json
import math
import re
from itertools import groupby, permutations, product
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.synthetic import training
from benchmarks.synthetic.formal_languages import LANGUAGES
from benchmarks.synthetic.mad import LastStateDecoder, memorised_table
from benchmarks.synthetic.measure import known_tasks, measure
from benchmarks.synthetic.model import small_model
from benchmarks.synthetic.program import main, parse, run
from benchmarks.synthetic.state_tracking import is_even
from benchmarks.synthetic.task import Batch, Task, chance, loss, score
from hope_hf import HopeConfig, HopeForCausalLM
from hope_hf.common.flags import ModelArguments

pytestmark = pytest.mark.benchmarks

SETTING = str(Path(__file__).parents[1] / "benchmarks" / "formal_languages.yaml")
SMALL = ModelArguments(config_overrides="hidden_size=16,head_dim=16,num_hidden_layers=1,memory_chunk_size=16")
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
        continued = {word[len(prefix)] for word in words if word.startswith(prefix) and len(word) > len(prefix)}
        expected = [symbol in continued for symbol in language.alphabet] + [prefix in words]
        ids = torch.tensor([language.alphabet.index(symbol) for symbol in prefix])
        assert language.next_symbols(ids)[-1].tolist() == expected, prefix
    # samples are words of the bins' lengths with their sets
    for bin, lengths in {None: range(2, 51), 1: range(51, 101)}.items():
        for ids, sets, mask in rows_of(name, bin):
            length = sum(mask)
            assert length in lengths and is_word("".join(language.alphabet[i] for i in ids[:length]))
            assert sets[:length] == language.next_symbols(torch.tensor(ids[:length])).tolist()


@pytest.mark.parametrize("name", ["mqar-4", "mqar", "rekeyed"])
def test_every_asked_key_wants_the_value_it_was_written_with(name):
    for ids, targets, mask in rows_of(name, bin=None):
        pairs = sum(mask)
        meaning = dict(zip(ids[: 2 * pairs : 2], ids[1 : 2 * pairs : 2], strict=True))
        if name == "rekeyed":
            renamed = ids[2 * pairs + 1 : 4 * pairs + 1]
            meaning = {new: meaning[old] for old, new in zip(renamed[::2], renamed[1::2], strict=True)}
        assert {ids[place]: targets[place] for place, scored in enumerate(mask) if scored} == meaning


def test_recall_asks_for_the_value_of_every_key_that_has_occurred_before():
    for ids, targets, mask in rows_of("mad-recall"):
        known = {}
        for place in range(0, len(ids), 2):
            key, value = ids[place], targets[place]
            assert mask[place] == (key in known) and key < 8 <= value < 16
            assert known.setdefault(key, value) == value
        assert mask[-1] and not any(mask[1::2])
    assert all(all(mask) and targets[:-1] == ids[1:] for ids, targets, mask in rows_of("mad-recall", None))


def test_fuzzy_recall_asks_for_the_values_of_words_that_have_occurred_before():
    for ids, targets, mask in rows_of("mad-fuzzy-recall"):
        tokens = [ids[0], *targets]
        content = [token for token in tokens if token != 15]
        runs = [tuple(run) for _, run in groupby(content, lambda token: token >= 7)]
        known, expected = {}, [False] * (len(tokens) - len(content))
        for key, value in zip(runs[::2], runs[1::2], strict=True):
            expected += [False] * len(key) + [key in known] * len(value)
            assert known.setdefault(key, value) == value
        # the mask belongs to the token before the one that is asked
        assert [False, *mask] == expected and expected[-1]


def test_copying_compression_and_memorisation_ask_for_what_was_written():
    for ids, targets, mask in rows_of("mad-selective-copying"):
        content = [token for token in ids[:239] if token != 14]
        assert targets[240:] == content and len(content) == 16 and mask == [False] * 240 + [True] * 16
    for ids, targets, mask in rows_of("mad-compression"):
        assert ids == targets and ids[-1] == 15 and mask == [True] * 31 + [False]
    table = memorised_table(256).tolist()
    assert len(set(table)) == 127
    for ids, targets, mask in rows_of("mad-memorisation"):
        assert targets[1::2] == [table[key] for key in ids[::2]] and mask == [token == 255 for token in ids]


@pytest.mark.parametrize(("name", "things"), [("s3", 3), ("a5", 5)])
def test_targets_are_what_a_row_of_things_has_become(name, things):
    elements = [element for element in permutations(range(things)) if name == "s3" or is_even(element)]
    assert len(elements) == {"s3": 6, "a5": 60}[name]
    for word, targets, _ in rows_of(name, bin=1):
        state = list(range(things))
        for symbol, target in zip(word, targets, strict=True):
            state = [elements[symbol][thing] for thing in state]
            assert tuple(state) == elements[target]


def test_the_decoder_sees_the_last_state_alone():
    model = HopeForCausalLM(HopeConfig(vocab_size=16, hidden_size=32, head_dim=16, num_hidden_layers=1)).double()
    decoder = LastStateDecoder(model, 12, 16).double()
    input_ids = torch.randint(16, (2, 12))
    state = model.model(input_ids=input_ids).last_hidden_state[:, -1]
    expected = [decoder.decoder(state + decoder.positions[place]) for place in range(12)]
    torch.testing.assert_close(decoder(input_ids), torch.stack(expected, 1))


def test_sets_are_right_as_a_whole_and_symbols_by_their_share():
    sets = torch.tensor([[[1, 0], [0, 1], [1, 1]], [[0, 1], [1, 0], [0, 0]]]).bool()
    batch = Batch(torch.zeros(2, 3, dtype=torch.long), sets, torch.tensor([[1, 1, 1], [1, 1, 0]]).bool())
    logits = torch.where(sets, 10.0, -10.0)
    # what is not scored may be wrong
    logits[1, 2] = 10
    assert score(logits, batch).tolist() == [1, 1]
    assert loss(logits, batch).item() == pytest.approx(math.log1p(math.exp(-10)), rel=1e-2)
    logits[0, 0, 0] = 0
    assert score(logits, batch).tolist() == [0, 1]
    # three sets of two symbols, and two
    assert chance(batch, 2) == (1 / 64 + 1 / 16) / 2
    logits[0, 0, 0] = math.nan
    with pytest.raises(ValueError, match="not finite"):
        score(logits, batch)
    targets = torch.tensor([[0, 1, -100]])
    symbols = Batch(targets, targets, targets >= 0)
    logits = torch.tensor([[[1.0, 2.0], [0.0, 3.0], [9.0, 9.0]]])
    expected = (math.log(math.exp(1) + math.exp(2)) - 1 + math.log(1 + math.exp(3)) - 3) / 2
    assert loss(logits, symbols).item() == pytest.approx(expected)
    assert score(logits, symbols).item() == chance(symbols, 2) == 0.5


class Constant(nn.Module):
    """The same logits everywhere, which are trained."""

    def __init__(self, model):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(33))
        self.trained = []

    def forward(self, input_ids):
        if self.training:
            self.trained.append(self.weight.detach().clone())
        return self.weight.expand(*input_ids.shape, 33)


@pytest.mark.parametrize("right", [0, 1, None])
def test_the_weights_or_their_mean_end_the_training(right, monkeypatch):
    tested = []

    def all_right(task, module, *_):
        tested.append(module)
        return len(tested) - 1 == right

    monkeypatch.setattr(training, "all_right", all_right)
    monkeypatch.setattr(training, "CHECK_EVERY", 4)
    task = known_tasks()["mqar-4"].with_settings(max_train_steps=5, batch_size=4, ema_decay=0.75)
    task = Task(**(vars(task) | {"attach": Constant}))
    done = training.train(task, small_model(SMALL, 33, 0), 0, torch.device("cpu"))
    module, mean = tested[:2] if right != 0 else (tested[0], None)
    assert done.steps == (5 if right is None else 4) and done.module is (module if right == 0 else mean)
    if right == 1:
        # trained[n] are the weights after n steps; the mean starts from those after the first
        expected = module.trained[1]
        for after_a_step in [*module.trained[2:], module.weight.detach()]:
            expected = 0.75 * expected + 0.25 * after_a_step
        torch.testing.assert_close(mean.weight.detach(), expected)


def test_training_that_diverges_names_the_task_and_the_mend():
    class Broken(Constant):
        def forward(self, input_ids):
            return super().forward(input_ids) * math.nan

    task = Task(**(vars(known_tasks()["mqar-4"]) | {"attach": Broken}))
    with pytest.raises(training.Diverged, match="mqar-4.* at step 1; try a --learning_rate below"):
        measure(task, SMALL, 0)


@pytest.mark.parametrize("model_type", ["hope", "llama", "mamba2", "gpt2"])
def test_models_of_any_architecture_are_small_and_seeded(model_type):
    first, again, other = (small_model(ModelArguments(model_type=model_type), 7, seed) for seed in (0, 0, 1))
    assert first.config.hidden_size == 64 and first.config.num_hidden_layers == 2 and first.config.vocab_size == 7
    weights = [torch.cat([p.flatten() for p in model.parameters()]) for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_a_call_prints_a_row_per_length_and_keeps_it(tmp_path, capsys):
    flags = ["--tasks", "mqar-4,aa", "--max_train_steps", "2", "--limit", "4", "--num_seeds", "2", "--device", "cpu"]
    flags += ["--config_overrides", SMALL.config_overrides, "--cpu_threads", "1"]
    assert main([*flags, "--results", str(tmp_path / "rows.jsonl")]) == 0
    rows = list(map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines()))
    assert [(row["task"], row["length"]) for row in rows] == [("mqar-4", "32"), ("aa", "2-50"), ("aa", "51-100")]
    assert all(row["n"] == 8 and row["steps"] == 2 and row["accuracy"] <= row["best"] for row in rows)
    assert "| mqar-4 |" in capsys.readouterr().out
    random_state = torch.random.get_rng_state()
    again = run(parse(flags))
    assert [row["accuracy"] for row in again] == [row["accuracy"] for row in rows]
    assert torch.equal(torch.random.get_rng_state(), random_state)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tasks", "aa,paritty"], ["--tasks paritty", "parity"]),
        (["--tasks", "aa", "--lengths", "20,100"], ["--lengths", "formal languages"]),
        (["--learning_rate", "2"], ["--learning_rate"]),
        (["--num_seeds", "0"], ["--num_seeds"]),
        (["none.yaml"], ["none.yaml"]),
    ],
)
def test_mistakes_are_one_sentence(flags, words, capsys):
    assert main(flags) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words) and error.count("\n") == 1


def accuracies(language: str, *flags: str) -> list[float]:
    """Of words of up to 50 and up to 100 symbols, after training one model with the setting and more flags."""
    rows = run(parse([SETTING, "--tasks", language, "--num_seeds", "1", "--seed", "0", *flags, "--device", "cpu"]))
    return [row["accuracy"] for row in rows][:2]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    """The setting names a results file."""
    monkeypatch.chdir(tmp_path)


def test_a_language_that_needs_a_sign_to_flip_is_learned_in_a_few_steps_through_the_memory():
    assert accuracies("aa", "--max_train_steps", "75") == [1, 1]
    # the control: the convolutions of two layers see six symbols back, so no longer word is right
    setting = {"conv_kernel_size": 4, "memory_learning_rate_max": 0}
    assert accuracies("aa", "--max_train_steps", "75", "--config_overrides", json.dumps(setting))[1] == 0


@pytest.mark.long
@pytest.mark.parametrize("language", LANGUAGES)
def test_one_setting_learns_every_language(language):
    assert accuracies(language) == [1, 1]
