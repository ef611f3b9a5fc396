"""Packing an operand of a product, zeros where its rows or terms end.

An operand has `rows` rows of K terms, and lies in memory along K, [rows, K], or across, [K, rows].
A word is one float32, or a pair of bfloat16 that are neighbours along K. The product reads

    A row by row:                 target[r * words + t] = word t of row r
    B in panels of `width` rows:  target[t * width + r] = word t of row r

so both are read in blocks of 16 x 16 words, which are turned where memory and target differ.
"""

from numba import types
from numba.extending import overload

from ..common.cache import njit
from ..common.simd import (
    LANES,
    load_first,
    load_pairs,
    load_zipped,
    prefetch,
    registers_of,
    store_first,
    transpose,
)


@njit()
def pack_rows(target, words, source, along, step, rows, terms, pair, wanted):
    """`wanted` rows of A from `rows` rows that lie `step` elements apart (across: their terms)."""
    lines = registers_of(target, LANES)
    for block in range(_blocks(wanted) * _blocks(words)):
        r, t = _place(block, along, wanted, words)
        _read_block(lines, source, along, step, r, t, rows, terms, pair)
        if not along:
            transpose(lines)
        for i in range(LANES):
            if r + i < wanted:
                store_first(target, (r + i) * words + t, lines[i], words - t)


@njit()
def pack_panels(target, words, source, along, step, rows, terms, pair, width, wanted):
    """`wanted` rows, whole panels of B of a `width` of whole vectors, from `rows` as above."""
    lines = registers_of(target, LANES)
    for block in range(_blocks(wanted) * _blocks(words)):
        r, t = _place(block, along, wanted, words)
        _read_block(lines, source, along, step, r, t, rows, terms, pair)
        if along:
            transpose(lines)
        panel = r // width
        start = panel * width * words + r - panel * width
        for i in range(LANES):
            if t + i < words:
                store_first(target, start + (t + i) * width, lines[i], LANES)


@njit(forceinline=True)
def _blocks(size):
    return (size + LANES - 1) // LANES


@njit(forceinline=True)
def _place(block, along, rows, words):
    """Row and word of a block, in the order of memory: a stretch of it comes with a page."""
    inner = _blocks(words) if along else _blocks(rows)
    outer = block // inner
    inner = block - outer * inner
    return (outer * LANES, inner * LANES) if along else (inner * LANES, outer * LANES)


@njit(forceinline=True)
def _read_block(lines, source, along, step, r, t, rows, terms, pair):
    """Rows r to r + 15 of words t to t + 15; of an operand that lies across, one word in a line.

    What will be read next is asked for: 0.5 % of a product.
    """
    for i in range(LANES):
        if along:
            left = terms - t * pair if r + i < rows else 0
            prefetch(source, (r + LANES + i) * step + t * pair)
            lines[i] = _neighbours(source, (r + i) * step + t * pair, left)
        else:
            term = (t + i) * pair
            prefetch(source, (term + LANES * pair) * step + r)
            lines[i] = _columns(source, term * step + r, step, rows - r, terms - term)


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
            source, at, rows if left > 0 else 0, at + step, rows if left > 1 else 0)
    return lambda source, at, step, rows, left: load_first(source, at, rows if left > 0 else 0)
