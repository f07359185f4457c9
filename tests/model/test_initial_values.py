"""What `_init_weights` promises of a new model, measured on its weights."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from hope_hf import HopeConfig, HopeForCausalLM

LAYERS, STD = 8, 0.02
SMALL = STD / (2 * LAYERS) ** 0.5


def new_model(**options):
    torch.manual_seed(0)
    return HopeForCausalLM(HopeConfig(vocab_size=500, hidden_size=128, num_hidden_layers=LAYERS, **options))


def assert_spread(weight, expected, rel=0.05):
    assert weight.std().item() == pytest.approx(expected, rel=rel)


def test_maps_that_end_a_branch_are_smaller_in_deeper_models():
    model = new_model(layer_types=["hope_memory", "full_attention"] * (LAYERS // 2))
    for block in model.model.layers:
        (level,) = block.continuum.levels
        assert_spread(block.mixer.o_proj.weight, SMALL)
        assert_spread(level.down_proj.weight, SMALL)
        assert_spread(block.mixer.q_proj.weight, STD)
        assert_spread(level.up_proj.weight, STD)


def test_wide_embeddings_and_heads_are_smaller():
    model = HopeForCausalLM(HopeConfig(vocab_size=500, hidden_size=1536, num_hidden_layers=1))
    assert_spread(model.model.embed_tokens.weight, STD * 0.5**0.5)
    assert_spread(model.lm_head.weight, STD * 0.5**0.5)


@pytest.mark.parametrize("rule", ["delta", "paper"])
def test_a_query_begins_as_the_next_tokens_key_under_the_delta_rule_alone(rule):
    mixer = new_model(memory_rule=rule, memory_projections=[]).model.layers[0].mixer
    is_delta = rule == "delta"
    keys, queries = mixer.k_conv1d.weight, mixer.q_conv1d.weight
    assert torch.equal(mixer.k_proj.weight, mixer.q_proj.weight) == is_delta
    assert torch.equal(F.pad(keys[..., :-1], (1, 0)), queries) == is_delta
    # uniform, a token's own weight a tenth
    assert_spread(keys[..., :-1], 0.5 / 3**0.5, rel=0.1)
    assert_spread(keys[..., -1], (0.05 if is_delta else 0.5) / 3**0.5, rel=0.1)
    assert mixer.k_proj.weight.data_ptr() != mixer.q_proj.weight.data_ptr()
    # reads begin with the whole of the token's own value
    assert (mixer.value_share.weight == 1).all() if is_delta else mixer.value_share is None


def test_queries_that_a_checkpoint_lacks_begin_as_its_keys(tmp_path):
    model = new_model()
    mixer = model.model.layers[0].mixer
    for weight in (mixer.k_proj.weight, mixer.k_conv1d.weight):
        torch.nn.init.normal_(weight)
    weights = {name: weight for name, weight in model.state_dict().items() if ".q_" not in name}
    model.save_pretrained(tmp_path, state_dict=weights)
    loaded = HopeForCausalLM.from_pretrained(tmp_path).model.layers[0].mixer
    assert torch.equal(loaded.q_proj.weight, mixer.k_proj.weight)
    assert torch.equal(loaded.k_conv1d.weight, mixer.k_conv1d.weight)
    assert torch.equal(loaded.q_conv1d.weight, F.pad(mixer.k_conv1d.weight[..., :-1], (1, 0)))


def test_memories_of_the_delta_rule_begin_at_zero():
    assert not new_model().model.layers[0].mixer.initial_memory.weight.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_memories_of_the_papers_rule_begin_small_with_an_orthogonal_inner_layer(dtype):
    """A factorisation in half precision does not exist."""
    torch.manual_seed(0)
    config = HopeConfig(vocab_size=8, hidden_size=128, num_hidden_layers=1, memory_rule="paper", memory_depth=2)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    inner, outer = (layer.float() for layer in model.model.layers[0].mixer.initial_memory.parameters())
    assert_spread(outer, 0.05 / outer.shape[-1] ** 0.5)
    torch.testing.assert_close(inner @ inner.mT, 4 * torch.eye(64).expand_as(inner), rtol=0, atol=0.03)


@pytest.mark.parametrize("rule", ["delta", "paper"])
def test_memories_that_project_begin_at_the_identity_or_near_it(rule):
    mixer = new_model(memory_rule=rule, memory_projections=["k", "v"]).model.layers[0].mixer
    memories, x = mixer.memories(1, torch.float32), torch.randn(2 * 128 // 64, 5, 64)
    for index in range(2):
        change = (memories.project(memories.fresh(), index, x) - x).norm() / x.norm()
        assert 0 < change < 0.1 if rule == "paper" else change == 0


def test_retention_of_the_delta_rule_begins_as_in_the_gated_deltanet():
    """Time steps between 0.001 and 0.1, evenly in their logarithm; rates evenly up to 16."""
    torch.manual_seed(0)
    config = HopeConfig(vocab_size=8, hidden_size=64, num_hidden_layers=1, num_memory_heads=4000, head_dim=1)
    gates = HopeForCausalLM(config).model.layers[0].mixer.gates
    steps, rates = F.softplus(gates.dt_bias).log10(), gates.A_log.exp()
    for values, low, high in ((steps, -3, -1), (rates, 0.01, 16)):
        near = 0.01 * (high - low)
        assert low <= values.min() < low + near
        assert high - near < values.max() <= high
        assert values.mean().item() == pytest.approx((low + high) / 2, rel=0.03)
