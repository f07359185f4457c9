"""What `_init_weights` promises of a new model, measured on its weights."""

import pytest
import torch

from hope_hf import HopeConfig, HopeForCausalLM

LAYERS, STD = 8, 0.02
SMALL = STD / (2 * LAYERS) ** 0.5


def new_model(**options):
    torch.manual_seed(0)
    return HopeForCausalLM(HopeConfig(vocab_size=500, hidden_size=128, num_hidden_layers=LAYERS, **options))


@pytest.mark.parametrize("mixer", ["self_modifying", "attention"])
def test_maps_that_end_a_branch_are_smaller_in_deeper_models(mixer):
    model = new_model(mixer=mixer)
    for block in model.model.layers:
        ends = [block.mixer.o_proj, *(level.down_proj for level in block.continuum.levels)]
        begins = [block.mixer.q_proj, *(level.up_proj for level in block.continuum.levels)]
        for expected, maps in ((SMALL, ends), (STD, begins)):
            for linear in maps:
                assert linear.weight.std().item() == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("tied", [False, True])
def test_wide_embeddings_and_heads_are_smaller(tied):
    torch.manual_seed(0)
    width = 1536
    model = HopeForCausalLM(
        HopeConfig(vocab_size=500, hidden_size=width, num_hidden_layers=1, tie_word_embeddings=tied)
    )
    for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
        assert weight.std().item() == pytest.approx(STD * (768 / width) ** 0.5, rel=0.05)


def test_memories_begin_near_the_identity_with_an_orthogonal_inner_layer():
    for block in new_model(memory_depth=2).model.layers:
        for memory in (block.mixer.content_memory, block.mixer.projection_memory):
            inner = memory.inner[0, 0]
            torch.testing.assert_close(inner @ inner.T, 4 * torch.eye(len(inner)), rtol=0, atol=1e-4)
            assert memory.outer.std().item() == pytest.approx(0.05 / memory.outer.shape[-1] ** 0.5, rel=0.05)


@pytest.mark.parametrize("gate_mode", ["static", "memory"])
def test_learning_rates_and_horizons_are_spread_over_the_heads(gate_mode):
    size = {"vocab_size": 500, "hidden_size": 256, "num_hidden_layers": 1, "gate_mode": gate_mode}
    spread = HopeConfig(memory_learning_rate_bias_min=-1.0, memory_learning_rate_bias_max=2.5, **size)
    gates = HopeForCausalLM(spread).model.layers[0].mixer.gates
    assert gates.learning_rate_bias.tolist() == [-1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    gates = HopeForCausalLM(HopeConfig(**size)).model.layers[0].mixer.gates
    assert gates.retention_bias.tolist() == pytest.approx(torch.linspace(1, 8, 8).tolist())
    assert gates.learning_rate_bias.tolist() == [0.0] * 8
