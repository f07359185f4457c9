"""The synthetic suite: its tasks and rows, and what small models can and cannot learn."""

import math
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from hope_hf.evaluation.flags import Arguments
from hope_hf.evaluation.synthetic import training
from hope_hf.evaluation.synthetic.formal_languages import LANGUAGES, draw
from hope_hf.evaluation.synthetic.model import describe, small_model
from hope_hf.evaluation.synthetic.suite import asked_tasks, known_tasks, measure, synthetic
from hope_hf.evaluation.synthetic.task import Batch, Task
from hope_hf.evaluation.synthetic.training import fixed_samples, rate_at, score_samples, train

CPU = torch.device("cpu")
SMALL = "hidden_size=16,head_dim=16,num_hidden_layers=1,memory_chunk_size=16"
# flips of a whole chunk's memory, as parity and counting modulo need them
FLIPS = "hidden_size=32,head_dim=16,num_hidden_layers=1,memory_chunk_size=32"


def arguments(**options) -> Arguments:
    return Arguments(**{"device": "cpu", "batch_size": None, "config_overrides": SMALL, **options})


def short_words(name: str) -> Task:
    """Words of up to 16 symbols, and of 17 to 32."""
    language = LANGUAGES[name]
    make = partial(draw, language=language, ends=[16, 32])
    return Task(name, len(language.alphabet) + 1, ("2-16", "17-32"), make, max_train_steps=200, learning_rate=1e-2)


def accuracies(rate: float) -> list[float]:
    # Whether 200 steps are enough depends on the seed (1 and 2: yes, 42: no); a frozen memory never learns it.
    overrides = f"{FLIPS},memory_learning_rate_max={rate}"
    rows = measure(short_words("aa"), arguments(config_overrides=overrides, seed=1), CPU)
    return [row["accuracy"] for row in rows]


def test_a_memory_that_flips_learns_a_language_and_longer_words_of_it():
    assert accuracies(rate=1.99)[0] == 1


def test_a_frozen_memory_cannot():
    assert accuracies(rate=0)[0] < 0.6


@pytest.mark.parametrize("model_type", ["hope", "llama", "mamba2", "gpt2"])
def test_models_of_any_architecture_are_small_and_seeded(model_type):
    args = arguments(model_type=model_type, config_overrides=None)
    first, again, other = (small_model(args, 7, seed) for seed in (0, 0, 1))
    assert first.config.model_type == model_type and first.config.vocab_size == 7
    assert first.config.hidden_size == 64 and first.config.num_hidden_layers == 2
    assert sum(p.numel() for p in first.parameters()) < 200_000
    weights = [[p.flatten() for p in model.parameters()] for model in (first, again, other)]
    assert torch.equal(torch.cat(weights[0]), torch.cat(weights[1]))
    assert not torch.equal(torch.cat(weights[0]), torch.cat(weights[2]))


def test_the_users_overrides_go_on_top_and_a_named_size_stays_as_it_is():
    assert small_model(arguments(config_overrides="hidden_size=128"), 7, 0).config.num_memory_heads == 8
    named = small_model(arguments(config_name="tiny", config_overrides="num_hidden_layers=1"), 7, 0).config
    assert (named.hidden_size, named.num_hidden_layers, named.vocab_size) == (256, 1, 7)


def test_a_loaded_model_plays_no_part_and_the_user_is_told():
    with pytest.warns(UserWarning, match="--model_name_or_path is not used"):
        small_model(arguments(model_name_or_path="nowhere"), 7, 0)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "hope"),
        ({"model_type": "llama"}, "llama"),
        ({"config_overrides": "conv_kernel_size=2"}, "hope (conv_kernel_size=2)"),
        ({"config_name": "tiny", "config_overrides": SMALL}, "tiny (4 fields changed)"),
    ],
)
def test_a_models_name_says_what_was_changed(options, name):
    assert describe(arguments(**{"config_overrides": None, **options})) == name


def test_rows_count_what_they_rest_on():
    args = arguments(tasks="mqar-4,parity", max_train_steps=2, limit=5, num_seeds=2, batch_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        rows = synthetic(args).tables["Synthetic tasks"]
    assert [(row["task"], row["length"]) for row in rows] == [
        ("mqar-4", "32"), ("parity", "2-50"), ("parity", "51-100"),
    ]  # fmt: skip
    for row in rows:
        assert set(row) == set(rows[0]) and row["n"] == 10 and row["steps"] == 2 and row["seconds"] > 0
        assert row["model"] == "hope (4 fields changed)"
        assert 0 <= row["accuracy"] <= row["best"] <= 1
    module = small_model(args, 33, 0)
    assert rows[0]["parameters"] == sum(p.numel() for p in module.parameters())


def test_results_follow_from_the_seed():
    def run(seed: int) -> list:
        args = arguments(tasks="mad-recall", max_train_steps=3, limit=8, batch_size=8, seed=seed)
        row = synthetic(args).tables["Synthetic tasks"][0]
        return [row["accuracy"], row["accuracy_stderr"]]

    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    assert run(1) == run(1) != run(2)
    # the caller's random generator is unchanged
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_standard_error_of_one_model_is_its_samples():
    class Half(nn.Module):
        """Right where the row's first symbol is 0."""

        def __init__(self, model):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))

        def forward(self, input_ids):
            right = (input_ids[:, :1] == 0)[..., None] == torch.tensor([False, True])
            return 1.0 * right.expand(-1, input_ids.shape[1], -1) + self.weight

    def make(rows, generator, bin):
        ids = torch.stack([torch.randint(2, (rows,), generator=generator), torch.arange(rows)], 1)
        return Batch(ids, torch.ones_like(ids), torch.ones_like(ids, dtype=torch.bool))

    task = Task("half", 4, ("2",), make, Half, max_train_steps=1, samples=100)
    row = measure(task, arguments(), CPU)[0]
    p = row["accuracy"]
    assert 0.3 < p < 0.7 and row["n"] == 100
    assert row["accuracy_stderr"] == pytest.approx(math.sqrt(p * (1 - p) / 99))
    both = measure(task, arguments(num_seeds=2), CPU)[0]
    assert (both["accuracy"], both["best"], both["accuracy_stderr"], both["n"]) == (p, p, 0, 200)


def test_tested_samples_are_fixed_and_no_two_the_same():
    task = known_tasks()["parity"]
    first, again = fixed_samples(task, 3, 40), fixed_samples(task, 3, 40)
    assert list(first) == list(task.bins)
    for name in first:
        assert torch.equal(first[name].input_ids, again[name].input_ids)
    assert len(fixed_samples(known_tasks()["aa"], 3, 400)["2-50"]) == 25


def test_training_stops_when_unseen_samples_are_all_right(monkeypatch):
    seen = []

    def next_outcome(task, module, samples, batch_size, device):
        seen.append(len(samples))
        # One wrong sample, in the first check's second batch.
        right = torch.ones(len(samples))
        right[-1] = len(seen) != 2
        return right

    monkeypatch.setattr(training, "score_samples", next_outcome)
    monkeypatch.setattr(training, "CHECK_EVERY", 3)
    task = replace(known_tasks()["mqar-4"], batch_size=2)
    trained = train(task, small_model(arguments(), task.vocab_size, 0), 0, CPU)
    assert trained.steps == 6 and seen[:2] == [2, 2] and sum(seen[2:]) == training.CHECK_SAMPLES


def test_batches_do_not_change_the_scores():
    task = known_tasks()["mqar-4"]
    module = task.attach(small_model(arguments(), task.vocab_size, 0)).train()
    samples = fixed_samples(task, 0, 20)["32"]
    at_once, in_threes = (score_samples(task, module, samples, size, CPU) for size in (20, 3))
    assert torch.equal(at_once, in_threes) and len(at_once) == 20 and module.training


def test_dropout_is_on_in_training_only():
    class Recording(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.weight, self.modes = nn.Parameter(torch.zeros(())), []

        def forward(self, input_ids):
            self.modes.append(self.training)
            return torch.zeros(*input_ids.shape, 33) + self.weight

    task = replace(known_tasks()["mqar-4"], attach=Recording, max_train_steps=2, batch_size=4, samples=4)
    module = train(task, small_model(arguments(), 33, 0), 0, CPU).module
    score_samples(task, module, fixed_samples(task, 0, 4)["32"], 4, CPU)
    assert module.modes == [True, True, False]


def test_every_seed_trains_on_samples_of_its_own():
    drawn = []

    def recording(rows, generator, bin):
        batch = known_tasks()["mqar-4"].draw(rows, generator, bin)
        if bin is None:
            drawn.append(batch.input_ids.tolist())
        return batch

    task = replace(known_tasks()["mqar-4"], draw=recording, max_train_steps=1, batch_size=4)
    for seed in (0, 1, 0):
        train(task, small_model(arguments(), 33, 0), seed, CPU)
    assert drawn[0] == drawn[2] != drawn[1]


def test_the_mean_of_the_weights_is_tested_beside_them(monkeypatch):
    """The weights or their mean, whichever is right first, end the training and are returned; else the mean."""
    trained, tested = [], []

    class Bias(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(33))

        def forward(self, input_ids):
            if self.training:
                trained.append(self.weight.detach().clone())
            return self.weight.expand(*input_ids.shape, 33)

    def run(right: int | None) -> training.Trained:
        trained.clear()
        tested.clear()
        monkeypatch.setattr(training, "all_right", lambda task, module, *_: tested.append(module) or (
            len(tested) - 1 == right
        ))  # fmt: skip
        task = replace(known_tasks()["mqar-4"], attach=Bias, max_train_steps=5, batch_size=4, ema_decay=0.75)
        return train(task, small_model(arguments(), 33, 0), 0, CPU)

    monkeypatch.setattr(training, "CHECK_EVERY", 4)
    done = run(None)
    assert done.steps == 5 and done.module is tested[1] and len(tested) == 2
    # trained[n] are the weights after n steps; the mean starts from those after the first
    weights, mean = trained[4], trained[1]
    for after_a_step in trained[2:5]:
        mean = 0.75 * mean + 0.25 * after_a_step
    for right, expected in enumerate([weights, mean]):
        done = run(right)
        assert done.steps == 4 and done.module is tested[right] and len(tested) == right + 1
        torch.testing.assert_close(done.module.weight.detach(), expected)
    assert not torch.allclose(weights, mean)


def test_the_rate_warms_up_and_falls_to_a_tenth():
    rates = [rate_at(step, 1000) for step in range(1000)]
    assert rates[0] == 1 / 50 and rates[49] == rates[50] == 1
    assert rates[50:] == sorted(rates[50:], reverse=True) and rates[-1] == pytest.approx(0.1, rel=1e-3)
    assert [rate_at(step, 1) for step in range(1)] == [1]


def test_the_users_settings_replace_the_tasks_own():
    own = known_tasks()["mqar-8"]
    task = asked_tasks(arguments(tasks="mqar-8"))[0]
    assert (task.max_train_steps, task.batch_size, task.learning_rate) == (
        own.max_train_steps, own.batch_size, own.learning_rate,
    )  # fmt: skip
    asked = arguments(tasks="mqar-8", max_train_steps=7, batch_size=3, learning_rate=0.5, limit=2, ema_decay=0.9)
    task = asked_tasks(asked)[0]
    settings = task.max_train_steps, task.batch_size, task.learning_rate, task.samples, task.ema_decay
    assert settings == (7, 3, 0.5, 2, 0.9)
    assert [task.name for task in asked_tasks(arguments())] == list(known_tasks())
    assert asked_tasks(arguments(tasks="aa", lengths="64,128"))[0].bins == ("2-50", "51-64", "65-128")


def test_unknown_tasks_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="^--tasks paritty is none of parity, aa, .*; did you mean parity[?]$"):
        asked_tasks(arguments(tasks="aa,paritty"))
    with pytest.raises(ValueError, match="--tasks names no synthetic task"):
        asked_tasks(arguments(tasks=","))


class Broken(nn.Module):
    """Logits that are NaN from the `calls`-th call on."""

    def __init__(self, model, calls):
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.ones(())), calls

    def forward(self, input_ids):
        self.calls -= 1
        value = math.nan if self.calls < 0 else 0.0
        return torch.full((*input_ids.shape, 33), value) * self.weight


@pytest.mark.parametrize(
    ("calls", "sentence"),
    [
        (0, "Task mqar-4: the loss became nan at step 1; try a --learning_rate below 0.003."),
        (2, "Task mqar-4 cannot be scored: its logits are not finite; try a --learning_rate below 0.003."),
    ],
)
def test_divergence_names_the_task_and_the_mend(calls, sentence):
    task = replace(known_tasks()["mqar-4"], attach=partial(Broken, calls=calls), max_train_steps=2)
    with pytest.raises(ValueError) as error:
        measure(task, arguments(), CPU)
    assert str(error.value) == sentence


def test_compression_trains_its_decoder():
    args = arguments(tasks="mad-compression", max_train_steps=1, limit=4, batch_size=4)
    row = synthetic(args).tables["Synthetic tasks"][0]
    without = sum(p.numel() for p in small_model(args, 16, 0).parameters())
    assert row["parameters"] > without
