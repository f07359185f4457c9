"""Shapes, units and rules of a model on the meta device."""

import pytest
from models import small_config
from transformers import GPT2Config, LlamaConfig, Qwen2Config

from hope_hf import HopeConfig
from hope_hf.optim import RULES, build_optimizer
from hope_hf.plan.shapes import EMBEDDING, ROOT, TAIL, Weight, meta_model, shapes_of

REST = {"learning_rate": 1, "weight_decay": 0.1, "betas": (0.9, 0.9), "eps": 1e-8}


def test_every_parameter_is_in_its_block():
    for weight in shapes_of(HopeConfig.from_preset("tiny-hybrid", tie_word_embeddings=True)).weights:
        words = weight.name.split(".")
        assert weight.unit == (int(words[2]) if words[1] == "layers" else TAIL)
    assert shapes_of(Qwen2Config(num_hidden_layers=3)).units.keys() == {EMBEDDING, TAIL, 0, 1, 2}
    # learned positions are in none of accelerate's groups but the root's
    assert shapes_of(GPT2Config()).units[ROOT] == 1024 * 768


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("config", [LlamaConfig, HopeConfig], ids=lambda config: config.model_type)
def test_a_tied_head_is_one_table_in_the_unit_of_the_last_norm(config, tie):
    config = config(vocab_size=1000, num_hidden_layers=2, tie_word_embeddings=tie)
    shapes = shapes_of(config)
    table = 1000 * config.hidden_size
    matrices = sum(parameter.numel() for parameter in meta_model(config).parameters() if parameter.ndim == 2)
    assert shapes.is_tied is tie
    assert shapes.units[TAIL] == table + config.hidden_size
    # only a tied table is multiplied, as the head
    if tie:
        assert EMBEDDING not in shapes.units
        assert shapes.matrices == matrices
    else:
        assert shapes.units[EMBEDDING] == table
        assert shapes.matrices == matrices - table


# 512: the first level of `clocks` steps every second time, the fewest for which it adds up gradients.
@pytest.mark.parametrize("optimizer", RULES)
@pytest.mark.parametrize(("name", "tokens_per_step"), [("clocks", 1), ("clocks", 512), ("clocks", 2**16), ("gpt2", 1)])
def test_rules_periods_and_states_are_the_optimizers(name, tokens_per_step, optimizer):
    config = small_config(name)
    model, weights = meta_model(config), shapes_of(config).weights
    clock = build_optimizer(model, optimizer, tokens_per_step=tokens_per_step, **REST)
    clock.create_states()
    names = {parameter: name for name, parameter in model.named_parameters()}
    built = {}
    for group in clock.param_groups:
        for parameter in group["params"]:
            built[names[parameter]] = group["optimizer"], group["period_tokens"]
    assert {weight.name: (weight.rules[optimizer], weight.period) for weight in weights} == built
    size = 0
    for state in clock.state.values():
        size += sum(tensor.nbytes for tensor in state.values() if tensor.ndim)
    assert sum(weight.count * weight.optimizer_bytes(optimizer, tokens_per_step) for weight in weights) == size


@pytest.mark.parametrize(("tokens_per_step", "size"), [(700, 8), (600, 12)])
def test_a_level_adds_up_gradients_from_the_second_step_of_its_period(tokens_per_step, size):
    weight = Weight("a", (2,), 0, period=1000, rules={"adamw": "adamw"})
    assert weight.optimizer_bytes("adamw", tokens_per_step) == size
