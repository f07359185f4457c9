"""Sparse attention as the paper writes it (arXiv 2502.11089, equations 5 to 12), query by query, over one document.

Short convolutions and the normalisation of queries and keys, which the paper has not, come first.
"""

import torch


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
