"""The scan of the delta rule by two Triton kernels: memories that remake streams, then the content memory.

Memories that remake keys and values are written with these, and know nothing of the content memory: their scan comes
first (`triton_projection`). What needs no memory is made for all slots at once. Under the keys and values that come
out, the content memory is a gated delta rule whose targets are what its initial weights do not know yet, `V - K W_0`
(`triton_content`). Reads add `q W_0 + d v`.

Axes: b sequences times heads, S slots, N tiles, R memories that remake streams, D head width, K width of the
convolution.
"""

import importlib.util
import os
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .chunks import ScanPiece, whole
from .layers import convolve
from .memory_delta import DeltaMemories, step_token
from .memory_scan import ScanInputs, ScanState, unit, written_values

_WIDTHS = (16, 32, 64, 128)


def obstacle(inputs: ScanInputs, memories) -> str | None:
    """Why the kernels cannot compute this scan; `None` if they can."""
    query = inputs.query
    if not isinstance(memories, DeltaMemories):
        return "Triton's kernels do not know memory_rule='paper'"
    if query.dtype == torch.float64:
        return "the model is float64"
    if query.shape[-1] not in _WIDTHS:
        return f"heads of Triton's kernels are 16, 32, 64 or 128 wide, not {query.shape[-1]}"
    if query.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "the model is on a CPU"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    return None


class _Tiles(NamedTuple):
    """Runs of at most C slots, of which none crosses the start of a document."""

    # C
    size: int
    # first slot of every tile, and S: int32 [N + 1]
    bounds: torch.Tensor
    # 0 where a document begins at the tile; 1 after the last: float32 [b, N + 1]
    keeps: torch.Tensor
    # where the state of the chunk's start lies: before the call at 0, before tile n at n + 1: int32 [b, N]
    starts: torch.Tensor
    # tiles of the chunk that began with each state: int32 [b, N + 1]
    counts: torch.Tensor
    # whether the last chunk is closed: bool [b, 1, 1]
    closed: torch.Tensor

    @classmethod
    def of(cls, pieces: list[ScanPiece], rows: int, size: int, device: torch.device, has_chunks: bool) -> "_Tiles":
        """`has_chunks`: whether states at starts of chunks are read."""
        if not has_chunks and pieces[0].keeps is None:
            # tiles may lie across chunks
            pieces = [pieces[-1]._replace(start=0)]
        bounds = [start for piece in pieces for start in range(piece.start, piece.stop, size)]
        tiles = len(bounds)
        first = torch.tensor([bounds.index(piece.start) for piece in pieces], device=device)
        keeps = torch.ones(rows, tiles + 1, device=device)
        closes = torch.stack([_per_row(piece.closes, rows, device) for piece in pieces], dim=1)
        begins = F.pad(closes[:, :-1], (1, 0))
        if pieces[0].keeps is not None:
            kept = torch.stack([piece.keeps.view(rows) for piece in pieces], dim=1)
            keeps[:, first] = kept.float()
            begins = begins | ~kept
        starts = torch.zeros(rows, tiles, dtype=torch.long, device=device)
        starts[:, first] = torch.where(begins, first + 1, 0)
        starts = starts.cummax(1).values
        counts = torch.zeros(rows, tiles + 1, dtype=torch.long, device=device)
        counts.scatter_add_(1, starts, torch.ones_like(starts))
        bounds = torch.tensor([*bounds, pieces[-1].stop], dtype=torch.int32, device=device)
        return cls(size, bounds, keeps, starts.int(), counts.int(), closes[:, -1, None, None])

    @property
    def number(self) -> int:
        return len(self.bounds) - 1

    def room(self, start: torch.Tensor, current: torch.Tensor, saves: bool = True) -> torch.Tensor:
        """Room for the states of all tiles [b, N + 2, R, D, D], of two if not saved, with those of earlier calls."""
        states = current.new_empty(len(current), self.number + 2 if saves else 2, *current.shape[1:])
        states[:, 0] = start
        states[:, 1] = current * self.keeps[:, 0, None, None, None]
        return states

    def opened(self, states: torch.Tensor) -> torch.Tensor:
        """The state with which the last chunk began [b, R, D, D]."""
        return states[torch.arange(len(states), device=states.device), self.starts[:, -1].long()]


def _per_row(flag: torch.Tensor | bool, rows: int, device: torch.device) -> torch.Tensor:
    return torch.full((rows,), flag, device=device) if isinstance(flag, bool) else flag.view(rows)


def _on(device: torch.device):
    # Triton launches on the current device
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def tile_size(width: int, dtype: torch.dtype) -> int:
    """Slots of a tile, the most with which little is spilled (`tests/model/test_offline_kernels.py`)."""
    return 16 if width > 64 or dtype == torch.float32 else 32


def _launch(width: int, is_backward: bool) -> dict[str, int]:
    """Warps and stages. One stage: loads that wait for what the program itself has stored must not be hoisted."""
    return {"num_warps": 8 if width > (32 if is_backward else 64) else 4, "num_stages": 1}


class _Content(torch.autograd.Function):
    """Reads [b, S, D] of unit queries and keys and targets, the state after them, and that of the last chunk's start.

    States are [b, 1, D, D].
    """

    @staticmethod
    def forward(ctx, tiles, has_chunks, has_backward, queries, keys, targets, rate, log_retention, current, start):
        from .triton_content import content_forward

        rows, slots, width = queries.shape
        keep = has_backward and any(ctx.needs_input_grad)
        saves = keep or has_chunks
        states = tiles.room(start, current, saves)
        reads = torch.empty_like(queries, dtype=torch.float32)
        shape = (rows, tiles.number, tiles.size, tiles.size) if keep else (0,)
        inverses = queries.new_empty(shape)
        with _on(queries.device):
            content_forward[(rows,)](
                queries, keys, targets, rate, log_retention, tiles.bounds, tiles.keeps, states, inverses, reads,
                tiles.number, slots, states.shape[1], int(saves),
                D=width, C=tiles.size, LEVELS=tiles.size.bit_length() - 1, SAVES=keep, DT=_triton_type(queries.dtype),
                **_launch(width, False),
            )  # fmt: skip
        if keep:
            ctx.tiles, ctx.has_chunks = tiles, has_chunks
            ctx.save_for_backward(queries, keys, targets, rate, log_retention, states, inverses)
            ctx.set_materialize_grads(False)
        return reads, states[:, -1].clone(), tiles.opened(states) if has_chunks else None

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_reads, grad_after, grad_opened):
        from .triton_content import content_backward

        tiles = ctx.tiles
        queries, keys, targets, rate, log_retention, states, inverses = ctx.saved_tensors
        rows, slots, width = queries.shape
        opened, grad_opened, grad_start = _opened_gradient(tiles, grad_opened, states)
        grad_state = _own(grad_after, states[:, 0])
        grad_reads = torch.zeros_like(queries) if grad_reads is None else grad_reads.contiguous()
        grads = [torch.empty_like(part) for part in (queries, keys, targets, rate, log_retention)]
        with _on(queries.device):
            content_backward[(rows,)](
                queries, keys, targets, rate, log_retention, tiles.bounds, tiles.keeps, states, inverses,
                grad_reads, opened, grad_opened, grad_state, *grads, tiles.number, slots,
                D=width, C=tiles.size, DT=_triton_type(queries.dtype), **_launch(width, True),
            )  # fmt: skip
        return None, None, None, *grads, grad_state * tiles.keeps[:, 0, None, None, None], grad_start


class _Projection(torch.autograd.Function):
    """Keys and values [b, S, D], rows of the convolution [R, b, K - 1 + S, D], and two states as of `_Content`.

    `fixed` is the stream that no memory remakes, if there is one.
    """

    @staticmethod
    def forward(
        ctx, tiles, dtype, remade, factors, inside, tails, has_backward,
        given, fixed, taps, tail, rate, log_retention, value_norm, current, start,
    ):  # fmt: skip
        from .triton_projection import projection_forward

        number, rows, slots, width = given.shape
        reach = taps.shape[2] - 1
        raw = given.new_empty(number, rows, reach + slots, width)
        raw[:, :, :reach] = tail
        raw.scatter_(2, _tail_rows(tails, tail), tail)
        keys = fixed if "k" not in remade else torch.empty_like(given[0])
        values = fixed if "v" not in remade else torch.empty_like(given[0])
        states = tiles.room(start, current)
        alike = len(set(factors)) == 1
        inverses = given.new_empty(rows, tiles.number, 1 if alike else number, tiles.size, tiles.size, dtype=dtype)
        flags = {
            "K_REMADE": "k" in remade, "V_REMADE": "v" in remade, "NORMED": value_norm is not None,
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
            ctx.tiles, ctx.flags, ctx.remade = tiles, flags, remade
            saved = (given, taps, tail, inside, tails, rate, log_retention, value_norm, factors)
            ctx.save_for_backward(*saved, raw, keys, values, states, inverses)
            ctx.set_materialize_grads(False)
        outputs = (keys, values, raw, states[:, -1].clone(), tiles.opened(states))
        # an input that is returned must be said to be one
        return tuple(part.clone() if part is fixed else part for part in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_keys, grad_values, grad_raw, grad_after, grad_opened):
        from .triton_projection import projection_backward

        tiles = ctx.tiles
        saved = ctx.saved_tensors
        given, taps, tail, inside, tails, rate, log_retention, value_norm, factors = saved[:9]
        raw, keys, values, states, inverses = saved[9:]
        _, rows, slots, width = given.shape
        opened, grad_opened, grad_start = _opened_gradient(tiles, grad_opened, states)
        grad_state = _own(grad_after, states[:, 0])
        grad_first = torch.zeros_like(grad_state)
        # written in place
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
        fixed = None if len(ctx.remade) == 2 else grad_values if ctx.remade == ("k",) else grad_keys
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
    """A tensor for an argument that a kernel does not read."""
    return other if tensor is None else tensor


def _own(grad: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """A gradient that a kernel may write into."""
    if grad is None:
        return torch.zeros_like(like, memory_format=torch.contiguous_format)
    return grad.clone(memory_format=torch.contiguous_format)


def _opened_gradient(tiles: _Tiles, grad: torch.Tensor | None, states: torch.Tensor) -> tuple:
    """Of the last chunk's start: its place, its gradient [b, R, D, D], and what of this is of an earlier call."""
    if grad is None:
        return torch.full_like(tiles.starts[:, -1], -1), states, None
    place = tiles.starts[:, -1]
    is_earlier = place == 0
    return torch.where(is_earlier, -1, place), grad.contiguous(), torch.where(is_earlier.view(-1, 1, 1, 1), grad, 0.0)


def _tail_rows(tails: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    """Which rows of the padded streams are the tail of earlier calls; of the tail's shape [R, b, K - 1, D]."""
    around = torch.arange(tail.shape[2], device=tails.device)
    return (tails.long()[:, None] + around)[None, :, :, None].expand_as(tail)


def _convolution_gradients(raw, taps, inside, tails, grad_mixed, grad_raw, tail):
    """Of the taps [R, b, K, D] and of the tail of earlier calls [R, b, K - 1, D]."""
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
    # rows before the first slot are the tail, too, but where it lies elsewhere
    return grad_taps, moved + grad_padded.scatter(2, index, 0.0)[:, :, :reach]


def scan_triton(
    inputs: ScanInputs,
    memories: DeltaMemories,
    state: ScanState,
    pieces: list[ScanPiece],
    need_state: bool = True,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, ScanState | None]:
    """`memory_scan.scan_plain` of memories under the delta rule; operands of products are rounded to `dtype`."""
    if pieces[-1].stop == 1 and not torch.is_grad_enabled():
        reads, state = step_token(inputs, memories, state, pieces[0])
        return reads, state if need_state else None
    piece, (rows, _, width) = whole(pieces), inputs.query.shape
    has_backward, remade = torch.is_grad_enabled(), memories.remade
    tiles = _Tiles.of(pieces, rows, tile_size(width, dtype), inputs.query.device, bool(remade))
    names = ("k", "v", "q")
    raw = dict(zip(names, inputs[:3], strict=True))
    tails, taps = (dict(zip(names, part.chunk(3, dim=-1), strict=True)) for part in (state.conv_tail, memories.taps))
    # [b, D, M D] to [b, M, D, D]
    current, *start = (part[0].unflatten(-1, (-1, width)).movedim(-2, 1) for part in state[:2] if part)
    start = start[0] if start else torch.zeros_like(current)

    fixed = [name for name in names if name not in remade]
    parts = (torch.cat([of[name] for name in fixed], dim=-1) for of in (raw, tails, taps))
    mixed, after_tail = convolve(*parts, piece)
    streams = dict(zip(fixed, F.silu(mixed).chunk(len(fixed), dim=-1), strict=True))
    after_tails = dict(zip(fixed, after_tail.chunk(len(fixed), dim=-1), strict=True))
    for name in set("kq").intersection(fixed):
        streams[name] = unit(streams[name])
    if "v" in fixed:
        streams["v"] = written_values(inputs, streams["v"], piece)
    gates = (inputs.rate.contiguous(), inputs.log_retention.contiguous())
    afters = []
    if remade:
        other = [streams[name].contiguous() for name in "kv" if name in fixed]
        masks = None
        if piece.inside is not None:
            masks = piece.inside.squeeze(-1).transpose(0, 1).to(torch.int8).contiguous()
        begin = torch.zeros(rows, dtype=torch.int32, device=tiles.bounds.device)
        if piece.tail_in is not None and piece.tail_in.shape[1]:
            begin = piece.tail_in[:, 0, 0].int()
        streams["k"], streams["v"], padded, after, opened = _Projection.apply(
            tiles, dtype, remade, memories.rate_factors[:-1], masks, begin, has_backward,
            torch.stack([raw[name] for name in remade]), other[0] if other else None,
            torch.stack([taps[name].squeeze(2).transpose(0, 1) for name in remade]),
            torch.stack([tails[name] for name in remade]), *gates,
            None if inputs.value_norm is None or "v" in fixed else inputs.value_norm.contiguous(),
            current[:, :-1], start[:, :-1],
        )  # fmt: skip
        afters.append((after, opened))
        for index, name in enumerate(remade):
            rows_after = padded[index, :, inputs.query.shape[1] :]
            if piece.tail_out is not None:
                rows_after = padded[index].gather(1, piece.tail_out.expand_as(rows_after))
            after_tails[name] = rows_after
    keys, values, queries = (streams[name] for name in names[:3])
    targets = values - keys @ memories.initial
    operands = [part.to(dtype).contiguous() for part in (queries, keys, targets)]
    weights = current[:, -1:], start[:, -1:]
    reads, *after = _Content.apply(tiles, bool(remade), has_backward, *operands, *gates, *weights)
    reads = reads + memories.unwritten(queries, values)
    if not need_state:
        return reads, None
    afters.append(after)
    current, opened = (
        None if parts[-1] is None else torch.cat(parts, dim=1).movedim(1, -2).flatten(-2)
        for parts in zip(*afters, strict=True)
    )
    chunk_start = (torch.where(tiles.closed, current, opened),) if remade else ()
    return reads, ScanState((current,), chunk_start, torch.cat([after_tails[name] for name in names], dim=-1))
