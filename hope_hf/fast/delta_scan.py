"""`memory_scan.scan_plain` for the delta rule, with a backward pass written by hand.

All memories lie side by side as columns of the same products. k, v and q of a span pass elementwise operators one
after the other, since each fits into a CPU's cache. Spans save what their backward pass reads and is dear to compute
again; with `recompute`, all but the last ones save the dearest alone.

Axes: b sequences times heads, S slot (`chunks`), C slot of a span, D head width, M memories of a layer, K kernel size
of the convolution. Tokens are rows; a memory is applied as `z W`.
"""

from itertools import islice

import torch
from torch import Tensor

from ..model.backends import once_differentiable
from ..model.chunks import ChunkSpan
from ..model.layers import tail_after
from ..model.memory_delta import DeltaMemories
from ..model.memory_scan import ScanInputs, ScanState
from .delta_span import Saved, Shape, SpanBackward, State, Tokens, Weights, mixed_streams, padded_streams, solve

# Size of the diagonal blocks that are inverted by powers.
_BASE = 4


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """`(I - lower)^-1` for `lower` [b, C, C], of which only the part below the diagonal is read.

    Powers invert diagonal blocks of 4 (the fourth power is 0), and blocks are then merged two by two. This takes fewer
    operations than a triangular solve and is as exact in float32. Powers of larger blocks cancel if keys are similar:
    with blocks of 16 and a learning rate of 1.99 no digit is right. Sizes are padded to 4 times a power of two.
    """
    batch, size, _ = lower.shape
    padded = _BASE
    while padded < size:
        padded *= 2
    # Each matrix has one row more than columns: the blocks along all diagonals then lie at equal distances in memory,
    # and form one batch.
    shape = batch, padded + 1, padded
    matrix = lower.new_empty(shape) if padded == size else lower.new_zeros(shape)
    matrix[:, :size, :size] = lower
    inverse = lower.new_zeros(shape)
    # I + L + L^2 + L^3 = (I + L) + (I + L) L^2
    block = _diagonal_blocks(matrix, _BASE).tril(-1)
    identity = torch.eye(_BASE, dtype=lower.dtype, device=lower.device)
    first_powers = identity + block
    square = torch.bmm(block, block)
    all_powers = torch.baddbmm(first_powers, first_powers, square)
    _diagonal_blocks(inverse, _BASE).copy_(all_powers)
    width = _BASE
    while width < padded:
        # of every block of twice the width, the quarters on the diagonal and the one below
        step = 2 * width
        below = width * padded
        upper_left = _diagonal_blocks(inverse, step, width)
        lower_right = _diagonal_blocks(inverse, step, width, below + width)
        lower_left = _diagonal_blocks(matrix, step, width, below)
        merged = torch.bmm(lower_right, lower_left)
        merged = torch.bmm(merged, upper_left)
        _diagonal_blocks(inverse, step, width, below).copy_(merged)
        width = step
    return inverse[:, :size, :size]


def _diagonal_blocks(matrix: Tensor, step: int, width: int = _BASE, offset: int = 0) -> Tensor:
    """Views [., width, width] of `matrix` [b, N + 1, N] at every `step` along the diagonal, `offset` numbers later."""
    batch, _, size = matrix.shape
    shape = batch * size // step, width, width
    strides = step * (size + 1), size, 1
    return matrix.as_strided(shape, strides, offset)


def _forward_span(
    inputs: ScanInputs,
    weights: Weights,
    state: State,
    span: ChunkSpan,
    shape: Shape,
    reads: Tensor,
    saves_all: bool,
) -> tuple[State, Saved]:
    """The state after a span, and the tensors to save; its reads [b, C, D] are written into `reads`."""
    cut = slice(span.start, span.stop)
    padded = padded_streams(inputs, state, span, shape)
    mixed, scales, active = mixed_streams(padded, weights, span)
    tokens = Tokens.of(inputs, span, active, scales)
    values = tokens.values
    if inputs.value_norm is not None:
        values = values * inputs.value_norm[:, cut, None]
    written = tokens.written.mT
    attention = torch.bmm(tokens.queries, written).mul_(tokens.decay)
    lower = torch.bmm(tokens.keys, written).mul_(tokens.decay)
    if len(shape.groups) > 1:
        lower = torch.cat([rho * lower for _, rho in shape.groups])
    solved = unit_lower_inverse(lower)
    reads_of_state = _reads_of_state(tokens, state.current, weights.initial, shape)
    reads_of_keys, reads_of_queries = reads_of_state.unbind(1)
    right = _right_side(tokens, values, reads_of_keys, state.current, shape)
    errors = solve(solved, right, shape)
    errors_of_content = errors[..., shape.content]
    reads_of_memory = torch.baddbmm(reads_of_queries, attention, errors_of_content)
    own_values = inputs.own_values(values, cut)
    torch.addcmul(reads_of_memory, weights.value_share, own_values, out=reads)
    if not saves_all:
        mixed = scales = attention = None
    saved = Saved(mixed, scales, attention, solved, errors, *state)
    after = _state_after(state, span, tokens, errors, padded)
    return after, saved


def _state_after(state: State, span: ChunkSpan, tokens: Tokens, errors: Tensor, padded: list[Tensor]) -> State:
    """The state after a span, from that before it; `padded` holds its streams with the tail in front."""
    decayed = tokens.from_start[:, -1:] * state.current
    # `written` is not read again
    written = tokens.written.mul_(tokens.to_end)
    after = decayed.baddbmm_(written.mT, errors)
    chunk_start = state.chunk_start
    if not isinstance(span.closes, bool):
        chunk_start = torch.where(span.closes, after, chunk_start)
    elif span.closes:
        # one tensor for both, as `_Scan` checks by identity
        chunk_start = after
    tails_before = state.conv_tail.chunk(3, dim=-1)
    tails = []
    for stream, tail in zip(padded, tails_before, strict=True):
        tails.append(tail_after(stream, tail, span))
    return State(after, chunk_start, torch.cat(tails, dim=-1))


def _reads_of_state(tokens: Tokens, current: Tensor, initial: Tensor, shape: Shape) -> Tensor:
    """What the content memory before the span returns for keys and queries [b, 2, C, D], with the initial memory."""
    rows = tokens.rows
    content = current[..., shape.content]
    reads = torch.bmm(rows, content)
    decay = tokens.from_start.unsqueeze(1)
    reads.view_as(tokens.both).mul_(decay)
    reads.baddbmm_(rows, initial)
    return reads.view_as(tokens.both)


def _right_side(tokens: Tokens, values: Tensor, reads_of_keys: Tensor, current: Tensor, shape: Shape) -> Tensor:
    """What each memory returns for the keys before the span, minus its values [b, C, M D]."""
    right = reads_of_keys - values
    if not shape.projected:
        return right
    projecting = current[..., shape.others]
    right_of_projecting = torch.bmm(tokens.keys, projecting)
    right_of_projecting.mul_(tokens.from_start)
    # their initial weights are the identity
    initial_right = (tokens.keys - values).unsqueeze(2)
    by_memory = right_of_projecting.unflatten(-1, (-1, shape.width))
    by_memory.add_(initial_right)
    return torch.cat([right_of_projecting, right], dim=-1)


class _Scan(torch.autograd.Function):
    """The scan as one autograd node; the last arguments are the tensors of `ScanInputs`, `Weights` and `State`."""

    @staticmethod
    def forward(ctx, spans, projected, factors, need_state, recompute, has_backward, *tensors):
        inputs, weights, state = _group(tensors)
        weights = weights.by_stream()
        shape = Shape.of(inputs.query.shape[-1], projected, factors)
        saves = has_backward and any(ctx.needs_input_grad)
        reads = torch.empty_like(inputs.query)
        to_save = []
        # whether S at the chunk's start is S before the span
        shared = []
        first_whole = len(spans) - recompute if recompute else 0
        for number, span in enumerate(spans):
            if span.continues is not None:
                state = _restarted(state, span)
            span_reads = reads[:, span.start : span.stop]
            saves_all = number >= first_whole
            state, saved = _forward_span(inputs, weights, state, span, shape, span_reads, saves_all)
            shared.append(saved.chunk_start is saved.current)
            if saves:
                to_save.extend(saved)
        if saves:
            ctx.spans = spans
            ctx.shape = shape
            ctx.shared = shared
            current_after = state.current if need_state else None
            ctx.save_for_backward(*tensors, current_after, *to_save)
            ctx.set_materialize_grads(False)
        if not need_state:
            return reads, None, None, None
        current, chunk_start, tail = state
        if chunk_start is current:
            chunk_start = chunk_start.clone()
        return reads, current, chunk_start, tail.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_reads, grad_current, grad_start, grad_tail):
        tensors = list(ctx.saved_tensors)
        fields = len(Saved._fields)
        # the forward pass's arguments, S after the last span, and what each span saved
        first = len(tensors) - len(ctx.spans) * fields
        inputs, weights, _ = _group(tensors[: first - 1])
        current_after = tensors[first - 1]
        # Uninitialised, since every slot is written once. Contiguous, which fixes the order of the sums over them.
        grad_inputs = ScanInputs(*map(empty_like, inputs))
        grad_weights = Weights(*map(torch.zeros_like, weights))
        weights = weights.by_stream()
        grad_views = grad_weights.by_stream()
        if grad_reads is None:
            grad_reads = torch.zeros_like(inputs.query)
        if grad_start is not None:
            # gradients are added in place
            grad_start = grad_start.clone()
        grad_state = State(grad_current, grad_start, grad_tail)
        # a backward pass started within autocast would round these products
        with torch.autocast(grad_reads.device.type, enabled=False):
            for span, shared in zip(reversed(ctx.spans), reversed(ctx.shared), strict=True):
                saved = Saved(*tensors[-fields:])
                del tensors[-fields:]
                if shared:
                    saved = saved._replace(chunk_start=saved.current)
                backward = SpanBackward(inputs, weights, span, ctx.shape, saved, grad_inputs, grad_views)
                grad_reads_of_span = grad_reads[:, span.start : span.stop]
                grad_state = backward.run(grad_reads_of_span, grad_state, current_after)
                current_after = saved.current
        return None, None, None, None, None, None, *grad_inputs, *grad_weights, *grad_state


def _restarted(state: State, span: ChunkSpan) -> State:
    """The state with which a span begins, whose documents may be new."""
    current = span.continues * state.current
    if state.chunk_start is state.current:
        return State(current, current, state.conv_tail)
    return State(current, span.continues * state.chunk_start, state.conv_tail)


def empty_like(part: Tensor | None) -> Tensor | None:
    """A contiguous tensor of the shape and dtype of `part`, not initialised."""
    return None if part is None else torch.empty_like(part, memory_format=torch.contiguous_format)


def _group(tensors) -> tuple[ScanInputs, Weights, State]:
    """The tensors of `_Scan.apply`."""
    remaining = iter(tensors)
    inputs = ScanInputs._make(islice(remaining, len(ScanInputs._fields)))
    weights = Weights._make(islice(remaining, len(Weights._fields)))
    return inputs, weights, State._make(remaining)


def scan_fused(
    inputs: ScanInputs,
    memories: DeltaMemories,
    state: ScanState,
    spans: list[ChunkSpan],
    need_state: bool = True,
    recompute: int = 0,
) -> tuple[Tensor, ScanState | None]:
    """`memory_scan.scan_plain` for memories under the delta rule; the state is `None` unless it is needed.

    Args:
        recompute: the last spans, which keep all that their backward pass reads. Those before keep 43 % (one memory of
            as many columns as a span has tokens), and compute convolution, norms and products of queries and keys
            again. With 0 all spans keep all.
    """
    (current,), chunk_start, tail = state
    # where nothing reads the chunk's start, the current weights take its place
    start = chunk_start[0] if chunk_start else current
    # `needs_input_grad` is true for leaves even under `no_grad`
    has_backward = torch.is_grad_enabled()
    weights = Weights(memories.conv_weights, memories.initial, memories.value_share)
    reads, current, start, tail = _Scan.apply(
        spans,
        memories.projected,
        memories.rate_factors,
        need_state,
        recompute,
        has_backward,
        *inputs,
        *weights,
        *State(current, start, tail),
    )
    if not need_state:
        return reads, None
    chunk_start = (start,) if chunk_start else ()
    return reads, ScanState((current,), chunk_start, tail)
