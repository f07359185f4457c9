"""What one chunk does in each of the two scans, as pure functions of tensors over the rules in `memory_update`.

Axes: B sequence in batch, S slot (`chunk_layout`), H head, N memory of a group, G stream (k, v, q), C token in piece,
D head width, K width of the convolution.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .chunk_layout import ChunkLayout, Piece
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
    # keys, values and queries before convolution [B, H, S, D], each None where a memory makes it
    static_streams: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
    # logits of learning rate and retention [B, H, 2, S], or None where memories make them
    gate_logits: torch.Tensor | None
    # log of the momentum's coefficient [B, H, S], or None
    log_momentum: torch.Tensor | None

    def split(self, layout: ChunkLayout) -> list["ProjectionInputs"]:
        """The inputs of each piece."""
        static = zip(*(layout.split(stream, -2) for stream in self.static_streams), strict=True)
        memory_input = layout.split(self.memory_input, -2)
        gates = (layout.split(gate, -1) for gate in (self.gate_logits, self.log_momentum))
        return [ProjectionInputs(*part) for part in zip(memory_input, static, *gates, strict=True)]


class Projections(NamedTuple):
    """What scan 1 makes of every slot, and scan 2 reads."""

    # k, v, q after convolution and SiLU, not normalised [B, H, 3, S, D]
    streams: torch.Tensor
    # eta of equation (88) [B, H, S]
    learning_rate: torch.Tensor
    # log alpha [B, H, S]
    log_retention: torch.Tensor
    # as in the inputs
    log_momentum: torch.Tensor | None

    def split(self, layout: ChunkLayout) -> list["Projections"]:
        """The projections of each piece."""
        streams = layout.split(self.streams, -2)
        gates = (layout.split(gate, -1) for gate in self[1:])
        return [Projections(*part) for part in zip(streams, *gates, strict=True)]

    def gates(self, valid: torch.Tensor | None = None) -> Gates:
        """What the content memory writes, keeps and carries on."""
        return Gates(self.learning_rate, self.log_retention, self.log_momentum, valid)

    @staticmethod
    def join(parts: list["Projections"], log_momentum: torch.Tensor | None) -> "Projections":
        """The inverse of `split`; of `log_momentum` the whole is at hand."""
        if len(parts) == 1:
            return parts[0]
        streams, rates, retentions, _ = zip(*parts, strict=True)
        return Projections(torch.cat(streams, -2), torch.cat(rates, -1), torch.cat(retentions, -1), log_momentum)


class GateWeights(NamedTuple):
    """How learning rate and retention follow from their logits, and the logits from memories' outputs."""

    # added to the logits [H, 1]
    learning_rate_bias: torch.Tensor
    retention_bias: torch.Tensor
    # of both gates' memories [H, 2, 1, D], or None where a linear map makes the logits
    readouts: torch.Tensor | None
    # the largest eta
    largest_learning_rate: float

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """From the outputs of the gates' memories [B, H, 2, C, D]; returns [B, H, 2, C]."""
        # not a matrix product, whose operands TF32 would round
        return (unit(outputs) * self.readouts).sum(-1)

    def squash(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """eta and log alpha, both [B, H, C], from logits [B, H, 2, C]."""
        rate, retention = logits.unbind(2)
        learning_rate = self.largest_learning_rate * (rate + self.learning_rate_bias).sigmoid()
        return learning_rate, F.logsigmoid(retention + self.retention_bias)


class MemoryGroup(NamedTuple):
    """A group of memories as a call finds it."""

    # learned initial weights, each [H, N, o, i]
    initial: Weights
    # the state of having read nothing
    fresh: MemoryState
    rule: MemoryRule

    @classmethod
    def of(cls, initial: Weights, batch_size: int, rule: MemoryRule) -> "MemoryGroup":
        """For `batch_size` sequences."""
        return cls(initial, initial_state(initial, batch_size, rule), rule)


class ProjectionGroup(NamedTuple):
    """What all chunks of scan 1 have in common."""

    # in the order (k)(, v)(, learning rate, retention)(, q)
    memories: MemoryGroup
    # of the convolutions on k, v and q [K, H, 3, D]
    taps: torch.Tensor
    gates: GateWeights
    # by which these memories' eta is smaller than what a token's gate says
    rate_factor: float


def select_rows(rows: torch.Tensor | bool, chosen: Any, other: Any) -> Any:
    """`chosen` for the batch rows where `rows` is true, `other` elsewhere; tensors or (nested) tuples of them."""
    if isinstance(rows, bool):
        return chosen if rows else other
    if isinstance(chosen, torch.Tensor):
        return torch.where(rows.view(-1, *(1,) * (chosen.ndim - 1)), chosen, other)
    parts = [select_rows(rows, a, b) for a, b in zip(chosen, other, strict=True)]
    return type(chosen)(*parts) if hasattr(chosen, "_fields") else tuple(parts)


def begin_piece(state: MemoryState, fresh: MemoryState, piece: Piece) -> MemoryState:
    """Forget the document before where another begins."""
    return state if piece.resets is None else select_rows(piece.resets, fresh, state)


def end_piece(state: MemoryState, piece: Piece) -> MemoryState:
    """Where a chunk ends, the weights become those at which the next one's errors are taken."""
    return state._replace(snap=select_rows(piece.closes, state.run, state.snap))


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
            # one axis after the other: both at once takes the CPU six times as long
            grad_taps[tap] = (part * padded[..., tap : tap + length, :]).sum(-2).sum(0)
        return grad_padded, grad_taps, None


def short_convolution(
    raw: torch.Tensor, tail: torch.Tensor, taps: torch.Tensor, piece: Piece
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal depthwise convolution within each document, and the inputs that the next piece needs.

    Args:
        raw: [B, H, G, C, D].
        tail: the last K - 1 tokens before the piece [B, H, G, K - 1, D].
        taps: [K, H, G, D], oldest token first.
    """
    reach, length = tail.shape[-2], raw.shape[-2]
    padded = torch.cat([tail, raw], dim=-2)
    around = torch.arange(reach, device=raw.device)
    if piece.offset is not None:
        # the piece begins with empty slots: put the tail right before its first token
        padded = padded.scatter(-2, _row_index(piece.offset[:, None] + around, tail), tail)
    if piece.valid is None:
        return _ShortConvolution.apply(padded, taps, None), padded[..., length:, :]
    # a tap that reaches back beyond the document's first token reads nothing
    back = torch.arange(reach, 0, -1, device=raw.device)[:, None, None]
    inside = (piece.position >= back).to(raw.dtype)[:, :, None, None, :, None]
    mixed = _ShortConvolution.apply(padded, taps, inside)
    return mixed, padded.gather(-2, _row_index(piece.ends[:, None] + around, tail))


def _row_index(positions: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return positions[:, None, None, :, None].expand(like.shape)


def project_chunk(
    inputs: ProjectionInputs,
    state: MemoryState,
    tail: torch.Tensor,
    group: ProjectionGroup,
    piece: Piece,
    need_state: bool,
) -> tuple[Projections, MemoryState, torch.Tensor]:
    """One piece of scan 1: keys, values, queries and gates, and what the memories that make them learn of it.

    Equations (83) to (88). Returns the state after the piece (the state before it unless needed), and the last inputs
    of the convolutions [B, H, 3, K - 1, D].
    """
    initial, fresh, rule = group.memories
    state = begin_piece(state, fresh, piece)
    weights = effective_weights(state.snap, initial, rule)
    made = iter(apply_memory(weights, inputs.memory_input, rule).unbind(2))
    static_key, static_value, static_query = inputs.static_streams
    key = next(made) if static_key is None else static_key
    value = next(made) if static_value is None else static_value
    logits = inputs.gate_logits
    if logits is None:
        logits = group.gates.logits(torch.stack([next(made), next(made)], dim=2))
    query = next(made) if static_query is None else static_query
    streams, tail = short_convolution(torch.stack([key, value, query], dim=2), tail, group.taps, piece)
    streams = F.silu(streams)
    learning_rate, log_retention = group.gates.squash(logits)
    if piece.valid is not None:
        # padding neither writes nor forgets
        learning_rate = torch.where(piece.valid, learning_rate, 0.0)
        log_retention = torch.where(piece.valid, log_retention, 0.0)
    output = Projections(streams, learning_rate, log_retention, inputs.log_momentum)
    if need_state:
        gates = Gates(group.rate_factor * learning_rate, log_retention, inputs.log_momentum, piece.valid)
        key, value, _ = streams.unbind(2)
        _, state = update_chunk(state, initial, unit(key), value, gates, rule)
        state = end_piece(state, piece)
    return output, state, tail


def read_chunk(
    made: Projections, state: MemoryState, memory: MemoryGroup, piece: Piece, need_state: bool
) -> tuple[torch.Tensor, MemoryState]:
    """One piece of scan 2: write its keys and values, and read at each of its tokens (equation 86).

    Returns the reads [B, H, 1, C, D], and the state after the piece (the state before it unless needed).
    """
    initial, fresh, rule = memory
    state = begin_piece(state, fresh, piece)
    key, value, query = made.streams.unbind(2)
    gates = made.gates(piece.valid)
    reads, after = update_chunk(state, initial, unit(key), value, gates, rule, unit(query), need_state=need_state)
    return reads, end_piece(after, piece) if need_state else state
