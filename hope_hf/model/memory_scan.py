"""The two scans of a self-modifying mixer: chunk after chunk, in the order in which a text is read.

Pure functions of tensors over the rules in `memory_update`. Chunks are recomputed in the backward pass, a group at a
time, from the state saved at the group's start.

Axes: B sequence in batch, S slot (`chunk_layout`), H head, N memory of a group, G stream (k, v, q), C token in piece,
D head width, K width of the convolution.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from .chunk_layout import ChunkLayout
from .memory_update import (
    Gates,
    MemoryRule,
    MemoryState,
    Weights,
    apply_memory,
    effective_weights,
    initial_state,
    update_chunk,
)
from .vector_norms import unit


class ProjectionInputs(NamedTuple):
    """What scan 1 reads of every slot."""

    # x of equation (83) [B, H, 1, S, D], or [B, H, N, S, D] where the memory of q reads another
    memory_input: torch.Tensor
    # static queries before convolution [B, H, S, D], or None where a memory makes them
    query_input: torch.Tensor | None
    # logits of learning rate and retention [B, H, 2, S], or None where memories make them
    gate_logits: torch.Tensor | None
    # log of the momentum's coefficient [B, H, S], or None
    log_momentum: torch.Tensor | None


class Projections(NamedTuple):
    """What scan 1 makes of every slot, and scan 2 reads."""

    # k, v, q after convolution and SiLU, not normalised [B, H, 3, S, D]
    streams: torch.Tensor
    # eta of equation (88) [B, H, S]
    step: torch.Tensor
    # log alpha [B, H, S]
    log_retention: torch.Tensor
    # as in the inputs
    log_momentum: torch.Tensor | None


class GateFunctions(NamedTuple):
    """How gates follow from the outputs of their memories; made by `MemoryGates`."""

    # outputs of the two gates' memories [B, H, 2, C, D] -> logits [B, H, 2, C]
    logits: Callable
    # logits -> eta and log alpha [B, H, C]
    squash: Callable


def scan(step: Callable, carry: Any, num_pieces: int, group: int) -> tuple[list, Any]:
    """Run `output, carry = step(index, carry)` over all pieces; recompute `group` pieces at a time in backward.

    `group` 0 keeps all activations.
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
        if recompute:
            made, carry = checkpoint(run, carry, start, stop, use_reentrant=False, preserve_rng_state=False)
        else:
            made, carry = run(carry, start, stop)
        outputs.extend(made)
    return outputs, carry


def select_rows(rows: torch.Tensor | bool, chosen: Any, other: Any) -> Any:
    """`chosen` for the batch rows where `rows` is true, `other` elsewhere; tensors or (nested) tuples of them."""
    if isinstance(rows, bool):
        return chosen if rows else other
    if isinstance(chosen, torch.Tensor):
        return torch.where(rows.view(-1, *(1,) * (chosen.ndim - 1)), chosen, other)
    parts = [select_rows(rows, a, b) for a, b in zip(chosen, other, strict=True)]
    return type(chosen)(*parts) if hasattr(chosen, "_fields") else tuple(parts)


def begin_piece(state: MemoryState, fresh: MemoryState, layout: ChunkLayout, index: int) -> MemoryState:
    """Forget the document before where another begins."""
    return state if layout.resets is None else select_rows(layout.resets[index], fresh, state)


def end_piece(state: MemoryState, layout: ChunkLayout, index: int) -> MemoryState:
    """Where a chunk ends, the weights become those at which the next one's errors are taken."""
    return state._replace(snap=select_rows(layout.closes[index], state.run, state.snap))


def short_convolution(
    raw: torch.Tensor, tail: torch.Tensor, taps: torch.Tensor, layout: ChunkLayout, index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal depthwise convolution within each document, and the inputs that the next piece needs.

    Args:
        raw: [B, H, G, C, D], the slots of piece `index`.
        tail: the last K - 1 tokens before the piece [B, H, G, K - 1, D].
        taps: [K, H, G, D], oldest token first.
    """
    reach, length = tail.shape[-2], raw.shape[-2]
    padded = torch.cat([tail, raw], dim=-2)
    around = torch.arange(reach, device=raw.device)
    if index == 0 and layout.offset is not None:
        # the first piece begins with empty slots: put the tail right before its first token
        padded = padded.scatter(-2, _row_index(layout.offset[:, None] + around, tail), tail)
    mixed = taps[reach].unsqueeze(-2) * raw
    start, stop = layout.pieces[index]
    for back in range(1, reach + 1):
        term = taps[reach - back].unsqueeze(-2) * padded[..., reach - back : reach - back + length, :]
        if layout.position is not None:
            inside = layout.position[:, start:stop] >= back
            term = term * inside[:, None, None, :, None]
        mixed = mixed + term
    if layout.is_plain:
        return mixed, padded[..., length:, :]
    return mixed, padded.gather(-2, _row_index(layout.ends[index][:, None] + around, tail))


def _row_index(positions: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return positions[:, None, None, :, None].expand(like.shape)


def scan_projections(
    inputs: ProjectionInputs,
    initial: Weights,
    taps: torch.Tensor,
    gate: GateFunctions,
    state: MemoryState | None,
    tail: torch.Tensor | None,
    layout: ChunkLayout,
    rule: MemoryRule,
    rate: float,
    group: int,
    need_state: bool,
) -> tuple[Projections, MemoryState, torch.Tensor]:
    """Scan 1: make keys, values, queries and gates, and let the memories that make them learn (equations 83 to 88).

    Args:
        initial: initial weights, each [H, N, o, i]; memories in the order k, v(, learning rate, retention)(, q).
        taps: of the convolutions on k, v and q [K, H, 3, D].
        state, tail: of the call before, or `None` at a text's start.
        rate: step of these memories relative to the content memory's.
        group: chunks recomputed together in backward.
    """
    batch, heads, _, _, width = inputs.memory_input.shape
    fresh = initial_state(initial, batch, rule)
    if state is None:
        state = fresh
        tail = inputs.memory_input.new_zeros(batch, heads, 3, taps.shape[0] - 1, width)
    last = len(layout.pieces) - 1

    def step(index: int, carry: tuple) -> tuple[Projections, tuple]:
        state, tail = carry
        start, stop = layout.pieces[index]
        state = begin_piece(state, fresh, layout, index)
        weights = effective_weights(state.snap, initial, rule)
        made = apply_memory(weights, inputs.memory_input[..., start:stop, :], rule)
        query = made[:, :, -1:] if inputs.query_input is None else inputs.query_input[:, :, None, start:stop]
        streams, tail = short_convolution(torch.cat([made[:, :, :2], query], dim=2), tail, taps, layout, index)
        streams = F.silu(streams)
        if inputs.gate_logits is None:
            logits = gate.logits(made[:, :, 2:4])
        else:
            logits = inputs.gate_logits[..., start:stop]
        learning_rate, log_retention = gate.squash(logits)
        valid = None
        if layout.valid is not None:
            # padding neither writes nor forgets
            valid = layout.valid[:, None, start:stop]
            learning_rate = torch.where(valid, learning_rate, 0.0)
            log_retention = torch.where(valid, log_retention, 0.0)
        momentum = None if inputs.log_momentum is None else inputs.log_momentum[..., start:stop]
        output = Projections(streams, learning_rate, log_retention, momentum)
        if need_state or index < last:
            gates = Gates(rate * learning_rate, log_retention, momentum, valid)
            _, state = update_chunk(state, initial, unit(streams[:, :, 0]), streams[:, :, 1], gates, rule)
            state = end_piece(state, layout, index)
        return output, (state, tail)

    outputs, (state, tail) = scan(step, (state, tail), last + 1, group)
    if len(outputs) == 1:
        return outputs[0], state, tail
    streams, steps, retentions, _ = zip(*outputs, strict=True)
    made = Projections(
        torch.cat(streams, -2), torch.cat(steps, -1), torch.cat(retentions, -1), inputs.log_momentum
    )
    return made, state, tail


def scan_content(
    made: Projections,
    initial: Weights,
    state: MemoryState | None,
    layout: ChunkLayout,
    rule: MemoryRule,
    group: int,
    need_state: bool,
) -> tuple[torch.Tensor, MemoryState]:
    """Scan 2: write keys and values into the content memory, read it at every token [B, H, S, D] (equation 86)."""
    fresh = initial_state(initial, made.step.shape[0], rule)
    keys, values, queries = unit(made.streams[:, :, 0]), made.streams[:, :, 1], unit(made.streams[:, :, 2])
    last = len(layout.pieces) - 1

    def step(index: int, state: MemoryState) -> tuple[torch.Tensor, MemoryState]:
        start, stop = layout.pieces[index]
        state = begin_piece(state, fresh, layout, index)
        valid = None if layout.valid is None else layout.valid[:, None, start:stop]
        gates = Gates(made.step, made.log_retention, made.log_momentum).tokens(start, stop)._replace(valid=valid)
        here = slice(start, stop)
        keep = need_state or index < last
        reads, after = update_chunk(
            state, initial, keys[:, :, here], values[:, :, here], gates, rule, queries[:, :, here], need_state=keep
        )
        return reads, end_piece(after, layout, index) if keep else state

    reads, state = scan(step, fresh if state is None else state, last + 1, group)
    return torch.cat(reads, dim=-2).squeeze(2), state
