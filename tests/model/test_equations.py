"""The paper's equations written down once more, literally, against the module."""

import pytest
import torch
import torch.nn.functional as F
from mixers import build_mixer, run_fast

RULE = dict(
    depth=2,
    read_mode="exclusive",
    erase="both",
    hidden_norm="none",
    target_norm=False,
    error_clip=None,
    decay_to="zero",
    inner_rate=1.0,
)
LITERAL = dict(
    memory_rule="paper", paper_rule=RULE, memory_chunk_size=1, projection_memory_rate=1.0, conv_kernel_size=1
)


def unit(z):
    return z / (z @ z + 1e-6).sqrt()


def literal_loop(mixer, hidden_states):
    """Equations (86) to (89) for one head at a time; what the paper leaves open (gates, norms, output) as in HOPE.

    M_t = M_{t-1} (alpha I - eta u u^T) - eta grad L(M_{t-1}; k, vhat) for every layer with its own input u, and
    L = |M(k) - vhat|^2 / 2 with vhat = M_{t-1}(v) a constant.
    """
    config = mixer.config
    batch_size, length, _ = hidden_states.shape
    heads, width = config.num_memory_heads, config.head_dim
    names = ["k", "v", "content"]
    reads = torch.zeros(batch_size, length, heads, width, dtype=hidden_states.dtype)
    for b in range(batch_size):
        for h in range(heads):
            initial = mixer.initial_memory
            layers = {name: (initial.outer[h, n], initial.inner[h, n]) for n, name in enumerate(names)}

            def M(name, z, layers=layers):
                W1, W2 = layers[name]
                return z + W1 @ F.silu(W2 @ z)

            head = slice(h * width, (h + 1) * width)
            convolve = [c.weight[head, 0, 0] for c in (mixer.k_conv1d, mixer.v_conv1d, mixer.q_conv1d)]
            for t in range(length):
                n = hidden_states[b, t]
                x, q = mixer.in_proj.weight[head] @ n, mixer.q_proj.weight[head] @ n
                k, v = M("k", x), M("v", x)
                k, v, q = (F.silu(c * z) for c, z in zip(convolve, (k, v, q), strict=True))
                k, q = unit(k), unit(q)
                gates = mixer.gates
                rate, forgetting = (gates.gate_proj.weight @ n).view(2, heads)[:, h]
                eta = torch.sigmoid(rate + gates.learning_rate_bias[h])
                alpha = torch.sigmoid(-forgetting - gates.dt_bias[h])
                reads[b, t, h] = M("content", q)
                for name in names:
                    W1, W2 = layers[name]
                    target = M(name, v).detach()
                    weights = [W.detach().requires_grad_() for W in (W1, W2)]
                    loss = (k + weights[0] @ F.silu(weights[1] @ k) - target).square().sum() / 2
                    grad1, grad2 = torch.autograd.grad(loss, weights)
                    s = F.silu(W2 @ k)
                    identity1, identity2 = torch.eye(s.numel()).to(s), torch.eye(k.numel()).to(k)
                    layers[name] = (
                        W1 @ (alpha * identity1 - eta * torch.outer(s, s)) - eta * grad1,
                        W2 @ (alpha * identity2 - eta * torch.outer(k, k)) - eta * grad2,
                    )
    normed = reads * torch.rsqrt(reads.square().mean(-1, keepdim=True) + config.rms_norm_eps) * mixer.o_norm.weight
    return mixer.o_proj(normed.flatten(2) * F.silu(mixer.g_proj(hidden_states)))


@torch.no_grad()
def small(mixer):
    """Gentle gates: the literal rule, unclipped, is not stable at large ones."""
    mixer.gates.learning_rate_bias.sub_(3.0)
    return mixer


def test_chunks_of_one_token_are_the_papers_equations():
    mixer = small(build_mixer(**LITERAL))
    hidden_states = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    with torch.enable_grad():
        expected = literal_loop(mixer, hidden_states)
    actual = run_fast(mixer, hidden_states)
    assert actual.isfinite().all()
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    "change",
    [
        dict(error_clip=0.01),
        dict(decay_to="initial"),
        dict(erase="output"),
        dict(hidden_norm="unit"),
        dict(read_mode="inclusive"),
        dict(inner_rate=0.1),
        dict(target_norm=True),
        dict(memory_chunk_size=4),
        dict(projection_memory_rate=0.1),
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_addition_differs_from_the_papers_equations(change):
    """The control of the test above: no option is without effect."""
    hidden_states = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    literal = run_fast(small(build_mixer(**LITERAL)), hidden_states)
    of_rule = {name: value for name, value in change.items() if name in RULE}
    options = LITERAL | {"paper_rule": RULE | of_rule} if of_rule else LITERAL | change
    changed = run_fast(small(build_mixer(**options)), hidden_states)
    assert (literal - changed).abs().max() > 1e-7
