"""The gated delta rule: what it stores, and the gated DeltaNet that it contains."""

import pytest
import torch
from sparse_mixers import mixed
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

from hope_hf import HopeCache, HopeConfig, HopeForCausalLM
from hope_hf.reference import DeltaMemory

WIDTH = 8


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def write(keys, values, rate=1.0, retention=1.0, state=None, initial=None):
    """The weights [D, D] of one memory after tokens [C, D], read as `keys @ weights.mT`.

    By the loop of the equations, with which `test_equivalence.py` compares all code.
    """
    memory = DeltaMemory(torch.zeros(1, WIDTH, WIDTH).double() if initial is None else initial[None], 1)
    memory.weight = memory.weight if state is None else state[None, None]
    gates = (torch.full((1, 1), gate, dtype=torch.float64) for gate in (rate, retention))
    gates = [*gates, 1.0, torch.ones(1, 1)]
    for key, value in zip(keys[:, None, None], values[:, None, None], strict=True):
        memory.step(key, value, *gates)
    return memory.weight[0, 0]


def test_a_write_replaces_what_is_under_its_key_and_nothing_else():
    keys = torch.linalg.qr(normal(WIDTH, WIDTH)).Q
    values, other = normal(WIDTH, WIDTH, seed=1), normal(1, WIDTH, seed=2)
    stored = write(keys, values)
    torch.testing.assert_close(keys @ stored.mT, values)
    for rate in (0.3, 1.0, 1.99):
        changed = write(keys[2:3], other, rate=rate, state=stored)
        expected = values.clone()
        expected[2] = (1 - rate) * values[2] + rate * other
        torch.testing.assert_close(keys @ changed.mT, expected)


def test_what_is_not_written_decays_to_the_initial_weights():
    initial, moved = normal(WIDTH, WIDTH, seed=1), normal(WIDTH, WIDTH, seed=2)
    weights = write(*normal(2, 10, WIDTH, seed=3), rate=0.0, retention=0.9, state=moved, initial=initial)
    torch.testing.assert_close(weights, initial + 0.9**10 * (moved - initial))


def one_layer(**options):
    torch.manual_seed(0)
    return HopeForCausalLM(HopeConfig(**dict(vocab_size=8, num_hidden_layers=1) | options)).eval()


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
    """A float64 model whose memories begin at 0, and transformers' module with the same weights."""
    model = one_layer(
        hidden_size=HIDDEN, head_dim=HEAD_WIDTH, num_memory_heads=HEADS, memory_projections=[],
        memory_value_gate=False, memory_chunk_size=16,
    ).double()  # fmt: skip
    config, mixer = model.config, model.model.layers[0].mixer
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
    return model, theirs


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
def test_static_projections_and_memories_of_zero_are_the_gated_deltanet_of_transformers():
    model, theirs = build_pair()
    mixer = model.model.layers[0].mixer
    (inputs, ours) = mixed(model, normal(2, 40, HIDDEN, seed=50).requires_grad_())
    output = theirs(inputs)
    weight = normal(2, 40, HIDDEN, seed=51)
    (ours * weight).sum().backward(retain_graph=True)
    (output * weight).sum().backward()
    found = in_the_order_of_qwen({name: parameter.grad for name, parameter in mixer.named_parameters()})
    found["output"] = ours
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    expected["output"] = output
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        assert wanted.norm() > 0.1, name
        assert (found[name] - wanted).norm() <= 1e-10 * wanted.norm(), name


@torch.no_grad()
@pytest.mark.parametrize("bias, counts", [(-60.0, True), (60.0, False)])
def test_a_memory_that_does_not_erase_counts(bias, counts):
    """400 writes of a value at one key, in float32: their sum, or the value where the memory erases."""
    model = one_layer(hidden_size=64, head_dim=16, num_memory_heads=4, memory_erase_bias=[bias, bias])
    gates = model.model.layers[0].mixer.gates
    gates.gate_proj.weight.zero_()
    gates.learning_rate_bias.fill_(20.0)
    gates.dt_bias.fill_(-40.0)
    token = normal(1, 1, 64).float()
    cache = HopeCache(model.config)
    largest = []
    for _ in range(4):
        model(inputs_embeds=token.expand(1, 100, 64), cache=cache)
        largest.append(cache.state_tensors()["0.current.0"].abs().max().item())
    expected = [largest[0] * (number if counts else 1) for number in (1, 2, 3, 4)]
    assert largest[0] > 0.1 and largest == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("options", [{}, dict(memory_rule="paper")], ids=["delta", "paper"])
def test_gates_begin_where_the_configuration_says(options):
    model = one_layer(
        hidden_size=32, head_dim=16, num_memory_heads=4, memory_learning_rate_max=1.5,
        memory_learning_rate_bias=[-1.0, 2.0], retention_bias=[0.0, 6.0], **options,
    )  # fmt: skip
    rate, retention = model.model.layers[0].mixer.gate_values(torch.zeros(1, 1, 32))
    torch.testing.assert_close(rate[0, 0], 1.5 * torch.tensor([-1.0, 0.0, 1.0, 2.0]).sigmoid())
    torch.testing.assert_close(retention[0, 0], torch.tensor([0.0, 2.0, 4.0, 6.0]).sigmoid())
