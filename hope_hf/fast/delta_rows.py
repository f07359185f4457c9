"""`memory_scan.scan_plain` for the delta rule by `delta_rows.cpp`, for memories that project nothing.

A row, which is one sequence and head, passes from its first token to its last in blocks of 32 that stay in a core's
cache; threads take rows. A block saves its errors and the state before it for the backward pass, which computes
everything else again.

Axes: b sequences times heads, S slot, D head width, K kernel size of the convolution, N blocks.
"""

import ctypes
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from ..model.backends import once_differentiable
from ..model.chunks import ChunkSpan
from ..model.layers import tail_after, with_tail
from ..model.memory_delta import DeltaMemories
from ..model.memory_scan import ScanInputs, ScanState
from .delta_scan import empty_like, scan_fused
from .delta_span import Weights
from .native import POINTER, VECTOR_BYTES, fields, function, run, set_addresses

# Tokens of a block, and what the work space of a row holds.
BLOCK = 32
_MOST_WIDTH, _MOST_TAPS = 256, 8
# in the compiled library
_NAME = "hope_scan"
# of rows and slots
_STRIDES = ctypes.c_int64 * 2
_STRIDED = ("key", "value", "query", "reads")
# of a thread
_LEAST_BLOCKS = 8


class _Arguments(ctypes.Structure):
    """`Arguments` of `delta_rows.cpp`."""

    _fields_ = [
        *fields(ctypes.c_int64, "rows", "slots", "width", "taps", "blocks"),
        *fields(POINTER, "starts", "continues", "reach", "offset"),
        *fields(POINTER, "key", "value", "query"),
        *fields(_STRIDES, "key_strides", "value_strides", "query_strides"),
        *fields(POINTER, "rate", "log_retention", "value_norm", "erased"),
        *fields(POINTER, "conv_weights", "initial", "value_share", "tail", "current", "reads"),
        *fields(_STRIDES, "reads_strides"),
        *fields(POINTER, "errors", "states", "grad_current"),
        *fields(POINTER, "grad_key", "grad_value", "grad_query"),
        *fields(POINTER, "grad_rate", "grad_log_retention", "grad_value_norm", "grad_erased"),
        *fields(POINTER, "grad_conv_weights", "grad_initial", "grad_value_share", "grad_tail"),
    ]


def runs_on(inputs: ScanInputs, memories: DeltaMemories) -> bool:
    """Whether the compiled scan computes these inputs."""
    query = inputs.query
    width = query.shape[-1]
    taps = len(memories.conv_weights)
    if memories.projected or query.device.type != "cpu":
        return False
    if width > _MOST_WIDTH or taps > _MOST_TAPS:
        return False
    if width * query.itemsize % VECTOR_BYTES:
        return False
    return function(_NAME, query.dtype) is not None


class _Blocks(NamedTuple):
    """Where blocks begin, and what documents and padding change; `None` without them."""

    # [N + 1], int64, on the CPU
    starts: Tensor
    # whether a block goes on with the document before it [N, b], bool
    continues: Tensor | None
    # slots before each slot that belong to its document, at most K - 1 [b, S], uint8
    reach: Tensor | None
    # slots before the row's first token [b], int64
    offset: Tensor | None

    @property
    def number(self) -> int:
        """Of blocks."""
        return len(self.starts) - 1

    @classmethod
    def of(cls, spans: Sequence[ChunkSpan], rows: int, tail_size: int) -> "_Blocks":
        """The blocks of `rows` rows, whose convolutions read `tail_size` tokens before their own."""
        slots = spans[-1].stop
        if spans[0].inside is None:
            starts = torch.tensor([*range(0, slots, BLOCK), slots])
            return cls(starts, continues=None, reach=None, offset=None)
        starts = []
        continues = []
        for span in spans:
            starts_of_span = range(span.start, span.stop, BLOCK)
            starts += starts_of_span
            goes_on = torch.ones(len(starts_of_span), rows, dtype=torch.bool)
            if span.continues is not None:
                goes_on[0] = span.continues.flatten()
            continues.append(goes_on)
        starts.append(slots)
        inside = torch.cat([span.inside for span in spans], dim=2)
        reach = inside[:tail_size].sum(0, dtype=torch.uint8).squeeze(-1)
        offset = None
        tail_in = spans[0].tail_in
        if tail_in is not None and tail_size:
            offset = tail_in[:, 0, 0].contiguous()
        return cls(torch.tensor(starts), torch.cat(continues), reach.contiguous(), offset)


def _columns_of_tail(spans: Sequence[ChunkSpan], rows: int, tail_size: int) -> Tensor | None:
    """Which columns of the tail before and the slots [b, K - 1 + S] are the tail after a call [b, K - 1, 1].

    `None` for the last ones, without documents and padding.
    """
    if spans[0].inside is None:
        return None
    columns = torch.arange(tail_size + spans[-1].stop)
    columns = columns.expand(rows, -1).unsqueeze(-1)
    tail = columns[:, :tail_size]
    for span in spans:
        columns_of_span = columns[:, tail_size + span.start : tail_size + span.stop]
        padded = with_tail(columns_of_span, tail, span)
        tail = tail_after(padded, tail, span)
    return tail


def _strides(tensor: Tensor) -> ctypes.Array:
    row, slot, _ = tensor.stride()
    return _STRIDES(row, slot)


def _with_dense_tokens(tensor: Tensor) -> Tensor:
    """[b, S, D], of which the numbers of a token lie side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class _Call(NamedTuple):
    """The tensors that both passes read, as `delta_rows.cpp` expects them."""

    inputs: ScanInputs
    weights: Weights
    blocks: _Blocks
    # [b, K - 1, 3 D]
    tail: Tensor

    @classmethod
    def of(cls, inputs: ScanInputs, weights: Weights, blocks: _Blocks, tail: Tensor) -> "_Call":
        streams = map(_with_dense_tokens, inputs[:3])
        gates = [None if gate is None else gate.contiguous() for gate in inputs[3:]]
        inputs = ScanInputs(*streams, *gates)
        weights = Weights._make(map(Tensor.contiguous, weights))
        return cls(inputs, weights, blocks, tail.contiguous())

    def run(
        self,
        reads: Tensor,
        grad_inputs: ScanInputs | None = None,
        grad_weights: Weights | None = None,
        **tensors: Tensor | None,
    ) -> None:
        """Run all rows, or their backward pass if there are gradients to write.

        Args:
            reads: [b, S, D], to be written; in a backward pass their gradient.
            tensors: further fields of `_Arguments`.
        """
        if is_fake(reads):
            # a planner asks for shapes and sizes alone
            return
        rows, slots, width = self.inputs.query.shape
        taps = len(self.weights.conv_weights)
        blocks = self.blocks.number
        arguments = _Arguments(rows, slots, width, taps, blocks)
        tensors |= {"reads": reads, "tail": self.tail}
        for group in (self.blocks, self.weights, self.inputs):
            tensors |= group._asdict()
        if grad_inputs is not None:
            gradients = grad_inputs._asdict() | grad_weights._asdict()
            for name, gradient in gradients.items():
                tensors[f"grad_{name}"] = gradient
        set_addresses(arguments, tensors)
        for name in _STRIDED:
            strides = _strides(tensors[name])
            setattr(arguments, f"{name}_strides", strides)
        # a thread begins in the time of some blocks
        least = _LEAST_BLOCKS // blocks
        compiled = function(_NAME, reads.dtype)
        run(compiled, arguments, rows, max(1, least))


class _RowScan(torch.autograd.Function):
    """The scan as one autograd node; its last arguments are inputs, weights and the two tensors of a state."""

    @staticmethod
    def forward(ctx, spans, need_state, has_backward, *tensors):
        inputs, weights, (current, tail) = _group(tensors)
        rows, slots, width = inputs.query.shape
        blocks = _Blocks.of(spans, rows, tail_size=tail.shape[1])
        call = _Call.of(inputs, weights, blocks, tail)
        reads = torch.empty_like(inputs.query)
        current = current.clone(memory_format=torch.contiguous_format)
        errors = states = columns = None
        saves = has_backward and any(ctx.needs_input_grad)
        if saves:
            errors = reads.new_empty(rows, slots, width)
            states = reads.new_empty(rows, call.blocks.number, width, width)
        call.run(reads=reads, current=current, errors=errors, states=states)
        if need_state:
            columns = _columns_of_tail(spans, rows, tail.shape[1])
        if saves:
            ctx.blocks = call.blocks
            after = current if need_state else None
            ctx.save_for_backward(*call.inputs, *call.weights, call.tail, errors, states, after, columns)
            ctx.set_materialize_grads(False)
        if not need_state:
            return reads, None, None
        # a state that autograd saves must not be a result
        return reads, current.clone() if saves else current, _tail(call, columns)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_reads, grad_current, grad_tail_after):
        inputs, weights, (tail, errors, states, after, columns) = _group(ctx.saved_tensors)
        call = _Call(inputs, weights, ctx.blocks, tail)
        rows, slots, width = inputs.query.shape
        if grad_reads is None:
            grad_reads = torch.zeros_like(errors)
        if grad_current is None:
            after = None
            grad_current = states.new_zeros(rows, width, width)
        grad_inputs = ScanInputs(*map(empty_like, inputs))
        taps, _, _, channels = weights.conv_weights.shape
        grad_conv_weights = tail.new_zeros(rows, taps, channels)
        grad_weights = Weights(
            grad_conv_weights,
            torch.zeros_like(weights.initial),
            torch.zeros_like(weights.value_share),
        )
        grad_tail = torch.zeros_like(tail)
        grad_current = grad_current.clone(memory_format=torch.contiguous_format)
        call.run(
            reads=_with_dense_tokens(grad_reads),
            current=after,
            errors=errors,
            states=states,
            grad_current=grad_current,
            grad_tail=grad_tail,
            grad_inputs=grad_inputs,
            grad_weights=grad_weights,
        )
        if grad_tail_after is not None:
            _add_to_inputs(grad_inputs, grad_tail, grad_tail_after, columns)
        grad_conv_weights = grad_conv_weights.transpose(0, 1).unsqueeze(2)
        grad_weights = grad_weights._replace(conv_weights=grad_conv_weights)
        return None, None, None, *grad_inputs, *grad_weights, grad_current, grad_tail


def _group(tensors: Sequence[Tensor | None]) -> tuple[ScanInputs, Weights, Sequence[Tensor | None]]:
    """The inputs, the weights, and the tensors behind them."""
    remaining = iter(tensors)
    inputs = ScanInputs._make(islice(remaining, len(ScanInputs._fields)))
    weights = Weights._make(islice(remaining, len(Weights._fields)))
    return inputs, weights, tuple(remaining)


def _tail(call: _Call, columns: Tensor | None) -> Tensor:
    """The last K - 1 inputs of each row [b, K - 1, 3 D], at `columns` of the tail before and the slots."""
    tail_size = call.tail.shape[1]
    first = max(0, call.inputs.query.shape[1] - tail_size)
    tails = call.tail.chunk(3, dim=-1)
    parts = []
    for before, stream in zip(tails, call.inputs[:3], strict=True):
        if columns is None:
            newest = stream[:, first:]
            older = before[:, newest.shape[1] :]
            part = torch.cat([older, newest], dim=1)
        else:
            padded = torch.cat([before, stream], dim=1)
            part = padded.gather(1, columns.expand_as(before))
        parts.append(part)
    return torch.cat(parts, dim=-1)


def _add_to_inputs(
    grad_inputs: ScanInputs, grad_tail: Tensor, grad_tail_after: Tensor, columns: Tensor | None
) -> None:
    """Add the gradient of `_tail` to those of the inputs and of the tail before, in place."""
    tail_size = grad_tail.shape[1]
    rows, slots, width = grad_inputs.query.shape
    if columns is None:
        columns = torch.arange(slots, slots + tail_size).view(1, -1, 1)
    tails = grad_tail.chunk(3, dim=-1)
    tails_after = grad_tail_after.chunk(3, dim=-1)
    for of_tail, of_tail_after, of_stream in zip(tails, tails_after, grad_inputs[:3], strict=True):
        padded = of_stream.new_zeros(rows, tail_size + slots, width)
        padded.scatter_add_(1, columns.expand_as(of_tail_after), of_tail_after)
        of_tail.add_(padded[:, :tail_size])
        of_stream.add_(padded[:, tail_size:])


def scan_rows(
    inputs: ScanInputs,
    memories: DeltaMemories,
    state: ScanState,
    spans: Sequence[ChunkSpan],
    need_state: bool = True,
    recompute: int = 0,
) -> tuple[Tensor, ScanState | None]:
    """`memory_scan.scan_plain` where it can run (`runs_on`), else `delta_scan.scan_fused`.

    Args:
        recompute: not read here, since little is saved: a block's errors, and the state before it.
    """
    if not runs_on(inputs, memories):
        return scan_fused(inputs, memories, state, spans, need_state, recompute)
    (current,), _, tail = state
    weights = Weights(memories.conv_weights, memories.initial, memories.value_share)
    # `needs_input_grad` is true for leaves even under `no_grad`
    has_backward = torch.is_grad_enabled()
    reads, current, tail = _RowScan.apply(spans, need_state, has_backward, *inputs, *weights, current, tail)
    if not need_state:
        return reads, None
    return reads, ScanState((current,), (), tail)
