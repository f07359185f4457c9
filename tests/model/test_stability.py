"""Long texts: state and output stay finite and bounded at any gates."""

import pytest
import torch

from hope_hf import HopeCache, HopeConfig, HopeForCausalLM
from hope_hf.model import memory_paper

LENGTH = 16_384
# what the default suite can afford; the long tests read all
SHORT = 8_192
# every head has memories of its own: five heads are five random initialisations read at once
WIDTH, HEADS = 160, 5


def build(seed=0, **options):
    """A freshly initialised model with the default chunks."""
    torch.manual_seed(seed)
    shape = {"hidden_size": WIDTH, "head_dim": WIDTH // HEADS, "num_memory_heads": HEADS}
    return HopeForCausalLM(HopeConfig(vocab_size=8, num_hidden_layers=1, **shape, **options)).eval()


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


# options, and what is added to the biases of learning rate and retention, so that the sigmoid saturates
NEVER_FORGET, ALWAYS_FORGET = (10.0, 15.0), (10.0, -15.0)
LARGEST = dict(memory_learning_rate_max=1.99)
PAPER = dict(memory_rule="paper", memory_depth=2)
GATES = {
    "never-forget": ({}, *NEVER_FORGET),
    "largest-rate": (LARGEST, *NEVER_FORGET),
    "made-keys-largest-rate": (LARGEST | dict(memory_projections=["k"]), *NEVER_FORGET),
    "static-largest-rate": (LARGEST | dict(memory_projections=[]), *NEVER_FORGET),
    "paper-never-forget": (PAPER, *NEVER_FORGET),
    "paper-always-forget": (PAPER, *ALWAYS_FORGET),
    "paper-largest-rate": (PAPER | LARGEST, *NEVER_FORGET),
    "paper-1-largest-rate": (PAPER | LARGEST | dict(memory_depth=1), *NEVER_FORGET),
}
QUICK = ["made-keys-largest-rate", "paper-always-forget", "paper-largest-rate"]


def read_with_gates(long_streams, options, rate, retention, seed=0):
    """Logits, and the largest weight after the text."""
    model = build(seed, **options)
    cache, gates = HopeCache(model.config), model.model.layers[0].mixer.gates
    with torch.no_grad():
        gates.learning_rate_bias.add_(rate)
        gates.dt_bias.sub_(retention)
        logits = model(inputs_embeds=long_streams, cache=cache).logits
    weights = [tensor for name, tensor in cache.state_tensors().items() if ".current." in name]
    return logits, max(weight.abs().max().item() for weight in weights)


@pytest.mark.parametrize("name", QUICK)
def test_long_texts_stay_bounded(long_streams, name):
    output, largest = read_with_gates(long_streams, *GATES[name])
    assert output.isfinite().all()
    assert largest < 1e3


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", GATES)
def test_more_initialisations_stay_bounded(name, seed):
    """Other static maps, and other texts."""
    output, largest = read_with_gates(streams(LENGTH, seed), *GATES[name], seed=seed)
    assert output.isfinite().all()
    assert largest < 1e3


@pytest.mark.long
@pytest.mark.parametrize("name", ["largest-rate", "static-largest-rate", "paper-largest-rate", "paper-1-largest-rate"])
def test_a_hundred_thousand_tokens_stay_bounded(name):
    """Four times the text: a layer that neither erases nor forgets grows 2 times, like a random walk.

    At a rate of 2, which the config refuses, weights grow 3 to 4 times, in proportion.
    """
    text = streams(100_000, seed=5)
    _, before = read_with_gates(text[:, :25_000], *GATES[name])
    output, largest = read_with_gates(text, *GATES[name])
    assert output.isfinite().all()
    assert largest < 1e3 and largest < 2.6 * before


def test_without_the_clip_the_papers_rule_diverges(monkeypatch):
    """The control: the bound above is the clip's doing. How far a seed goes depends on the machine's rounding."""
    monkeypatch.setattr(memory_paper, "ERROR_CLIP", 1e9)
    reached = (read_with_gates(streams(SHORT, seed), *GATES["paper-never-forget"], seed=seed)[1] for seed in (1, 2, 3))
    assert not all(largest < 1e3 for largest in reached)
