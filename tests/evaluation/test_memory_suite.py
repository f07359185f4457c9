"""Gates are read back as set, and a state that grows without bound is reported."""

import math

import pytest
import torch

from hope_hf import HopeConfig, HopeForCausalLM
from hope_hf.evaluation.memory import gate_rows, memory, stress
from hope_hf.evaluation.subject import Subject


def test_gates_are_read_back(subject, arguments):
    loaded = subject()
    for block in loaded.model.model.layers:
        gates = block.mixer.gates
        with torch.no_grad():
            gates.gate_proj.weight.zero_()
            gates.learning_rate_bias.copy_(torch.tensor([0.0, math.log(3.0)] * 2))
            gates.dt_bias.copy_(-torch.tensor([math.log(9.0), math.log(99.0)] * 2))
            gates.A_log.zero_()
    tables = memory(arguments(lengths="64", samples_per_length=2), loaded).tables
    rows = tables["Gates by layer and head"]
    assert [(row["layer"], row["head"]) for row in rows] == [(layer, head) for layer in (0, 1) for head in range(4)]
    for row in rows:
        assert row["rate_mean"] == pytest.approx([0.5, 0.75][row["head"] % 2], rel=1e-5)
        assert row["rate_std"] == pytest.approx(0.0, abs=1e-6)
        for name in ("horizon_25", "horizon_median", "horizon_75"):
            assert row[name] == pytest.approx([10.0, 100.0][row["head"] % 2], rel=1e-4)


def test_layers_with_attention_have_no_gates():
    sizes = dict(vocab_size=50, hidden_size=32, num_hidden_layers=3, head_dim=16, num_memory_heads=2)
    config = HopeConfig(**sizes, layer_types=["full_attention", "hope_memory", "full_attention"])
    hybrid = Subject(HopeForCausalLM(config).eval(), None)
    rows = gate_rows(hybrid, [torch.tensor([[0, 1, 2, 3]])])
    assert [(row["layer"], row["head"]) for row in rows] == [(1, 0), (1, 1)]
    assert hybrid.has_memory and hybrid.longest_input == config.max_position_embeddings


def test_the_hooks_are_gone_afterwards(subject):
    loaded = subject()
    gate_rows(loaded, [torch.tensor([[0, 1, 2, 3]])])
    assert not any(block.mixer._forward_pre_hooks for block in loaded.model.model.layers)


def test_unusual_inputs(subject, arguments):
    loaded = subject()
    before = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    rows = stress(arguments(), loaded, [40, 80])
    assert [(row["gates"], row["input"], row["tokens"]) for row in rows] == [
        (gates, name, tokens)
        for gates in ("as learned", "writing most, forgetting nothing")
        for name in ("random tokens", "one token", "two tokens in turn")
        for tokens in (40, 80)
    ]
    assert all(0 < row["largest_weight"] < 1e3 for row in rows)
    # at the end the largest rate has written more into every memory than the learned one
    assert rows[7]["largest_weight"] > rows[1]["largest_weight"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.model.state_dict().items())


def test_a_state_without_bound_is_an_error(subject, arguments):
    loaded = subject()
    for block in loaded.model.model.layers:
        # what is stored is turned over and grows 49-fold with every write of the same key
        block.mixer.config.memory_learning_rate_max = 50.0
        with torch.no_grad():
            block.mixer.gates.learning_rate_bias.fill_(10.0)
    with pytest.raises(ValueError, match="the state is not finite after"):
        stress(arguments(), loaded, [2000])
