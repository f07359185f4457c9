"""The chunk-parallel mixer against the token-by-token loop of the equations: outputs and all gradients."""

import pytest
import torch
from mixers import build_mixer, run_fast

from hope_hf import reference
from hope_hf.model import memory_paper
from hope_hf.reference import self_modifying_titans

LENGTH = 37
# every option of the delta rule, over chunks that do not divide the length
DELTA = {
    "defaults": {},
    "static-k": dict(memory_projections=["v"]),
    "static-v": dict(memory_projections=["k"]),
    "static": dict(memory_projections=[]),
    "erase-gate": dict(memory_projections=[], memory_erase_bias=[-3.0, 3.0]),
    "equal-rates": dict(projection_memory_rate=1.0),
    "frozen-projections": dict(projection_memory_rate=0.0),
}
# what is the same under both rules
BOTH = {
    "frozen": dict(memory_learning_rate_max=0.0),
    "largest-rate": dict(memory_learning_rate_max=1.99),
    "chunk-1": dict(memory_chunk_size=1),
    "chunk-5": dict(memory_chunk_size=5),
    "chunk-longer-than-text": dict(memory_chunk_size=64),
    "recompute-each-chunk": dict(recompute_chunks=1),
    "no-recompute": dict(recompute_chunks=0),
    "no-convolution": dict(conv_kernel_size=1),
}


def paper(depth, **options):
    return dict(memory_rule="paper", memory_depth=depth, **options)


VARIANTS = {
    **{f"delta-{name}": options for name, options in (DELTA | BOTH).items()},
    **{f"paper-2-{name}": paper(2, **options) for name, options in BOTH.items()},
    "paper-1": paper(1),
    "paper-1-static-v": paper(1, memory_projections=["k"]),
    "paper-2": paper(2),
    "paper-2-static-k": paper(2, memory_projections=["v"]),
    "paper-1-static": paper(1, memory_projections=[]),
    "paper-2-equal-rates": paper(2, projection_memory_rate=1.0),
}


def output_and_gradients(function, mixer, hidden_states, weight):
    hidden_states = hidden_states.clone().requires_grad_()
    output = function(mixer, hidden_states)
    mixer.zero_grad()
    (output * weight).sum().backward()
    gradients = {
        # a frozen memory's gates have no gradient in one of the two forms and zeros in the other
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in mixer.named_parameters()
    }
    return output.detach(), {**gradients, "input": hidden_states.grad}


def assert_equal_to_the_loop(options):
    mixer = build_mixer(**options)
    generator = torch.Generator().manual_seed(1)
    hidden_states = torch.randn(2, LENGTH, 16, generator=generator, dtype=torch.float64)
    weight = torch.randn(2, LENGTH, 16, generator=generator, dtype=torch.float64)
    slow, slow_gradients = output_and_gradients(self_modifying_titans, mixer, hidden_states, weight)
    fast, fast_gradients = output_and_gradients(run_fast, mixer, hidden_states, weight)
    assert slow.abs().max() > 0.01
    torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-10)
    assert fast_gradients.keys() == slow_gradients.keys()
    for name, gradient in slow_gradients.items():
        torch.testing.assert_close(
            fast_gradients[name], gradient, rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_outputs_and_gradients_equal_the_loop(options):
    assert_equal_to_the_loop(options)


@pytest.mark.parametrize("name, value", [("ERROR_CLIP", 0.3), ("ERROR_CLIP", 1e9), ("INNER_RATE", 1.0)])
@pytest.mark.parametrize("depth", [1, 2])
def test_every_clip_and_inner_rate_equals_the_loop(depth, name, value, monkeypatch):
    """No error here is as long as 2, so the constants of the rule alone would not show the clip."""
    for module in (memory_paper, reference):
        monkeypatch.setattr(module, name, value)
    assert_equal_to_the_loop(paper(depth))
