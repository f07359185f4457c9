"""What both passes of `delta_scan.py` make of a span, and its backward pass.

Axes: b sequences times heads, C slot of a span, D head width, M memories of a layer, K kernel size of the convolution.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..model.chunks import ChunkSpan
from ..model.layers import with_tail
from ..model.memory_scan import NORM_EPSILON, ScanInputs
from .convolution import convolution_gradients, convolve_padded


class Saved(NamedTuple):
    """Tensors that the backward pass of a span reads; the first three are None where it computes them again."""

    # k, v and q after the convolution [3, b, C, D], and 1 / |k|, 1 / |v| if values have unit norm, 1 / |q| after SiLU
    # [3, b, C, 1]
    mixed: Tensor | None
    scales: Tensor | None
    # -eta_i e^(g_t - g_i) (q_t . k_i) for i <= t [b, C, C]
    attention: Tensor | None
    # (I + rho L)^-1 for each rho [R b, C, C], rho A [b, C, M D]
    solved: Tensor
    errors: Tensor

    # S before the span, and at the start of its chunk
    current: Tensor
    chunk_start: Tensor
    # last inputs of the convolutions before the span [b, K - 1, 3 D]
    conv_tail: Tensor


class Weights(NamedTuple):
    """The tensors of `DeltaMemories`; in a span, `conv_weights` are the K weights of k, of v and of q."""

    conv_weights: Tensor | list[tuple[Tensor, ...]]
    initial: Tensor
    value_share: Tensor

    def by_stream(self) -> "Weights":
        """Views for the spans."""
        streams = self.conv_weights.chunk(3, dim=-1)
        return self._replace(conv_weights=[stream.unbind() for stream in streams])


class State(NamedTuple):
    """The tensors of `ScanState`."""

    current: Tensor
    chunk_start: Tensor
    conv_tail: Tensor


class Shape(NamedTuple):
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
    def of(cls, width: int, projected: tuple[str, ...], factors: tuple[float, ...]) -> "Shape":
        """`projected` and `factors` as in `DeltaMemories`."""
        projecting = {}
        for index, name in enumerate(projected):
            stream = "kv".index(name)
            first = index * width
            projecting[stream] = slice(first, first + width)
        start = len(projected) * width
        others = slice(0, start)
        content = slice(start, start + width)
        # the memories that project have one rho
        if factors[0] == factors[-1]:
            groups = [(slice(0, content.stop), factors[0])]
        else:
            groups = [(others, factors[0]), (content, factors[-1])]
        return cls(width, groups, projecting, content, others)


def padded_streams(inputs: ScanInputs, state: State | Saved, span: ChunkSpan, shape: Shape) -> list[Tensor]:
    """k, v and q of a span, projected, each with the tail in front [b, K - 1 + C, D]."""
    before = span.start - state.conv_tail.shape[1]
    streams = []
    for index, tail in enumerate(state.conv_tail.chunk(3, dim=-1)):
        stream = inputs[index]
        columns = shape.projected.get(index)
        if columns is None and before >= 0 and span.tail_out is None:
            # the inputs hold the tail already
            streams.append(stream[:, before : span.stop])
            continue
        raw = stream[:, span.start : span.stop]
        if columns is not None:
            of_memory = state.chunk_start[..., columns]
            raw = raw + torch.bmm(raw, of_memory)
        streams.append(with_tail(raw, tail, span))
    return streams


class Tokens(NamedTuple):
    """What both passes make of a span's k, v and q."""

    # unit keys above unit queries [b, 2, C, D], and views of either
    both: Tensor
    keys: Tensor
    queries: Tensor
    # [b, C, D], of unit norm if a gate sets their norm
    values: Tensor
    # -eta k [b, C, D]
    written: Tensor
    # e^(g_t), e^(g_C - g_t) [b, C, 1], and e^(g_t - g_i) for i <= t, else 0 [b, C, C]
    from_start: Tensor
    to_end: Tensor
    decay: Tensor

    @classmethod
    def of(cls, inputs: ScanInputs, span: ChunkSpan, active: list[Tensor], scales: Tensor) -> "Tokens":
        """`active`: k, v and q after SiLU, of which v is changed; `scales` of each, as in `Saved`."""
        cut = slice(span.start, span.stop)
        active_keys, values, active_queries = active
        scale_of_keys, scale_of_values, scale_of_queries = scales.unbind()
        rows, size, width = values.shape
        both = values.new_empty(rows, 2, size, width)
        keys, queries = both.unbind(1)
        torch.mul(active_keys, scale_of_keys, out=keys)
        torch.mul(active_queries, scale_of_queries, out=queries)
        if inputs.value_norm is not None:
            values.mul_(scale_of_values)
        rate = inputs.rate[:, cut, None]
        total = inputs.log_retention[:, cut, None].cumsum(1)
        # The exponential of minus infinity is slow: the mask comes after it, and nothing takes a gradient of it.
        decay = (total - total.mT).exp_().tril_()
        from_start = total.exp()
        to_end = (total[:, -1:] - total).exp_()
        return cls(both, keys, queries, values, -rate * keys, from_start, to_end, decay)

    @property
    def rows(self) -> Tensor:
        """Keys above queries [b, 2 C, D]."""
        return self.both.flatten(1, 2)


def solve(solved: Tensor, x: Tensor, shape: Shape, transposed: bool = False) -> Tensor:
    """`rho (I + rho L)^-1 x`, or of the transposed matrix, for the columns of each rho of `x` [b, C, M D]."""
    if transposed:
        solved = solved.mT
    parts = []
    for (columns, rho), inverse in zip(shape.groups, solved.split(len(x)), strict=True):
        if rho != 1:
            inverse = rho * inverse
        parts.append(torch.bmm(inverse, x[..., columns]))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def mixed_streams(padded: list[Tensor], weights: Weights, span: ChunkSpan) -> tuple[Tensor, Tensor, list[Tensor]]:
    """`mixed` and `scales` of `Saved`, and k, v and q after SiLU, from the results of `padded_streams`."""
    of_keys = padded[0]
    rows, _, width = of_keys.shape
    size = span.stop - span.start
    mixed = of_keys.new_empty(3, rows, size, width)
    scales = of_keys.new_empty(3, rows, size, 1)
    streams = mixed.unbind()
    convolve_padded(padded, weights.conv_weights, span, streams)
    active = [F.silu(part) for part in streams]
    for part, scale in zip(active, scales.unbind(), strict=True):
        torch.linalg.vector_norm(part, dim=-1, keepdim=True, out=scale)
    scales.square_().add_(NORM_EPSILON).rsqrt_()
    return mixed, scales, active


class SpanBackward:
    """The backward pass of a span, in steps; each uses the gradients that those before have made.

    Gradients of inputs are written into `grad_inputs`; gradients of weights are added to `grad_weights`.
    """

    def __init__(
        self,
        inputs: ScanInputs,
        weights: Weights,
        span: ChunkSpan,
        shape: Shape,
        saved: Saved,
        grad_inputs: ScanInputs,
        grad_weights: Weights,
    ):
        self.inputs = inputs
        self.weights = weights
        self.span = span
        self.shape = shape
        self.saved = saved
        self.grad_inputs = grad_inputs
        self.grad_weights = grad_weights
        self.cut = slice(span.start, span.stop)
        self.padded = padded_streams(inputs, saved, span, shape)
        if saved.mixed is None:
            self.mixed, self.scales, active = mixed_streams(self.padded, weights, span)
        else:
            self.mixed = saved.mixed
            self.scales = saved.scales
            active = [F.silu(part) for part in saved.mixed]
        self.tokens = Tokens.of(inputs, span, active, self.scales)

    def run(self, grad_reads: Tensor, after: State, current_after: Tensor | None) -> State:
        """Gradient of the state before the span, from that of its reads and of the state after it (may be None).

        `current_after` is S after the span.
        """
        saved = self.saved
        grad_after, grad_start = self.close_backward(after.current, after.chunk_start)
        self.reads_backward(grad_reads, grad_after)
        self.solve_backward(grad_reads)
        self.keys_backward(grad_after, current_after)
        self.values_backward(grad_reads)
        if self.shape.projected and grad_start is None:
            # memories that project are read at the chunk's start
            grad_start = torch.zeros_like(saved.chunk_start)
        grad_tail = self.stream_backward(grad_start, after.conv_tail)

        grad_current = self.grad_current
        if saved.chunk_start is saved.current and grad_start is not None:
            grad_current = grad_current.add_(grad_start)
            grad_start = None
        continues = self.span.continues
        if continues is not None:
            grad_current = continues * grad_current
            if grad_start is not None:
                grad_start = continues * grad_start
        return State(grad_current, grad_start, grad_tail)

    def close_backward(
        self, grad_after: Tensor | None, grad_start: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of S after the span, and of S at the chunk's start before it, from those of both after it.

        In rows whose chunk ends with the span, S after the span is that at the next chunk's start.
        """
        closes = self.span.closes
        if grad_start is None or closes is False:
            return grad_after, grad_start
        if closes is True:
            closed, grad_start = grad_start, None
        else:
            closed = torch.where(closes, grad_start, 0.0)
            grad_start = grad_start - closed
        grad_after = closed if grad_after is None else grad_after + closed
        return grad_after, grad_start

    def reads_backward(self, grad_reads: Tensor, grad_after: Tensor | None) -> None:
        """Through the reads of what the span writes, and the state after it: errors, written keys, S."""
        tokens = self.tokens
        saved = self.saved
        attention = saved.attention
        if attention is None:
            attention = torch.bmm(tokens.queries, tokens.written.mT).mul_(tokens.decay)
        grad_errors = torch.bmm(attention.mT, grad_reads)
        if self.shape.projected:
            grad_errors = F.pad(grad_errors, (self.shape.content.start, 0))
        if grad_after is None:
            self.grad_written = torch.zeros_like(tokens.keys)
            self.grad_current = torch.zeros_like(saved.current)
        else:
            written_at_end = tokens.to_end * tokens.written
            grad_errors.baddbmm_(written_at_end, grad_after)
            self.grad_written = torch.bmm(saved.errors, grad_after.mT).mul_(tokens.to_end)
            decay_of_span = tokens.from_start[:, -1:]
            self.grad_current = decay_of_span * grad_after
        self.grad_errors = grad_errors

    def solve_backward(self, grad_reads: Tensor) -> None:
        """Through the solve and the products of keys and queries: both, written keys, S."""
        tokens = self.tokens
        errors = self.saved.errors
        current = self.saved.current
        content = self.shape.content
        others = self.shape.others
        rows = tokens.rows
        grad_right = solve(self.saved.solved, self.grad_errors, self.shape, transposed=True)
        # of what the content memory returns for keys and queries [b, 2 C, D]
        grad_returned = torch.cat([grad_right[..., content], grad_reads], dim=1)
        from_start = tokens.from_start.unsqueeze(1)
        decayed = from_start * grad_returned.view_as(tokens.both)
        decayed = decayed.view_as(rows)
        products = torch.bmm(grad_returned, errors[..., content].mT)
        # of keys, and of queries [b, 2, C, C]
        products = products.unflatten(1, (2, -1))
        products_of_keys = products[:, 0]
        grad_both = torch.bmm(decayed, current[..., content].mT)
        grad_both = grad_both.view_as(tokens.both)
        if self.shape.projected:
            # these memories are read at keys alone
            grad_others = grad_right[..., others]
            products_of_keys += torch.bmm(grad_others, errors[..., others].mT)
            decayed_others = tokens.from_start * grad_others
            grad_both[:, 0] += torch.bmm(decayed_others, current[..., others].mT)
            grad_of_content = torch.bmm(rows.mT, decayed)
            grad_of_others = torch.bmm(tokens.keys.mT, decayed_others)
            self.grad_current[..., content] += grad_of_content
            self.grad_current[..., others] += grad_of_others
        else:
            self.grad_current.baddbmm_(rows.mT, decayed)
        products.mul_(tokens.decay.unsqueeze(1))
        # a token's error does not depend on its own write
        products_of_keys.diagonal(dim1=1, dim2=2).zero_()
        products = products.flatten(1, 2)
        self.grad_written.baddbmm_(products.mT, rows)
        grad_both.view_as(rows).baddbmm_(products, tokens.written)
        self.grad_right = grad_right
        self.grad_returned = grad_returned
        self.grad_both = grad_both

    def keys_backward(self, grad_after: Tensor | None, current_after: Tensor | None) -> None:
        """Through rates, retentions and the initial memory, to unit keys and queries.

        Where e^(g_t) scales a vector, the gradient of g_t is the vector's product with its own.
        """
        tokens = self.tokens
        cut = self.cut
        grad_both = self.grad_both
        rate = self.inputs.rate[:, cut]
        grad_rate = (self.grad_written * tokens.keys).sum(-1)
        grad_rate.neg_()
        grad_total = (grad_both * tokens.both).sum((1, 3))
        grad_total.addcmul_(grad_rate, rate, value=-1)
        if grad_after is not None:
            grad_of_last = (grad_after * current_after).sum((1, 2))
            grad_total[:, -1].add_(grad_of_last)
        self.grad_inputs.rate[:, cut] = grad_rate
        self.grad_inputs.log_retention[:, cut] = grad_total.flip(-1).cumsum(-1).flip(-1)
        rows = tokens.rows
        initial = self.weights.initial
        grad_both.view_as(rows).baddbmm_(self.grad_returned, initial.mT)
        grad_both[:, 0].addcmul_(rate.unsqueeze(-1), self.grad_written, value=-1)
        self.grad_weights.initial.baddbmm_(rows.mT, self.grad_returned)

    def values_backward(self, grad_reads: Tensor) -> None:
        """Through the errors, the share of the value in a read, and the gates of values, to values of unit norm."""
        inputs = self.inputs
        cut = self.cut
        values = self.tokens.values
        value_share = self.weights.value_share
        grad_values = inputs.own_values(value_share * grad_reads, cut)
        grad_values.sub_(self.grad_right[..., self.shape.content])
        if self.shape.projected:
            # each of these memories takes k - v
            grad_others = self.grad_right[..., self.shape.others]
            by_memory = grad_others.unflatten(-1, (-1, self.shape.width))
            grad_targets = by_memory.sum(2)
            self.grad_both[:, 0] += grad_targets
            grad_values -= grad_targets
        # of each token's share of its value
        grad_share = (grad_reads * values).sum(-1)
        # the gradient's product with the unit value [b, C, 1], through whose norm it goes; None without a norm
        self.value_dot = None
        if inputs.value_norm is not None:
            norm = inputs.value_norm[:, cut]
            grad_share.mul_(norm)
            grad_norm = (grad_values * values).sum(-1)
            self.grad_inputs.value_norm[:, cut] = grad_norm
            grad_values.mul_(norm.unsqueeze(-1))
            self.value_dot = (grad_norm * norm).unsqueeze(-1)
        if inputs.erased is not None:
            self.grad_inputs.erased[:, cut] = value_share.squeeze(-1) * grad_share
            grad_share.mul_(inputs.erased[:, cut])
        grad_share = grad_share.sum(-1)
        self.grad_weights.value_share.add_(grad_share[:, None, None])
        self.grad_values = grad_values

    def stream_backward(self, grad_start: Tensor | None, grad_tail: Tensor | None) -> Tensor:
        """Through norms, SiLU, convolutions and projections of k, v and q: the gradient of the tail before.

        Where memories project, their gradient is added to `grad_start`.
        """
        grad_keys, grad_queries = self.grad_both.unbind(1)
        grad_tails = [None] * 3 if grad_tail is None else grad_tail.chunk(3, dim=-1)
        grad_tails_before = []
        for index, grad in enumerate((grad_keys, self.grad_values, grad_queries)):
            self.norm_backward(index, grad)
            torch.ops.aten.silu_backward.grad_input(grad, self.mixed[index], grad_input=grad)
            grad_raw, grad_tail_before = convolution_gradients(
                grad,
                grad_tails[index],
                self.padded[index],
                self.weights.conv_weights[index],
                self.grad_weights.conv_weights[index],
                self.span,
            )
            grad_tails_before.append(grad_tail_before)
            if index in self.shape.projected:
                grad_raw = self.projection_backward(index, grad_raw.contiguous(), grad_start)
            self.grad_inputs[index][:, self.cut] = grad_raw
        return torch.cat(grad_tails_before, dim=-1)

    def norm_backward(self, index: int, grad: Tensor) -> None:
        """Through the norm of k (0), v (1) or q (2): `grad` [b, C, D] is changed in place."""
        tokens = self.tokens
        units = tokens.keys, tokens.values, tokens.queries
        unit = units[index]
        if index == 1:
            dot = self.value_dot
        else:
            dot = (grad * unit).sum(-1, keepdim=True)
        if dot is not None:
            grad.addcmul_(unit, dot, value=-1).mul_(self.scales[index])

    def projection_backward(self, index: int, grad: Tensor, grad_start: Tensor) -> Tensor:
        """Through the memory that projects k (0) or v (1), whose gradient is added to `grad_start`."""
        columns = self.shape.projected[index]
        raw = self.inputs[index][:, self.cut]
        grad_start[..., columns] += torch.bmm(raw.mT, grad)
        deviation = self.saved.chunk_start[..., columns]
        return torch.baddbmm(grad, grad, deviation.mT)
