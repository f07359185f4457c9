"""Memories by the plain code against the token-by-token loop of the equations: outputs and all gradients.

`test_equivalence.py` goes through their options; here are the ends of what the options and constants may be.
"""

import pytest
import torch
from definitions import assert_as_defined

from hope_hf import reference
from hope_hf.model import memory_paper

DELTA, PAPER = dict(memory_rule="delta"), dict(memory_rule="paper", memory_depth=2)
# options, and constants of the paper's rule: not each text has an error that its own constant clips
ENDS = {
    "no writes": (DELTA | dict(memory_learning_rate_max=0.0), {}),
    "largest rate": (DELTA | dict(memory_learning_rate_max=1.99, projection_memory_rate=1.0), {}),
    "paper, no writes": (PAPER | dict(memory_learning_rate_max=0.0), {}),
    "paper, largest rate": (PAPER | dict(memory_learning_rate_max=1.99), {}),
    "paper, one layer, small clip": (PAPER | dict(memory_depth=1), {"ERROR_CLIP": 0.3}),
    "paper, small clip": (PAPER, {"ERROR_CLIP": 0.3}),
    "paper, no clip": (PAPER, {"ERROR_CLIP": 1e9}),
    "paper, rate 1": (PAPER, {"INNER_RATE": 1.0}),
}


@pytest.mark.parametrize("end", ENDS)
def test_memories_equal_the_loop(tiny_model, monkeypatch, end):
    options, constants = ENDS[end]
    monkeypatch.setenv("HOPE_KERNELS", "plain")
    for name, value in constants.items():
        monkeypatch.setattr(memory_paper, name, value)
        monkeypatch.setattr(reference, name, value)
    model = tiny_model(torch.float64, num_hidden_layers=1, memory_projections=["k", "v"], **options)
    with torch.no_grad():
        for parameter in model.model.layers[0].mixer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    assert_as_defined(model, torch.randint(64, (2, 18)))
