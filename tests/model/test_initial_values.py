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


def is_close(value, expected, rel=0.05):
    return value.std().item() == pytest.approx(expected, rel=rel)


def test_maps_that_end_a_branch_are_smaller_in_deeper_models():
    model = new_model(layer_types=["hope_memory", "full_attention"] * (LAYERS // 2))
    for block in model.model.layers:
        (level,) = block.continuum.levels
        assert all(is_close(linear.weight, SMALL) for linear in (block.mixer.o_proj, level.down_proj))
        assert all(is_close(linear.weight, STD) for linear in (block.mixer.q_proj, level.up_proj))


def test_wide_embeddings_and_heads_are_smaller():
    sizes = dict(vocab_size=500, hidden_size=1536, num_hidden_layers=1)
    for tied in (False, True):
        model = HopeForCausalLM(HopeConfig(**sizes, tie_word_embeddings=tied))
        assert is_close(model.model.embed_tokens.weight, STD * 0.5**0.5)
        assert is_close(model.lm_head.weight, STD * 0.5**0.5)


def test_reads_begin_with_the_whole_of_the_tokens_own_value_under_the_delta_rule_alone():
    assert [set(block.mixer.value_share.weight.tolist()) for block in new_model().model.layers] == [{1.0}] * LAYERS
    assert all(block.mixer.value_share is None for block in new_model(memory_rule="paper").model.layers)


def test_a_query_begins_as_the_next_tokens_key_under_the_delta_rule_alone():
    for rule in ("delta", "paper"):
        for block in new_model(memory_rule=rule, memory_projections=[]).model.layers:
            mixer, is_delta = block.mixer, rule == "delta"
            assert torch.equal(mixer.k_proj.weight, mixer.q_proj.weight) == is_delta
            keys, queries = mixer.k_conv1d.weight, mixer.q_conv1d.weight
            assert torch.equal(F.pad(keys[..., :-1], (1, 0)), queries) == is_delta
            # uniform, a token's own weight a tenth
            assert is_close(keys[..., :-1], 0.5 / 3**0.5, rel=0.1)
            assert is_close(keys[..., -1], (0.05 if is_delta else 0.5) / 3**0.5, rel=0.1)
            assert mixer.k_proj.weight.data_ptr() != mixer.q_proj.weight.data_ptr()
    mixer = new_model(conv_kernel_size=1).model.layers[0].mixer
    assert torch.equal(mixer.k_conv1d.weight, mixer.q_conv1d.weight) and mixer.k_conv1d.weight.std() > 0.5


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


def test_memories_begin_at_zero_or_small_with_an_orthogonal_inner_layer():
    for options in ({}, dict(memory_rule="paper"), dict(memory_rule="paper", memory_depth=2)):
        for block in new_model(**options).model.layers:
            *inner, outer = block.mixer.initial_memory.parameters()
            if not options:
                assert not outer.any()
                continue
            assert is_close(outer, 0.05 / outer.shape[-1] ** 0.5)
            assert len(inner) == ("memory_depth" in options)
            for layer in inner:
                products = layer @ layer.mT
                torch.testing.assert_close(products, 4 * torch.eye(64).expand_as(products), rtol=0, atol=1e-4)


@pytest.mark.parametrize("made", [["k", "v"], ["v"]], ids=str)
@pytest.mark.parametrize("rule", ["delta", "paper"])
def test_memories_that_project_begin_at_the_identity_or_near_it(rule, made):
    mixer = new_model(memory_rule=rule, memory_projections=made).model.layers[0].mixer
    memories, x = mixer.memories(1, torch.float32), torch.randn(2 * 128 // 64, 5, 64)
    for index in range(len(made)):
        change = (memories.project(memories.fresh(), index, x) - x).norm() / x.norm()
        assert 0 < change < 0.1 if rule == "paper" else change == 0


@pytest.mark.parametrize("rule", ["delta", "paper"])
def test_learning_rates_and_horizons_are_spread_over_the_heads(rule):
    size = {"vocab_size": 500, "hidden_size": 256, "num_hidden_layers": 1, "memory_rule": rule}
    gates = HopeForCausalLM(HopeConfig(memory_learning_rate_bias=[-1.0, 2.5], **size)).model.layers[0].mixer.gates
    assert gates.learning_rate_bias.tolist() == pytest.approx([-1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5])
    gates = HopeForCausalLM(HopeConfig(retention_bias=[1, 8], **size)).model.layers[0].mixer.gates
    assert gates.dt_bias.tolist() == pytest.approx((-torch.linspace(1, 8, 8)).tolist())
    assert gates.A_log is None if rule == "paper" else gates.A_log.tolist() == [0.0] * 8
    assert gates.learning_rate_bias.tolist() == [0.0] * 8


def test_retention_of_the_delta_rule_begins_as_in_the_gated_deltanet():
    """Time steps between 0.001 and 0.1, evenly in their logarithm; rates evenly up to 16."""
    torch.manual_seed(0)
    config = HopeConfig(vocab_size=8, hidden_size=64, num_hidden_layers=1, num_memory_heads=4000, head_dim=1)
    gates = HopeForCausalLM(config).model.layers[0].mixer.gates
    steps, rates = F.softplus(gates.dt_bias).log10(), gates.A_log.exp()
    for values, low, high in ((steps, -3, -1), (rates, 0.01, 16)):
        assert low <= values.min() < low + 0.01 * (high - low) and high - 0.01 * (high - low) < values.max() <= high
        assert values.mean().item() == pytest.approx((low + high) / 2, rel=0.03)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_inner_layers_of_memories_begin_orthogonal_in_every_precision(tiny_config, dtype):
    """Which a factorisation in half precision could not make: it does not exist."""
    torch.manual_seed(0)
    config = tiny_config(memory_rule="paper", memory_depth=2)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    assert all(p.dtype == dtype and p.isfinite().all() for p in model.parameters())
    inner = model.model.layers[0].mixer.initial_memory.inner.float()
    torch.testing.assert_close(inner @ inner.mT, 4 * torch.eye(16).expand_as(inner), rtol=0, atol=0.03)
