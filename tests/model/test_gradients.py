"""Outer gradients reach every parameter; gradients of gradients of memories are refused."""

import pytest
import torch
from mixers import MEMORIES, STATES

OPTIONS = MEMORIES | STATES | {"independent-levels": dict(level_variant="independent")}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_every_parameter_gets_a_gradient(tiny_model, options):
    """Ten chunks, freshly initialised; no option leaves a dead parameter."""
    model = tiny_model(**options).train()
    ids = torch.randint(64, (2, 40), generator=torch.Generator().manual_seed(0))
    model(ids, labels=ids).loss.backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert without == []


def test_gradients_of_gradients_of_memories_are_refused(tiny_model):
    """What the forward pass keeps would be taken for constants."""
    model, ids = tiny_model(torch.float64), torch.randint(64, (1, 9))
    weight = model.model.layers[0].mixer.q_proj.weight
    (gradient,) = torch.autograd.grad(model(ids, use_cache=False).logits.square().sum(), weight, create_graph=True)
    with pytest.raises(ValueError, match="HOPE_KERNELS=plain"):
        gradient.square().sum().backward()
