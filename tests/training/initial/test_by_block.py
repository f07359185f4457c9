"""Initial values drawn block by block are those of the ordinary way, and only one block is in memory."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hope_hf import HopeConfig
from hope_hf.training.initial.by_block import draw_by_block

LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
HOPE = {"hidden_size": 32, "num_hidden_layers": 3, "head_dim": 16, "level_intermediate_sizes": [16, 16]}
HOPE |= {"level_periods": [64, 128]}
CONFIGS = {
    "hope": lambda: HopeConfig(vocab_size=90, **HOPE),
    "hope of the paper": lambda: HopeConfig(vocab_size=90, memory_rule="paper", **HOPE),
    "hope-attention": lambda: HopeConfig(vocab_size=90, layer_types=["full_attention"] * 3, **HOPE),
    "llama": lambda: LlamaConfig(vocab_size=90, **LLAMA),
    "llama, tied": lambda: LlamaConfig(vocab_size=90, tie_word_embeddings=True, **LLAMA),
    "gpt2": lambda: AutoConfig.for_model("gpt2", vocab_size=90, n_embd=32, n_layer=3, n_head=2, n_positions=16),
    "mamba2": lambda: AutoConfig.for_model(
        "mamba2", vocab_size=90, hidden_size=32, num_hidden_layers=3, num_heads=4, head_dim=16, state_size=8
    ),
    "mixtral": lambda: AutoConfig.for_model(
        "mixtral", vocab_size=90, num_key_value_heads=2, num_local_experts=2, **LLAMA
    ),
}


def drawn(model_of, config) -> tuple[dict, PreTrainedModel]:
    """Values by name, and the model they were drawn for."""
    values = {}
    example = model_of(config)
    roots = {type(own): name for name, own in example.named_modules() if isinstance(own, PreTrainedModel)}
    torch.manual_seed(1)
    model = draw_by_block(lambda: model_of(config), lambda name, own: values.update({name: own.clone()}), roots)
    return values, model


@pytest.mark.parametrize("name", CONFIGS)
def test_values_and_random_numbers_are_those_of_the_ordinary_way(name):
    values, left = drawn(AutoModelForCausalLM.from_config, CONFIGS[name]())
    random = torch.get_rng_state()
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]())
    assert torch.equal(torch.get_rng_state(), random)
    for parameter, expected in model.named_parameters():
        assert torch.equal(values[parameter], expected), parameter
    assert values.keys() - dict(model.named_parameters()).keys() == {*model.all_tied_weights_keys}
    assert all(parameter.is_meta for parameter in left.parameters())
    for (_, own), (buffer, expected) in zip(left.named_buffers(), model.named_buffers(), strict=True):
        assert torch.equal(own, expected), buffer


def test_queries_begin_as_keys():
    values, _ = drawn(AutoModelForCausalLM.from_config, CONFIGS["hope"]())
    for name in ("proj", "conv1d"):
        keys, queries = (values[f"model.layers.1.mixer.{which}_{name}.weight"] for which in "kq")
        assert keys.std() > 0 and torch.equal(keys, queries)


def test_a_block_is_freed_when_the_next_one_begins(monkeypatch):
    init_weights = PreTrainedModel._init_weights

    def watch(root, module):
        held.append(sum(parameter.numel() for parameter in root.parameters() if not parameter.is_meta))
        init_weights(root, module)

    held = []
    monkeypatch.setattr(PreTrainedModel, "_init_weights", watch)
    _, model = drawn(LlamaForCausalLM, CONFIGS["llama"]())
    # The ordinary model comes first.
    held = held[len(held) // 2 :]
    assert max(held) == sum(parameter.numel() for parameter in model.model.layers[0].parameters())


class Unset(LlamaForCausalLM):
    """Its head keeps the values of its construction."""

    def _init_weights(self, module):
        if module is not self.lm_head:
            super()._init_weights(module)


class Added(LlamaForCausalLM):
    """A block gets a parameter after its initialisation."""

    def __init__(self, config):
        super().__init__(config)
        self.model.layers[1].scale = nn.Parameter(torch.ones(3))


class Late(LlamaForCausalLM):
    """Changes its blocks after all others."""

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if module is self.lm_head:
            self.model.layers[0].mlp.up_proj.weight.zero_()


@pytest.mark.parametrize(
    ("model", "name"),
    [(Unset, "lm_head.weight"), (Added, "model.layers.1.scale"), (Late, "model.layers.0.mlp.up_proj.weight")],
)
def test_values_that_come_from_elsewhere_are_refused(model, name):
    before = PreTrainedModel._initialize_weights
    with pytest.raises(ValueError, match=f"--init sharded cannot draw {name}, .*: leave --init out"):
        drawn(model, CONFIGS["llama"]())
    assert PreTrainedModel._initialize_weights is before
    # Nothing is freed in later models.
    assert not any(parameter.is_meta for parameter in LlamaForCausalLM(CONFIGS["llama"]()).parameters())
