"""The self-modifying mixer token by token, for reading beside the paper; slow, and equal to `hope_hf.model`.

Nothing is parallel over tokens here, and no gradient of the paper's rule is derived by hand: autograd of the inner
loss gives the errors. Only tests use this file. Vectors are rows, so a memory acts as `z W^T`. Axes of a tensor: B
sequence, H head, D head width; equation numbers are those of arXiv 2512.24695.
"""

import torch
import torch.nn.functional as F

NORM_EPSILON = 1e-6
LEAST_ERASED = 1e-7
HIDDEN_NORM_FLOOR = 0.1
ERROR_CLIP = 2.0
INNER_RATE = 0.1


def norm(x):
    """The norm of each vector, with an epsilon that keeps it above 0."""
    return (x.square().sum(-1, keepdim=True) + NORM_EPSILON).sqrt()


def unit(x):
    return x / norm(x)


def matvec(weight, x):
    """`W x` for one vector per sequence and head: [B, H, o, i], [B, H, i] -> [B, H, o]."""
    return torch.einsum("bhoi,bhi->bho", weight, x)


def outer(a, b):
    """`a b^T`: [B, H, o], [B, H, i] -> [B, H, o, i]."""
    return torch.einsum("bho,bhi->bhoi", a, b)


def of_vectors(gate):
    """A gate [B, H] as a factor of vectors [B, H, D]."""
    return gate[..., None]


def of_matrices(gate):
    """A gate [B, H] as a factor of matrices [B, H, o, i]."""
    return gate[..., None, None]


def rows_of(weight, batch_size):
    """A weight [H, o, i] for every sequence [B, H, o, i]."""
    return weight.unsqueeze(0).expand(batch_size, -1, -1, -1)


class DeltaMemory:
    """One memory of every sequence and head under the gated delta rule: M(z) = W z, whose weights decay to W_0."""

    def __init__(self, initial, batch_size):
        self.initial = rows_of(initial, batch_size)
        self.weight = self.initial
        self.chunk_start = self.initial

    def __call__(self, z):
        return matvec(self.weight, z)

    def at_chunk_start(self, z):
        return matvec(self.chunk_start, z)

    def step(self, k, v, eta, alpha, rate, erased):
        """`W = W' + rho eta (v - zeta W' k) k^T` with `W' = W_0 + alpha (W - W_0)`. eta, alpha, zeta: [B, H]."""
        decayed = self.initial + of_matrices(alpha) * (self.weight - self.initial)
        error = v - of_vectors(erased) * matvec(decayed, k)
        self.weight = decayed + rate * of_matrices(eta) * outer(error, k)

    def close_chunk(self):
        self.chunk_start = self.weight


class PaperMemory:
    """One memory of every sequence and head under the paper's rule: M(z) = z + W1 act(W2 z), equation (89)."""

    def __init__(self, initial, batch_size):
        self.initial = [rows_of(weight, batch_size) for weight in initial]
        self.weights = self.initial
        self.chunk_start = self.initial

    def __call__(self, z):
        return self.apply(self.weights, z)

    def at_chunk_start(self, z):
        return self.apply(self.chunk_start, z)

    @staticmethod
    def apply(weights, z):
        """`M(z)` with these weights: (W,) or (W2, W1)."""
        if len(weights) == 1:
            return z + matvec(weights[0], z)
        hidden = unit(F.silu(matvec(weights[0], z)))
        return z + matvec(weights[1], hidden)

    def target(self, v):
        """Equation (84): the target `M(v)`, with the weights of the chunk's start."""
        return self.at_chunk_start(unit(v))

    def layer_inputs_and_errors(self, k, target):
        """u and delta = dL/d(W u) of each layer, L = |M(k) - target|^2 / 2 (93), by autograd at the chunk's start."""
        if len(self.chunk_start) == 1:
            product = matvec(self.chunk_start[0], k)
            loss = (k + product - target).square().sum() / 2
            (error,) = torch.autograd.grad(loss, product, create_graph=True)
            return [(k, error)]
        pre = matvec(self.chunk_start[0], k)
        hidden = unit(F.silu(pre))
        product = matvec(self.chunk_start[1], hidden)
        loss = (k + product - target).square().sum() / 2
        inner_error, outer_error = torch.autograd.grad(loss, [pre, product], create_graph=True)
        # a hidden activation of norm below 0.1 passes no larger error than one of norm 0.1
        inner_error = inner_error * (norm(F.silu(pre)) / HIDDEN_NORM_FLOOR).clamp(max=1.0)
        return [(k, inner_error), (hidden, outer_error)]

    def step(self, k, v, eta, alpha, rate, _):
        """Equation (88) for every layer: W_t = W' - e W_{t-1} u u^T - w delta u^T. eta, alpha: [B, H].

        W' = W_0 + alpha (W_{t-1} - W_0): weights decay to their initial values. Errors are clipped; the last layer
        alone erases; steps of the layer before it are a tenth.
        """
        layers = self.layer_inputs_and_errors(k, self.target(v))
        weights = []
        for index, (u, error) in enumerate(layers):
            is_last = index == len(layers) - 1
            error = error * (ERROR_CLIP / norm(error)).clamp(max=1.0)
            step = of_matrices(rate * eta * (1.0 if is_last else INNER_RATE))
            weight = self.weights[index]
            initial = self.initial[index]
            new = of_matrices(alpha) * weight + of_matrices(1 - alpha) * initial
            if is_last:
                new = new - step * outer(matvec(weight, u), u)
            weights.append(new - step * outer(error, u))
        self.weights = weights

    def close_chunk(self):
        self.chunk_start = self.weights


def causal_convolution(weight, history):
    """One token of a depthwise convolution: weight [H * D, 1, K], history: the last K inputs [B, H, D] or fewer."""
    heads = history[-1].shape[1]
    taps = weight.view(heads, -1, weight.shape[-1])
    # the last tap is that of the token itself
    output = 0
    for back in range(1, min(taps.shape[-1], len(history)) + 1):
        output = output + taps[..., -back] * history[-back]
    return output


def make_memories(mixer, batch_size):
    """The memories at the start of a text: those that project keys and values, by name, and the content memory."""
    config = mixer.config
    layers = dict(mixer.initial_memory.named_parameters())
    memories = {}
    for index, name in enumerate([*config.memory_projections, "content"]):
        if config.memory_rule == "paper":
            initial = [layer[:, index] for layer in layers.values()]
            memories[name] = PaperMemory(initial, batch_size)
            continue
        initial = layers["weight"].mT
        if name != "content":
            # memories that project keys and values begin at the identity
            initial = torch.eye(config.head_dim, dtype=initial.dtype).expand_as(initial)
        memories[name] = DeltaMemory(initial, batch_size)
    return memories, memories.pop("content")


def keys_values_queries(mixer, n, makers, history):
    """Key, value and query [B, H, D] of a token (83); `history` gets what the convolutions read."""
    heads = mixer.config.num_memory_heads
    projections = {"k": mixer.k_proj, "v": mixer.v_proj, "q": mixer.q_proj}
    convolutions = {"k": mixer.k_conv1d, "v": mixer.v_conv1d, "q": mixer.q_conv1d}
    outputs = []
    for name, projection in projections.items():
        projection = mixer.in_proj if projection is None else projection
        raw = projection(n).view(len(n), heads, -1)
        if name in makers:
            # keys and values from the memories at their chunk's start (90)
            raw = makers[name].at_chunk_start(raw)
        history[name].append(raw)
        outputs.append(F.silu(causal_convolution(convolutions[name].weight, history[name])))
    k, v, q = outputs
    return unit(k), v, unit(q)


def make_gates(mixer, n):
    """Of a token: eta, alpha, zeta and the norm of values, [B, H] each; without their gates 1 and None."""
    gates = mixer.gates
    logits = gates.gate_proj(n).view(len(n), -1, mixer.config.num_memory_heads)
    rate, decay, *more = logits.unbind(1)
    eta = mixer.config.memory_learning_rate_max * torch.sigmoid(rate + gates.learning_rate_bias)
    steepness = 1.0 if gates.A_log is None else gates.A_log.exp()
    alpha = torch.exp(-F.softplus(decay + gates.dt_bias) * steepness)
    value_norm = None
    if gates.value_bias is not None:
        value_norm = 2 * torch.sigmoid(more[0] + gates.value_bias)
    erased = torch.ones_like(eta)
    if gates.erase_bias is not None:
        share = torch.sigmoid(more[1] + gates.erase_bias)
        erased = LEAST_ERASED + (1 - LEAST_ERASED) * share
    return eta, alpha, erased, value_norm


def self_modifying_titans(mixer, hidden_states):
    """Output [B, T, hidden_size] of `SelfModifyingTitans` for texts without padding that begin at token 0.

    Args:
        mixer: the module whose weights are used.
        hidden_states: its input [B, T, hidden_size].
    """
    config = mixer.config
    batch_size, length, _ = hidden_states.shape
    makers, content = make_memories(mixer, batch_size)
    history = {"k": [], "v": [], "q": []}
    outputs = []
    for t in range(length):
        n = hidden_states[:, t]
        k, v, q = keys_values_queries(mixer, n, makers, history)
        eta, alpha, erased, value_norm = make_gates(mixer, n)
        if value_norm is not None:
            v = of_vectors(value_norm) * unit(v)

        # (88) for every memory, and the read after it (82)
        content.step(k, v, eta, alpha, 1.0, erased)
        y = content(q)
        if mixer.value_share is not None:
            y = y + mixer.value_share.weight[:, None] * v
        for memory in makers.values():
            memory.step(k, v, eta, alpha, config.projection_memory_rate, erased)

        # (90)
        if (t + 1) % config.memory_chunk_size == 0:
            for memory in (content, *makers.values()):
                memory.close_chunk()

        mean_square = y.square().mean(-1, keepdim=True)
        normed = y * torch.rsqrt(mean_square + mixer.o_norm.variance_epsilon)
        normed = (normed * mixer.o_norm.weight).reshape(batch_size, -1)
        outputs.append(mixer.o_proj(normed * F.silu(mixer.g_proj(n))))
    return torch.stack(outputs, dim=1)
