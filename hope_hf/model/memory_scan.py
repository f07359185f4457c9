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
    split_tokens,
    update_chunk,
)
from .vector_norms import unit


class ProjectionInputs(NamedTuple):
    """What scan 1 reads of every slot."""

    # x of equation (83) [B, H, 1, S, D], or [B, H, N, S, D] where the memory of q reads another
    memory_input: torch.Tensor
    # keys, values and queries before convolution [B, H, S, D], each None where a memory makes it
    static_streams: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
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


class _ShortConvolution(torch.autograd.Function):
    """`sum_j taps[K - 1 - j] x_{t - j}` over `padded`, which begins K - 1 tokens early, as one autograd node."""

    @staticmethod
    def forward(ctx, padded, taps, inside):
        length = padded.shape[-2] - taps.shape[0] + 1
        mixed = taps[-1].unsqueeze(-2) * padded[..., padded.shape[-2] - length :, :]
        for tap in range(taps.shape[0] - 1):
            term = padded[..., tap : tap + length, :]
            mixed.addcmul_(taps[tap].unsqueeze(-2), term if inside is None else term * inside[tap])
        ctx.save_for_backward(padded, taps, inside)
        return mixed

    @staticmethod
    def backward(ctx, gradient):
        padded, taps, inside = ctx.saved_tensors
        length = gradient.shape[-2]
        grad_padded, grad_taps = torch.zeros_like(padded), torch.empty_like(taps)
        for tap in range(taps.shape[0]):
            part = gradient if inside is None or tap == taps.shape[0] - 1 else gradient * inside[tap]
            grad_padded[..., tap : tap + length, :].addcmul_(taps[tap].unsqueeze(-2), part)
            grad_taps[tap] = (part * padded[..., tap : tap + length, :]).sum((0, -2))
        return grad_padded, grad_taps, None


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
    if layout.is_plain:
        return _ShortConvolution.apply(padded, taps, None), padded[..., length:, :]
    # a tap that reaches back beyond the document's first token reads nothing
    start, stop = layout.pieces[index]
    back = torch.arange(reach, 0, -1, device=raw.device)[:, None, None]
    inside = (layout.position[:, start:stop] >= back).to(raw.dtype)[:, :, None, None, :, None]
    mixed = _ShortConvolution.apply(padded, taps, inside)
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
        initial: initial weights, each [H, N, o, i]; memories in the order (k)(, v)(, learning rate, retention)(, q).
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
    memory_inputs = split_tokens(inputs.memory_input, layout.sizes, -2)
    static_streams = [split_tokens(stream, layout.sizes, -2) for stream in inputs.static_streams]
    gate_logits = split_tokens(inputs.gate_logits, layout.sizes, -1)
    log_momentum = split_tokens(inputs.log_momentum, layout.sizes, -1)

    def step(index: int, carry: tuple) -> tuple[Projections, tuple]:
        state, tail = carry
        state = begin_piece(state, fresh, layout, index)
        weights = effective_weights(state.snap, initial, rule)
        made = iter(apply_memory(weights, memory_inputs[index], rule).unbind(2))
        static_key, static_value, static_query = (stream[index] for stream in static_streams)
        key = next(made) if static_key is None else static_key
        value = next(made) if static_value is None else static_value
        if inputs.gate_logits is None:
            logits = gate.logits(torch.stack([next(made), next(made)], dim=2))
        else:
            logits = gate_logits[index]
        query = next(made) if static_query is None else static_query
        streams, tail = short_convolution(torch.stack([key, value, query], dim=2), tail, taps, layout, index)
        streams = F.silu(streams)
        learning_rate, log_retention = gate.squash(logits)
        valid = None
        if layout.valid is not None:
            # padding neither writes nor forgets
            valid = layout.valid_piece(index)
            learning_rate = torch.where(valid, learning_rate, 0.0)
            log_retention = torch.where(valid, log_retention, 0.0)
        output = Projections(streams, learning_rate, log_retention, log_momentum[index])
        if need_state or index < last:
            gates = Gates(rate * learning_rate, log_retention, log_momentum[index], valid)
            key, value, _ = streams.unbind(2)
            _, state = update_chunk(state, initial, unit(key), value, gates, rule)
            state = end_piece(state, layout, index)
        return output, (state, tail)

    outputs, (state, tail) = scan(step, (state, tail), last + 1, group)
    if len(outputs) == 1:
        return outputs[0], state, tail
    streams, steps, retentions, _ = zip(*outputs, strict=True)
    made = Projections(torch.cat(streams, -2), torch.cat(steps, -1), torch.cat(retentions, -1), inputs.log_momentum)
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
    keys, values, queries = made.streams.unbind(2)
    keys, values, queries = (split_tokens(part, layout.sizes, -2) for part in (unit(keys), values, unit(queries)))
    gates = Gates(made.step, made.log_retention, made.log_momentum).split(layout.sizes)
    last = len(layout.pieces) - 1

    def step(index: int, state: MemoryState) -> tuple[torch.Tensor, MemoryState]:
        state = begin_piece(state, fresh, layout, index)
        here = gates[index]._replace(valid=layout.valid_piece(index))
        keep = need_state or index < last
        reads, after = update_chunk(
            state, initial, keys[index], values[index], here, rule, queries[index], need_state=keep
        )
        return reads, end_piece(after, layout, index) if keep else state

    reads, state = scan(step, fresh if state is None else state, last + 1, group)
    return torch.cat(reads, dim=-2).squeeze(2), state


def measure_surprise(
    made: Projections, initial: Weights, layout: ChunkLayout, rule: MemoryRule
) -> dict[str, torch.Tensor]:
    """How far the content memory misses its targets at each chunk's first and last weights, and how far it moves.

    For plain layouts, from the initial state. Means over sequences, heads and tokens.
    """
    state = initial_state(initial, made.step.shape[0], rule)
    keys, values, _ = made.streams.unbind(2)
    keys, values = (split_tokens(part, layout.sizes, -2) for part in (unit(keys), values))
    gates = Gates(made.step, made.log_retention, made.log_momentum).split(layout.sizes)
    before, after, targets = [], [], []
    for index, (key, value) in enumerate(zip(keys, values, strict=True)):
        weights = effective_weights(state.snap, initial, rule)
        target = apply_memory(weights, (unit(value) if rule.target_norm else value).unsqueeze(2), rule)
        _, state = update_chunk(state, initial, key, value, gates[index], rule)
        written = effective_weights(state.run, initial, rule)
        targets.append(target.norm(dim=-1))
        before.append((apply_memory(weights, key.unsqueeze(2), rule) - target).norm(dim=-1))
        after.append((apply_memory(written, key.unsqueeze(2), rule) - target).norm(dim=-1))
        state = end_piece(state, layout, index)
    moved = sum((weight - base).square().sum((-1, -2)) for weight, base in zip(written, initial, strict=True)).sqrt()
    start = sum(base.square().sum((-1, -2)) for base in initial).sqrt()
    return {
        "surprise_before": torch.cat(before, -1).mean(),
        "surprise_after": torch.cat(after, -1).mean(),
        "state_norm_ratio": (moved / start).mean(),
        "target_norm": torch.cat(targets, -1).mean(),
    }
