"""Outer gradients reach every parameter; a norm whose backward pass is written by hand; no gradients of gradients."""

from functools import partial

import pytest
import torch
from mixers import MEMORIES, STATES
from torch import nn

from hope_hf.fast import norm as fast_norm
from hope_hf.model import layers

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
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("gated", [True, False])
def test_the_norm_in_blocks_equals_the_plain_one(gated, monkeypatch):
    """Heads in the middle, as reads are; gradients too."""
    monkeypatch.setattr(fast_norm, "_BLOCK", 7 * 24)
    generator = torch.Generator().manual_seed(3)
    make = partial(torch.randn, generator=generator, dtype=torch.float64, requires_grad=True)
    norm, x, gate = layers.HopeRMSNorm(8, 1e-3).double(), make(2, 3, 10, 8).transpose(1, 2), make(2, 10, 3, 8)
    nn.init.uniform_(norm.weight)
    leaves, gate = [x, norm.weight, *[gate] * gated], gate if gated else None
    found = [norm(x, partial(layers.gated_norm, gate=gate, kernels=kernels)) for kernels in ("auto", "plain")]
    assert type(found[0].grad_fn).__name__ == "_GatedNormBackward"
    # a text that is read without gradients goes over torch's norm, and must give the same bits; SiLU may round the few
    # numbers of these small blocks otherwise
    assert gated or torch.equal(*found)
    results = []
    for out in found:
        loss = (out * torch.arange(8)).sum()
        results.append([out, *torch.autograd.grad(loss, leaves)])
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-11)
