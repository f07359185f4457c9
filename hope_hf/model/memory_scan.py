"""The two scans of a self-modifying mixer: chunk after chunk, in the order in which a text is read.

Loops over the steps in `chunk_steps`. Chunks are recomputed in the backward pass, a group at a time, from the state
saved at the group's start.

Axes: B sequence in batch, S slot (`chunk_layout`), H head, N memory of a group, D head width, K width of the
convolution.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from .chunk_layout import ChunkLayout
from .chunk_steps import (
    MemoryGroup,
    ProjectionGroup,
    ProjectionInputs,
    Projections,
    end_piece,
    project_chunk,
    read_chunk,
)
from .memory_update import MemoryState, apply_memory, effective_weights, update_chunk
from .vector_norms import unit


def scan(step: Callable, carry: Any, num_pieces: int, group: int) -> tuple[list, Any]:
    """Run `output, carry = step(index, carry)` over all pieces; recompute `group` pieces at a time in backward.

    The last group keeps its activations, which the backward pass asks for first; `group` 0 keeps all.
    """
    outputs = []

    def run(carry: Any, start: int, stop: int) -> tuple[list, Any]:
        made = []
        for index in range(start, stop):
            output, carry = step(index, carry)
            made.append(output)
        return made, carry

    recompute = group > 0 and torch.is_grad_enabled()
    stride = group if recompute else num_pieces
    for start in range(0, num_pieces, stride):
        stop = min(start + stride, num_pieces)
        if recompute and stop < num_pieces:
            made, carry = checkpoint(run, carry, start, stop, use_reentrant=False, preserve_rng_state=False)
        else:
            made, carry = run(carry, start, stop)
        outputs.extend(made)
    return outputs, carry


def scan_projections(
    inputs: ProjectionInputs,
    group: ProjectionGroup,
    state: MemoryState | None,
    tail: torch.Tensor | None,
    layout: ChunkLayout,
    recompute: int,
    need_state: bool,
) -> tuple[Projections, MemoryState, torch.Tensor]:
    """Scan 1: make keys, values, queries and gates, and let the memories that make them learn (equations 83 to 88).

    Args:
        state, tail: of the call before, or `None` at a text's start.
        recompute: chunks recomputed together in backward.
    """
    batch, heads, _, _, width = inputs.memory_input.shape
    if state is None:
        state = group.memories.fresh
        tail = inputs.memory_input.new_zeros(batch, heads, 3, group.taps.shape[0] - 1, width)
    last = len(layout.pieces) - 1
    pieces = inputs.split(layout)

    def step(index: int, carry: tuple) -> tuple[Projections, tuple]:
        output, *carry = project_chunk(pieces[index], *carry, group, layout.piece(index), need_state or index < last)
        return output, tuple(carry)

    outputs, (state, tail) = scan(step, (state, tail), last + 1, recompute)
    return Projections.join(outputs, inputs.log_momentum), state, tail


def scan_content(
    made: Projections,
    memory: MemoryGroup,
    state: MemoryState | None,
    layout: ChunkLayout,
    recompute: int,
    need_state: bool,
) -> tuple[torch.Tensor, MemoryState]:
    """Scan 2: write keys and values into the content memory, read it at every token [B, H, S, D] (equation 86)."""
    last = len(layout.pieces) - 1
    pieces = made.split(layout)

    def step(index: int, state: MemoryState) -> tuple[torch.Tensor, MemoryState]:
        return read_chunk(pieces[index], state, memory, layout.piece(index), need_state or index < last)

    reads, state = scan(step, memory.fresh if state is None else state, last + 1, recompute)
    return torch.cat(reads, dim=-2).squeeze(2), state


def measure_surprise(made: Projections, memory: MemoryGroup, layout: ChunkLayout) -> dict[str, torch.Tensor]:
    """How far the content memory misses its targets at each chunk's first and last weights, and how far it moves.

    For plain layouts, from the initial state. Means over sequences, heads and tokens.
    """
    initial, state, rule = memory
    before, after, targets = [], [], []
    for index, part in enumerate(made.split(layout)):
        key, value, _ = part.streams.unbind(2)
        key = unit(key)
        weights = effective_weights(state.snap, initial, rule)
        target = apply_memory(weights, (unit(value) if rule.target_norm else value).unsqueeze(2), rule)
        _, state = update_chunk(state, initial, key, value, part.gates(), rule)
        written = effective_weights(state.run, initial, rule)
        targets.append(target.norm(dim=-1))
        before.append((apply_memory(weights, key.unsqueeze(2), rule) - target).norm(dim=-1))
        after.append((apply_memory(written, key.unsqueeze(2), rule) - target).norm(dim=-1))
        state = end_piece(state, layout.piece(index))
    moved = sum((weight - base).square().sum((-1, -2)) for weight, base in zip(written, initial, strict=True)).sqrt()
    start = sum(base.square().sum((-1, -2)) for base in initial).sqrt()
    return {
        "surprise_before": torch.cat(before, -1).mean(),
        "surprise_after": torch.cat(after, -1).mean(),
        "state_norm_ratio": (moved / start).mean(),
        "target_norm": torch.cat(targets, -1).mean(),
    }
