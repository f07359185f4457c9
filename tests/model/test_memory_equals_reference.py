"""The chunk-parallel mixer against the token-by-token loop of the paper's equations: outputs and all gradients."""

import pytest
import torch
from mixers import build_mixer, run_fast

from hope_hf.reference import self_modifying_titans

LENGTH = 37
# every option of the inner rule, over chunk sizes that do not divide the length (nor, in one case, one another)
VARIANTS = {
    "defaults": {},
    "exclusive": dict(memory_read_mode="exclusive"),
    "start": dict(memory_read_mode="start"),
    "depth-1": dict(memory_depth=1),
    "depth-1-exclusive": dict(memory_depth=1, memory_read_mode="exclusive"),
    "depth-1-start-zero": dict(memory_depth=1, memory_read_mode="start", memory_decay_to="zero"),
    "wide": dict(memory_expansion=2, projection_memory_expansion=3),
    "adaptive-q": dict(adaptive_q=True),
    "static-k": dict(adaptive_k=False),
    "static-v-adaptive-q": dict(adaptive_v=False, adaptive_q=True),
    "static-k-memory-gates": dict(adaptive_k=False, gate_mode="memory"),
    "memory-gates": dict(gate_mode="memory"),
    "memory-gates-adaptive-q": dict(gate_mode="memory", adaptive_q=True),
    "memory-gates-start-zero": dict(gate_mode="memory", memory_read_mode="start", memory_decay_to="zero"),
    "memory-gates-erase-both": dict(gate_mode="memory", memory_erase="both", memory_hidden_norm="step"),
    "erase-both": dict(memory_erase="both"),
    "erase-none": dict(memory_erase="none"),
    "erase-none-depth-1": dict(memory_erase="none", memory_depth=1),
    "no-clip": dict(memory_error_clip=None),
    "tight-clip": dict(memory_error_clip=0.3),
    "decay-to-zero": dict(memory_decay_to="zero"),
    "hidden-step": dict(memory_hidden_norm="step"),
    "hidden-plain": dict(memory_hidden_norm="none"),
    "raw-target": dict(memory_target_norm=False, memory_error_clip=0.5),
    "factor-2": dict(memory_gradient_factor=2.0),
    "frozen": dict(memory_learning_rate_max=0.0),
    "frozen-decaying": dict(memory_learning_rate_max=0.0, memory_decay_to="zero"),
    "largest-rate": dict(memory_learning_rate_max=1.99),
    "full-rates": dict(inner_layer_rate=1.0, projection_memory_rate=1.0),
    "momentum": dict(memory_momentum=True),
    "momentum-exclusive-zero": dict(memory_momentum=True, memory_read_mode="exclusive", memory_decay_to="zero"),
    "momentum-erase-both": dict(memory_momentum=True, memory_erase="both"),
    "momentum-erase-none": dict(memory_momentum=True, memory_erase="none"),
    "momentum-depth-1-memory-gates": dict(memory_momentum=True, memory_depth=1, gate_mode="memory"),
    "momentum-start": dict(memory_momentum=True, memory_read_mode="start"),
    "chunk-1": dict(memory_chunk_size=1, projection_chunk_size=1),
    "chunk-4-8": dict(memory_chunk_size=4, projection_chunk_size=8),
    "chunk-12-5": dict(memory_chunk_size=12, projection_chunk_size=5),
    "chunk-longer-than-text": dict(memory_chunk_size=64, projection_chunk_size=256),
    "recompute-each-chunk": dict(recompute_chunks=1),
    "no-recompute": dict(recompute_chunks=0),
    "no-convolution": dict(conv_kernel_size=1),
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


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_outputs_and_gradients_equal_the_loop(options):
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
