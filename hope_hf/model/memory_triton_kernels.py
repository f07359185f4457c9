"""Triton kernels of the memories that project keys and values (equation 83 of arXiv 2512.24695). Needs Triton.

One program per sequence and head loops over its time tiles of C tokens. It projects the qkv inputs with the weights
of the chunk's start, applies the convolution, and writes the tile into every memory:

    x (I + S_start)  ->  convolution  ->  SiLU  ->  k / |k|, v or n v / |v|  ->  S of each memory, with U = V - K

With `T_t` the sum of log alpha within the tile up to token t, and memories that act on rows:

    (I + rho L) A = e^T K S - U,     L_ti = e^(T_t - T_i) eta_i (k_t . k_i) for i < t
    S <- e^(T_C) S - (eta e^(T_C - T) K)^T rho A

Operands of products are rounded to DT; sums, gates, the solve and states are float32. The transposed left operand of
a product is loaded from memory: made from another product's result, it is wrong in Triton 3.4 to 3.7.0 on Hopper GPUs.
A barrier separates a program's stores from loads of the same addresses by other threads of the program. Such addresses
hold the convolution's padded inputs, and the states: registers hold one state, the chip's caches the others.

Axes: b rows (sequences times heads), R memories that project, S slots, N time tiles, K kernel size of the convolution,
D head width. The states of a row are [N + 2, R, D, D]: index 0 holds the chunk's start of earlier calls, index n + 1
the state before tile n.
"""

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("Triton is not installed: pip install triton, or set HOPE_KERNELS=torch") from error

# the value of `memory_scan.NORM_EPSILON`
_EPSILON = tl.constexpr(1e-6)


@triton.jit
def product(a, b, DT: tl.constexpr):
    """`a @ b` in float32, of operands rounded to DT; float32 operands take three tf32 products."""
    return tl.dot(a.to(DT), b.to(DT), input_precision="tf32x3")


@triton.jit
def tile(rows, columns, WIDTH: tl.constexpr):
    """Offsets [rows, columns] of the elements of a matrix with WIDTH columns."""
    return rows[:, None] * WIDTH + columns[None, :]


@triton.jit
def turned(rows, columns, WIDTH: tl.constexpr):
    """Offsets [columns, rows] of the transpose of a matrix with WIDTH columns."""
    return rows[None, :] * WIDTH + columns[:, None]


@triton.jit
def read_rows(pointer, rows, live, columns, WIDTH: tl.constexpr):
    """The rows of a matrix; 0 for rows that are not live."""
    return tl.load(pointer + tile(rows, columns, WIDTH), mask=live[:, None], other=0.0)


@triton.jit
def read_turned(pointer, rows, live, columns, WIDTH: tl.constexpr):
    """The transpose of `read_rows`, loaded from transposed addresses."""
    return tl.load(pointer + turned(rows, columns, WIDTH), mask=live[None, :], other=0.0)


@triton.jit
def write_rows(pointer, rows, live, columns, WIDTH: tl.constexpr, x):
    """Store `x` in the live rows of a matrix."""
    tl.store(pointer + tile(rows, columns, WIDTH), x.to(pointer.dtype.element_ty), mask=live[:, None])


@triton.jit
def read_gates(rate, log_retention, rows, live):
    """eta [C], T [C] and T_C; eta and log alpha are 0 for slots that are not live, which neither write nor decay."""
    logs = tl.load(log_retention + rows, mask=live, other=0.0)
    return tl.load(rate + rows, mask=live, other=0.0), tl.cumsum(logs, 0), tl.sum(logs, 0)


@triton.jit
def decay(total, C: tl.constexpr):
    """e^(T_t - T_i) for i <= t, else 0. The mask comes before the exponential, which overflows above the diagonal."""
    c = tl.arange(0, C)
    return tl.exp(tl.where(c[:, None] >= c[None, :], total[:, None] - total[None, :], float("-inf")))


@triton.jit
def decay_turned(total, C: tl.constexpr):
    """The transpose of `decay`."""
    c = tl.arange(0, C)
    return tl.exp(tl.where(c[:, None] <= c[None, :], total[None, :] - total[:, None], float("-inf")))


@triton.jit
def strictly_lower(x, C: tl.constexpr):
    """`x` below the diagonal, else 0."""
    c = tl.arange(0, C)
    return tl.where(c[:, None] > c[None, :], x, 0.0)


@triton.jit
def unit_lower_inverse(lower, C: tl.constexpr, LEVELS: tl.constexpr):
    """`(I + lower)^-1` of a strictly lower triangular [C, C], `C = 2^LEVELS`, in float32.

    A block of 2 is inverted by a change of sign. Blocks are then merged in pairs: with the inverses P and Q of two
    diagonal blocks, the corner below becomes -Q corner P. Powers of larger blocks would cancel if keys are similar.
    """
    c = tl.arange(0, C)
    same = c[:, None] // 2 == c[None, :] // 2
    inverse = tl.where(c[:, None] == c[None, :], 1.0, 0.0) - tl.where(same, lower, 0.0)
    for level in range(1, LEVELS):
        row, column = c[:, None] >> level, c[None, :] >> level
        corner = tl.where((row != column) & ((row >> 1) == (column >> 1)), lower, 0.0)
        merged = tl.dot(inverse, corner, input_precision="tf32x3")
        inverse -= tl.dot(merged, inverse, input_precision="tf32x3")
    return inverse


@triton.jit
def errors(keys, state, targets, kept, inverse, rho, DT: tl.constexpr):
    """rho A [C, D]."""
    right = kept[:, None] * product(keys, state, DT) - targets
    return rho * product(inverse, right, DT)


@triton.jit
def written_gradients(keys, errors, grad, scale, DT: tl.constexpr):
    """Gradients of errors and keys [C, D] and of scale [C], from the gradient of `S - (scale K)^T errors`."""
    grad_errors = -scale[:, None] * product(keys, grad, DT)
    grad_written = -product(errors, tl.trans(grad.to(DT)), DT)
    return grad_errors, scale[:, None] * grad_written, tl.sum(grad_written * keys, 1)


@triton.jit
def _mixed(raw, taps, inside, c, live, d, slots, K: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr):
    """Convolution [C, D] of one padded input with the kernel weights `taps` [K, D]; `raw` points K - 1 rows early."""
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
    """Convolution and SiLU of one qkv input; UNIT divides by the norm, then NORMED multiplies by `norms` [S]."""
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
    """Write the gradients of the convolution's output and of `norms`, from the gradient of `_stream`'s result."""
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
    K_PROJECTED: tl.constexpr, V_PROJECTED: tl.constexpr, NORMED: tl.constexpr, MASKED: tl.constexpr,
    ALIKE: tl.constexpr,
    K: tl.constexpr, D: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Keys and values [b, S, D] from the qkv inputs `given` [R, b, S, D]. Tensors are float32.

    Args:
        taps: kernel weights of the convolutions [R, b, K, D].
        inside: with MASKED, whether the token K - 1 to 1 slots earlier is of the same document [b, K - 1, S].
        norms: with NORMED, norms of the values [b, S].
        rate, log_retention: eta, log alpha [b, S].
        factors: rho of each memory [R]; with ALIKE all are equal.
        bounds: first slot of every tile, then S [N + 1].
        keeps: 0 for a tile at which a document begins, else 1; the last entry is 1 [b, N + 1].
        starts: for every tile, the index of its chunk's start state [b, N].
        tails: row of `raw` at which the tail of earlier calls begins [b].
        raw: padded inputs of the convolutions [R, b, K - 1 + S, D]; the tail is read, the other rows are written.
        keys, values: written if a memory projects them, else read.
        states: [b, N + 2, R, D, D]; indices 0 and 1 are read, the others written.
        inverses: (I + rho L)^-1 in DT, written [b, N, 1 or R, C, C].
        batch, tiles, slots: b, N, S.
    """
    # int64, since a long text's states hold more than 2^31 numbers; a size of 1 is a constant without a method `to`
    row, batch, slots = tl.program_id(0).to(tl.int64), tl.cast(batch, tl.int64), tl.cast(slots, tl.int64)
    memories: tl.constexpr = K_PROJECTED + V_PROJECTED
    groups: tl.constexpr = 1 if ALIKE else memories
    c, d = tl.arange(0, C), tl.arange(0, D)
    taps += row * K * D
    inside += row * (K - 1) * slots
    keeps += row * (tiles + 1)
    starts += row * tiles
    states += row * (tiles + 2) * memories * D * D
    inverses += row * tiles * groups * C * C
    # strides from one memory to the next, and of `states` and `inverses` from one tile to the next
    given_size, raw_size, taps_size = batch * slots * D, batch * (K - 1 + slots) * D, batch * K * D
    square, inverse_square = tl.cast(D * D, tl.int64), tl.cast(C * C, tl.int64)
    state_size, inverse_size = memories * square, groups * inverse_square
    tail = tl.load(tails + row)
    for n in range(tiles):
        first = tl.load(bounds + n)
        live = c < tl.load(bounds + n + 1) - first
        # first slot of the tile and pointer to its first padded input, over all sequences and heads
        at = row * slots + first
        raw_at = raw + (at + row * (K - 1)) * D
        start = states + tl.load(starts + n) * state_size
        into = live & ((first + c + K - 1 < tail) | (first + c >= tail))
        for m in range(memories):
            x = read_rows(given + m * given_size + at * D, c, live, d, D)
            x += product(x, tl.load(start + m * square + tile(d, d, D)), DT)
            write_rows(raw_at + m * raw_size + (K - 1) * D, c, into, d, D, x)
        tl.debug_barrier()
        if K_PROJECTED:
            key = _stream(raw_at, taps, inside + first, norms, c, live, d, slots, K, D, MASKED, True, False)
            write_rows(keys + at * D, c, live, d, D, key)
        if V_PROJECTED:
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
            tl.store(inverses + n * inverse_size + tile(c, c, C), inverse.to(DT))
        targets = read_rows(values + at * D, c, live, d, D) - key
        keep = tl.load(keeps + n + 1)
        for m in range(memories):
            rho = tl.load(factors + m)
            if not ALIKE:
                inverse = unit_lower_inverse(rho * lower, C, LEVELS)
                tl.store(inverses + n * inverse_size + m * inverse_square + tile(c, c, C), inverse.to(DT))
            place = states + (n + 1) * state_size + m * square + tile(d, d, D)
            state = tl.load(place)
            error = errors(key, state, targets, kept, inverse, rho, DT)
            state = tl.exp(last) * state - product(key_turned * scale[None, :], error, DT)
            tl.store(place + state_size, keep * state)
        tl.debug_barrier()


@triton.jit
def _given_gradients(
    given, grad_mixed, grad_raw, grad_given, taps, inside, bounds, tail, state, row, n, count, slots,
    K: tl.constexpr, D: tl.constexpr, C: tl.constexpr, MASKED: tl.constexpr, TAILED: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Gradient of the state [D, D] that projects `count` tiles from n on; writes the gradient of `given`."""
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
    K_PROJECTED: tl.constexpr, V_PROJECTED: tl.constexpr, NORMED: tl.constexpr, MASKED: tl.constexpr,
    ALIKE: tl.constexpr,
    TAILED: tl.constexpr, K: tl.constexpr, D: tl.constexpr, C: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Backward pass of `projection_forward`, from the tensors that it wrote.

    Args:
        counts: for every state, the number of tiles whose chunk starts with it [b, N + 1].
        opened: index of the state [b] to which `grad_opened` [b, R, D, D] is added, or -1.
        grad_raw: with TAILED, gradient of `raw` [R, b, K - 1 + S, D].
        grad_keys, grad_values: [b, S, D]; those of keys or values that no memory projects are added to in place.
        grad_state: gradient of the state after the last tile [b, R, D, D]; overwritten by that before the first.
        grad_first: gradient of the chunk's start of earlier calls [b, R, D, D].
        grad_mixed: gradient of the convolutions' output [R, b, S, D].
        grad_given, grad_norms, grad_rate, grad_log_retention: gradients of the inputs, in their shapes.
    """
    # int64, since a long text's states hold more than 2^31 numbers; a size of 1 is a constant without a method `to`
    row, batch, slots = tl.program_id(0).to(tl.int64), tl.cast(batch, tl.int64), tl.cast(slots, tl.int64)
    memories: tl.constexpr = K_PROJECTED + V_PROJECTED
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
    # strides from one memory to the next, and of `states` and `inverses` from one tile to the next
    given_size, raw_size, taps_size = batch * slots * D, batch * (K - 1 + slots) * D, batch * K * D
    square, inverse_square = tl.cast(D * D, tl.int64), tl.cast(C * C, tl.int64)
    state_size, inverse_size = memories * square, groups * inverse_square
    tail = tl.load(tails + row)
    place = tl.load(opened + row)
    # the last iteration, n = -1, is for the chunk that earlier calls began
    for back in tl.range(tiles + 1, disable_licm=True):
        n = tiles - 1 - back
        if n >= 0:
            first = tl.load(bounds + n)
            live = c < tl.load(bounds + n + 1) - first
            # first slot of the tile and pointer to its first padded input, over all sequences and heads
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
                state_at = states + (n + 1) * state_size + m * square
                grad_at = grad_state + m * square + tile(d, d, D)
                inverse_at = inverses + n * inverse_size
                if not ALIKE:
                    inverse_at += m * inverse_square
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

            if K_PROJECTED:
                _stream_gradient(
                    grad_key, raw_at, taps, inside + first, norms, grad_mixed + at * D, grad_norms, c, live, d, slots,
                    K, D, MASKED, True, False,
                )  # fmt: skip
            else:
                write_rows(grad_keys + at * D, c, live, d, D, grad_key)
            tl.debug_barrier()
            if V_PROJECTED:
                grad_value = read_rows(grad_values + at * D, c, live, d, D)
                _stream_gradient(
                    grad_value, raw_at + v * raw_size, taps + v * taps_size, inside + first, norms + at,
                    grad_mixed + v * given_size + at * D, grad_norms + at, c, live, d, slots,
                    K, D, MASKED, NORMED, NORMED,
                )  # fmt: skip
            tl.debug_barrier()

        # gradient of the chunk's start, once all tiles of the chunk are done
        count = tl.load(counts + n + 1)
        if count > 0:
            for m in range(memories):
                grad = _given_gradients(
                    given + m * given_size, grad_mixed + m * given_size, grad_raw + m * raw_size,
                    grad_given + m * given_size, taps + m * taps_size, inside, bounds, tail,
                    states + (n + 1) * state_size + m * square, row, tl.maximum(n, 0), count, slots,
                    K, D, C, MASKED, TAILED, DT,
                )  # fmt: skip
                if place == n + 1:
                    grad += tl.load(grad_opened + m * square + tile(d, d, D))
                sum_at = (grad_state if n >= 0 else grad_first) + m * square + tile(d, d, D)
                tl.store(sum_at, tl.load(sum_at) + grad)
            tl.debug_barrier()
