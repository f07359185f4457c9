"""`memory_scan.scan_plain` for the delta rule, with a backward pass written by hand.

All memories lie side by side as columns of the same products. k, v and q of a span pass elementwise operators one
after the other, since each fits into a CPU's cache. Spans save what their backward pass reads and is dear to compute
again; with `recompute`, all but the last ones save the dearest alone.

Axes: b sequences times heads, S slot (`chunks`), C slot of a span, D head width, M memories of a layer, K kernel size
of the convolution. Tokens are rows; a memory is applied as `z W`.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from ..model.chunks import ChunkSpan
from ..model.layers import with_tail
from ..model.memory_delta import DeltaMemories
from ..model.memory_scan import NORM_EPSILON, ScanInputs, ScanState
from .convolution import convolution_gradients, convolve_padded

# Size of the diagonal blocks that are inverted by powers.
_BASE = 4


def unit_lower_inverse(lower: torch.Tensor) -> torch.Tensor:
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
    matrix = (lower.new_empty if padded == size else lower.new_zeros)(batch, padded + 1, padded)
    inverse = lower.new_zeros(batch, padded + 1, padded)
    matrix[:, :size, :size] = lower
    shape, strides = (batch * padded // _BASE, _BASE, _BASE), (_BASE * (padded + 1), padded, 1)
    corner = matrix.as_strided(shape, strides).tril(-1)
    start = torch.eye(_BASE, dtype=lower.dtype, device=lower.device) + corner
    inverse.as_strided(shape, strides).copy_(torch.baddbmm(start, start, torch.bmm(corner, corner)))
    width = _BASE
    while width < padded:
        # blocks of the matrix below the diagonal, and those of the inverse above, beside and below
        shape, strides = (batch * padded // (2 * width), width, width), (2 * width * (padded + 1), padded, 1)
        below = width * padded
        upper_left, lower_right = (inverse.as_strided(shape, strides, at) for at in (0, below + width))
        product = torch.bmm(lower_right, matrix.as_strided(shape, strides, below))
        inverse.as_strided(shape, strides, below).copy_(torch.bmm(product, upper_left))
        width *= 2
    return inverse[:, :size, :size]


class _Saved(NamedTuple):
    """Tensors that the backward pass of a span reads; the first three are None where it computes them again."""

    # k, v and q after the convolution [3, b, C, D], and 1 / |k|, 1 / |v| if values have unit norm, 1 / |q| after SiLU
    # [3, b, C, 1]
    mixed: torch.Tensor | None
    scales: torch.Tensor | None
    # -eta_i e^(T_t - T_i) (q_t . k_i) for i <= t [b, C, C]
    attention: torch.Tensor | None
    # (I + rho L)^-1 for each rho [R b, C, C], rho A [b, C, M D]
    solved: torch.Tensor
    errors: torch.Tensor

    # S before the span, and at the start of its chunk
    current: torch.Tensor
    chunk_start: torch.Tensor
    # last inputs of the convolutions before the span [b, K - 1, 3 D]
    conv_tail: torch.Tensor


class _Weights(NamedTuple):
    """The tensors of `DeltaMemories`; in a span, `conv_weights` are the K weights of k, of v and of q."""

    conv_weights: torch.Tensor | list[tuple[torch.Tensor, ...]]
    initial: torch.Tensor
    value_share: torch.Tensor

    def by_stream(self) -> "_Weights":
        """Views for the spans."""
        return self._replace(conv_weights=[part.unbind() for part in self.conv_weights.chunk(3, dim=-1)])


class _State(NamedTuple):
    """The tensors of `ScanState`."""

    current: torch.Tensor
    chunk_start: torch.Tensor
    conv_tail: torch.Tensor


class _Shape(NamedTuple):
    """Head width, and each memory's column range."""

    width: int
    # columns of all memories of one rho, and rho
    groups: list[tuple[slice, float]]
    # columns of the memory that projects k (0) or v (1)
    projected: dict[int, slice]
    # columns of the content memory, and of those before it
    content: slice
    others: slice

    @classmethod
    def of(cls, width: int, projected: tuple[str, ...], factors: tuple[float, ...]) -> "_Shape":
        """`projected` and `factors` as in `DeltaMemories`."""
        groups = []
        for factor in dict.fromkeys(factors):
            members = [index for index, other in enumerate(factors) if other == factor]
            groups.append((slice(members[0] * width, (members[-1] + 1) * width), factor))
        columns = [slice(index * width, (index + 1) * width) for index in range(len(factors))]
        own = {"kv".index(name): part for name, part in zip(projected, columns, strict=False)}
        return cls(width, groups, own, columns[-1], slice(0, columns[-1].start))


def _padded(inputs: ScanInputs, state: _State | _Saved, span: ChunkSpan, shape: _Shape) -> list[torch.Tensor]:
    """k, v and q of a span, projected, each with the tail in front [b, K - 1 + C, D]."""
    before, streams = span.start - state.conv_tail.shape[1], []
    for index, tail in enumerate(state.conv_tail.chunk(3, dim=-1)):
        if before >= 0 and span.tail_out is None and index not in shape.projected:
            streams.append(inputs[index][:, before : span.stop])
            continue
        raw = inputs[index][:, span.start : span.stop]
        if index in shape.projected:
            raw = raw + torch.bmm(raw, state.chunk_start[..., shape.projected[index]])
        streams.append(with_tail(raw, tail, span))
    return streams


class _Tokens(NamedTuple):
    """What both passes make of a span's k, v and q."""

    # unit keys above unit queries [b, 2, C, D], and views of either
    both: torch.Tensor
    keys: torch.Tensor
    queries: torch.Tensor
    # [b, C, D], of unit norm if a gate sets their norm
    values: torch.Tensor
    # -eta k [b, C, D]
    written: torch.Tensor
    # e^(T_t), e^(T_C - T_t) [b, C, 1], and e^(T_t - T_i) for i <= t, else 0 [b, C, C]
    from_start: torch.Tensor
    to_end: torch.Tensor
    decay: torch.Tensor

    @classmethod
    def of(cls, inputs: ScanInputs, span: ChunkSpan, active: list[torch.Tensor], scales: torch.Tensor) -> "_Tokens":
        """`active`: k, v and q after SiLU, of which v is changed; `scales` of each, as in `_Saved`."""
        cut, values = slice(span.start, span.stop), active[1]
        both = values.new_empty(len(values), 2, *values.shape[1:])
        keys, queries = both.unbind(1)
        torch.mul(active[0], scales[0], out=keys)
        torch.mul(active[2], scales[2], out=queries)
        if inputs.value_norm is not None:
            values.mul_(scales[1])
        total = inputs.log_retention[:, cut, None].cumsum(1)
        # The exponential of minus infinity is slow: the mask comes after it, and nothing takes a gradient of it.
        decay = (total - total.mT).exp_().tril_()
        written = -inputs.rate[:, cut, None] * keys
        return cls(both, keys, queries, values, written, total.exp(), (total[:, -1:] - total).exp_(), decay)


def _solve(solved: torch.Tensor, x: torch.Tensor, shape: _Shape, transposed: bool = False) -> torch.Tensor:
    """`rho (I + rho L)^-1 x`, or of the transposed matrix, for the columns of each rho of `x` [b, C, M D]."""
    solved = solved.mT if transposed else solved
    parts = zip(shape.groups, solved.split(len(x)), strict=True)
    found = [torch.bmm(inverse if rho == 1 else rho * inverse, x[..., columns]) for (columns, rho), inverse in parts]
    return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


def _mix(
    padded: list[torch.Tensor], weights: _Weights, span: ChunkSpan
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """`mixed` and `scales` of `_Saved`, and k, v and q after SiLU, from the results of `_padded`."""
    rows, _, width = padded[0].shape
    shape = (3, rows, span.stop - span.start)
    mixed, scales = padded[0].new_empty(*shape, width), padded[0].new_empty(*shape, 1)
    streams = mixed.unbind()
    convolve_padded(padded, weights.conv_weights, span, streams)
    active = [F.silu(part) for part in streams]
    for part, scale in zip(active, scales.unbind(), strict=True):
        torch.linalg.vector_norm(part, dim=-1, keepdim=True, out=scale)
    scales.square_().add_(NORM_EPSILON).rsqrt_()
    return mixed, scales, active


def _forward_span(
    inputs: ScanInputs,
    weights: _Weights,
    state: _State,
    span: ChunkSpan,
    shape: _Shape,
    reads: torch.Tensor,
    keeps_all: bool,
) -> tuple[_State, _Saved]:
    """The state after a span, and the tensors to save; its reads [b, C, D] are written into `reads`."""
    current, chunk_start, tail = state
    cut, size, width, rows = slice(span.start, span.stop), span.stop - span.start, shape.width, len(current)
    padded = _padded(inputs, state, span, shape)
    mixed, scales, active = _mix(padded, weights, span)
    both, keys, queries, values, written, from_start, to_end, decay = _Tokens.of(inputs, span, active, scales)
    flat = both.view(rows, 2 * size, width)
    if inputs.value_norm is not None:
        values = values * inputs.value_norm[:, cut, None]

    attention = torch.bmm(queries, written.mT).mul_(decay)
    lower = torch.bmm(keys, written.mT).mul_(decay)
    if len(shape.groups) > 1:
        lower = torch.cat([rho * lower for _, rho in shape.groups])
    solved = unit_lower_inverse(lower)

    # what the content memory returns for keys and queries
    found = torch.bmm(flat, current[..., shape.content]).view_as(both).mul_(from_start.unsqueeze(1))
    found.view_as(flat).baddbmm_(flat, weights.initial)
    found_for_keys, read = found.unbind(1)
    right = found_for_keys - values
    if shape.projected:
        others = torch.bmm(keys, current[..., shape.others]).mul_(from_start).unflatten(-1, (-1, width))
        right = torch.cat([others.add_((keys - values).unsqueeze(2)).flatten(2), right], dim=-1)
    errors = _solve(solved, right, shape)
    read = torch.baddbmm(read, attention, errors[..., shape.content])
    if inputs.erased is not None:
        values = values * inputs.erased[:, cut, None]
    torch.addcmul(read, weights.value_share, values, out=reads)
    again = (mixed, scales, attention) if keeps_all else (None, None, None)
    saved = _Saved(*again, solved, errors, current, chunk_start, tail)

    after = (from_start[:, -1:] * current).baddbmm_(written.mul_(to_end).mT, errors)
    if not isinstance(span.closes, bool):
        chunk_start = torch.where(span.closes, after, chunk_start)
    elif span.closes:
        # one tensor for both, as `_Scan` checks by identity
        chunk_start = after
    if span.tail_out is None:
        tails = [part[:, size:] for part in padded]
    else:
        tails = [part.gather(1, span.tail_out.expand(-1, -1, width)) for part in padded]
    return _State(after, chunk_start, torch.cat(tails, dim=-1)), saved


def _backward_span(
    inputs: ScanInputs,
    weights: _Weights,
    span: ChunkSpan,
    shape: _Shape,
    saved: _Saved,
    grad_reads: torch.Tensor,
    current_after: torch.Tensor | None,
    after: _State,
    grad_inputs: ScanInputs,
    grad_weights: _Weights,
) -> _State:
    """Gradient of the state before a span, from the gradients of its reads and of the state after it (may be None).

    `current_after` is S after the span. Gradients of inputs are written into `grad_inputs`; gradients of weights are
    added to `grad_weights`.
    """
    cut, width, initial, current = slice(span.start, span.stop), shape.width, weights.initial, saved.current
    rows, size, _ = saved.errors.shape
    grad_after, grad_start, grad_tail = after
    if grad_start is not None and span.closes is not False:
        closed = grad_start if span.closes is True else torch.where(span.closes, grad_start, 0.0)
        grad_after = closed if grad_after is None else grad_after + closed
        grad_start = None if span.closes is True else grad_start - closed

    padded, (mixed, scales, attention) = _padded(inputs, saved, span, shape), saved[:3]
    if mixed is None:
        mixed, scales, active = _mix(padded, weights, span)
    else:
        active = [F.silu(part) for part in mixed]
    both, keys, queries, values, written, from_start, to_end, decay = _Tokens.of(inputs, span, active, scales)
    flat, rate = both.view(rows, 2 * size, width), inputs.rate[:, cut, None]

    # the state after the span, and the reads of what it writes
    if attention is None:
        attention = torch.bmm(queries, written.mT).mul_(decay)
    grad_errors = torch.bmm(attention.mT, grad_reads)
    if shape.projected:
        grad_errors = F.pad(grad_errors, (shape.content.start, 0))
    if grad_after is None:
        grad_written, grad_current = torch.zeros_like(keys), torch.zeros_like(current)
    else:
        grad_errors.baddbmm_(to_end * written, grad_after)
        grad_written = torch.bmm(saved.errors, grad_after.mT).mul_(to_end)
        grad_current = from_start[:, -1:] * grad_after

    # the solve, and what the content memory returns for keys and queries
    grad_right = _solve(saved.solved, grad_errors, shape, transposed=True)
    grad_found = torch.cat([grad_right[..., shape.content], grad_reads], dim=1)
    decayed = (from_start.unsqueeze(1) * grad_found.view_as(both)).view_as(flat)
    grad_products = torch.bmm(grad_found, saved.errors[..., shape.content].mT).view(rows, 2, size, size)
    grad_both = torch.bmm(decayed, current[..., shape.content].mT).view_as(both)
    grad_keys, grad_queries = grad_both.unbind(1)
    grad_all = grad_both.view_as(flat)
    if shape.projected:
        grad_others = grad_right[..., shape.others]
        grad_products[:, 0] += torch.bmm(grad_others, saved.errors[..., shape.others].mT)
        decayed_others = from_start * grad_others
        grad_keys += torch.bmm(decayed_others, current[..., shape.others].mT)
    grad_products.mul_(decay.unsqueeze(1))
    grad_products[:, 0].diagonal(dim1=1, dim2=2).zero_()
    grad_products = grad_products.view(rows, 2 * size, size)
    grad_written.baddbmm_(grad_products.mT, flat)

    # Keys and queries. Where e^(T_t) scales a vector, the gradient of T_t is the vector's product with its own.
    grad_all.baddbmm_(grad_products, written)
    grad_rate = (grad_written * keys).sum(-1).neg_()
    grad_total = (grad_both * both).sum((1, 3)).addcmul_(grad_rate, rate.squeeze(-1), value=-1)
    if grad_after is not None:
        grad_total[:, -1].add_((grad_after * current_after).sum((1, 2)))
    grad_inputs.rate[:, cut] = grad_rate
    grad_inputs.log_retention[:, cut] = grad_total.flip(-1).cumsum(-1).flip(-1)
    grad_all.baddbmm_(grad_found, initial.mT)
    grad_keys.addcmul_(rate, grad_written, value=-1)
    grad_weights.initial.baddbmm_(flat.mT, grad_found)
    grad_values = weights.value_share * grad_reads
    if inputs.erased is not None:
        grad_values.mul_(inputs.erased[:, cut, None])
    grad_values.sub_(grad_right[..., shape.content])
    if shape.projected:
        grad_current[..., shape.content] += torch.bmm(flat.mT, decayed)
        grad_current[..., shape.others] += torch.bmm(keys.mT, decayed_others)
        grad_others = grad_others.unflatten(-1, (-1, width)).sum(2)
        grad_keys += grad_others
        grad_values -= grad_others
    else:
        grad_current.baddbmm_(flat.mT, decayed)

    # norms, SiLU and convolution
    share, along = (grad_reads * values).sum(-1), None
    if inputs.value_norm is not None:
        norm = inputs.value_norm[:, cut]
        share.mul_(norm)
        along = (grad_values * values).sum(-1)
        grad_inputs.value_norm[:, cut] = along
        grad_values.mul_(norm.unsqueeze(-1))
        along = (along * norm).unsqueeze(-1)
    if inputs.erased is not None:
        grad_inputs.erased[:, cut] = weights.value_share.squeeze(-1) * share
        share.mul_(inputs.erased[:, cut])
    grad_weights.value_share.add_(share.sum(-1)[:, None, None])
    if shape.projected and grad_start is None:
        # memories that project are read at the chunk's start
        grad_start = torch.zeros_like(saved.chunk_start)
    grad_tails = [None] * 3 if grad_tail is None else list(grad_tail.chunk(3, dim=-1))
    for index, (grad, unit) in enumerate(((grad_keys, keys), (grad_values, values), (grad_queries, queries))):
        along_unit = along if index == 1 else (grad * unit).sum(-1, keepdim=True)
        if along_unit is not None:
            grad.addcmul_(unit, along_unit, value=-1).mul_(scales[index])
        torch.ops.aten.silu_backward.grad_input(grad, mixed[index], grad_input=grad)
        conv_weights, grad_conv_weights = weights.conv_weights[index], grad_weights.conv_weights[index]
        grad_raw, grad_tails[index] = convolution_gradients(
            grad, grad_tails[index], padded[index], conv_weights, grad_conv_weights, span
        )
        if index in shape.projected:
            own, grad_source = shape.projected[index], grad_raw.contiguous()
            grad_start[..., own] += torch.bmm(inputs[index][:, cut].mT, grad_source)
            grad_raw = torch.baddbmm(grad_raw, grad_source, saved.chunk_start[..., own].mT)
        grad_inputs[index][:, cut] = grad_raw

    # the state before the span
    if saved.chunk_start is current and grad_start is not None:
        grad_current, grad_start = grad_current.add_(grad_start), None
    if span.keeps is not None:
        grad_current = span.keeps * grad_current
        grad_start = None if grad_start is None else span.keeps * grad_start
    return _State(grad_current, grad_start, torch.cat(grad_tails, dim=-1))


class _Scan(torch.autograd.Function):
    """The scan as one autograd node; the last arguments are the tensors of `ScanInputs`, `_Weights` and `_State`."""

    @staticmethod
    def forward(ctx, spans, projected, factors, need_state, recompute, has_backward, *tensors):
        inputs, weights, state = _group(tensors)
        weights, shape = weights.by_stream(), _Shape.of(inputs.query.shape[-1], projected, factors)
        keep = has_backward and any(ctx.needs_input_grad)
        reads, to_save, shared = torch.empty_like(inputs.query), [], []
        whole = len(spans) - recompute if recompute else 0
        for number, span in enumerate(spans):
            if span.keeps is not None:
                same = state.chunk_start is state.current
                current = span.keeps * state.current
                state = _State(current, current if same else span.keeps * state.chunk_start, state.conv_tail)
            into = reads[:, span.start : span.stop]
            state, saved = _forward_span(inputs, weights, state, span, shape, into, keeps_all=number >= whole)
            shared.append(saved.chunk_start is saved.current)
            if keep:
                to_save.extend(saved)
        if keep:
            ctx.spans, ctx.shape, ctx.shared = spans, shape, shared
            ctx.save_for_backward(*tensors, state.current if need_state else None, *to_save)
            ctx.set_materialize_grads(False)
        if not need_state:
            return reads, None, None, None
        current, chunk_start, tail = state
        return reads, current, chunk_start.clone() if chunk_start is current else chunk_start, tail.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_reads, *grad_state):
        to_save = list(ctx.saved_tensors)
        first = len(to_save) - len(ctx.spans) * len(_Saved._fields)
        inputs, weights, _ = _group(to_save[: first - 1])
        current_after = to_save[first - 1]
        # Uninitialised, since every slot is written once. Contiguous, which fixes the order of the sums over them.
        grad_inputs = [
            None if part is None else torch.empty_like(part, memory_format=torch.contiguous_format) for part in inputs
        ]
        grad_inputs = ScanInputs(*grad_inputs)
        grad_weights = _Weights(*map(torch.zeros_like, weights))
        weights, grad_views = weights.by_stream(), grad_weights.by_stream()
        grad_reads = torch.zeros_like(inputs.query) if grad_reads is None else grad_reads
        grad_current, grad_start, grad_tail = grad_state
        # cloned, since gradients are added in place
        grad_state = _State(grad_current, None if grad_start is None else grad_start.clone(), grad_tail)
        # a backward pass started within autocast would round these products
        with torch.autocast(grad_reads.device.type, enabled=False):
            for span, shared in zip(reversed(ctx.spans), reversed(ctx.shared), strict=True):
                saved = _Saved(*to_save[-len(_Saved._fields) :])
                del to_save[-len(_Saved._fields) :]
                if shared:
                    saved = saved._replace(chunk_start=saved.current)
                part = grad_reads[:, span.start : span.stop]
                around = (part, current_after, grad_state, grad_inputs, grad_views)
                grad_state = _backward_span(inputs, weights, span, ctx.shape, saved, *around)
                current_after = saved.current
        return None, None, None, None, None, None, *grad_inputs, *grad_weights, *grad_state


def _group(tensors) -> tuple[ScanInputs, _Weights, _State]:
    inputs, weights = len(ScanInputs._fields), len(_Weights._fields)
    rest = tensors[inputs:]
    return ScanInputs(*tensors[:inputs]), _Weights(*rest[:weights]), _State(*rest[weights:])


def scan_fused(
    inputs: ScanInputs,
    memories: DeltaMemories,
    state: ScanState,
    spans: list[ChunkSpan],
    need_state: bool = True,
    recompute: int = 0,
) -> tuple[torch.Tensor, ScanState | None]:
    """`memory_scan.scan_plain` for memories under the delta rule; the state is `None` unless it is needed.

    Args:
        recompute: the last spans, which keep all that their backward pass reads. Those before keep 43 % (one memory of
            as many columns as a span has tokens), and compute convolution, norms and products of queries and keys
            again. With 0 all spans keep all.
    """
    (current,), chunk_start, tail = state
    weights = (memories.conv_weights, memories.initial, memories.value_share)
    # `needs_input_grad` is true for leaves even under `no_grad`
    options = (spans, memories.projected, memories.rate_factors, need_state, recompute, torch.is_grad_enabled())
    # where nothing reads the chunk's start, the current weights take its place
    start = chunk_start[0] if chunk_start else current
    reads, current, start, tail = _Scan.apply(*options, *inputs, *weights, current, start, tail)
    return reads, ScanState((current,), (start,) if chunk_start else (), tail) if need_state else None
