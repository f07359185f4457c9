"""Statistics of a mixer's memories on a text, for training's log, evaluation and tests.

The functions take a `SelfModifyingTitans` (of any copy of the code) and its input [B, T, hidden_size], which begins a
text.
"""

import torch

from .chunks import plan_chunks
from .memory_scan import fresh_state, make_qkv, scan_span, unit, written_values


def _read(mixer, hidden_states: torch.Tensor):
    """For every span: the memories, keys, values, queries, reads, and the states before and after."""
    plan = plan_chunks(mixer.config, hidden_states.shape[:2], hidden_states.device)
    inputs = mixer.scan_inputs(hidden_states, plan)
    memories = mixer.memories(len(hidden_states), inputs.query.dtype)
    state = fresh_state(memories)
    for span in plan.spans:
        keys, values, queries, _ = make_qkv(inputs, memories, state, span)
        values = written_values(inputs, values, span)
        reads, after = scan_span(inputs, memories, state, span)
        yield memories, keys, values, queries, reads, state, after
        state = after


@torch.no_grad()
def memory_statistics(mixer, hidden_states: torch.Tensor) -> dict[str, torch.Tensor]:
    """Means over sequences, heads and tokens, 0-dim tensors.

    | name | meaning |
    |---|---|
    | learning_rate_mean, retention_mean | eta and alpha of equation (88) |
    | surprise_before, surprise_after | norm of M(k) - target at the chunk's first and last weights |
    | state_norm_ratio | norm of the content memory's change over the norm of the identity |
    | key_norm, value_norm, target_norm | norms of keys before normalisation, of values and targets as written |
    """
    norms = {name: [] for name in ("surprise_before", "surprise_after", "key_norm", "value_norm", "target_norm")}
    with torch.autocast(hidden_states.device.type, enabled=False):
        # each span is a chunk, so the state before it holds the weights of the chunk's start
        for memories, keys, values, _, _, before, after in _read(mixer, hidden_states):
            target = memories.target(before.current, values)
            for name, vectors in (
                ("surprise_before", memories.recall(before.current, unit(keys)) - target),
                ("surprise_after", memories.recall(after.current, unit(keys)) - target),
                ("key_norm", keys),
                ("value_norm", values),
                ("target_norm", target),
            ):
                norms[name].append(vectors.norm(dim=-1))
        initial, final = memories.content(memories.fresh()), memories.content(after.current)
    moved = sum((b - a).square().sum((-1, -2)) for a, b in zip(initial, final, strict=True)).sqrt()
    rate, retention = gate_values(mixer, hidden_states)
    return {
        "learning_rate_mean": rate.mean(),
        "retention_mean": retention.mean(),
        **{name: torch.cat(parts, -1).mean() for name, parts in norms.items()},
        "state_norm_ratio": moved.mean() / mixer.config.head_dim**0.5,
    }


@torch.no_grad()
def gate_values(mixer, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Learning rate and retention, eta and alpha of equation (88), of every token and head, both [B, T, H]."""
    rate, log_retention, _ = mixer.gates(hidden_states)
    return rate, log_retention.exp()


@torch.no_grad()
def contribution(mixer, hidden_states: torch.Tensor) -> torch.Tensor:
    """Norm of the change that writes make to the content memory's reads, per token [B, T, H]."""
    parts = []
    with torch.autocast(hidden_states.device.type, enabled=False):
        for memories, _, values, queries, reads, _, _ in _read(mixer, hidden_states):
            parts.append((reads - memories.initial_read(unit(queries), values)).norm(dim=-1))
    heads = mixer.config.num_memory_heads
    return torch.cat(parts, dim=1).unflatten(0, (-1, heads)).transpose(1, 2)
