"""Memories by the plain code against the token-by-token loop of the equations: outputs and all gradients.

`test_equivalence.py` goes through their options; here are the ends of what the options and constants may be.
"""

import pytest
import torch
from definitions import assert_as_defined

from hope_hf import reference
from hope_hf.model import memory_paper

RULES = {"delta": {}, "paper": dict(memory_rule="paper"), "paper-2": dict(memory_rule="paper", memory_depth=2)}
ENDS = {
    "defaults": {},
    "no writes": dict(memory_learning_rate_max=0.0),
    "largest rate": dict(memory_learning_rate_max=1.99),
    "equal rates": dict(projection_memory_rate=1.0),
    "chunks of a token": dict(memory_chunk_size=1),
    "no convolution": dict(conv_kernel_size=1),
}


def compare(tiny_model, monkeypatch, **options):
    monkeypatch.setenv("HOPE_KERNELS", "plain")
    model = tiny_model(torch.float64, num_hidden_layers=1, memory_projections=["k", "v"], **options)
    with torch.no_grad():
        for parameter in model.model.layers[0].mixer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    assert_as_defined(model, torch.randint(64, (2, 18)))


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("rule", RULES)
def test_memories_equal_the_loop(tiny_model, monkeypatch, rule, end):
    compare(tiny_model, monkeypatch, **RULES[rule], **ENDS[end])


@pytest.mark.parametrize("name, value", [("ERROR_CLIP", 0.3), ("ERROR_CLIP", 1e9), ("INNER_RATE", 1.0)])
@pytest.mark.parametrize("rule", ["paper", "paper-2"])
def test_every_clip_and_inner_rate_equals_the_loop(tiny_model, monkeypatch, rule, name, value):
    """Not each text has an error that the constants of the rule clip."""
    for module in (memory_paper, reference):
        monkeypatch.setattr(module, name, value)
    compare(tiny_model, monkeypatch, **RULES[rule])
