"""Vectors of float32 stored as the words of a product: as they are, or in pairs of bfloat16."""

from numba import types
from numba.extending import overload

from ..common.simd import LANES, pack_neighbours, pack_pairs, store


def store_along(p, i, first, second):
    """Terms i to i + 31 of a row of words p."""


@overload(store_along, jit_options={"forceinline": True})
def _(p, i, first, second):
    if p.dtype == types.int32:
        return lambda p, i, first, second: store(p, i // 2, pack_neighbours(first, second))

    def as_they_are(p, i, first, second):
        store(p, i, first)
        store(p, i + LANES, second)

    return as_they_are


def store_across(p, i, upper, lower):
    """Two terms of 16 rows from i on, as words; words of one term lie as `store_along` does it."""


@overload(store_across, jit_options={"forceinline": True})
def _(p, i, upper, lower):
    if p.dtype == types.int32:
        return lambda p, i, upper, lower: store(p, i, pack_pairs(upper, lower))
    return lambda p, i, upper, lower: None
