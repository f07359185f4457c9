"""Outer gradients reach every parameter, through the writes, to second order."""

import pytest
import torch
import torch.nn.functional as F
from mixers import build_mixer, run_fast

from hope_hf.model.memory_update import TILE, Gates, MemoryRule, MemoryState, initial_state, update_chunk
from hope_hf.model.vector_norms import back_through_unit_silu, clip_norm, unit, unit_silu

OPTIONS = {
    "defaults": {},
    "adaptive-q": dict(adaptive_q=True),
    "memory-gates": dict(gate_mode="memory"),
    "momentum": dict(memory_momentum=True),
    "depth-1": dict(memory_depth=1),
    "erase-none": dict(memory_erase="none"),
    "independent-levels": dict(level_variant="independent"),
    "attention": dict(mixer="attention"),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_every_parameter_gets_a_gradient(tiny_model, options):
    """Four layers, more than two chunks of the slower scan, freshly initialised; no option leaves a dead parameter."""
    model = tiny_model(num_hidden_layers=4, **options).train()
    ids = torch.randint(64, (2, 40), generator=torch.Generator().manual_seed(0))
    model(ids, labels=ids).loss.backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert without == []


@pytest.mark.parametrize("options", [{}, dict(memory_momentum=True), dict(memory_depth=1)], ids=str)
def test_gradients_of_initial_states_equal_finite_differences(options):
    """The initial states act through every write that follows: these gradients hold the second-order terms."""
    mixer = build_mixer(**options)
    generator = torch.Generator().manual_seed(2)
    hidden_states = torch.randn(1, 37, 16, generator=generator, dtype=torch.float64)

    def loss():
        return run_fast(mixer, hidden_states).square().sum()

    states = [p for m in (mixer.content_memory, mixer.projection_memory) for p in m.parameters()]
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


def test_hand_written_norms_have_the_gradients_of_their_formulas():
    generator = torch.Generator().manual_seed(0)
    x, b = (torch.randn(5, 7, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2))
    # rows on both sides of the clip and of the clamp
    scales = torch.tensor([0.01, 0.05, 0.3, 1.0, 4.0], dtype=torch.float64)[:, None]

    def back(b, x):
        y, inverse = unit_silu(x * scales)
        return back_through_unit_silu(b, x * scales, y, inverse, 10.0)

    assert torch.autograd.gradcheck(lambda x: unit(x * scales), (x,))
    assert torch.autograd.gradcheck(lambda x: clip_norm(x * scales, 1.0), (x,))
    assert torch.autograd.gradcheck(lambda x: unit_silu(x * scales)[0], (x,))
    assert torch.autograd.gradcheck(back, (b, x))
    # unclamped, it is the transposed Jacobian that autograd finds
    y, inverse = unit_silu(x)
    (expected,) = torch.autograd.grad(unit_silu(x)[0], x, b)
    torch.testing.assert_close(back_through_unit_silu(b, x, y, inverse, 1e6), expected)
    norm = F.silu(x).norm(dim=-1, keepdim=True)
    torch.testing.assert_close(
        back_through_unit_silu(b, x, y, inverse, 10.0), expected * (norm * 10).clamp(max=1), rtol=1e-9, atol=1e-12
    )


def random_chunk(rule, length, dtype=torch.float64):
    generator = torch.Generator().manual_seed(4)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    initial = (normal(2, 1, 8, 8),) if rule.depth == 1 else (normal(2, 1, 8, 8), normal(2, 1, 8, 8))
    state = initial_state(initial, 3, rule)
    # a chunk that an earlier call has begun: the weights have moved away from those at its start
    moved = tuple(weights + 0.1 * normal(*weights.shape) for weights in state.run)
    momentum = tuple(0.1 * normal(*weights.shape) for weights in state.momentum)
    state = MemoryState(moved, state.snap, momentum)
    keys, values, queries = (normal(3, 2, length, 8) for _ in range(3))
    log_momentum = F.logsigmoid(normal(3, 2, length)) if rule.momentum else None
    gates = Gates(torch.sigmoid(normal(3, 2, length)), F.logsigmoid(3 + normal(3, 2, length)), log_momentum)
    return state, initial, unit(keys), values, gates, unit(queries)


@pytest.mark.parametrize("momentum", [False, True], ids=["plain", "momentum"])
@pytest.mark.parametrize("mode", ["inclusive", "exclusive", "start"])
@pytest.mark.parametrize("tile", [1, 5, 16, TILE])
def test_the_result_does_not_depend_on_the_tile(momentum, mode, tile):
    rule = MemoryRule(momentum=momentum, read_mode=mode)
    state, initial, keys, values, gates, queries = random_chunk(rule, 37)
    reads, after = update_chunk(state, initial, keys, values, gates, rule, queries, tile=37)
    tiled_reads, tiled_after = update_chunk(state, initial, keys, values, gates, rule, queries, tile=tile)
    torch.testing.assert_close(tiled_reads, reads, rtol=1e-10, atol=1e-10)
    for field in ("run", "momentum"):
        for tiled, whole in zip(getattr(tiled_after, field), getattr(after, field), strict=True):
            torch.testing.assert_close(tiled, whole, rtol=1e-10, atol=1e-10)
    assert after.run[0].ne(state.run[0]).any()
