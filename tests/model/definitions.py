"""Each mixer as its equations say, for one document without padding: query by query, token by token.

Sparse attention is as the paper writes it (arXiv 2502.11089, equations 5 to 12); short convolutions and the
normalisation of queries and keys, which the paper has not, come first. Memories are `hope_hf.reference`.
"""

import torch
import torch.nn.functional as F

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
    out = torch.zeros_like(x)
    for back in range(min(width, len(x))):
        tap = weight[:, 0, width - 1 - back]
        out = out + tap * F.pad(x[: len(x) - back], (0, 0, back, 0))
    return out


def normed(x, weight, epsilon):
    return weight * x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt()


def chosen_blocks(importance: list[float], top_k: int) -> list[int]:
    """Blocks of the query whose own block is the last: itself, the first, the one before, then the most important."""
    own = len(importance) - 1
    by_importance = sorted(range(own), key=lambda block: -importance[block])
    order = dict.fromkeys([own, 0, max(own - 1, 0), *by_importance])
    return list(order)[:top_k]


def compressed(x, weight):
    """Of the slots of a head [T, D], each whole stride as a sum weighted by [stride, D]."""
    stride = len(weight)
    starts = range(0, len(x) + 1 - stride, stride)
    if not starts:
        return x[:0]
    return torch.stack([(weight * x[start : start + stride]).sum(0) for start in starts])


def dense_sparse(mixer, hidden_states, angles):
    """The output [T, hidden_size] of a `HopeSparseAttention` for one document [T, hidden_size]."""
    config, sizes = mixer.config, mixer.sizes
    heads = []
    for name in ("q", "k", "v"):
        projection, convolution = getattr(mixer, f"{name}_proj"), getattr(mixer, f"{name}_conv1d")
        mapped = convolved(projection(hidden_states), convolution.weight)
        heads.append(mapped.unflatten(-1, (-1, config.head_dim)))
    query, key, value = heads
    query = rotated(normed(query, mixer.q_norm.weight, config.rms_norm_eps), angles)
    key = rotated(normed(key, mixer.k_norm.weight, config.rms_norm_eps), angles)
    gates = mixer.branch_proj(hidden_states).unflatten(-1, (-1, 3)).sigmoid()
    group = query.shape[1] // key.shape[1]
    outputs = []
    for t in range(len(hidden_states)):
        reads = []
        near = slice(max(0, t - sizes.window + 1), t + 1)
        for h in range(key.shape[1]):
            keys, values = key[: t + 1, h], value[: t + 1, h]
            small_keys = compressed(keys, mixer.k_compress.weight[h])
            small_values = compressed(values, mixer.v_compress.weight[h])
            queries = query[t, h * group : (h + 1) * group]
            importance = [0.0] * (t // sizes.block + 1)
            coarse_reads = []
            for one in queries:
                coarse, attention = softmax_read(one, small_keys, small_values)
                coarse_reads.append(coarse)
                for slot, weight in enumerate(attention.tolist()):
                    importance[slot * sizes.stride // sizes.block] += weight
            blocks = chosen_blocks(importance, sizes.top_k)
            slots = [slot for slot in range(t + 1) if slot // sizes.block in blocks]
            for one, coarse in zip(queries, coarse_reads, strict=True):
                selected, _ = softmax_read(one, keys[slots], values[slots])
                windowed, _ = softmax_read(one, keys[near], values[near])
                reads.append(torch.stack([coarse, selected, windowed]))
        outputs.append((gates[t, :, None] @ torch.stack(reads)).flatten())
    return mixer.o_proj(torch.stack(outputs))


def windowed(mixer, hidden_states):
    """The output [T, hidden_size] of softmax attention, with a window or without, for one document."""
    config = mixer.config
    is_whole = config.layer_types[mixer.layer_idx] == "full_attention"
    window, sinks = (len(hidden_states), 0) if is_whole else (config.sliding_window, config.attention_sinks)
    width = mixer.head_dim
    queries = mixer.q_proj(hidden_states).unflatten(-1, (-1, width))
    keys = mixer.k_proj(hidden_states).unflatten(-1, (-1, width))
    values = mixer.v_proj(hidden_states).unflatten(-1, (-1, width))
    if mixer.q_norm is not None:
        queries, keys = mixer.q_norm(queries), mixer.k_norm(keys)
    group = queries.shape[1] // keys.shape[1]
    outputs = []
    for t in range(len(hidden_states)):
        slots = [slot for slot in range(t + 1) if t - slot < window or slot < sinks]
        # a sink outside of the window stays where it was when the window was first full
        distances = [t - slot if t - slot < window else min(t, sinks + window - 1) - slot for slot in slots]
        turns = angles(torch.tensor([distances]), width)
        for head, query in enumerate(queries[t]):
            turned = rotated(query.expand(len(slots), 1, width), turns)[:, 0]
            scores = (turned * keys[slots, head // group]).sum(-1)
            outputs.append((scores / width**0.5).softmax(0) @ values[slots, head // group])
    return mixer.o_proj(torch.stack(outputs).view(len(hidden_states), -1))


def retaining(mixer, hidden_states):
    """The same with a window of whole blocks, and the older tokens with the highest scores of each head."""
    config = mixer.config
    window, sinks, block = config.sliding_window, config.attention_sinks, config.retained_block_size
    width = mixer.head_dim
    queries = mixer.q_proj(hidden_states).unflatten(-1, (-1, width))
    keys = mixer.k_proj(hidden_states).unflatten(-1, (-1, width))
    values = mixer.v_proj(hidden_states).unflatten(-1, (-1, width))
    group = queries.shape[1] // keys.shape[1]
    scores = mixer.scores(hidden_states).tolist()
    retained = [[] for _ in range(keys.shape[1])]
    outputs = []
    for t in range(len(hidden_states)):
        first = t - t % block
        if t == first and t > 0:
            for head, count in enumerate(mixer.counts):
                left = range(max(sinks, first - block - window), first - window)
                old = [slot for slot in retained[head] if first + block - 1 - slot < config.max_position_embeddings]
                new = [slot for slot in left if first + block - 1 - slot < config.max_position_embeddings]
                by_score = sorted(old + new, key=lambda slot: (-scores[slot][head], slot))
                retained[head] = by_score[:count]
        for head, query in enumerate(queries[t]):
            near = [slot for slot in range(t + 1) if slot >= first - window or slot < sinks]
            slots = near + retained[head // group]
            # a sink is never farther away than the model's positions
            capped = min(t, config.max_position_embeddings - 1)
            distances = [(capped if slot < sinks else t) - slot for slot in slots]
            turned = rotated(query.expand(len(slots), 1, width), angles(torch.tensor([distances]), width))[:, 0]
            products = (turned * keys[slots, head // group]).sum(-1)
            outputs.append((products / width**0.5).softmax(0) @ values[slots, head // group])
    return mixer.o_proj(torch.stack(outputs).view(len(hidden_states), -1))


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
        return torch.stack([dense_sparse(mixer, row, turns) for row in hidden_states])
    read = retaining if kind == "retaining_attention" else windowed
    return torch.stack([read(mixer, row) for row in hidden_states])


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
        weights = torch.randn_like(output)
        leaves = [hidden_states, *mixer.parameters()]
        # a frozen memory's gates have no gradient in one of the two forms and zeros in the other
        options = dict(materialize_grads=True, allow_unused=True, retain_graph=True)
        found = torch.autograd.grad((output * weights).sum(), leaves, **options)
        wanted = torch.autograd.grad((expected * weights).sum(), leaves, **options)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
