"""Outer gradients reach every parameter, through the writes, to second order."""

from functools import partial

import pytest
import torch
from mixers import MEMORIES, MIXERS, build_mixer, run_fast
from torch import nn

from hope_hf.fast import norm as fast_norm
from hope_hf.model import layers
from hope_hf.model.chunks import plan_chunks

OPTIONS = MIXERS | {
    "independent-levels": dict(level_variant="independent"),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_every_parameter_gets_a_gradient(tiny_model, options):
    """Ten chunks, freshly initialised; no option leaves a dead parameter."""
    model = tiny_model(**options).train()
    ids = torch.randint(64, (2, 40), generator=torch.Generator().manual_seed(0))
    model(ids, labels=ids).loss.backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert without == []


@pytest.mark.parametrize("options", MEMORIES.values(), ids=MEMORIES.keys())
def test_gradients_of_initial_states_equal_finite_differences(options):
    """The initial states act through every write that follows: these gradients hold the second-order terms."""
    mixer = build_mixer(**options)
    generator = torch.Generator().manual_seed(2)
    hidden_states = torch.randn(1, 37, 16, generator=generator, dtype=torch.float64)

    def loss():
        return run_fast(mixer, hidden_states).square().sum()

    states = list(mixer.initial_memory.parameters())
    gradients = torch.autograd.grad(loss(), states)
    for state, gradient in zip(states, gradients, strict=True):
        direction = torch.randn(state.shape, generator=generator, dtype=torch.float64)
        step = 1e-5
        with torch.no_grad():
            values = []
            for sign in (1, -2, 1):
                state.add_(direction, alpha=sign * step)
                values.append(loss())
        slope = (values[0] - values[1]) / (2 * step)
        torch.testing.assert_close(slope, (gradient * direction).sum(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("size", [5, 16])
def test_the_result_does_not_depend_on_the_calls_that_cut_a_chunk(depth, size):
    mixer = build_mixer(memory_rule="paper", memory_depth=depth, memory_chunk_size=30)
    hidden_states = torch.randn(2, 37, 16, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    plan = plan_chunks(mixer.config, hidden_states.shape[:2], hidden_states.device)
    output, state = mixer(hidden_states, plan=plan, need_state=True)
    assert state.current[0].ne(state.chunk_start[0]).any()
    outputs, past, cut = [], None, None
    for part in hidden_states.split(size, dim=1):
        plan = plan_chunks(mixer.config, part.shape[:2], part.device, past)
        part, cut = mixer(part, cut, plan=plan, need_state=True)
        outputs.append(part)
        past = plan.past
    torch.testing.assert_close(torch.cat(outputs, dim=1), output, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(cut, state, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("gated", [True, False])
def test_the_norm_in_blocks_equals_the_plain_one(gated, monkeypatch):
    """Heads in the middle, as reads are; gradients too, and gradients of gradients."""
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
        twice = torch.autograd.grad(loss, leaves, create_graph=True)
        again = torch.autograd.grad(sum(part.square().sum() for part in twice), leaves, retain_graph=True)
        results.append([out, *torch.autograd.grad(loss, leaves), *twice, *again])
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-11)
