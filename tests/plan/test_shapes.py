"""Shapes, units and rules of a model on the meta device."""

import pytest
import torch
from models import small_config
from transformers import GPT2Config, LlamaConfig, Qwen2Config

from hope_hf import PRESETS, HopeConfig
from hope_hf.optim import RULES, build_optimizer
from hope_hf.plan.shapes import EMBEDDING, ROOT, TAIL, Weight, meta_model, shapes_of

CONFIGS = {name: lambda name=name: HopeConfig.from_preset(name) for name in PRESETS} | {
    "clocks": lambda: small_config("clocks"),
    "paper": lambda: HopeConfig.from_preset("tiny", memory_rule="paper", memory_depth=2),
    "llama": lambda: small_config("llama"),
    "gpt2": lambda: small_config("gpt2"),
}


def test_every_parameter_is_in_its_block():
    config = HopeConfig.from_preset("tiny-hybrid", tie_word_embeddings=True)
    for weight in shapes_of(config).weights:
        words = weight.name.split(".")
        assert weight.unit == (int(words[2]) if words[1] == "layers" else TAIL)
    assert shapes_of(Qwen2Config(num_hidden_layers=3)).units.keys() == {EMBEDDING, TAIL, 0, 1, 2}


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("config", [LlamaConfig, HopeConfig, GPT2Config], ids=lambda config: config.model_type)
def test_a_tied_head_is_one_table_in_the_unit_of_the_last_norm(config, tie):
    config = config(vocab_size=1000, tie_word_embeddings=tie)
    shapes, width = shapes_of(config), config.hidden_size
    norm = 2 * width if config.model_type == "gpt2" else width
    assert shapes.is_tied is tie
    assert shapes.units[TAIL] == 1000 * width + norm and shapes.units.get(EMBEDDING) == (None if tie else 1000 * width)
    # Only a tied table is multiplied, as the head.
    assert shapes.matrices == sum(
        parameter.numel()
        for name, parameter in meta_model(config).named_parameters()
        if parameter.ndim == 2 and (tie or "embed_tokens" not in name and "wte" not in name) and "wpe" not in name
    )


def test_learned_positions_are_in_none_of_accelerates_groups_but_the_roots():
    assert shapes_of(GPT2Config()).units[ROOT] == 1024 * 768


@pytest.mark.parametrize("optimizer", RULES)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_has_the_optimizers_rule_and_period(name, optimizer):
    config = CONFIGS[name]()
    model = meta_model(config)
    clock = build_optimizer(
        model, optimizer, learning_rate=1, weight_decay=0.1, betas=(0.9, 0.9), eps=1e-8, tokens_per_step=1
    )
    names = {parameter: name for name, parameter in model.named_parameters()}
    built = {names[p]: (g["optimizer"], g["period_tokens"]) for g in clock.param_groups for p in g["params"]}
    weights = shapes_of(config).weights
    assert {weight.name: (weight.rules[optimizer], weight.period) for weight in weights} == built
    assert {rule for rule, _ in built.values()} == {"adamw", optimizer}


# 512: the first level of `clocks` steps every second time, the fewest for which it adds up gradients.
@pytest.mark.parametrize("optimizer", RULES)
@pytest.mark.parametrize("tokens_per_step", [1, 512, 1024, 65_536])
@pytest.mark.parametrize("name", ["clocks", "llama"])
def test_optimizer_state_is_what_the_optimizer_creates(name, tokens_per_step, optimizer):
    config = small_config(name)
    rest = {"learning_rate": 1, "weight_decay": 0.1, "betas": (0.9, 0.9), "eps": 1e-8}
    clock = build_optimizer(meta_model(config), optimizer, tokens_per_step=tokens_per_step, **rest)
    clock.create_states()
    real = sum(tensor.nbytes for state in clock.state.values() for tensor in state.values() if tensor.ndim)
    weights = shapes_of(config).weights
    assert sum(weight.count * weight.optimizer_bytes(optimizer, tokens_per_step) for weight in weights) == real


@pytest.mark.parametrize(("tokens_per_step", "size"), [(1000, 8), (700, 8), (600, 12), (334, 12)])
def test_a_level_adds_up_gradients_from_the_second_step_of_its_period(tokens_per_step, size):
    weight = Weight("a", (2,), 0, period=1000, rules={"adamw": "adamw"})
    assert weight.optimizer_bytes("adamw", tokens_per_step) == size


def test_the_meta_device_holds_no_numbers():
    state = torch.get_rng_state()
    assert next(shapes_of(small_config("tiny")).model.parameters()).device == torch.device("meta")
    assert torch.equal(torch.get_rng_state(), state)
