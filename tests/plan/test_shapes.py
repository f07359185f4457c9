"""Shapes from a config alone are those of the model."""

import pytest
import torch
from models import small_config
from transformers import GPT2Config, LlamaConfig, MistralConfig, Qwen2Config

from hope_hf import PRESETS, HopeConfig
from hope_hf.optim import build_optimizer
from hope_hf.plan import shapes
from hope_hf.plan.shapes import EMBEDDING, ROOT, TAIL, meta_model, shapes_of

HOPES = {
    "paper": dict(memory_rule="paper"),
    "paper, depth 2, keys": dict(memory_rule="paper", paper_rule={"depth": 2}, memory_projections=["k"]),
    "remade": dict(memory_projections=["k", "v"]),
    "no value gate": dict(memory_value_gate=False),
    "hybrid": dict(layer_types=["full_attention", "hope_memory"] * 2, attention_bias=True, num_key_value_heads=2),
    "side by side": dict(level_variant="independent", tie_word_embeddings=True),
}
CONFIGS = (
    {f"hope {name}": lambda name=name: HopeConfig.from_preset(name) for name in PRESETS}
    | {f"hope {name}": lambda own=own: HopeConfig.from_preset("tiny", **own) for name, own in HOPES.items()}
    | {
        "llama": lambda: LlamaConfig(num_hidden_layers=2),
        "llama, biases, groups, tied": lambda: LlamaConfig(
            num_hidden_layers=2, attention_bias=True, mlp_bias=True, num_key_value_heads=8, tie_word_embeddings=True
        ),
        "mistral": lambda: MistralConfig(num_hidden_layers=2, head_dim=64),
        "gpt2": GPT2Config,
        "gpt2, own width": lambda: GPT2Config(n_layer=2, n_inner=100, tie_word_embeddings=False),
    }
)


@pytest.mark.parametrize("name", CONFIGS)
def test_formula_has_the_models_names_and_shapes(name):
    config = CONFIGS[name]()
    found = shapes_of(config)
    assert found.is_formula
    assert {w.name: w.shape for w in found.weights} == {
        name: tuple(parameter.shape) for name, parameter in meta_model(config).named_parameters()
    }
    # The units that the meta device shows are those of the formula.
    assert shapes._from_model(config, False).units == found.units


def test_other_architectures_come_from_the_meta_device():
    config = Qwen2Config(num_hidden_layers=3)
    found = shapes_of(config)
    assert not found.is_formula
    assert found.count == meta_model(config).num_parameters()
    assert {unit for unit in found.units if isinstance(unit, int)} == {0, 1, 2}


def test_embeddings_and_head_have_units_of_their_own():
    separate, tied = (shapes_of(LlamaConfig(tie_word_embeddings=tie)).units for tie in (False, True))
    assert separate[EMBEDDING] == 32000 * 4096 and separate[TAIL] == 32000 * 4096 + 4096
    assert EMBEDDING not in tied and tied[TAIL] == 32000 * 4096 + 4096
    # Learned positions are in none of accelerate's groups but the root's.
    assert shapes_of(GPT2Config()).units[ROOT] == 1024 * 768


@pytest.mark.parametrize("name", ["tiny", "pilot", "llama", "gpt2"])
def test_muon_has_the_optimizers_own_choice(name):
    config = small_config(name)
    model = meta_model(config)
    optimizer = build_optimizer(
        model, "muon", learning_rate=1, weight_decay=0.1, betas=(0.9, 0.9), eps=1e-8, tokens_per_step=1
    )
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [group for group in optimizer.param_groups if group["optimizer"] == "muon"]
    assert {weight.name for weight in shapes_of(config).weights if weight.is_muon} == {
        names[parameter] for group in groups for parameter in group["params"]
    }


def test_the_meta_device_holds_no_numbers():
    assert next(meta_model(small_config("tiny")).parameters()).device == torch.device("meta")
