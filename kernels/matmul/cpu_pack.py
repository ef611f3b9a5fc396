"""Packing an operand of a product: its rows into panels, zeros where there are none.

An operand has `rows` rows of K terms, and lies in memory along K, [rows, K], or across, [K, rows].
A panel holds `width` rows word by word, so that the product reads it front to back:

    panel[t * width + r] = word t of row r

A word is one float32, or a pair of bfloat16 that are neighbours along K. Rows that lie along K are
turned 16 x 16 words at a time; those that lie across are copied, or two of them zipped into pairs.
"""

from numba import prange, types
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

STRIP = 64  # rows that are packed at the same time, if their panels are not wider


@njit(parallel=True)
def pack(a_panels, a_width, a, a_along, M, b_panels, b_width, b, b_along, N, K, first, terms, pair):
    """Pack terms `first` to `first + terms` of all rows of A and columns of B.

    Operands are flat, of float32 or uint16, and panels of float32 or int32; `pair` is the number
    of terms in a word. A task is a strip of some panels, so that all of a cache line is used while
    it is there.
    """
    a_strip = max(1, STRIP // a_width) * a_width
    b_strip = max(1, STRIP // b_width) * b_width
    a_tasks = (M + a_strip - 1) // a_strip
    for task in prange(a_tasks + (N + b_strip - 1) // b_strip):
        if task < a_tasks:
            _pack_strip(a_panels, a_width, a, a_along, M, K, first, terms, pair, task * a_strip,
                        a_strip)
        else:
            _pack_strip(b_panels, b_width, b, b_along, N, K, first, terms, pair,
                        (task - a_tasks) * b_strip, b_strip)


@njit()
def _pack_strip(panels, width, source, along, rows, K, first, terms, pair, row, strip):
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
