"""Each mixer as its equations say, for one document without padding: query by query, token by token.

Sparse attention is as the paper writes it (arXiv 2502.11089, equations 5 to 12); short convolutions and the
normalisation of queries and keys, which the paper has not, come first. Memories are `hope_hf.reference`.
"""

import torch

from hope_hf.reference import self_modifying_titans


def softmax_read(query, keys, values):
    """[D] of a query [D] and keys [M, D]; 0 without keys."""
    if not len(keys):
        return torch.zeros_like(query), query.new_zeros(0)
    attention = (keys @ query / query.shape[-1] ** 0.5).softmax(0)
    return attention @ values, attention


def rotated(x, angles):
    """Rotary positions of heads [T, H, D], of which `angles` are cosines and sines [1, T, D]."""
    cos, sin = (part[0, :, None] for part in angles)
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


def convolved(x, weight):
    """Each channel of a text [T, C] with its own taps [C, 1, K], the last of which is the token's own."""
    width = weight.shape[-1]
    rows = [
        sum(weight[:, 0, width - 1 - back] * x[t - back] for back in range(min(width, t + 1))) for t in range(len(x))
    ]
    return torch.stack(rows)


def normed(x, weight, epsilon):
    return weight * x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt()


def chosen_blocks(importance: list[float], sizes) -> list[int]:
    """Blocks of the query whose own block is the last: itself, the first, the one before, then the most important."""
    own = len(importance) - 1
    order = list(dict.fromkeys([own, 0, max(own - 1, 0), *sorted(range(own), key=lambda i: -importance[i])]))
    return order[: sizes.top_k]


def dense_sparse(mixer, hidden_states, angles):
    """The output [T, hidden_size] of a `HopeSparseAttention` for one document [T, hidden_size], and blocks read."""
    config, sizes = mixer.config, mixer.sizes
    width, stride, block = config.head_dim, sizes.stride, sizes.block
    maps = ((mixer.q_proj, mixer.q_conv1d), (mixer.k_proj, mixer.k_conv1d), (mixer.v_proj, mixer.v_conv1d))
    query, key, value = (
        convolved(projection(hidden_states), convolution.weight).unflatten(-1, (-1, width))
        for projection, convolution in maps
    )
    query, key = (
        rotated(normed(x, norm.weight, config.rms_norm_eps), angles)
        for x, norm in ((query, mixer.q_norm), (key, mixer.k_norm))
    )
    gates = mixer.branch_proj(hidden_states).unflatten(-1, (-1, 3)).sigmoid()
    heads, shared = query.shape[1], key.shape[1]
    group = heads // shared
    outputs, read = [], []
    for t in range(len(hidden_states)):
        reads = []
        for h in range(shared):
            whole = range(0, t + 2 - stride, stride)
            small_keys, small_values = (
                torch.stack([(compress.weight[h] * x[i : i + stride, h]).sum(0) for i in whole] or [x[:0, h].sum(0)])[
                    : len(whole)
                ]
                for compress, x in ((mixer.k_compress, key), (mixer.v_compress, value))
            )
            members = range(h * group, (h + 1) * group)
            compressed = [softmax_read(query[t, m], small_keys, small_values) for m in members]
            importance = [0.0] * (t // block + 1)
            for _, attention in compressed:
                for z, weight in enumerate(attention.tolist()):
                    importance[z * stride // block] += weight
            blocks = chosen_blocks(importance, sizes)
            slots = [i for y in blocks for i in range(y * block, (y + 1) * block) if i <= t]
            near = range(max(0, t - sizes.window + 1), t + 1)
            for m, (first, _) in zip(members, compressed, strict=True):
                second = softmax_read(query[t, m], key[slots, h], value[slots, h])[0]
                third = softmax_read(query[t, m], key[near.start : near.stop, h], value[near.start : near.stop, h])[0]
                reads.append(gates[t, m] @ torch.stack([first, second, third]))
            read.append(set(blocks))
        outputs.append(torch.cat(reads))
    return mixer.o_proj(torch.stack(outputs)), read


def turned(x, distances, theta=10000.0):
    """Heads [D] turned by each of the distances [N], in tokens: [N, D]."""
    frequencies = theta ** -(torch.arange(0, len(x), 2, dtype=x.dtype) / len(x))
    angles = (distances[:, None] * frequencies).repeat(1, 2)
    low, high = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat([-high, low], dim=-1) * angles.sin()


def windowed(mixer, hidden_states):
    """The output [T, hidden_size] of softmax attention, with a window or without, for one document."""
    config = mixer.config
    is_whole = config.layer_types[mixer.layer_idx] == "full_attention"
    window, sinks = (len(hidden_states), 0) if is_whole else (config.sliding_window, config.attention_sinks)
    queries, keys, values = (
        projection(hidden_states).unflatten(-1, (-1, mixer.head_dim))
        for projection in (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    )
    if mixer.q_norm is not None:
        queries, keys = mixer.q_norm(queries), mixer.k_norm(keys)
    group = queries.shape[1] // keys.shape[1]
    outputs = []
    for at in range(len(hidden_states)):
        seen = [j for j in range(at + 1) if at - j < window or j < sinks]
        # a sink outside of the window stays where it was when the window was first full
        distances = torch.tensor([at - j if at - j < window else min(at, sinks + window - 1) - j for j in seen])
        reads = []
        for head, query in enumerate(queries[at]):
            scores = (turned(query, distances) * keys[seen, head // group]).sum(-1)
            reads.append((scores / mixer.head_dim**0.5).softmax(0) @ values[seen, head // group])
        outputs.append(torch.cat(reads))
    return mixer.o_proj(torch.stack(outputs))


def angles(positions, width, theta=10000.0):
    """Cosines and sines [..., D] of positions [...] in float64; transformers computes them in float32."""
    frequencies = theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    turns = (positions[..., None] * frequencies).repeat(*[1] * positions.ndim, 2)
    return turns.cos(), turns.sin()


def defined(mixer, hidden_states):
    """The output [B, T, hidden_size] of a mixer for texts [B, T, hidden_size]."""
    kind = mixer.config.layer_types[mixer.layer_idx]
    if kind == "hope_memory":
        return self_modifying_titans(mixer, hidden_states)
    if kind == "sparse_attention":
        turns = angles(torch.arange(hidden_states.shape[1])[None], mixer.config.head_dim)
        return torch.stack([dense_sparse(mixer, row, turns)[0] for row in hidden_states])
    return torch.stack([windowed(mixer, row) for row in hidden_states])


def assert_as_defined(model, ids):
    """Each mixer of a float64 model gives what its equations say for the texts [B, T], and the same gradients."""
    if model.model.rotary_emb is not None:
        model.model.rotary_emb.forward = lambda x, position_ids: angles(position_ids, model.config.head_dim)
    read = {}
    for block in model.model.layers:
        block.mixer.register_forward_hook(lambda mixer, inputs, output: read.update({mixer: (inputs[0], output[0])}))
    model(ids, use_cache=False)
    assert len(read) == len(model.model.layers)
    for mixer, (hidden_states, output) in read.items():
        expected = defined(mixer, hidden_states)
        torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-10)
        weights, leaves = torch.randn_like(output), [hidden_states, *mixer.parameters()]
        options = dict(allow_unused=True, retain_graph=True)
        pairs = (torch.autograd.grad((out * weights).sum(), leaves, **options) for out in (output, expected))
        for leaf, found, wanted in zip(leaves, *pairs, strict=True):
            # a frozen memory's gates have no gradient in one of the two forms and zeros in the other
            found, wanted = (torch.zeros_like(leaf) if part is None else part for part in (found, wanted))
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
