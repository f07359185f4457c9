"""`memory_scan.scan_plain` for the delta rule, with a backward pass written by hand.

Batched matrix products, with all memories side by side as columns, take two thirds of its time. Per span it saves only
the tensors that the backward pass reads, far less than autograd would save.

Axes: b sequences times heads, S slot (`chunks`), C slot of a span, D head width, M memories of a layer, K kernel size
of the convolution. Tokens are rows; a memory is applied as `z W`.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .chunks import ChunkSpan
from .layers import convolution_gradients, convolve_padded, tail_after
from .memory_delta import DeltaMemories
from .memory_scan import NORM_EPSILON, ScanInputs, ScanState, decay_matrix

# Size of the diagonal blocks that are inverted by powers.
_BASE = 4


def unit_lower_inverse(lower: torch.Tensor) -> torch.Tensor:
    """`(I + lower)^-1` for strictly lower triangular `lower` [b, C, C].

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
    both = lower.new_zeros(2, batch, padded + 1, padded)
    (matrix, inverse), second = both.unbind(0), both.stride(0)
    matrix[:, :size, :size] = lower
    shape, strides = (batch * padded // _BASE, _BASE, _BASE), (_BASE * (padded + 1), padded, 1)
    corner = both.as_strided(shape, strides).contiguous()
    start = torch.eye(_BASE, dtype=lower.dtype, device=lower.device) - corner
    both.as_strided(shape, strides, second).copy_(torch.baddbmm(start, start, torch.bmm(corner, corner)))
    width = _BASE
    while width < padded:
        # blocks of the matrix below the diagonal, and those of the inverse above, beside and below
        shape, strides = (batch * padded // (2 * width), width, width), (2 * width * (padded + 1), padded, 1)
        below = width * padded
        upper_left, lower_right = (both.as_strided(shape, strides, second + at) for at in (0, below + width))
        product = torch.bmm(lower_right, both.as_strided(shape, strides, below))
        torch.neg(torch.bmm(product, upper_left), out=both.as_strided(shape, strides, second + below))
        width *= 2
    return inverse[:, :size, :size]


class _Saved(NamedTuple):
    """Tensors that the backward pass of a span reads."""

    # S before the span, and at the start of its chunk
    current: torch.Tensor
    chunk_start: torch.Tensor
    # k, v, q with the tail in front [b, K - 1 + C, 3 D], after the convolution, and after SiLU and norms [b, C, 3 D]
    padded: torch.Tensor
    mixed: torch.Tensor
    qkv: torch.Tensor
    # 1 / |k|, 1 or 1 / |v|, 1 / |q| [b, C, 3, 1]
    scales: torch.Tensor
    # e^(T_t), e^(T_C - T_t) [b, C], e^(T_t - T_i) [b, C, C]
    decay_from_start: torch.Tensor
    decay_to_end: torch.Tensor
    decay: torch.Tensor
    # K K^T, Q K^T [b, C, C], (I + rho L)^-1 for each rho [R b, C, C]
    gram: torch.Tensor
    similarity: torch.Tensor
    solved: torch.Tensor
    # rho A [b, C, M D]
    errors: torch.Tensor


class _Weights(NamedTuple):
    """The tensors of `DeltaMemories`."""

    conv_weights: torch.Tensor
    initial: torch.Tensor
    value_share: torch.Tensor


class _State(NamedTuple):
    """The tensors of `ScanState`."""

    current: torch.Tensor
    chunk_start: torch.Tensor
    conv_tail: torch.Tensor


class _Shape(NamedTuple):
    """Head width, number of memories, and each memory's column range."""

    width: int
    memories: int
    # columns of all memories of one rho, and rho
    groups: list[tuple[slice, float]]
    # for each memory that projects: the columns of its k or v, and the memory's own
    projected: list[tuple[slice, slice]]
    # columns of the content memory
    content: slice

    @classmethod
    def of(cls, width: int, projected: tuple[str, ...], factors: tuple[float, ...]) -> "_Shape":
        """`projected` and `factors` as in `DeltaMemories`."""
        memories = len(factors)
        groups = []
        for factor in dict.fromkeys(factors):
            members = [index for index, other in enumerate(factors) if other == factor]
            groups.append((slice(members[0] * width, (members[-1] + 1) * width), factor))
        columns = [slice(index * width, (index + 1) * width) for index in range(3)]
        qkv = [columns["kv".index(name)] for name in projected]
        return cls(width, memories, groups, list(zip(qkv, columns, strict=False)), columns[memories - 1])


def _forward_span(
    inputs: ScanInputs, weights: _Weights, state: _State, span: ChunkSpan, shape: _Shape
) -> tuple[torch.Tensor, _Saved]:
    """Reads [b, C, D] of one span, and the tensors to save."""
    current, chunk_start, tail = state
    cut, size, tail_size, width = slice(span.start, span.stop), span.stop - span.start, tail.shape[1], shape.width
    rows, conv_weights, initial = len(current), weights.conv_weights, weights.initial
    padded = tail.new_empty(rows, tail_size + size, 3 * width)
    padded[:, :tail_size] = tail
    raw = padded[:, tail_size:]
    torch.cat([x[:, cut] for x in inputs[:3]], dim=-1, out=raw)
    for source, columns in shape.projected:
        raw[..., source] += torch.bmm(raw[..., source], chunk_start[..., columns])
    if span.tail_in is not None:
        padded.scatter_(1, span.tail_in.expand_as(tail), tail)
    mixed = convolve_padded(padded, conv_weights, span)
    qkv = F.silu(mixed).view(rows, size, 3, width)
    scales = torch.linalg.vector_norm(qkv, dim=-1, keepdim=True).square_().add_(NORM_EPSILON).rsqrt_()
    if inputs.value_norm is None:
        # values keep their norm
        scales[:, :, 1] = 1.0
    qkv = qkv.mul_(scales).view(rows, size, 3 * width)
    keys, values, queries = qkv.split(width, dim=-1)

    total, step = inputs.log_retention[:, cut].cumsum(-1), inputs.rate[:, cut].unsqueeze(-2)
    decay_from_start, decay_to_end = total.exp(), (total[:, -1:] - total).exp()
    decay = decay_matrix(total, total)
    weighted = decay * step
    gram, similarity = torch.bmm(keys, keys.mT), torch.bmm(queries, keys.mT)
    lower = (gram * weighted).tril_(-1)
    solved = unit_lower_inverse(torch.cat([lower if factor == 1 else factor * lower for _, factor in shape.groups]))

    right = torch.bmm(decay_from_start.unsqueeze(-1) * keys, current)
    right[..., shape.content] += torch.bmm(keys, initial)
    for _, columns in shape.projected:
        right[..., columns] += keys
    if inputs.value_norm is not None:
        values = values * inputs.value_norm[:, cut, None]
    right.view(rows, size, shape.memories, width).sub_(values.unsqueeze(2))
    errors = torch.empty_like(right)
    for (columns, factor), inverse in zip(shape.groups, solved.split(rows), strict=True):
        errors[..., columns] = torch.bmm(inverse if factor == 1 else factor * inverse, right[..., columns])

    reads = torch.bmm(queries, initial)
    reads.baddbmm_(decay_from_start.unsqueeze(-1) * queries, current[..., shape.content])
    reads.baddbmm_(similarity * weighted, errors[..., shape.content], alpha=-1)
    reads.addcmul_(weights.value_share, values)
    everything = (current, chunk_start, padded, mixed, qkv, scales, decay_from_start, decay_to_end, decay)
    return reads, _Saved(*everything, gram, similarity, solved, errors)


def _end_span(inputs: ScanInputs, state: _State, span: ChunkSpan, saved: _Saved) -> _State:
    """The state after a span."""
    width = inputs.query.shape[-1]
    scale = (inputs.rate[:, span.start : span.stop] * saved.decay_to_end).unsqueeze(-1)
    written = scale * saved.qkv[..., :width]
    after = torch.baddbmm(saved.decay_from_start[:, -1:, None] * saved.current, written.mT, saved.errors, alpha=-1)
    if isinstance(span.closes, bool):
        # one tensor for both, as `_Scan` checks by identity
        chunk_start = after if span.closes else saved.chunk_start
    else:
        chunk_start = torch.where(span.closes, after, saved.chunk_start)
    return _State(after, chunk_start, tail_after(saved.padded, state.conv_tail, span))


def _backward_span(
    inputs: ScanInputs,
    weights: _Weights,
    span: ChunkSpan,
    shape: _Shape,
    saved: _Saved,
    grad_reads: torch.Tensor,
    after: _State,
    grad_inputs: ScanInputs,
    grad_weights: _Weights,
) -> _State:
    """Gradient of the state before a span, from the gradients of its reads and of the state after it (may be None).

    Gradients of inputs are written into `grad_inputs`; gradients of weights are added to `grad_weights`.
    """
    cut, width, initial = slice(span.start, span.stop), shape.width, weights.initial
    rows, size, _ = saved.mixed.shape
    keys, values, queries = saved.qkv.split(width, dim=-1)
    step, decay_column = inputs.rate[:, cut], saved.decay_from_start.unsqueeze(-1)
    grad_after, grad_start, grad_tail = after
    if grad_start is not None and span.closes is not False:
        closed = grad_start if span.closes is True else torch.where(span.closes, grad_start, 0.0)
        grad_after = closed if grad_after is None else grad_after + closed
        grad_start = None if span.closes is True else grad_start - closed

    # the state after the span
    if grad_after is None:
        grad_errors, grad_keys = torch.zeros_like(saved.errors), torch.zeros_like(keys)
        grad_total, grad_step = torch.zeros_like(step), torch.zeros_like(step)
        grad_current = torch.zeros_like(saved.current)
    else:
        scale = step * saved.decay_to_end
        grad_errors = torch.bmm(scale.unsqueeze(-1) * keys, grad_after).neg_()
        grad_written = torch.bmm(saved.errors, grad_after.mT).neg_()
        grad_scale = (grad_written * keys).sum(-1)
        grad_keys = grad_written.mul_(scale.unsqueeze(-1))
        grad_step = grad_scale * saved.decay_to_end
        moved = grad_scale.mul_(scale)
        grad_total = -moved
        last = saved.decay_from_start[:, -1]
        grad_total[:, -1] += moved.sum(-1) + (grad_after * saved.current).sum((-1, -2)) * last
        grad_current = last[:, None, None] * grad_after

    # the reads
    weighted = saved.decay * step.unsqueeze(-2)
    content = saved.errors[..., shape.content]
    # added after the product, since `baddbmm_` into columns multiplies one matrix after the other
    grad_errors[..., shape.content].sub_(torch.bmm((saved.similarity * weighted).mT, grad_reads))
    grad_product = torch.bmm(grad_reads, content.mT).neg_()
    grad_weighted = grad_product * saved.similarity
    grad_similarity = grad_product.mul_(weighted)
    grad_queries = torch.bmm(grad_similarity, keys)
    grad_keys.baddbmm_(grad_similarity.mT, queries)
    grad_queries.baddbmm_(grad_reads, initial.mT)
    through = torch.bmm(grad_reads, saved.current[..., shape.content].mT)
    grad_queries.addcmul_(decay_column, through)
    grad_total.addcmul_((through * queries).sum(-1), saved.decay_from_start)
    grad_current[..., shape.content].add_(torch.bmm((decay_column * queries).mT, grad_reads))
    grad_weights.initial.baddbmm_(queries.mT, grad_reads)

    # the solve
    grad_right = torch.empty_like(grad_errors)
    for (columns, factor), inverse in zip(shape.groups, saved.solved.split(rows), strict=True):
        transposed = (inverse if factor == 1 else factor * inverse).mT
        grad_right[..., columns] = torch.bmm(transposed, grad_errors[..., columns])
    grad_lower = torch.bmm(grad_right, saved.errors.mT).neg_().tril_(-1)
    grad_weighted.addcmul_(grad_lower, saved.gram)
    grad_gram = grad_lower.mul_(weighted)
    grad_keys.baddbmm_(grad_gram + grad_gram.mT, keys)
    grad_exponent = grad_weighted.mul_(saved.decay)
    column_sum = grad_exponent.sum(-2)
    grad_step.add_(column_sum)
    grad_total.addcmul_(step, column_sum, value=-1)
    grad_total.add_(torch.bmm(grad_exponent, step.unsqueeze(-1)).squeeze(-1))

    # the right side
    grad_keys.baddbmm_(grad_right[..., shape.content], initial.mT)
    for _, columns in shape.projected:
        grad_keys.add_(grad_right[..., columns])
    through = torch.bmm(grad_right, saved.current.mT)
    grad_keys.addcmul_(decay_column, through)
    grad_total.addcmul_((through * keys).sum(-1), saved.decay_from_start)
    grad_weights.initial.baddbmm_(keys.mT, grad_right[..., shape.content])
    grad_current.baddbmm_((decay_column * keys).mT, grad_right)
    grad_values = grad_right.view(rows, size, shape.memories, width).sum(2).neg_()
    grad_values.addcmul_(weights.value_share, grad_reads)

    # norms, SiLU and convolution
    share = (grad_reads * values).sum(-1)
    if inputs.value_norm is not None:
        share.mul_(inputs.value_norm[:, cut])
        grad_inputs.value_norm[:, cut] = (grad_values * values).sum(-1)
        grad_values.mul_(inputs.value_norm[:, cut, None])
    grad_weights.value_share.add_(share.sum(-1)[:, None, None])
    grad_qkv = torch.stack([grad_keys, grad_values, grad_queries], dim=2)
    directions = saved.qkv.view(rows, size, 3, width)
    along = (grad_qkv * directions).sum(-1, keepdim=True)
    if inputs.value_norm is None:
        along[:, :, 1] = 0.0
    grad_qkv.addcmul_(directions, along, value=-1).mul_(saved.scales)
    grad_mixed = torch.ops.aten.silu_backward(grad_qkv.view(rows, size, 3 * width), saved.mixed)
    grad_raw, grad_tail = convolution_gradients(
        grad_mixed, grad_tail, saved.padded, weights.conv_weights, grad_weights.conv_weights, span
    )
    # memories that project are read at the chunk's start
    if shape.projected and grad_start is None:
        grad_start = torch.zeros_like(saved.chunk_start)
    for source, columns in shape.projected:
        given = inputs.key if source.start == 0 else inputs.value
        grad_source = grad_raw[..., source].contiguous()
        grad_start[..., columns] += torch.bmm(given[:, cut].mT, grad_source)
        grad_raw[..., source] += torch.bmm(grad_source, saved.chunk_start[..., columns].mT)
    for grad, part in zip(grad_inputs[:3], grad_raw.split(width, dim=-1), strict=True):
        grad[:, cut] = part
    grad_inputs.rate[:, cut] = grad_step
    grad_inputs.log_retention[:, cut] = grad_total.flip(-1).cumsum(-1).flip(-1)

    # the state before the span
    if saved.chunk_start is saved.current and grad_start is not None:
        grad_current, grad_start = grad_current.add_(grad_start), None
    if span.keeps is not None:
        grad_current = span.keeps * grad_current
        grad_start = None if grad_start is None else span.keeps * grad_start
    return _State(grad_current, grad_start, grad_tail)


class _Scan(torch.autograd.Function):
    """The scan as one autograd node; the last arguments are the tensors of `ScanInputs`, `_Weights` and `_State`."""

    @staticmethod
    def forward(ctx, spans, projected, factors, need_state, has_backward, *tensors):
        inputs, weights, state = _group(tensors)
        shape = _Shape.of(inputs.query.shape[-1], projected, factors)
        keep = has_backward and any(ctx.needs_input_grad)
        reads, to_save, shared = torch.empty_like(inputs.query), [], []
        for index, span in enumerate(spans):
            if span.keeps is not None:
                same = state.chunk_start is state.current
                current = span.keeps * state.current
                state = _State(current, current if same else span.keeps * state.chunk_start, state.conv_tail)
            reads[:, span.start : span.stop], saved = _forward_span(inputs, weights, state, span, shape)
            shared.append(saved.chunk_start is saved.current)
            if need_state or index + 1 < len(spans):
                state = _end_span(inputs, state, span, saved)
            if keep:
                to_save.extend(saved)
        if keep:
            ctx.spans, ctx.shape, ctx.shared = spans, shape, shared
            ctx.save_for_backward(*tensors, *to_save)
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
        inputs, weights, _ = _group(to_save[:first])
        # uninitialised, since every slot is written once
        grad_inputs = ScanInputs(*(None if part is None else torch.empty_like(part) for part in inputs))
        grad_weights = _Weights(*map(torch.zeros_like, weights))
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
                arguments = (inputs, weights, span, ctx.shape, saved, part, grad_state, grad_inputs, grad_weights)
                grad_state = _backward_span(*arguments)
        return None, None, None, None, None, *grad_inputs, *grad_weights, *grad_state


def _group(tensors) -> tuple[ScanInputs, _Weights, _State]:
    return ScanInputs(*tensors[:6]), _Weights(*tensors[6:9]), _State(*tensors[9:])


def scan_fused(
    inputs: ScanInputs, memories: DeltaMemories, state: ScanState, spans: list[ChunkSpan], need_state: bool = True
) -> tuple[torch.Tensor, ScanState | None]:
    """`memory_scan.scan_plain` for memories under the delta rule; the state is `None` unless it is needed."""
    (current,), chunk_start, tail = state
    weights = (memories.conv_weights, memories.initial, memories.value_share)
    # `needs_input_grad` is true for leaves even under `no_grad`
    options = (spans, memories.projected, memories.rate_factors, need_state, torch.is_grad_enabled())
    # a rule that does not read the chunk's start gets the current weights in its place
    start = chunk_start[0] if chunk_start else current
    reads, current, start, tail = _Scan.apply(*options, *inputs, *weights, current, start, tail)
    return reads, ScanState((current,), (start,) if chunk_start else (), tail) if need_state else None
