"""Every parameter in the right group, once."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hope_hf import HopeConfig, HopeForCausalLM
from hope_hf.optim import RULES, build_optimizer, rules_of


def table(model, optimizer):
    """{parameter's name: its group}; fails where a parameter is in two groups."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    rows = [(names[parameter], group) for group in optimizer.param_groups for parameter in group["params"]]
    assert len(rows) == len({name for name, _ in rows})
    return dict(rows)


def kinds(model, optimizer):
    return {
        name: (group["optimizer"], group["weight_decay"] > 0, group["level"])
        for name, group in table(model, optimizer).items()
    }


def test_muon_groups_of_every_kind_of_parameter(leveled_model, settings):
    model = leveled_model()
    found = kinds(model, build_optimizer(model, "muon", **settings))
    expected = {
        "embed_tokens.weight": ("adamw", True, None),
        "mixer.short_conv_weight": ("adamw", True, None),
        "mixer.heads": ("muon", True, None),
        "mixer.head_bias": ("adamw", False, None),
        "mixer.rate": ("adamw", False, None),
        "mixer.conv.weight": ("adamw", True, None),
        "mixer.conv.bias": ("adamw", False, None),
        "mixer.head_norm.weight": ("adamw", False, None),
        "mixer.gate.weight": ("adamw", False, None),
        "mixer.gate.bias": ("adamw", False, None),
        "mixer.memories.weight": ("adamw", False, None),
        "norm.weight": ("adamw", False, None),
        "norm.bias": ("adamw", False, None),
    }
    for level in range(3):
        expected |= {
            f"levels.{level}.up_proj.weight": ("muon", True, level),
            f"levels.{level}.up_proj.bias": ("adamw", False, level),
            f"levels.{level}.input_layernorm.weight": ("adamw", False, level),
            f"levels.{level}.input_layernorm.bias": ("adamw", False, level),
        }
    assert found == expected


def test_adamw_takes_all_with_the_same_decay(leveled_model, settings):
    model = leveled_model()
    muon = kinds(model, build_optimizer(model, "muon", **settings))
    adamw = kinds(model, build_optimizer(model, "adamw", **settings))
    assert adamw == {name: ("adamw", decays, level) for name, (_, decays, level) in muon.items()}


def test_untied_head_is_no_matrix_and_frozen_parameters_are_left_out(leveled_model, settings):
    model = leveled_model(tied=False)
    model.mixer.heads.requires_grad_(False)
    found = kinds(model, build_optimizer(model, "muon", **settings))
    assert found["lm_head.weight"] == ("adamw", True, None)
    assert "mixer.heads" not in found


def test_periods_and_learning_rates_of_levels(leveled_model, settings):
    model = leveled_model(periods=(100, 400, 10_000))
    groups = table(model, build_optimizer(model, "adamw", **settings))
    rows = [groups[f"levels.{level}.up_proj.weight"] for level in range(3)]
    assert [(row["period_steps"], row["period_tokens"]) for row in rows] == [(1, 100), (4, 400), (100, 10_000)]
    assert [row["lr"] for row in rows] == pytest.approx([1e-2, 2e-2, 4e-2])
    assert groups["norm.weight"]["lr"] == groups["norm.weight"]["initial_lr"] == 1e-2


def test_periods_within_one_step_share_the_base_rate(leveled_model, settings):
    """With a batch larger than all periods every level sees the same gradients, so all have the same rate."""
    model = leveled_model()
    optimizer = build_optimizer(model, "adamw", **settings | {"tokens_per_step": 2_000})
    assert {(group["lr"], group["period_steps"]) for group in optimizer.param_groups} == {(1e-2, 1)}


VECTORS = {
    "mixer.short_conv_weight",
    "mixer.head_bias",
    "mixer.conv.bias",
    "mixer.head_norm.weight",
    "mixer.gate.bias",
    "norm.weight",
    "norm.bias",
}
VECTORS_OF_A_LEVEL = {"up_proj.bias", "input_layernorm.weight", "input_layernorm.bias"}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_vectors_have_a_rate_of_their_own(name, leveled_model, settings):
    """Their other settings stay; levels scale it as they scale the other rate."""
    model = leveled_model(periods=(100, 400))
    groups = table(model, build_optimizer(model, name, **settings, vector_learning_rate=5e-2))
    before = table(model, build_optimizer(model, name, **settings))
    assert {n for n, group in groups.items() if group["level"] is None and group["lr"] == 5e-2} == VECTORS
    for level, factor in ((0, 1), (1, 2)):
        for own_name in ("up_proj.weight", *VECTORS_OF_A_LEVEL):
            rate = (5e-2 if own_name in VECTORS_OF_A_LEVEL else 1e-2) * factor
            assert groups[f"levels.{level}.{own_name}"]["lr"] == pytest.approx(rate), own_name
    for n, group in groups.items():
        assert {k: v for k, v in group.items() if k not in ("params", "lr", "initial_lr")} == {
            k: v for k, v in before[n].items() if k not in ("params", "lr", "initial_lr")
        }, n
    assert build_optimizer(model, name, **settings, vector_learning_rate=5e-2).param_groups[0]["lr"] == 1e-2


def test_level_optimizers_override_one_level(leveled_model, settings):
    model = leveled_model()
    entry = {"optimizer": "muon", "lr_factor": 3.0, "betas": [0.8, 0.9], "weight_decay": 0.5}
    groups = table(model, build_optimizer(model, "adamw", **settings, level_optimizers={"1": entry}))
    matrix, bias = groups["levels.1.up_proj.weight"], groups["levels.1.up_proj.bias"]
    assert (matrix["optimizer"], matrix["weight_decay"], matrix["lr"]) == ("muon", 0.5, pytest.approx(3e-2))
    assert (bias["optimizer"], bias["weight_decay"], bias["betas"]) == ("adamw", 0.0, (0.8, 0.9))
    other = groups["levels.2.up_proj.weight"]
    assert (other["optimizer"], other["weight_decay"], other["betas"]) == ("adamw", 0.1, (0.9, 0.95))


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_groups_of_transformers_models(model_type, tied, settings):
    config = AutoConfig.for_model(
        model_type,
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )
    model = AutoModelForCausalLM.from_config(config)
    found = kinds(model, build_optimizer(model, "muon", **settings))
    assert set(found) == {name for name, _ in model.named_parameters()}
    assert ("lm_head.weight" in found) is not tied
    for name, (rule, decays, _) in found.items():
        embedding = any(part in name for part in ("embed_tokens", "wte", "wpe", "lm_head"))
        assert decays is (model.get_parameter(name).ndim == 2)
        assert rule == ("muon" if decays and not embedding else "adamw"), name


@pytest.mark.parametrize("rule", [{}, {"memory_rule": "paper", "memory_depth": 2}], ids=["delta", "paper"])
def test_groups_of_memories(rule, settings):
    model = HopeForCausalLM(HopeConfig(vocab_size=32, hidden_size=32, num_hidden_layers=1, head_dim=16, **rule))
    found = kinds(model, build_optimizer(model, "muon", **settings))
    rules = {"q_proj": ("muon", True), "gate_proj": ("muon", True), "conv1d": ("adamw", True)}
    rules |= dict.fromkeys(("initial_memory", "A_log", "dt_bias", "learning_rate_bias"), ("adamw", False))
    for part, expected in rules.items():
        own = {name: kind[:2] for name, kind in found.items() if f".{part}" in name or f"_{part}" in name}
        assert set(own.values()) == {expected} or (part == "A_log" and rule), own


def test_muon_trains_every_kind_of_parameter(leveled_model, set_gradients, settings):
    model = leveled_model()
    optimizer = build_optimizer(model, "muon", **settings)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for step in range(16):
        set_gradients(model, step)
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all()
        assert not torch.equal(parameter, before[name]), name


def test_unknown_optimizer_and_levels(leveled_model, settings):
    with pytest.raises(ValueError, match="--optimizer is 'sgd': use adamw or muon"):
        build_optimizer(leveled_model(), "sgd", **settings)
    with pytest.raises(ValueError, match="names level 7, but this model has levels 0 to 2"):
        build_optimizer(leveled_model(), "adamw", **settings, level_optimizers='{"7": {}}')
    with pytest.raises(ValueError, match="names level 0, but this model has no levels"):
        build_optimizer(leveled_model(periods=()), "adamw", **settings, level_optimizers='{"0": {}}')


@pytest.mark.parametrize("name", RULES)
def test_rules_are_known_without_numbers(name, leveled_model, settings):
    model = leveled_model(tied=False)
    built = kinds(model, build_optimizer(model, name, **settings))
    assert rules_of(model.to("meta"), name) == {parameter: rule for parameter, (rule, _, _) in built.items()}
