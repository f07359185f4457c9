"""Triton kernels of the content memory's scan: a gated delta rule that is read at every token. Needs Triton.

A program per sequence and head walks over the tiles with the deviation S on chip (`triton_tiles` has the equations):

    reads_t = q_t S_t = e^(T_t) q_t S - sum_{i <= t} e^(T_t - T_i) eta_i (q_t . k_i) A_i

Every document begins at a tile of its own, where S is multiplied by its `keeps` of 0.
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


@triton.jit
def content_forward(
    queries, keys, targets, rate, log_retention, bounds, keeps, states, inverses, reads,
    tiles, slots, room, hop,
    D: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, SAVES: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Reads [b, S, D] of unit queries and keys and of targets `V - K W_0` [b, S, D].

    Args:
        rate, log_retention: eta, log alpha [b, S], float32.
        bounds: first slot of every tile, and S [N + 1].
        keeps: 0 where a document begins at a tile, else 1; 1 after the last [b, N + 1].
        states: room for `room` matrices [D, D] a row, float32: of the first tile at 1, of the next `hop` further each.
        inverses: (I + L)^-1 [b, N, C, C], written where SAVES.
        tiles, slots: N, S.
    """
    row = tl.program_id(0).to(tl.int64)
    c, d = tl.arange(0, C), tl.arange(0, D)
    keeps += row * (tiles + 1)
    inverses += row * tiles * C * C
    states += (row * room + 1) * D * D
    state = tl.load(states + tile(d, d, D))
    for n in range(tiles):
        first = tl.load(bounds + n)
        live = c < tl.load(bounds + n + 1) - first
        # the tile's first slot among those of all rows
        at = row * slots + first
        step, total, last = read_gates(rate + at, log_retention + at, c, live)
        kept = tl.exp(total)
        key = read_rows(keys + at * D, c, live, d, D)
        key_turned = read_turned(keys + at * D, c, live, d, D)
        weighted = decay(total, C) * step[None, :]
        inverse = unit_lower_inverse(strictly_lower(product(key, key_turned, DT) * weighted, C), C, LEVELS)
        if SAVES:
            tl.store(inverses + n * C * C + tile(c, c, C), inverse.to(DT))
        error = errors(key, state, read_rows(targets + at * D, c, live, d, D).to(tl.float32), kept, inverse, 1.0, DT)
        query = read_rows(queries + at * D, c, live, d, D)
        read = kept[:, None] * product(query, state, DT)
        read -= product(product(query, key_turned, DT) * weighted, error, DT)
        write_rows(reads + at * D, c, live, d, D, read)
        scale = step * tl.exp(last - total)
        state = tl.exp(last) * state - product(key_turned * scale[None, :], error, DT)
        state *= tl.load(keeps + n + 1)
        states += hop * D * D
        tl.store(states + tile(d, d, D), state)


@triton.jit
def content_backward(
    queries, keys, targets, rate, log_retention, bounds, keeps, states, inverses, grad_reads, opened, grad_opened,
    grad_state, grad_queries, grad_keys, grad_targets, grad_rate, grad_log_retention,
    tiles, slots,
    D: tl.constexpr, C: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Gradients of what `content_forward` reads, with the states (`hop` 1) and inverses that it has saved.

    Args:
        grad_reads: [b, S, D], float32.
        opened: the tile's place among the states whose gradient `grad_opened` [b, D, D] has a part of its own [b].
        grad_state: of the state after the last tile [b, D, D], float32; then of the state before the first.
    """
    row = tl.program_id(0).to(tl.int64)
    c, d = tl.arange(0, C), tl.arange(0, D)
    keeps += row * (tiles + 1)
    inverses += row * tiles * C * C
    states += row * (tiles + 2) * D * D
    grad_state += row * D * D
    grad_opened += row * D * D
    place = tl.load(opened + row)
    for back in tl.range(tiles, disable_licm=True):
        n = tiles - 1 - back
        first = tl.load(bounds + n)
        live = c < tl.load(bounds + n + 1) - first
        # the tile's first slot among those of all rows
        at = row * slots + first
        step, total, last = read_gates(rate + at, log_retention + at, c, live)
        kept = tl.exp(total)
        left = tl.exp(last - total)
        scale = step * left
        keep = tl.load(keeps + n + 1)
        key = read_rows(keys + at * D, c, live, d, D)
        state = tl.load(states + (n + 1) * D * D + tile(d, d, D))
        inverse = tl.load(inverses + n * C * C + tile(c, c, C))
        target = read_rows(targets + at * D, c, live, d, D).to(tl.float32)
        error = errors(key, state, target, kept, inverse, 1.0, DT).to(DT)
        tl.debug_barrier()

        # the state after the tile
        key = read_rows(keys + at * D, c, live, d, D)
        grad = keep * tl.load(grad_state + tile(d, d, D))
        grad_error, grad_key, grad_scale = written_gradients(key, error, grad, scale, DT)
        grad_step = grad_scale * left
        grad_total = -grad_scale * scale
        grad_last = -tl.sum(grad_total, 0)
        tl.debug_barrier()

        # the reads
        key = read_rows(keys + at * D, c, live, d, D)
        query = read_rows(queries + at * D, c, live, d, D)
        grad_read = read_rows(grad_reads + at * D, c, live, d, D).to(DT)
        query_turned = read_turned(queries + at * D, c, live, d, D)
        weighted_turned = decay_turned(total, C) * step[:, None]
        grad_error -= product(product(key, query_turned, DT) * weighted_turned, grad_read, DT)
        grad_upper = -product(error, tl.trans(grad_read), DT) * weighted_turned
        grad_key += product(grad_upper, query, DT)
        tl.debug_barrier()
        state_turned = tl.load(states + (n + 1) * D * D + turned(d, d, D))
        grad_query = kept[:, None] * product(grad_read, state_turned, DT)
        grad_total += tl.sum(grad_query * query, 1)
        decays = decay(total, C)
        grad_product = -product(grad_read, tl.trans(error), DT) * decays
        grad_query += product(grad_product * step[None, :], key, DT)
        write_rows(grad_queries + at * D, c, live, d, D, grad_query)
        key_turned = read_turned(keys + at * D, c, live, d, D)
        grad_exponent = grad_product * product(query, key_turned, DT)
        tl.debug_barrier()

        # the solve
        key = read_rows(keys + at * D, c, live, d, D)
        inverse_turned = tl.load(inverses + n * C * C + turned(c, c, C))
        grad_right = product(inverse_turned, grad_error, DT)
        write_rows(grad_targets + at * D, c, live, d, D, -grad_right)
        grad_right = grad_right.to(DT)
        tl.debug_barrier()
        grad_lower = strictly_lower(-product(grad_right, tl.trans(error), DT), C) * decays
        grad_exponent += grad_lower * product(key, key_turned, DT)
        grad_upper = -product(error, tl.trans(grad_right), DT) * weighted_turned
        grad_upper = tl.where(c[:, None] < c[None, :], grad_upper, 0.0)
        grad_key += product(grad_lower * step[None, :] + grad_upper, key, DT)
        column_sum = tl.sum(grad_exponent, 0)
        grad_step += column_sum
        grad_total += tl.sum(grad_exponent * step[None, :], 1) - step * column_sum
        tl.store(grad_rate + at + c, grad_step, mask=live)
        tl.debug_barrier()

        # the right side
        key = read_rows(keys + at * D, c, live, d, D)
        state_turned = tl.load(states + (n + 1) * D * D + turned(d, d, D))
        through = kept[:, None] * product(grad_right, state_turned, DT)
        grad_total += tl.sum(through * key, 1)
        write_rows(grad_keys + at * D, c, live, d, D, grad_key + through)
        tl.debug_barrier()
        grad = keep * tl.exp(last) * tl.load(grad_state + tile(d, d, D))
        grad_last += tl.sum(tl.sum(grad * tl.load(states + (n + 1) * D * D + tile(d, d, D)), 1), 0)
        tl.store(grad_log_retention + at + c, tl.cumsum(grad_total, 0, reverse=True) + grad_last, mask=live)
        grad += product(read_turned(keys + at * D, c, live, d, D) * kept[None, :], grad_right, DT)
        grad_read = read_rows(grad_reads + at * D, c, live, d, D)
        grad += product(read_turned(queries + at * D, c, live, d, D) * kept[None, :], grad_read, DT)
        if place == n + 1:
            grad += tl.load(grad_opened + tile(d, d, D))
        tl.store(grad_state + tile(d, d, D), grad)
        tl.debug_barrier()
