"""Tiles of a head for `cpu.py`: packing rows into panels, the product of tiles, the causal mask.

A tile has TILE rows; a panel is PANEL columns of it, stored row after row, so that the distance
between two rows is a constant that LLVM can vectorise over.
"""

from ..common.cache import njit
from ..common.cpu_math import FAST, F, stack_array

TILE = 64  # queries, and keys, of a tile
PANEL = 32  # columns of a panel; a tile has two panels of queries
LOW = F(-1e30)  # below every score, and finite: differences of two of them are not NaN
_BLOCK_SIZE = 4 * PANEL  # sums of four rows, kept in registers


@njit(fastmath=FAST)
def multiply_add(c, c_start, rows, a, a_start, a_row, a_column, terms, b, b_start, fresh):
    """C[r, :] += (fresh: =) sum_k A[r, k] B[k, :] over one panel; rows is a multiple of 4.

    The 4 x 32 sums live in registers: LLVM vectorises the loops over i and then finds that each
    address of the stack array is constant.
    """
    for r in range(0, rows, 4):
        acc = stack_array(_BLOCK_SIZE)
        target = c[c_start + r * PANEL:c_start + (r + 4) * PANEL]
        if fresh:
            for i in range(4 * PANEL):
                acc[i] = F(0.0)
        else:
            for i in range(4 * PANEL):
                acc[i] = target[i]
        p0 = a_start + r * a_row
        p1 = p0 + a_row
        p2 = p1 + a_row
        p3 = p2 + a_row
        for k in range(terms):
            offset = k * a_column
            a0 = a[p0 + offset]
            a1 = a[p1 + offset]
            a2 = a[p2 + offset]
            a3 = a[p3 + offset]
            row = b[b_start + k * PANEL:]
            for i in range(PANEL):
                x = row[i]
                acc[i] += a0 * x
                acc[PANEL + i] += a1 * x
                acc[2 * PANEL + i] += a2 * x
                acc[3 * PANEL + i] += a3 * x
        for i in range(4 * PANEL):
            target[i] = acc[i]


@njit()
def pack_rows(target, width, source, first, count, column, head_dim):
    """target[r * width + j] = source[first + r, column + j], zeros up to TILE rows and width."""
    for r in range(TILE):
        row = target[r * width:(r + 1) * width]
        used = 0
        if r < count:
            used = head_dim
            values = source[first + r, column:column + head_dim]
            for j in range(values.size):
                row[j] = values[j]
        for j in range(width - used):
            row[used + j] = F(0.0)


@njit()
def pack_panels(target, source, first, count, column, head_dim):
    """Rows of a head in panels of columns: target[(j // 32 * TILE + r) * 32 + j % 32]."""
    panels = (head_dim + PANEL - 1) // PANEL
    for panel in range(panels):
        used = min(PANEL, head_dim - panel * PANEL)
        for r in range(TILE):
            row = target[(panel * TILE + r) * PANEL:(panel * TILE + r + 1) * PANEL]
            valid = 0
            if r < count:
                valid = used
                start = column + panel * PANEL
                values = source[first + r, start:start + used]
                for j in range(values.size):
                    row[j] = values[j]
            for j in range(PANEL - valid):
                row[valid + j] = F(0.0)


@njit()
def pack_transposed(target, width, source, first, count, column, head_dim, factor):
    """Query-contiguous panels: target[(i // 32 * width + j) * 32 + i % 32] = factor * row i."""
    for i in range(TILE):
        start = (i // PANEL) * width * PANEL + i % PANEL
        for j in range(width):
            value = F(0.0)
            if i < count and j < head_dim:
                value = source[first + i, column + j] * factor
            target[start + j * PANEL] = value


@njit()
def add_rows(target, first, count, column, head_dim, panels):
    """target[first + r, column + j] += the panels written as `pack_panels` does."""
    for panel in range((head_dim + PANEL - 1) // PANEL):
        start = column + panel * PANEL
        used = min(PANEL, head_dim - panel * PANEL)
        for r in range(count):
            row = target[first + r, start:start + used]
            source = panels[(panel * TILE + r) * PANEL:(panel * TILE + r + 1) * PANEL]
            for j in range(row.size):
                row[j] += source[j]


@njit()
def fill(array, value):
    for i in range(array.size):
        array[i] = value


@njit()
def hide_future(scores, base, keys, panel):
    """In the tile on the diagonal key j is hidden from queries i < j: their exp2 becomes 0."""
    for j in range(keys):
        row = scores[base + j * PANEL:base + (j + 1) * PANEL]
        for i in range(min(max(j - panel * PANEL, 0), PANEL)):
            row[i] = LOW
