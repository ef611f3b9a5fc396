"""The product of two matrices on the threads of Numba: C = A·B, or C += A·B.

A task is a block of rows of C times one panel of 32 columns. It packs K_BLOCK rows of its panel
of B at a time on its stack (32 KB) and reads A in place, by strides, so that a transposed operand
costs next to nothing. Each element of C is the sum, in order, of the sums over K_BLOCK terms:
its bits depend neither on the number of threads nor on the block of rows they were given.
"""

from numba import prange

from ..common.cache import njit
from ..common.cpu_math import FAST, F, pointer, stack_array
from ..common.cpu_tile import PANEL, multiply_add

K_BLOCK = 256
_PACKED = K_BLOCK * PANEL
_LINE = 16  # float32 of a cache line
_LINES = _LINE * PANEL
_MIN_ROWS = 32  # of a task: fewer and packing B would cost more than it gains


@njit(parallel=True, fastmath=FAST)
def product(c, a, a_row, a_column, b, b_row, b_column, size, fresh, threads):
    """C = A·B (fresh) or C += A·B; size is (M, N, K).

    All arrays are flat: c [M*N], A[m, k] = a[m * a_row + k * a_column], B[k, n] = b[k * b_row +
    n * b_column].
    """
    M, N, _ = size
    panels = (N + PANEL - 1) // PANEL
    blocks = min((4 * threads + panels - 1) // panels, (M + _MIN_ROWS - 1) // _MIN_ROWS)
    rows = ((M + blocks - 1) // blocks + 3) // 4 * 4
    blocks = (M + rows - 1) // rows
    for task in prange(blocks * panels):
        block = task // panels
        column = (task - block * panels) * PANEL
        row = block * rows
        _task(c, a, a_row, a_column, b, b_row, b_column, size, fresh, row, min(rows, M - row),
              column)


@njit(fastmath=FAST)
def _task(c, a, a_row, a_column, b, b_row, b_column, size, fresh, row, rows, column):
    _, N, K = size
    panel = stack_array(_PACKED)
    columns = min(PANEL, N - column)
    for k in range(0, K, K_BLOCK):
        terms = min(K_BLOCK, K - k)
        _pack(panel, b, k * b_row + column * b_column, b_row, b_column, terms, columns)
        multiply_add(c, row * N + column, N, rows, columns, a, row * a_row + k * a_column, a_row,
                     a_column, terms, panel, fresh and k == 0)


@njit(fastmath=FAST)
def _pack(panel, b, start, b_row, b_column, terms, columns):
    """panel[k * 32 + j] = B[k, j], zeros from `columns` on."""
    lines = stack_array(_LINES)  # nothing overlaps it, so that loops between it and b vectorise
    if columns < PANEL:
        for i in range(_LINES):
            lines[i] = F(0.0)
    for k in range(0, terms, _LINE):
        count = min(_LINE, terms - k)
        if b_column == 1 and columns == PANEL:
            for q in range(count):
                source = pointer(b, start + (k + q) * b_row)
                for i in range(PANEL):
                    lines[i] = source[i]
                for i in range(PANEL):
                    panel[(k + q) * PANEL + i] = lines[i]
            continue
        for j in range(columns):  # a transposed B: one of its cache lines at a time
            source = pointer(b, start + k * b_row + j * b_column)
            if count == _LINE:
                for i in range(_LINE):
                    lines[i * PANEL + j] = source[i * b_row]
            else:
                for i in range(count):
                    lines[i * PANEL + j] = source[i * b_row]
        for i in range(count * PANEL):
            panel[k * PANEL + i] = lines[i]
