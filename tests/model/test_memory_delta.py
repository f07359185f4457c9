"""The gated delta rule: what it stores, what it does not depend on, and the gated DeltaNet that it contains."""

import math

import pytest
import torch
import torch.nn.functional as F
from mixers import build_mixer, run_fast
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

from hope_hf import HopeConfig, HopeForCausalLM
from hope_hf.fast.delta_scan import scan_fused
from hope_hf.model.chunks import plan_chunks
from hope_hf.model.memory_delta import DeltaMemories
from hope_hf.model.memory_mixer import LEAST_ERASED
from hope_hf.model.memory_scan import ScanInputs, ScanState, Tokens, fresh_state, scan_plain, unit

WIDTH = 8


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def write(keys, values, rate=1.0, retention=1.0, state=None, initial=None):
    """Reads at the keys [C, D], and the weights [D, D] of one memory after tokens [C, D]."""
    initial = torch.zeros(1, WIDTH, WIDTH, dtype=torch.float64) if initial is None else initial
    memories = DeltaMemories(torch.empty(0), (), initial, initial.new_zeros(1, 1, 1), (1.0,))
    state = memories.fresh() if state is None else (state - initial,)
    gates = torch.full((2, 1, len(keys)), rate, dtype=torch.float64)
    gates[1] = math.log(retention)
    tokens = Tokens(keys[None], values[None], keys[None], *gates)
    reads, after = memories.write_and_read(ScanState(state, state, None), tokens)
    return reads[0], memories.content(after)[0][0]


def test_a_pair_written_twice_is_read_as_after_one_write():
    pairs = normal(2, 5, WIDTH)
    keys, values = F.normalize(pairs[0], dim=-1), pairs[1]
    again = torch.tensor([0, 0, 1, 2, 2, 2, 3, 4, 4])
    reads, twice = write(keys[again], values[again])
    _, once = write(keys, values)
    torch.testing.assert_close(reads, values[again], rtol=0, atol=1e-6)
    torch.testing.assert_close(twice, once, rtol=0, atol=1e-6)
    # the control: smaller steps leave something to write
    halves = write(keys[again], values[again], rate=0.5)[1], write(keys, values, rate=0.5)[1]
    assert (halves[0] - halves[1]).abs().max() > 0.01


def test_a_write_replaces_what_is_under_its_key_and_nothing_else():
    keys = torch.linalg.qr(normal(WIDTH, WIDTH)).Q
    values, other = normal(WIDTH, WIDTH, seed=1), normal(1, WIDTH, seed=2)
    _, stored = write(keys, values)
    torch.testing.assert_close(keys @ stored, values)
    for rate in (0.3, 1.0, 1.99):
        _, changed = write(keys[2:3], other, rate=rate, state=stored)
        expected = values.clone()
        expected[2] = (1 - rate) * values[2] + rate * other
        torch.testing.assert_close(keys @ changed, expected)


def test_what_is_not_written_decays_to_the_initial_weights():
    initial, moved = normal(1, WIDTH, WIDTH, seed=1), normal(1, WIDTH, WIDTH, seed=2)
    tokens = normal(2, 10, WIDTH, seed=3)
    _, weights = write(*tokens, rate=0.0, retention=0.9, state=moved, initial=initial)
    torch.testing.assert_close(weights, (initial + 0.9**10 * (moved - initial))[0])


def test_the_chunk_changes_nothing_where_keys_and_values_are_static():
    def output(chunk, **options):
        return run_fast(build_mixer(memory_chunk_size=chunk, **options), normal(2, 210, 16, seed=1))

    whole = output(200)
    for chunk in (7, 16, 64):
        torch.testing.assert_close(output(chunk), whole, rtol=1e-10, atol=1e-10)
    # the control: memories that project keys and values give other outputs
    projected = {"memory_projections": ["k", "v"]}
    assert (output(16, **projected) - output(64, **projected)).abs().max() > 1e-3


def saturated_weights(rate, made, length=4096):
    """Output and largest weights along a text whose tokens are all written at `rate` and never forgotten."""
    torch.manual_seed(0)
    options = dict(num_memory_heads=4, memory_projections=made)
    config = HopeConfig(vocab_size=8, hidden_size=64, num_hidden_layers=1, head_dim=16, **options)
    mixer = HopeForCausalLM(config).model.layers[0].mixer
    # which the configuration refuses above 1.99
    mixer.config.memory_learning_rate_max = rate
    with torch.no_grad():
        mixer.gates.gate_proj.weight.zero_()
        mixer.gates.learning_rate_bias.fill_(20.0)
        mixer.gates.dt_bias.fill_(-20.0)
        noise = normal(3, length, 64).float()
        # independent tokens, runs of equal ones, and one token with changing signs
        noise[1] = noise[1, torch.arange(length) // 500]
        noise[2] = noise[2, :1] * torch.randint(-1, 2, (length, 1), generator=torch.Generator().manual_seed(1))
        outputs, largest, past, state = [], [], None, None
        for part in noise.split(512, dim=1):
            plan = plan_chunks(mixer.config, part.shape[:2], part.device, past)
            output, state = mixer(part, state, plan=plan, need_state=True)
            past = plan.past
            outputs.append(output)
            largest.append(state.current[0].abs().max().item())
    return torch.cat(outputs, dim=1), largest


@pytest.mark.parametrize("made", [[], ["k", "v"]], ids=["static", "kv"])
@pytest.mark.parametrize("rate", [1.0, 1.99])
def test_memories_that_always_write_and_never_forget_stay_bounded(rate, made):
    output, largest = saturated_weights(rate, made)
    assert output.isfinite().all() and 0.1 < max(largest) < 100
    # and do not grow with the text
    assert max(largest[4:]) < 2 * max(largest[:4])


def test_above_the_largest_rate_the_same_text_diverges():
    assert not saturated_weights(2.2, [], length=512)[1][-1] < 1e6


HEADS, HEAD_WIDTH, HIDDEN = 3, 16, 40


def in_the_order_of_qwen(tensors):
    """Weights (or gradients) of a mixer without makers by the names, and in the layout, of the gated DeltaNet."""
    maps = [tensors[f"{name}_proj.weight"].view(HEADS, HEAD_WIDTH, HIDDEN) for name in "qkvg"]
    return {
        "in_proj_qkvz.weight": torch.cat(maps, dim=1).flatten(0, 1),
        "in_proj_ba.weight": tensors["gates.gate_proj.weight"].view(2, HEADS, HIDDEN).transpose(0, 1).flatten(0, 1),
        "conv1d.weight": torch.cat([tensors[f"{name}_conv1d.weight"] for name in "qkv"]),
        "A_log": tensors["gates.A_log"],
        "dt_bias": tensors["gates.dt_bias"],
        "norm.weight": tensors["o_norm.weight"],
        "out_proj.weight": tensors["o_proj.weight"],
    }


def build_pair():
    """A float64 mixer whose memories begin at 0, and transformers' module with the same weights."""
    config = HopeConfig(
        vocab_size=8, hidden_size=HIDDEN, num_hidden_layers=1, head_dim=HEAD_WIDTH, num_memory_heads=HEADS,
        memory_projections=[], memory_value_gate=False, memory_chunk_size=16,
    )  # fmt: skip
    mixer = HopeForCausalLM(config).double().model.layers[0].mixer
    with torch.no_grad():
        for index, (name, parameter) in enumerate(mixer.named_parameters()):
            if name != "gates.learning_rate_bias":
                parameter.copy_(normal(*parameter.shape, seed=index) * 0.3)
        mixer.gates.dt_bias.sub_(2.0)
        mixer.o_norm.weight.add_(1.0)
        mixer.initial_memory.weight.zero_()
        mixer.value_share.weight.zero_()
    theirs = modeling_qwen3_next.Qwen3NextGatedDeltaNet(
        Qwen3NextConfig(
            hidden_size=HIDDEN, num_hidden_layers=1, layer_types=["linear_attention"], linear_num_key_heads=HEADS,
            linear_num_value_heads=HEADS, linear_key_head_dim=HEAD_WIDTH, linear_value_head_dim=HEAD_WIDTH,
            linear_conv_kernel_dim=config.conv_kernel_size, rms_norm_eps=config.rms_norm_eps,
        ),
        layer_idx=0,
    ).double()  # fmt: skip
    theirs.load_state_dict(in_the_order_of_qwen(mixer.state_dict()))
    return mixer, theirs


@pytest.mark.parametrize("run", [scan_plain, scan_fused], ids=["plain", "fused"])
@pytest.mark.parametrize("erased", [LEAST_ERASED, 1.0])
def test_a_memory_that_does_not_erase_counts(run, erased):
    """200 writes of a value, then 200 of its opposite at the same key, in float32; one that erases holds the last."""
    length, width = 400, 8
    key, value = torch.randn(2, 1, 1, width, generator=torch.Generator().manual_seed(0)).abs() + 0.1
    signs = torch.ones(1, length)
    # SiLU leaves no opposites, so the norm has the sign
    signs[:, 200:] = -1
    streams = [part.expand(1, length, width) for part in (key, value, key)]
    gates = erased * torch.ones(1, length), torch.zeros(1, length), signs / erased, erased * torch.ones(1, length)
    initial = torch.zeros(1, width, width), torch.zeros(1, 1, 1)
    memories = DeltaMemories(torch.ones(1, 1, 1, 3 * width), (), *initial, (1.0,))
    spans = plan_chunks(HopeConfig(memory_chunk_size=64), (1, length), torch.device("cpu")).spans
    reads, _ = run(ScanInputs(*streams, *gates), memories, fresh_state(memories), spans)
    counts = reads[0] @ unit(F.silu(value[0, 0]))
    expected = torch.arange(1, 201.0) if erased < 1 else torch.ones(200)
    assert (counts[:200] - expected).abs().max() < 0.02
    assert abs(counts[-1] - (0 if erased < 1 else -1)) < 0.02


class WideTorch:
    """torch, but its float32 is float64."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture
def qwen_in_float64(monkeypatch):
    """transformers' rule, norm and gates compute in float32, which rounds sums of large terms to 1e-5."""
    monkeypatch.setattr(modeling_qwen3_next, "torch", WideTorch())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.mark.usefixtures("qwen_in_float64")
@pytest.mark.parametrize("rule", ["chunk", "recurrent"])
def test_static_projections_and_memories_of_zero_are_the_gated_deltanet_of_transformers(monkeypatch, rule):
    if rule == "recurrent":
        monkeypatch.setattr(
            modeling_qwen3_next,
            "torch_chunk_gated_delta_rule",
            modeling_qwen3_next.torch_recurrent_gated_delta_rule,
        )
    mixer, theirs = build_pair()
    hidden_states, weight = normal(2, 100, HIDDEN, seed=50), normal(2, 100, HIDDEN, seed=51)
    results = []
    for module, run in ((mixer, lambda x: run_fast(mixer, x)), (theirs, theirs)):
        x = hidden_states.clone().requires_grad_()
        output = run(x)
        (output * weight).sum().backward()
        gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
        results.append((output.detach(), x.grad, gradients))
    (ours, our_input, our_gradients), (output, input_gradient, gradients) = results
    our_gradients = in_the_order_of_qwen(our_gradients)
    assert our_gradients.keys() == gradients.keys()
    pairs = {name: (our_gradients[name], gradient) for name, gradient in gradients.items()}
    pairs |= {"output": (ours, output), "input": (our_input, input_gradient)}
    for name, (a, b) in pairs.items():
        assert b.norm() > 0.1, name
        assert (a - b).norm() <= 1e-10 * b.norm(), (name, (a - b).norm() / b.norm())


@pytest.mark.parametrize("options", [{}, dict(memory_rule="paper")], ids=["delta", "paper"])
def test_gates_begin_where_the_configuration_says(options):
    config = HopeConfig(
        vocab_size=8, hidden_size=32, num_hidden_layers=1, head_dim=16, num_memory_heads=4,
        memory_learning_rate_max=1.5, memory_learning_rate_bias=[-1.0, 2.0], retention_bias=[0.0, 6.0], **options,
    )  # fmt: skip
    mixer = HopeForCausalLM(config).model.layers[0].mixer
    rate, retention = mixer.gate_values(torch.zeros(1, 1, 32))
    torch.testing.assert_close(rate[0, 0], 1.5 * torch.tensor([-1.0, 0.0, 1.0, 2.0]).sigmoid())
    torch.testing.assert_close(retention[0, 0], torch.tensor([0.0, 2.0, 4.0, 6.0]).sigmoid())
