"""Packing an operand of a product: its rows into panels, zeros where there are none.

An operand has `rows` rows of K terms, and lies in memory along K, [rows, K], or across, [K, rows].
A panel holds `width` rows word by word, so that the product reads it front to back:

    panel[t * width + r] = word t of row r

A word is one float32, or a pair of bfloat16 that are neighbours along K. Rows that lie along K are
turned 16 x 16 words at a time; those that lie across are copied, or two of them zipped into pairs.
"""

from numba import types
from numba.extending import overload

from ..common.cache import njit
from ..common.cpu_math import pointer
from ..common.simd import (
    LANES,
    load_first,
    load_pairs,
    load_zipped,
    registers_of,
    store_first,
    transpose,
)


@njit()
def pack_strip(panels, width, source, along, rows, K, first, terms, pair, row, strip):
    """Pack terms `first` to `first + terms` of `strip` rows from `row` on, some whole panels.

    `source` is flat, of float32 or uint16, and panels of float32 or int32; `pair` is the number
    of terms in a word. A strip should be a cache line or more, if its rows lie across.
    """
    words = (terms + pair - 1) // pair
    if along:
        for r in range(row, min(row + strip, rows), width):
            pack_along(pointer(panels, r * words), width, pointer(source, r * K + first), K,
                       rows - r, terms, pair)
    else:
        pack_across(pointer(panels, row * words), strip, width,
                    pointer(source, first * rows + row), rows, rows - row, terms, pair)


@njit()
def pack_along(target, width, source, K, rows, terms, pair):
    """One panel from `rows` rows that lie along, `K` elements apart."""
    lines = registers_of(target, LANES)
    words = (terms + pair - 1) // pair
    for r in range(0, width, LANES):
        for t in range(0, words, LANES):
            for i in range(LANES):
                left = terms - t * pair if r + i < min(width, rows) else 0
                lines[i] = _neighbours(source, (r + i) * K + t * pair, left)
            transpose(lines)
            for i in range(LANES):
                if t + i < words:
                    store_first(target, (t + i) * width + r, lines[i], width - r)


@njit()
def pack_across(target, strip, width, source, step, rows, terms, pair):
    """A strip of panels, those of them that have rows; `step` elements lie between two terms."""
    words = (terms + pair - 1) // pair
    for t in range(words):
        for row in range(0, min(strip, rows), width):
            for r in range(row, row + width, LANES):
                line = _columns(source, t * pair * step + r, step, rows - r, terms - t * pair)
                store_first(target, row * words + t * width + r - row, line, row + width - r)


def _neighbours(source, at, left):
    """16 words of a row from `at` on, where `left` terms are left."""


@overload(_neighbours, jit_options={"forceinline": True})
def _(source, at, left):
    if source.dtype == types.uint16:
        return lambda source, at, left: load_pairs(source, at, left)
    return lambda source, at, left: load_first(source, at, left)


def _columns(source, at, step, rows, left):
    """A word of each of 16 rows, side by side from `at` on, of which `rows` are there."""


@overload(_columns, jit_options={"forceinline": True})
def _(source, at, step, rows, left):
    if source.dtype == types.uint16:
        return lambda source, at, step, rows, left: load_zipped(
            source, at, rows, at + step, rows if left > 1 else 0)
    return lambda source, at, step, rows, left: load_first(source, at, rows)
