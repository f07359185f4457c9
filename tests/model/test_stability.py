"""Long texts: state and output stay finite and bounded at any gates, the memory alive at the default ones."""

import pytest
import torch

from hope_hf import HopeConfig, HopeForCausalLM
from hope_hf.model.chunk_layout import plan_chunks

LENGTH = 16_384
# what the default suite can afford; the long tests read all
SHORT = 8_192
# every head has memories of its own: five heads are five random initialisations read at once
WIDTH, HEADS = 160, 5


def build_mixer(seed=0, **options):
    """A freshly initialised mixer with the default rule and chunks; of depth 2, harder to bound, unless asked."""
    torch.manual_seed(seed)
    shape = {"hidden_size": WIDTH, "head_dim": WIDTH // HEADS, "num_attention_heads": HEADS, "memory_depth": 2}
    config = HopeConfig(vocab_size=8, num_hidden_layers=1, **(shape | options))
    return HopeForCausalLM(config).model.layers[0].mixer


def streams(length, seed, rows=1):
    """Inputs of unit variance [3 * rows, length, WIDTH]: iid, AR(0.98), runs of 600 equal tokens."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(3 * rows, length, WIDTH, generator=generator)
    iid, correlated, runs = noise.chunk(3)
    correlated = correlated.clone()
    for t in range(1, length):
        correlated[:, t] = 0.98 * correlated[:, t - 1] + (1 - 0.98**2) ** 0.5 * correlated[:, t]
    runs = runs[:, torch.arange(length) // 600]
    return torch.cat([iid, correlated, runs])


@pytest.fixture(scope="module")
def long_streams():
    return streams(SHORT, seed=0)


def read(mixer, hidden_states):
    plan = plan_chunks(mixer.config, hidden_states.shape[:2], hidden_states.device, None, None, None)
    with torch.no_grad():
        return mixer(hidden_states, plan, need_state=True)


def largest_weight(state):
    return max(tensor.abs().max().item() for name, tensor in state.items() if ".run." in name)


GATES = {
    "default": ({}, 0.0, 0.0, 0.0),
    "always-write": ({}, 10.0, 0.0, 0.0),
    "never-forget": ({}, 10.0, 15.0, 0.0),
    "always-forget": ({}, 10.0, -15.0, 0.0),
    "largest-rate": (dict(memory_learning_rate_max=1.99), 10.0, 15.0, 0.0),
    "momentum": (dict(memory_momentum=True), 0.0, 0.0, 0.0),
    "strong-momentum": (dict(memory_momentum=True, projection_chunk_size=128), 10.0, 15.0, 5.0),
    "decay-to-zero": (dict(memory_decay_to="zero"), 10.0, 15.0, 0.0),
    "depth-1": (dict(memory_depth=1), 10.0, 15.0, 0.0),
    "depth-1-largest-rate": (dict(memory_depth=1, memory_learning_rate_max=1.99), 10.0, 15.0, 0.0),
    "depth-1-momentum-largest-rate": (
        dict(memory_depth=1, memory_learning_rate_max=1.99, memory_momentum=True),
        10.0,
        15.0,
        5.0,
    ),
    "one-rate-for-all": (dict(inner_layer_rate=1.0, projection_memory_rate=1.0), 10.0, 15.0, 0.0),
}


def read_with_gates(long_streams, options, rate, retention, momentum, seed=0):
    mixer = build_mixer(seed, **options)
    with torch.no_grad():
        mixer.gates.learning_rate_bias.add_(rate)
        mixer.gates.retention_bias.add_(retention)
        if momentum:
            mixer.momentum_proj.bias.add_(momentum)
    output, state = read(mixer, long_streams)
    return output, largest_weight(state)


@pytest.mark.parametrize("gates", GATES.values(), ids=GATES.keys())
def test_long_texts_stay_bounded(long_streams, gates):
    """The gate biases are moved to where the sigmoid saturates."""
    output, largest = read_with_gates(long_streams, *gates)
    assert output.isfinite().all()
    assert largest < 1e3


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("gates", GATES.values(), ids=GATES.keys())
def test_more_initialisations_stay_bounded(gates, seed):
    """Other static maps, and other texts."""
    output, largest = read_with_gates(streams(LENGTH, seed), *gates, seed=seed)
    assert output.isfinite().all()
    assert largest < 1e3


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["largest-rate", "strong-momentum", "depth-1-largest-rate", "depth-1-momentum-largest-rate"]
)
def test_a_hundred_thousand_tokens_stay_bounded(name):
    """Four times the text: a layer that neither erases nor forgets grows 2 times, like a random walk.

    At a rate of 2, which the config refuses, weights grow 3 to 4 times, in proportion.
    """
    long_streams = streams(100_000, seed=5)
    _, before = read_with_gates(long_streams[:, :25_000], *GATES[name])
    output, largest = read_with_gates(long_streams, *GATES[name])
    assert output.isfinite().all()
    assert largest < 1e3 and largest < 2.6 * before


@pytest.mark.parametrize("name", ["never-forget", "strong-momentum"])
def test_without_the_clip_the_same_gates_diverge(name):
    """The control: the bound above is the clip's doing. How far a seed goes depends on the machine's rounding."""
    options, *biases = GATES[name]
    unclipped = options | dict(memory_error_clip=None)
    reached = (read_with_gates(streams(SHORT, seed), unclipped, *biases, seed=seed)[1] for seed in (1, 2, 3))
    assert not all(largest < 1e3 for largest in reached)


@pytest.mark.parametrize("kind", ["iid", "AR(0.98)"])
def test_the_memory_stays_alive(kind):
    """At initialisation: its share of the read at positions 7K to 8K over that at 64 to 128, mean of 8 sequences."""
    mixer = build_mixer()
    iid, correlated, _ = streams(8192, seed=1, rows=8).chunk(3)
    share = mixer.contribution(iid if kind == "iid" else correlated).mean((0, 2))
    assert share[7168:].mean() >= 0.5 * share[64:128].mean()


def test_a_memory_that_decays_to_zero_dies():
    """The control: with retention towards zero the same measure falls, as the paper's literal rule does."""
    shares = []
    for target in ("initial", "zero"):
        mixer = build_mixer(memory_decay_to=target, memory_learning_rate_max=1e-5)
        share = mixer.contribution(streams(4096, seed=1)[:1]).mean((0, 2))
        shares.append(share[-512:].mean() / share[64:128].mean())
    assert shares[0] > 0.5 > shares[1]
