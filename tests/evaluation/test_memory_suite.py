"""Gates are read back as set, and a state that grows without bound is reported."""

import math
from itertools import product

import pytest
import torch

from hope_hf.evaluation.memory import GATES, memory, stress


def test_gates_are_read_back(subject, arguments):
    loaded = subject()
    for block in loaded.model.model.layers:
        gates = block.mixer.gates
        with torch.no_grad():
            gates.gate_proj.weight.zero_()
            gates.learning_rate_bias.copy_(torch.tensor([0.0, math.log(3.0)] * 2))
            gates.dt_bias.copy_(-torch.tensor([math.log(9.0), math.log(99.0)] * 2))
            gates.A_log.zero_()
    rows = memory(arguments(lengths="64", samples_per_length=2), loaded).tables["Gates by layer and head"]
    assert [(row["layer"], row["head"]) for row in rows] == list(product((0, 1), range(4)))
    for row in rows:
        rate, horizon = (0.75, 100.0) if row["head"] % 2 else (0.5, 10.0)
        assert row["rate_mean"] == pytest.approx(rate, rel=1e-5)
        assert row["rate_std"] == pytest.approx(0.0, abs=1e-6)
        for name in ("horizon_25", "horizon_median", "horizon_75"):
            assert row[name] == pytest.approx(horizon, rel=1e-4)


def test_unusual_inputs(subject, arguments):
    loaded = subject()
    before = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    rows = stress(arguments(), loaded, [40, 80])
    settings = product(GATES, ("random tokens", "one token", "two tokens in turn"), (40, 80))
    assert [(row["gates"], row["input"], row["tokens"]) for row in rows] == list(settings)
    assert all(0 < row["largest_weight"] < 1e3 for row in rows)
    # at the end the largest rate has written more into every memory than the learned one
    assert rows[7]["largest_weight"] > rows[1]["largest_weight"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.model.state_dict().items())
    for block in loaded.model.model.layers:
        # what is stored is turned over and grows 49-fold with every write of the same key
        block.mixer.config.memory_learning_rate_max = 50.0
        with torch.no_grad():
            block.mixer.gates.learning_rate_bias.fill_(10.0)
    with pytest.raises(ValueError, match="not finite"):
        stress(arguments(), loaded, [2000])
