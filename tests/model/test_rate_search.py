"""The rate that `learning_rate_search` finds is the one with which a text is read best; the model stays as it is."""

from dataclasses import replace

import pytest
import torch

from hope_hf import HopeCache, HopeConfig, HopeForCausalLM, LevelLearning, learning_rate_search

PERIOD = 8
RATES = (0.0, 0.01, 0.3, 3.0)


@pytest.fixture
def model() -> HopeForCausalLM:
    torch.manual_seed(0)
    config = HopeConfig(
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        layer_types=["full_attention"] * 2,
        level_intermediate_sizes=[48],
        level_periods=[PERIOD],
        level_learning=LevelLearning(periods=[PERIOD], gate=False),
        initializer_range=0.3,
    )
    return HopeForCausalLM(config).eval()


TEXTS = [torch.arange(10).repeat(8), torch.arange(20, 36).repeat(3)]


def read(model: HopeForCausalLM, fields: LevelLearning) -> float:
    """Mean loss of all texts, token by token, each read in pieces with these fields."""
    model.config.level_learning, total, count = fields, 0.0, 0
    for text in TEXTS:
        cache = HopeCache(model.config)
        for start in range(0, len(text), PERIOD):
            logits = model(text[None, start : start + PERIOD], cache=cache, learn=True).logits[0]
            targets = text[start + 1 : start + PERIOD + 1]
            total += torch.nn.functional.cross_entropy(logits[: len(targets)], targets, reduction="sum").item()
            count += len(targets)
    return total / count


def test_it_finds_the_rate_that_reads_best(model):
    fields = model.config.level_learning
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    found = learning_rate_search(model, TEXTS, RATES)
    assert model.config.level_learning is fields
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    tried = {rate: replace(fields, rate=rate, drift=min(1.0, 4 * rate)) for rate in RATES}
    losses = {rate: read(model, one) for rate, one in tried.items()}
    best = min(losses, key=losses.get)
    # neither the first nor the last, or the test would say little
    assert best not in (RATES[0], RATES[-1]) and losses[best] < losses[0.0]
    assert found == tried[best]


def test_the_fields_are_kept_where_a_text_fails(model):
    fields = model.config.level_learning
    with pytest.raises(ValueError, match="give tokens from 0 to 39"):
        learning_rate_search(model, [torch.tensor([1, 2, 400])])
    assert model.config.level_learning is fields
