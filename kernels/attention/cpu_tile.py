"""Tiles of a head for `cpu.py`: packing rows into panels, and the causal mask."""

import numpy as np

from ..common.cache import njit
from ..common.cpu_math import F
from ..common.cpu_tile import PANEL

TILE = 64  # queries, and keys, of a tile: two panels of columns
LOW = np.finfo(np.float32).min  # of all scores; finite: the difference of two is not NaN


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
