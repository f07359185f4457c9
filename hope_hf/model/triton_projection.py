"""Triton kernels of the memories that remake keys and values (equation 83 of arXiv 2512.24695). Needs Triton.

A program per sequence and head walks over the tiles. It remakes the raw streams at the weights of the chunk's start,
mixes tokens by the convolution, and writes the tile into every such memory (`triton_tiles` has the equations):

    x (I + S_start)  ->  convolution  ->  SiLU  ->  k / |k|, v or n v / |v|  ->  S of each memory, with U = V - K

What a program has just written and reads again, by other threads, lies behind a barrier: rows of the convolution, and
states, which stay in the caches of the chip and of which registers hold one at a time.

Axes: b rows (sequences times heads), R memories that remake streams, S slots, N tiles, K width of the convolution. The
states of a row are [N + 2, R, D, D]: at 0 the chunk's start that earlier calls left, at n + 1 that before tile n.
"""

from .triton_tiles import (
    decay,
    decay_turned,
    errors,
    product,
    read_gates,
    read_rows,
    read_turned,
    strictly_lower,
    tile,
    turned,
    unit_lower_inverse,
    write_rows,
    written_gradients,
)

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("Triton is not installed: pip install triton, or set HOPE_KERNELS=torch") from error

# as `memory_scan.NORM_EPSILON`
_EPSILON = tl.constexpr(1e-6)


@triton.jit
def _mixed(raw, taps, inside, c, live, d, slots, K: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr):
    """Convolution [C, D] of one stream, of which `raw` is the row K - 1 before the tile, with `taps` [K, D]."""
    mixed = read_rows(raw + (K - 1) * D, c, live, d, D) * tl.load(taps + (K - 1) * D + d)[None, :]
    for tap in tl.static_range(K - 1):
        term = read_rows(raw + tap * D, c, live, d, D) * tl.load(taps + tap * D + d)[None, :]
        if MASKED:
            term *= tl.load(inside + tap * slots + c, mask=live, other=0).to(tl.float32)[:, None]
        mixed += term
    return mixed


@triton.jit
def _stream(
    raw, taps, inside, norms, c, live, d, slots,
    K: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr, UNIT: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Convolution and SiLU of one stream, divided by its norm where UNIT, then times `norms` [S] where NORMED."""
    mixed = _mixed(raw, taps, inside, c, live, d, slots, K, D, MASKED)
    x = mixed * tl.sigmoid(mixed)
    if UNIT:
        x *= tl.rsqrt(tl.sum(x * x, 1) + _EPSILON)[:, None]
    if NORMED:
        x *= tl.load(norms + c, mask=live, other=0.0)[:, None]
    return x


@triton.jit
def _stream_gradient(
    grad, raw, taps, inside, norms, grad_mixed, grad_norms, c, live, d, slots,
    K: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr, UNIT: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Through `_stream`: gradients of what the convolution makes, and of `norms`, into those places."""
    mixed = _mixed(raw, taps, inside, c, live, d, slots, K, D, MASKED)
    gate = tl.sigmoid(mixed)
    if UNIT:
        x = mixed * gate
        scale = tl.rsqrt(tl.sum(x * x, 1) + _EPSILON)[:, None]
        x *= scale
        along = tl.sum(grad * x, 1)
        if NORMED:
            tl.store(grad_norms + c, along, mask=live)
            norm = tl.load(norms + c, mask=live, other=0.0)
            along *= norm
            grad *= norm[:, None]
        grad = (grad - x * along[:, None]) * scale
    write_rows(grad_mixed, c, live, d, D, grad * gate * (1 + mixed * (1 - gate)))


@triton.jit
def projection_forward(
    given, taps, inside, norms, rate, log_retention, factors, bounds, keeps, starts, tails,
    raw, keys, values, states, inverses,
    batch, tiles, slots,
    K_REMADE: tl.constexpr, V_REMADE: tl.constexpr, NORMED: tl.constexpr, MASKED: tl.constexpr, ALIKE: tl.constexpr,
    K: tl.constexpr, D: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Keys and values [b, S, D] of the streams `given` [R, b, S, D]. Tensors are float32.

    Args:
        taps: [R, b, K, D].
        inside: which taps reach a token of the same document, where MASKED [b, K - 1, S].
        norms: of the values [b, S], where NORMED.
        rate, log_retention: eta, log alpha [b, S].
        factors: rho of the memories [R]; ALIKE: all are one.
        bounds, keeps: as in `triton_content`.
        starts: place of the state of the chunk's start, for every tile [b, N].
        tails: where the tail of earlier calls lies among rows of `raw` [b].
        raw: [R, b, K - 1 + S, D], written but for the tail.
        keys, values: written where the stream is remade, else read.
        states: [b, N + 2, R, D, D]: 0 and 1 are read, the others written.
        inverses: (I + rho L)^-1 in DT, written [b, N, 1 or R, C, C].
        batch, tiles, slots: b, N, S.
    """
    row = tl.program_id(0).to(tl.int64)
    memories: tl.constexpr = K_REMADE + V_REMADE
    groups: tl.constexpr = 1 if ALIKE else memories
    c, d = tl.arange(0, C), tl.arange(0, D)
    taps += row * K * D
    inside += row * (K - 1) * slots
    keeps += row * (tiles + 1)
    starts += row * tiles
    states += row * (tiles + 2) * memories * D * D
    inverses += row * tiles * groups * C * C
    # from one stream to the next
    given_size = batch.to(tl.int64) * slots * D
    raw_size = batch.to(tl.int64) * (K - 1 + slots) * D
    taps_size = batch * K * D
    tail = tl.load(tails + row)
    for n in range(tiles):
        first = tl.load(bounds + n)
        live = c < tl.load(bounds + n + 1) - first
        # the tile among slots and among rows of the convolution, of all sequences and heads
        at = row * slots + first
        raw_at = raw + (at + row * (K - 1)) * D
        start = states + tl.load(starts + n) * memories * D * D
        into = live & ((first + c + K - 1 < tail) | (first + c >= tail))
        for m in range(memories):
            x = read_rows(given + m * given_size + at * D, c, live, d, D)
            x += product(x, tl.load(start + m * D * D + tile(d, d, D)), DT)
            write_rows(raw_at + m * raw_size + (K - 1) * D, c, into, d, D, x)
        tl.debug_barrier()
        if K_REMADE:
            key = _stream(raw_at, taps, inside + first, norms, c, live, d, slots, K, D, MASKED, True, False)
            write_rows(keys + at * D, c, live, d, D, key)
        if V_REMADE:
            v: tl.constexpr = memories - 1
            value = _stream(
                raw_at + v * raw_size, taps + v * taps_size, inside + first, norms + at, c, live, d, slots,
                K, D, MASKED, NORMED, NORMED,
            )  # fmt: skip
            write_rows(values + at * D, c, live, d, D, value)
        tl.debug_barrier()
        step, total, last = read_gates(rate + at, log_retention + at, c, live)
        kept = tl.exp(total)
        scale = step * tl.exp(last - total)
        key = read_rows(keys + at * D, c, live, d, D)
        key_turned = read_turned(keys + at * D, c, live, d, D)
        lower = strictly_lower(product(key, key_turned, DT) * decay(total, C) * step[None, :], C)
        if ALIKE:
            inverse = unit_lower_inverse(tl.load(factors) * lower, C, LEVELS)
            tl.store(inverses + n * C * C + tile(c, c, C), inverse.to(DT))
        targets = read_rows(values + at * D, c, live, d, D) - key
        keep = tl.load(keeps + n + 1)
        for m in range(memories):
            rho = tl.load(factors + m)
            if not ALIKE:
                inverse = unit_lower_inverse(rho * lower, C, LEVELS)
                tl.store(inverses + (n * memories + m) * C * C + tile(c, c, C), inverse.to(DT))
            place = states + ((n + 1) * memories + m) * D * D + tile(d, d, D)
            state = tl.load(place)
            error = errors(key, state, targets, kept, inverse, rho, DT)
            state = tl.exp(last) * state - product(key_turned * scale[None, :], error, DT)
            tl.store(place + memories * D * D, keep * state)
        tl.debug_barrier()


@triton.jit
def _given_gradients(
    given, grad_mixed, grad_raw, grad_given, taps, inside, bounds, tail, state, row, n, count, slots,
    K: tl.constexpr, D: tl.constexpr, C: tl.constexpr, MASKED: tl.constexpr, TAILED: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Of the state [D, D] that has remade tiles n to n + count of a stream; of the stream, into `grad_given`."""
    c, d = tl.arange(0, C), tl.arange(0, D)
    state_turned = tl.load(state + turned(d, d, D))
    grad_state = tl.zeros([D, D], tl.float32)
    for index in tl.range(n, n + count, disable_licm=True):
        first = tl.load(bounds + index)
        live = c < tl.load(bounds + index + 1) - first
        into = live & ((first + c + K - 1 < tail) | (first + c >= tail))
        at = row * slots + first
        grad = read_rows(grad_mixed + at * D, c, into, d, D) * tl.load(taps + (K - 1) * D + d)[None, :]
        for tap in tl.static_range(K - 1):
            later = K - 1 - tap
            reached = into & (c < slots - first - later)
            term = read_rows(grad_mixed + (at + later) * D, c, reached, d, D) * tl.load(taps + tap * D + d)[None, :]
            if MASKED:
                is_inside = tl.load(inside + tap * slots + first + later + c, mask=reached, other=0)
                term *= is_inside.to(tl.float32)[:, None]
            grad += term
        if TAILED:
            grad += read_rows(grad_raw + (at + (row + 1) * (K - 1)) * D, c, into, d, D)
        write_rows(grad_given + at * D, c, live, d, D, grad + product(grad, state_turned, DT))
        grad_state += product(read_turned(given + at * D, c, live, d, D), grad, DT)
    return grad_state


@triton.jit
def projection_backward(
    given, taps, inside, norms, rate, log_retention, factors, bounds, keeps, counts, tails,
    raw, keys, values, states, inverses, opened, grad_opened, grad_raw,
    grad_keys, grad_values, grad_state, grad_first, grad_mixed, grad_given, grad_norms, grad_rate, grad_log_retention,
    batch, tiles, slots,
    K_REMADE: tl.constexpr, V_REMADE: tl.constexpr, NORMED: tl.constexpr, MASKED: tl.constexpr, ALIKE: tl.constexpr,
    TAILED: tl.constexpr, K: tl.constexpr, D: tl.constexpr, C: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Gradients through `projection_forward`, with what it has written.

    Args:
        counts: tiles whose chunk began with each state [b, N + 1].
        opened: the place among the states whose gradient `grad_opened` [b, R, D, D] has a part of its own [b].
        grad_raw: [R, b, K - 1 + S, D], where TAILED.
        grad_keys, grad_values: [b, S, D]; in place those of the streams that are not remade.
        grad_state: of the state after the last tile [b, R, D, D]; then of the state before the first.
        grad_first: of the chunk's start that earlier calls left [b, R, D, D].
        grad_mixed: of what the convolutions make [R, b, S, D].
        grad_given, grad_norms, grad_rate, grad_log_retention: as the inputs.
    """
    row = tl.program_id(0).to(tl.int64)
    memories: tl.constexpr = K_REMADE + V_REMADE
    groups: tl.constexpr = 1 if ALIKE else memories
    v: tl.constexpr = memories - 1
    c, d = tl.arange(0, C), tl.arange(0, D)
    taps += row * K * D
    inside += row * (K - 1) * slots
    keeps += row * (tiles + 1)
    counts += row * (tiles + 1)
    states += row * (tiles + 2) * memories * D * D
    inverses += row * tiles * groups * C * C
    grad_state += row * memories * D * D
    grad_first += row * memories * D * D
    grad_opened += row * memories * D * D
    given_size = batch.to(tl.int64) * slots * D
    raw_size = batch.to(tl.int64) * (K - 1 + slots) * D
    taps_size = batch * K * D
    tail = tl.load(tails + row)
    place = tl.load(opened + row)
    # after the first tile comes the chunk that earlier calls began
    for back in tl.range(tiles + 1, disable_licm=True):
        n = tiles - 1 - back
        if n >= 0:
            first = tl.load(bounds + n)
            live = c < tl.load(bounds + n + 1) - first
            # the tile among slots and among rows of the convolution, of all sequences and heads
            at = row * slots + first
            raw_at = raw + (at + row * (K - 1)) * D
            step, total, last = read_gates(rate + at, log_retention + at, c, live)
            kept = tl.exp(total)
            left = tl.exp(last - total)
            scale = step * left
            grad_key = read_rows(grad_keys + at * D, c, live, d, D)
            grad_step = tl.zeros([C], tl.float32)
            grad_total = tl.zeros([C], tl.float32)
            grad_last = tl.sum(grad_total, 0)
            grad_lower = tl.zeros([C, C], tl.float32)
            grad_upper = tl.zeros([C, C], tl.float32)
            keep = tl.load(keeps + n + 1)
            for m in range(memories):
                state_at = states + ((n + 1) * memories + m) * D * D
                grad_at = grad_state + m * D * D + tile(d, d, D)
                inverse_at = inverses + n * C * C
                if not ALIKE:
                    inverse_at = inverses + (n * memories + m) * C * C
                rho = tl.load(factors + m)
                key = read_rows(keys + at * D, c, live, d, D)
                targets = read_rows(values + at * D, c, live, d, D) - key
                state = tl.load(state_at + tile(d, d, D))
                error = errors(key, state, targets, kept, tl.load(inverse_at + tile(c, c, C)), rho, DT).to(DT)
                tl.debug_barrier()
                key = read_rows(keys + at * D, c, live, d, D)
                grad = keep * tl.load(grad_at)
                grad_error, grad_written, grad_scale = written_gradients(key, error, grad, scale, DT)
                grad_key += grad_written
                grad_step += grad_scale * left
                grad_total -= grad_scale * scale
                grad_last += tl.sum(grad_scale * scale, 0)
                tl.debug_barrier()
                grad_right = rho * product(tl.load(inverse_at + turned(c, c, C)), grad_error, DT)
                grad_value = read_rows(grad_values + at * D, c, live, d, D) - grad_right
                write_rows(grad_values + at * D, c, live, d, D, grad_value)
                grad_key += grad_right
                grad_right = grad_right.to(DT)
                grad_lower -= product(grad_right, tl.trans(error), DT)
                grad_upper -= product(error, tl.trans(grad_right), DT)
                tl.debug_barrier()
                key = read_rows(keys + at * D, c, live, d, D)
                through = kept[:, None] * product(grad_right, tl.load(state_at + turned(d, d, D)), DT)
                grad_total += tl.sum(through * key, 1)
                grad_key += through
                tl.debug_barrier()
                grad = keep * tl.exp(last) * tl.load(grad_at)
                grad_last += tl.sum(tl.sum(grad * tl.load(state_at + tile(d, d, D)), 1), 0)
                grad += product(read_turned(keys + at * D, c, live, d, D) * kept[None, :], grad_right, DT)
                tl.store(grad_at, grad)
                tl.debug_barrier()
            key = read_rows(keys + at * D, c, live, d, D)
            decays = decay(total, C)
            grad_lower = strictly_lower(grad_lower, C) * decays
            grad_upper = tl.where(c[:, None] < c[None, :], grad_upper, 0.0) * decay_turned(total, C)
            grad_key += product(grad_lower * step[None, :] + grad_upper * step[:, None], key, DT)
            grad_exponent = grad_lower * product(key, read_turned(keys + at * D, c, live, d, D), DT)
            column_sum = tl.sum(grad_exponent, 0)
            grad_step += column_sum
            grad_total += tl.sum(grad_exponent * step[None, :], 1) - step * column_sum
            tl.store(grad_rate + at + c, grad_step, mask=live)
            tl.store(grad_log_retention + at + c, tl.cumsum(grad_total, 0, reverse=True) + grad_last, mask=live)
            tl.debug_barrier()

            if K_REMADE:
                _stream_gradient(
                    grad_key, raw_at, taps, inside + first, norms, grad_mixed + at * D, grad_norms, c, live, d, slots,
                    K, D, MASKED, True, False,
                )  # fmt: skip
            else:
                write_rows(grad_keys + at * D, c, live, d, D, grad_key)
            tl.debug_barrier()
            if V_REMADE:
                grad_value = read_rows(grad_values + at * D, c, live, d, D)
                _stream_gradient(
                    grad_value, raw_at + v * raw_size, taps + v * taps_size, inside + first, norms + at,
                    grad_mixed + v * given_size + at * D, grad_norms + at, c, live, d, slots,
                    K, D, MASKED, NORMED, NORMED,
                )  # fmt: skip
            tl.debug_barrier()

        # of the chunk's start, when all of the chunk's tiles are done
        count = tl.load(counts + n + 1)
        if count > 0:
            for m in range(memories):
                grad = _given_gradients(
                    given + m * given_size, grad_mixed + m * given_size, grad_raw + m * raw_size,
                    grad_given + m * given_size, taps + m * taps_size, inside, bounds, tail,
                    states + ((n + 1) * memories + m) * D * D, row, tl.maximum(n, 0), count, slots,
                    K, D, C, MASKED, TAILED, DT,
                )  # fmt: skip
                if place == n + 1:
                    grad += tl.load(grad_opened + m * D * D + tile(d, d, D))
                sum_at = (grad_state if n >= 0 else grad_first) + m * D * D + tile(d, d, D)
                tl.store(sum_at, tl.load(sum_at) + grad)
            tl.debug_barrier()
