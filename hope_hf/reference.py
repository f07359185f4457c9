"""The self-modifying mixer token by token, to be read with the paper; the slow reference for `hope_hf.model`.

Nothing is parallel over tokens here and no update is derived by hand: errors come from autograd of the inner loss.
Only tests use this file. Vectors are rows, so a memory acts as `z W^T`. Axes of a tensor: B sequence, H head, D head
width, M memory width; equation numbers are those of arXiv 2512.24695.
"""

import torch
import torch.nn.functional as F

HIDDEN_NORM_FLOOR = 0.1


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-12).sqrt()


def matvec(weight, x):
    """`W x` for one vector per sequence and head: [B, H, o, i], [B, H, i] -> [B, H, o]."""
    return torch.einsum("bhoi,bhi->bho", weight, x)


def outer(a, b):
    return torch.einsum("bho,bhi->bhoi", a, b)


class Memory:
    """One memory per sequence and head: M(z) = z + W1 act(W2 z), equation (89)."""

    def __init__(self, initial, batch_size, config):
        self.config = config
        self.initial = [weight.unsqueeze(0).expand(batch_size, -1, -1, -1) for weight in initial]
        self.weights = list(self.initial)
        # the weights at the start of the current chunk
        self.snap = list(self.initial)
        self.momentum = [torch.zeros_like(weight) for weight in self.initial]

    def hidden(self, pre):
        s = F.silu(pre)
        return unit(s) if self.config.memory_hidden_norm == "unit" else s

    def __call__(self, z, weights=None):
        weights = self.weights if weights is None else weights
        if len(weights) == 1:
            return z + matvec(weights[0], z)
        return z + matvec(weights[1], self.hidden(matvec(weights[0], z)))

    def target(self, v):
        """Equation (84): the memory computes its own target, with the weights of the chunk's start."""
        return self(unit(v) if self.config.memory_target_norm else v, self.snap)

    def layer_inputs_and_errors(self, k, target):
        """u and delta = dL/d(W u) of each layer for L = |M(k) - target|^2, by autograd at the chunk's start."""
        config = self.config
        # L/2 is equation (93), L the exact gradient of (88)
        scale = config.memory_gradient_factor / 2
        if len(self.snap) == 1:
            product = matvec(self.snap[0], k)
            loss = scale * (k + product - target).square().sum()
            (error,) = torch.autograd.grad(loss, product, create_graph=True)
            return [(k, error)]
        pre = matvec(self.snap[0], k)
        hidden = self.hidden(pre)
        product = matvec(self.snap[1], hidden)
        loss = scale * (k + product - target).square().sum()
        inner_error, outer_error = torch.autograd.grad(loss, [pre, product], create_graph=True)
        if config.memory_hidden_norm == "unit":
            # a tiny hidden activation passes no more gradient than one of norm 0.1
            norm = (F.silu(pre).square().sum(-1, keepdim=True) + 1e-12).sqrt()
            inner_error = inner_error * (norm / HIDDEN_NORM_FLOOR).clamp(max=1.0)
        return [(k, inner_error), (hidden, outer_error)]

    def step(self, k, v, eta, alpha, beta, rate):
        """Equation (88): W_t = W_{t-1} (alpha I - e u u^T) - w delta u^T, every layer. eta, alpha, beta: [B, H]."""
        config = self.config
        layers = self.layer_inputs_and_errors(k, self.target(v))
        last = len(layers) - 1
        weights = []
        for index, (u, error) in enumerate(layers):
            if config.memory_error_clip is not None:
                norm = (error.square().sum(-1, keepdim=True) + 1e-12).sqrt()
                error = error * (config.memory_error_clip / norm).clamp(max=1.0)
            eta_layer = rate * eta
            if index < last:
                eta_layer = eta_layer * config.inner_layer_rate
            elif last > 0 and config.memory_hidden_norm == "step":
                eta_layer = eta_layer / u.square().sum(-1).clamp(min=1.0)
            erases = config.memory_erase == "both" or (config.memory_erase == "output" and index == last)
            old, initial = self.weights[index], self.initial[index]
            new = alpha[..., None, None] * old
            if config.memory_decay_to == "initial":
                new = new + (1 - alpha)[..., None, None] * initial
            if erases:
                new = new - eta_layer[..., None, None] * outer(matvec(old, u), u)
            write = -eta_layer[..., None, None] * outer(error, u)
            if beta is not None:
                # S_t = beta S_{t-1} - w delta u^T, with the write scaled by 1 - beta
                write = beta[..., None, None] * self.momentum[index] + (1 - beta)[..., None, None] * write
                self.momentum[index] = write
            weights.append(new + write)
        self.weights = weights

    def close_chunk(self):
        self.snap = list(self.weights)


def causal_convolution(weight, history):
    """One token of a depthwise convolution: weight [H * D, 1, K], history: the last K inputs [B, H, D] or fewer."""
    heads = history[-1].shape[1]
    taps = weight.view(heads, -1, weight.shape[-1])
    reach = taps.shape[-1]
    return sum(taps[..., reach - 1 - back] * history[-1 - back] for back in range(min(reach, len(history))))


def self_modifying_titans(mixer, hidden_states):
    """Output [B, T, hidden_size] of `SelfModifyingTitans` for texts without padding that begin at token 0.

    Args:
        mixer: the module whose weights are used.
        hidden_states: its input [B, T, hidden_size].
    """
    config = mixer.config
    batch_size, length, _ = hidden_states.shape
    heads = config.num_attention_heads
    names = mixer.memory_names
    dtype = hidden_states.dtype

    def initial(module, index):
        layers = [module.outer] if module.inner is None else [module.inner, module.outer]
        return [layer[:, index] for layer in layers]

    content = Memory(initial(mixer.content_memory, 0), batch_size, config)
    others = {
        name: Memory(initial(mixer.projection_memory, index), batch_size, config) for index, name in enumerate(names)
    }
    history = {"k": [], "v": [], "q": []}
    gates = mixer.gates
    outputs = []
    for t in range(length):
        n = hidden_states[:, t]
        x = mixer.in_proj(n).view(batch_size, heads, -1)
        q = mixer.q_proj(n).view(batch_size, heads, -1)

        # (83): keys, values, learning rate and retention from the memories at their chunk's start (90)
        raw = {name: others[name](x, others[name].snap) for name in ("k", "v") if name in others}
        if not config.adaptive_k:
            raw["k"] = mixer.k_proj(n).view(batch_size, heads, -1)
        if not config.adaptive_v:
            raw["v"] = mixer.v_proj(n).view(batch_size, heads, -1)
        raw["q"] = others["q"](q, others["q"].snap) if config.adaptive_q else q
        made = {}
        for name, convolution in (("k", mixer.k_conv1d), ("v", mixer.v_conv1d), ("q", mixer.q_conv1d)):
            history[name].append(raw[name])
            made[name] = F.silu(causal_convolution(convolution.weight, history[name]))
        k, v, q = unit(made["k"]), made["v"], unit(made["q"])
        if config.gate_mode == "memory":
            m_eta, m_alpha = (others[name](x, others[name].snap) for name in ("learning_rate", "retention"))
            eta_logit = (unit(m_eta) * gates.learning_rate_readout).sum(-1)
            alpha_logit = (unit(m_alpha) * gates.retention_readout).sum(-1)
        else:
            eta_logit, alpha_logit = gates.gate_proj(n).view(batch_size, 2, heads).unbind(1)
        eta = config.memory_learning_rate_max * torch.sigmoid(eta_logit + gates.learning_rate_bias)
        alpha = torch.sigmoid(alpha_logit + gates.retention_bias)
        beta = torch.sigmoid(mixer.momentum_proj(n)) if config.memory_momentum else None

        # (88) for every memory, and the read of (86) before or after it
        if config.memory_read_mode == "start":
            y = content(q, content.snap)
        elif config.memory_read_mode == "exclusive":
            y = content(q)
        content.step(k, v, eta, alpha, beta, rate=1.0)
        if config.memory_read_mode == "inclusive":
            y = content(q)
        for memory in others.values():
            memory.step(k, v, eta, alpha, beta, rate=config.projection_memory_rate)

        # (90): two chunk sizes
        if (t + 1) % config.memory_chunk_size == 0:
            content.close_chunk()
        if (t + 1) % config.projection_chunk_size == 0:
            for memory in others.values():
                memory.close_chunk()

        normed = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + mixer.o_norm.variance_epsilon)
        normed = (normed * mixer.o_norm.weight).reshape(batch_size, -1)
        outputs.append(mixer.o_proj(normed * F.silu(mixer.g_proj(n))))
    return torch.stack(outputs, dim=1).to(dtype)
