"""What Triton's kernels of the delta rule share: a tile of C tokens of one sequence and head. Needs Triton.

With `T_t` the sum of log alpha within the tile up to token t, and memories that act on rows:

    (I + rho L) A = e^T K S - U,     L_ti = e^(T_t - T_i) eta_i (k_t . k_i) for i < t,     U = V - K W_0
    S <- e^(T_C) S - (eta e^(T_C - T) K)^T rho A

Tokens are rows. Operands of products are rounded to DT; sums, gates, the solve and states are float32. A transposed
left operand of a product is read from memory, never made from a product's result, which Triton 3.4 to 3.7.0 gets wrong
on Hopper GPUs.
"""

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("Triton is not installed: pip install triton, or set HOPE_KERNELS=torch") from error


@triton.jit
def product(a, b, DT: tl.constexpr):
    """`a @ b` in float32, of operands rounded to DT; float32 operands as three products of tf32."""
    return tl.dot(a.to(DT), b.to(DT), input_precision="tf32x3")


@triton.jit
def tile(rows, columns, WIDTH: tl.constexpr):
    """Offsets [rows, columns] into a matrix of that width; its transpose with the shapes of the indices swapped."""
    return rows[:, None] * WIDTH + columns[None, :]


@triton.jit
def turned(rows, columns, WIDTH: tl.constexpr):
    """Offsets [columns, rows] of the transpose of a matrix of that width."""
    return rows[None, :] * WIDTH + columns[:, None]


@triton.jit
def read_rows(pointer, rows, live, columns, WIDTH: tl.constexpr):
    """The rows of a matrix, 0 where they are not live."""
    return tl.load(pointer + tile(rows, columns, WIDTH), mask=live[:, None], other=0.0)


@triton.jit
def read_turned(pointer, rows, live, columns, WIDTH: tl.constexpr):
    """The transpose of `read_rows`, by its addresses."""
    return tl.load(pointer + turned(rows, columns, WIDTH), mask=live[None, :], other=0.0)


@triton.jit
def write_rows(pointer, rows, live, columns, WIDTH: tl.constexpr, x):
    """The inverse of `read_rows`."""
    tl.store(pointer + tile(rows, columns, WIDTH), x.to(pointer.dtype.element_ty), mask=live[:, None])


@triton.jit
def read_gates(rate, log_retention, rows, live):
    """eta, T [C] and T_C; a token that is not live neither writes nor forgets."""
    logs = tl.load(log_retention + rows, mask=live, other=0.0)
    return tl.load(rate + rows, mask=live, other=0.0), tl.cumsum(logs, 0), tl.sum(logs, 0)


@triton.jit
def decay(total, C: tl.constexpr):
    """e^(T_t - T_i) for i <= t, else 0. Masked before the exponential, which overflows above the diagonal."""
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

    Blocks of 2 are inverted by a sign, then merged two by two: the corner of a pair with inverses P, Q is -Q corner P.
    Powers of larger blocks would cancel where keys are alike.
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
    """Through `S - (scale K)^T errors`, with the gradient of S after it: of errors, keys [C, D] and scale [C]."""
    grad_errors = -scale[:, None] * product(keys, grad, DT)
    grad_written = -product(errors, tl.trans(grad.to(DT)), DT)
    return grad_errors, scale[:, None] * grad_written, tl.sum(grad_written * keys, 1)
