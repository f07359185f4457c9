"""The scan of memories that project keys and values, with HOPE's own Triton kernels. EXPERIMENTAL: never run on a GPU.

The memories that project keys and values do not depend on the content memory, so one kernel scans them first
(`memory_triton_kernels`). Keys and values that no memory projects are computed for all slots at once.
flash-linear-attention's kernels then compute the content memory's gated delta rule with these keys and values
(`kernels_fla.read_content`).

Axes: b sequences times heads, S slots, N time tiles, R memories that project, D head width, K kernel size of the
convolution.
"""

from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .chunks import ChunkSpan, merge_spans
from .kernels_fla import read_content, scan_obstacle
from .layers import convolve
from .memory_delta import DeltaMemories
from .memory_scan import ScanInputs, ScanState, unit, written_values

_WIDTHS = (16, 32, 64, 128)


def obstacle(rule: type, projected: tuple[str, ...], hidden_states: torch.Tensor, width: int) -> str | None:
    """Why the kernels cannot compute the scan, as `kernels_fla.scan_obstacle`; `None` if they can."""
    if rule is not DeltaMemories:
        return "Triton's kernels do not know memory_rule='paper'"
    if not projected:
        return "Triton's kernels are for memory_projections, and the model has none (set HOPE_KERNELS=fla)"
    if width not in _WIDTHS:
        return f"heads of Triton's kernels are 16, 32, 64 or 128 wide, not {width}"
    return scan_obstacle(rule, (), hidden_states, width)


class _Tiles(NamedTuple):
    """Time tiles: at most C consecutive slots of one document and one chunk."""

    # largest number of slots per tile, C
    size: int
    # first slot of every tile, then S: int32 [N + 1]
    bounds: torch.Tensor
    # 0 for a tile at which a document begins, else 1; the last entry is 1: float32 [b, N + 1]
    keeps: torch.Tensor
    # for every tile, the index of its chunk's start state: 0 = of an earlier call, n + 1 = before tile n: int32 [b, N]
    starts: torch.Tensor
    # for every state, the number of tiles whose chunk starts with it: int32 [b, N + 1]
    counts: torch.Tensor
    # whether the last chunk ends with the call: bool [b, 1, 1, 1]
    closed: torch.Tensor

    @classmethod
    def of(cls, spans: list[ChunkSpan], rows: int, size: int, device: torch.device) -> "_Tiles":
        bounds, first = [], []
        for span in spans:
            first.append(len(bounds))
            bounds += range(span.start, span.stop, size)
        tiles, first = len(bounds), torch.tensor(first, device=device)
        keeps = torch.ones(rows, tiles + 1, device=device)
        if spans[0].keeps is None:
            closes = torch.tensor([span.closes for span in spans], device=device).expand(rows, -1)
            begins = F.pad(closes[:, :-1], (1, 0))
        else:
            closes = torch.cat([span.closes for span in spans], dim=1).squeeze(-1)
            kept = torch.cat([span.keeps for span in spans], dim=1).squeeze(-1)
            keeps[:, first] = kept.float()
            begins = F.pad(closes[:, :-1], (1, 0)) | ~kept
        starts = torch.zeros(rows, tiles, dtype=torch.long, device=device)
        starts[:, first] = torch.where(begins, first + 1, 0)
        starts = starts.cummax(1).values
        counts = torch.zeros(rows, tiles + 1, dtype=torch.long, device=device)
        counts.scatter_add_(1, starts, torch.ones_like(starts))
        bounds = torch.tensor([*bounds, spans[-1].stop], dtype=torch.int32, device=device)
        return cls(size, bounds, keeps, starts.int(), counts.int(), closes[:, -1, None, None, None])

    @property
    def number(self) -> int:
        return len(self.bounds) - 1

    def states(self, start: torch.Tensor, current: torch.Tensor) -> torch.Tensor:
        """Allocate the states [b, N + 2, R, D, D]; fill in 0 (`start`) and 1 (`current`, reset at new documents)."""
        states = current.new_empty(len(current), self.number + 2, *current.shape[1:])
        states[:, 0] = start
        states[:, 1] = current * self.keeps[:, 0, None, None, None]
        return states

    def opened(self, states: torch.Tensor) -> torch.Tensor:
        """The state at the start of the last chunk [b, R, D, D]."""
        return states[torch.arange(len(states), device=states.device), self.starts[:, -1].long()]


def _on(device: torch.device):
    # Triton launches on the current device
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def tile_size(width: int, dtype: torch.dtype) -> int:
    """Largest number of slots per time tile with few register spills (`tests/model/test_offline_kernels.py`)."""
    return 16 if width > 64 or dtype == torch.float32 else 32


def _launch(width: int, is_backward: bool) -> dict[str, int]:
    """Numbers of warps and stages. With one stage Triton moves no load ahead of a store to the same address."""
    return {"num_warps": 8 if width > (32 if is_backward else 64) else 4, "num_stages": 1}


class _Projection(torch.autograd.Function):
    """Keys and values [b, S, D], the convolutions' padded inputs [R, b, K - 1 + S, D], and two states [b, R, D, D].

    The states are those after the last token and at the start of the last chunk. `fixed` holds the keys or values that
    no memory projects [b, S, D], or is `None`.
    """

    @staticmethod
    def forward(
        ctx, tiles, dtype, projected, factors, inside, tails, has_backward,
        given, fixed, taps, tail, rate, log_retention, value_norm, current, start,
    ):  # fmt: skip
        from .memory_triton_kernels import projection_forward

        number, rows, slots, width = given.shape
        reach = taps.shape[2] - 1
        raw = given.new_empty(number, rows, reach + slots, width)
        raw[:, :, :reach] = tail
        raw.scatter_(2, _tail_rows(tails, tail), tail)
        keys = fixed if "k" not in projected else torch.empty_like(given[0])
        values = fixed if "v" not in projected else torch.empty_like(given[0])
        states = tiles.states(start, current)
        alike = len(set(factors)) == 1
        inverses = given.new_empty(rows, tiles.number, 1 if alike else number, tiles.size, tiles.size, dtype=dtype)
        flags = {
            "K_PROJECTED": "k" in projected, "V_PROJECTED": "v" in projected, "NORMED": value_norm is not None,
            "MASKED": inside is not None, "ALIKE": alike, "K": reach + 1, "D": width, "C": tiles.size,
            "DT": _triton_type(dtype),
        }  # fmt: skip
        factors = torch.tensor(factors, device=given.device)
        with _on(given.device):
            projection_forward[(rows,)](
                given, taps, _or(inside, given), _or(value_norm, given), rate, log_retention, factors, tiles.bounds,
                tiles.keeps, tiles.starts, tails, raw, keys, values, states, inverses, rows, tiles.number, slots,
                LEVELS=tiles.size.bit_length() - 1, **flags, **_launch(width, False),
            )  # fmt: skip
        if has_backward and any(ctx.needs_input_grad):
            ctx.tiles, ctx.flags, ctx.projected = tiles, flags, projected
            saved = (given, taps, tail, inside, tails, rate, log_retention, value_norm, factors)
            ctx.save_for_backward(*saved, raw, keys, values, states, inverses)
            ctx.set_materialize_grads(False)
        outputs = (keys, values, raw, states[:, -1].clone(), tiles.opened(states))
        # copied, since autograd does not accept an input as an output
        return tuple(part.clone() if part is fixed else part for part in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_keys, grad_values, grad_raw, grad_after, grad_opened):
        from .memory_triton_kernels import projection_backward

        tiles = ctx.tiles
        saved = ctx.saved_tensors
        given, taps, tail, inside, tails, rate, log_retention, value_norm, factors = saved[:9]
        raw, keys, values, states, inverses = saved[9:]
        _, rows, slots, width = given.shape
        opened, grad_opened, grad_start = _opened_gradient(tiles, grad_opened, states)
        grad_state = _own(grad_after, states[:, 0])
        grad_first = torch.zeros_like(grad_state)
        # copies, since the kernel writes into them
        grad_keys, grad_values = _own(grad_keys, keys), _own(grad_values, values)
        grad_mixed, grad_given = torch.empty_like(given), torch.empty_like(given)
        grad_rate, grad_log = torch.empty_like(rate), torch.empty_like(rate)
        grad_norm = None if value_norm is None else torch.zeros_like(value_norm)
        with _on(given.device):
            projection_backward[(rows,)](
                given, taps, _or(inside, given), _or(value_norm, given), rate, log_retention, factors, tiles.bounds,
                tiles.keeps, tiles.counts, tails, raw, keys, values, states, inverses, opened, grad_opened,
                raw if grad_raw is None else grad_raw.contiguous(), grad_keys, grad_values, grad_state, grad_first,
                grad_mixed, grad_given, _or(grad_norm, given), grad_rate, grad_log, rows, tiles.number, slots,
                TAILED=grad_raw is not None, **ctx.flags, **_launch(width, True),
            )  # fmt: skip
        grad_taps, grad_tail = _convolution_gradients(raw, taps, inside, tails, grad_mixed, grad_raw, tail)
        fixed = None if len(ctx.projected) == 2 else grad_values if ctx.projected == ("k",) else grad_keys
        grad_first = grad_first if grad_start is None else grad_first + grad_start
        grad_state = grad_state * tiles.keeps[:, 0, None, None, None]
        grads = (grad_given, fixed, grad_taps, grad_tail, grad_rate, grad_log, grad_norm, grad_state, grad_first)
        return *(None,) * 7, *grads


def _triton_type(dtype: torch.dtype):
    try:
        import triton.language as tl
    except ImportError as error:
        raise ImportError("Triton does not load: set HOPE_KERNELS=torch") from error
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def _or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """`tensor`, or `other` for `None`: a kernel needs a tensor for every argument, even if it does not read it."""
    return other if tensor is None else tensor


def _own(grad: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of `grad`, into which a kernel may write; for `None` zeros of the shape of `like`."""
    if grad is None:
        return torch.zeros_like(like, memory_format=torch.contiguous_format)
    return grad.clone(memory_format=torch.contiguous_format)


def _opened_gradient(tiles: _Tiles, grad: torch.Tensor | None, states: torch.Tensor) -> tuple:
    """Index [b] of the last chunk's start state, its gradient, and the gradient of the state passed in [b, R, D, D].

    The index is -1 without a gradient, or if an earlier call began the chunk: its start is the state passed in.
    """
    if grad is None:
        return torch.full_like(tiles.starts[:, -1], -1), states, None
    place = tiles.starts[:, -1]
    is_earlier = place == 0
    return torch.where(is_earlier, -1, place), grad.contiguous(), torch.where(is_earlier.view(-1, 1, 1, 1), grad, 0.0)


def _tail_rows(tails: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    """Row indices of the tail of earlier calls in the padded inputs, expanded to its shape [R, b, K - 1, D]."""
    around = torch.arange(tail.shape[2], device=tails.device)
    return (tails.long()[:, None] + around)[None, :, :, None].expand_as(tail)


def _convolution_gradients(raw, taps, inside, tails, grad_mixed, grad_raw, tail):
    """Gradients of the kernel weights [R, b, K, D] and of the tail of earlier calls [R, b, K - 1, D]."""
    reach, slots = tail.shape[2], grad_mixed.shape[2]
    grad_taps = torch.empty_like(taps)
    grad_padded = torch.zeros_like(raw) if grad_raw is None else grad_raw.clone()
    for tap in range(reach + 1):
        part = grad_mixed
        if inside is not None and tap < reach:
            part = part * inside[:, tap, :, None]
        grad_taps[:, :, tap] = (part * raw[:, :, tap : tap + slots]).sum(2)
        grad_padded[:, :, tap : tap + slots].addcmul_(taps[:, :, tap, None], part)
    index = _tail_rows(tails, tail)
    moved = grad_padded.gather(2, index)
    # the first K - 1 rows hold a copy of the tail, which counts unless `tails` points to the same rows
    return grad_taps, moved + grad_padded.scatter(2, index, 0.0)[:, :, :reach]


def scan_triton(
    inputs: ScanInputs,
    memories: DeltaMemories,
    state: ScanState,
    spans: list[ChunkSpan],
    need_state: bool = True,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, ScanState | None]:
    """`memory_scan.scan_plain` for memories that project; operands of products are rounded to `dtype`.

    In the returned state, the content memory's columns of `chunk_start` hold its weights after the call. Nothing reads
    these columns.
    """
    span, (rows, slots, width) = merge_spans(spans), inputs.query.shape
    projected, names = memories.projected, ("k", "v", "q")
    tiles = _Tiles.of(spans, rows, tile_size(width, dtype), inputs.query.device)
    raw = dict(zip(names, inputs[:3], strict=True))
    tails, taps = (
        dict(zip(names, part.chunk(3, dim=-1), strict=True)) for part in (state.conv_tail, memories.conv_weights)
    )
    # [b, D, M D] to [b, M, D, D]
    current, start = (weights.unflatten(-1, (-1, width)).movedim(-2, 1) for (weights,) in state[:2])

    fixed = [name for name in names if name not in projected]
    parts = (torch.cat([of[name] for name in fixed], dim=-1) for of in (raw, tails, taps))
    mixed, after_tail = convolve(*parts, span)
    streams = dict(zip(fixed, F.silu(mixed).chunk(len(fixed), dim=-1), strict=True))
    after_tails = dict(zip(fixed, after_tail.chunk(len(fixed), dim=-1), strict=True))
    for name in set("kq").intersection(fixed):
        streams[name] = unit(streams[name])
    if "v" in fixed:
        streams["v"] = written_values(inputs, streams["v"], span)
    masks = None
    if span.inside is not None:
        masks = span.inside.squeeze(-1).transpose(0, 1).to(torch.int8).contiguous()
    begin = torch.zeros(rows, dtype=torch.int32, device=tiles.bounds.device)
    if span.tail_in is not None and span.tail_in.shape[1]:
        begin = span.tail_in[:, 0, 0].int()
    keys, values, padded, after, opened = _Projection.apply(
        tiles, dtype, projected, memories.rate_factors[:-1], masks, begin, torch.is_grad_enabled(),
        torch.stack([raw[name] for name in projected]),
        next((streams[name].contiguous() for name in "kv" if name in fixed), None),
        torch.stack([taps[name].squeeze(2).transpose(0, 1) for name in projected]),
        torch.stack([tails[name] for name in projected]),
        inputs.rate.contiguous(), inputs.log_retention.contiguous(),
        None if inputs.value_norm is None or "v" in fixed else inputs.value_norm.contiguous(),
        current[:, :-1], start[:, :-1],
    )  # fmt: skip
    given = streams["q"], keys, values, inputs, memories, current[:, -1]
    reads, content = read_content(*given, spans, need_state, dtype)
    if not need_state:
        return reads, None
    for index, name in enumerate(projected):
        rows_after = padded[index, :, slots:]
        if span.tail_out is not None:
            rows_after = padded[index].gather(1, span.tail_out.expand_as(rows_after))
        after_tails[name] = rows_after
    weights = (after, torch.where(tiles.closed, after, opened))
    current, opened = (torch.cat([part, content[:, None]], dim=1).movedim(1, -2).flatten(-2) for part in weights)
    return reads, ScanState((current,), (opened,), torch.cat([after_tails[name] for name in names], dim=-1))
