"""Every parameter in the right group, once."""

import pytest
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


def test_vectors_have_a_rate_of_their_own(leveled_model, settings):
    """Levels scale it as they scale the other rate."""
    model = leveled_model(periods=(100, 400))
    groups = table(model, build_optimizer(model, "muon", **settings, vector_learning_rate=5e-2))
    expected = {"norm.weight": 5e-2, "mixer.head_bias": 5e-2, "mixer.short_conv_weight": 5e-2, "mixer.heads": 1e-2}
    expected |= {"levels.1.up_proj.bias": 2 * 5e-2, "levels.1.up_proj.weight": 2 * 1e-2}
    assert {name: groups[name]["lr"] for name in expected} == pytest.approx(expected)


def test_level_optimizers_override_one_level(leveled_model, settings):
    model = leveled_model()
    entry = {"optimizer": "muon", "lr_factor": 3.0, "betas": [0.8, 0.9], "weight_decay": 0.5}
    groups = table(model, build_optimizer(model, "adamw", **settings, level_optimizers={"1": entry}))
    matrix, bias = groups["levels.1.up_proj.weight"], groups["levels.1.up_proj.bias"]
    assert (matrix["optimizer"], matrix["weight_decay"], matrix["lr"]) == ("muon", 0.5, pytest.approx(3e-2))
    assert (bias["optimizer"], bias["weight_decay"], bias["betas"]) == ("adamw", 0.0, (0.8, 0.9))
    assert groups["levels.2.up_proj.weight"]["optimizer"] == "adamw"


def test_unknown_optimizer_and_levels(leveled_model, settings):
    with pytest.raises(ValueError, match="--optimizer is 'sgd': use adamw or muon"):
        build_optimizer(leveled_model(), "sgd", **settings)
    for periods, words in (((100, 400, 1600), "levels 0 to 2"), ((), "no levels")):
        with pytest.raises(ValueError, match=f"names level 7, but this model has {words}"):
            build_optimizer(leveled_model(periods=periods), "adamw", **settings, level_optimizers='{"7": {}}')


@pytest.mark.parametrize("name", RULES)
def test_rules_are_known_without_numbers(name, leveled_model, settings):
    model = leveled_model(tied=False)
    built = kinds(model, build_optimizer(model, name, **settings))
    assert rules_of(model.to("meta"), name) == {parameter: rule for parameter, (rule, _, _) in built.items()}


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_groups_of_transformers_models(model_type, settings):
    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes, tie_word_embeddings=False))
    found = kinds(model, build_optimizer(model, "muon", **settings))
    assert set(found) == {name for name, _ in model.named_parameters()}
    for name, (rule, decays, _) in found.items():
        is_embedding = any(part in name for part in ("embed_tokens", "wte", "wpe", "lm_head"))
        assert decays is (model.get_parameter(name).ndim == 2)
        assert rule == ("muon" if decays and not is_embedding else "adamw"), name


def test_groups_of_memories(settings):
    config = HopeConfig(vocab_size=32, hidden_size=32, num_hidden_layers=1, head_dim=16)
    model = HopeForCausalLM(config)
    groups = table(model, build_optimizer(model, "muon", **settings))
    expected = {
        "q_proj.weight": ("muon", 0.1),
        "gates.gate_proj.weight": ("muon", 0.1),
        "q_conv1d.weight": ("adamw", 0.1),
        "initial_memory.weight": ("adamw", 0.0),
        "gates.learning_rate_bias": ("adamw", 0.0),
    }
    for name, kind in expected.items():
        group = groups[f"model.layers.0.mixer.{name}"]
        assert (group["optimizer"], group["weight_decay"]) == kind, name
