"""The inner product of matrices that the linear layer and attention share: one panel of columns.

A panel is PANEL columns of a matrix, stored row after row, so that the distance between two rows
is a constant that LLVM can vectorise over.
"""

from .cache import njit
from .cpu_math import FAST, F, pointer, stack_array

PANEL = 32  # columns of a panel
_ROWS = 4  # rows of C whose sums are in registers at the same time
_SUMS = _ROWS * PANEL


@njit(fastmath=FAST)
def multiply_add(c, c_start, c_row, rows, columns, a, a_start, a_row, a_column, terms, panel,
                 fresh):
    """C[r, j] += (fresh: =) sum_k A[r, k] B[k, j] for r < rows, j < columns <= PANEL.

    C[r, j] is c[c_start + r * c_row + j], A[r, k] is a[a_start + r * a_row + k * a_column], B[k, j]
    is panel[k * PANEL + j], a pointer. The terms of a sum are added in the order of k.

    The 4 x 32 sums live in registers: LLVM vectorises the loops over i and then finds that each
    address of the stack array is constant. Tiles at the edge of C go through a second array;
    the rows of A they lack are replaced by the last one.
    """
    for r in range(0, rows, _ROWS):
        acc = stack_array(_SUMS)
        for i in range(_SUMS):
            acc[i] = F(0.0)
        a0 = pointer(a, a_start + r * a_row)
        a1 = pointer(a, a_start + min(r + 1, rows - 1) * a_row)
        a2 = pointer(a, a_start + min(r + 2, rows - 1) * a_row)
        a3 = pointer(a, a_start + min(r + 3, rows - 1) * a_row)
        for k in range(terms):
            x0 = a0[k * a_column]
            x1 = a1[k * a_column]
            x2 = a2[k * a_column]
            x3 = a3[k * a_column]
            for i in range(PANEL):
                y = panel[k * PANEL + i]
                acc[i] += x0 * y
                acc[PANEL + i] += x1 * y
                acc[2 * PANEL + i] += x2 * y
                acc[3 * PANEL + i] += x3 * y
        t = c_start + r * c_row
        count = min(_ROWS, rows - r)
        if count < _ROWS or columns < PANEL:
            edge = stack_array(_SUMS)
            for i in range(_SUMS):
                edge[i] = acc[i]
            for q in range(count):
                target = pointer(c, t + q * c_row)
                for i in range(columns):
                    target[i] = edge[q * PANEL + i] + (F(0.0) if fresh else target[i])
            continue
        t0 = pointer(c, t)
        t1 = pointer(c, t + c_row)
        t2 = pointer(c, t + 2 * c_row)
        t3 = pointer(c, t + 3 * c_row)
        if not fresh:
            for i in range(PANEL):
                acc[i] += t0[i]
                acc[PANEL + i] += t1[i]
                acc[2 * PANEL + i] += t2[i]
                acc[3 * PANEL + i] += t3[i]
        for i in range(PANEL):
            t0[i] = acc[i]
            t1[i] = acc[PANEL + i]
            t2[i] = acc[2 * PANEL + i]
            t3[i] = acc[3 * PANEL + i]
