"""What is done to a row of logits, in vectors. Rows are pointers, of float32 or of bfloat16."""

import numpy as np

from ..common.cache import njit
from ..common.cpu_math import FAST_SUM, F, exp
from ..common.simd import (
    LANES,
    broadcast,
    lane_numbers,
    load,
    load_first,
    max_lanes,
    maximum,
    store,
    store_first,
    sum_lanes,
    where_less,
)

_LOWEST = F(-np.inf)


@njit()
def largest_of(row, size):
    """The largest of the first `size` elements, if none is NaN."""
    a = broadcast(_LOWEST)
    b = broadcast(_LOWEST)
    whole = size // (2 * LANES) * (2 * LANES)
    for j in range(0, whole, 2 * LANES):
        a = maximum(load(row, j), a)
        b = maximum(load(row, j + LANES), b)
    for j in range(whole, size, LANES):
        a = maximum(_first(row, j, size), a)
    return max_lanes(maximum(a, b))


@njit(forceinline=True)
def _first(row, j, size):
    """row[j : j + 16], and -infinity from `size` on."""
    return where_less(lane_numbers(), F(size - j), load_first(row, j, size - j), _LOWEST)


@njit(fastmath=FAST_SUM)
def exponentials(target, row, size, largest):
    """target[j] = exp(row[j] - largest), and their sum."""
    total = broadcast(F(0.0))
    whole = size // LANES * LANES
    for j in range(0, whole, LANES):
        e = exp(load(row, j) - largest)
        total = total + e
        store(target, j, e)
    if whole < size:
        e = exp(_first(row, whole, size) - largest)
        total = total + where_less(lane_numbers(), F(size - whole), e, F(0.0))
        store_first(target, whole, e, size - whole)
    return sum_lanes(total)


@njit()
def scaled(target, row, size, factor):
    """target[j] = row[j] * factor."""
    whole = size // LANES * LANES
    for j in range(0, whole, LANES):
        store(target, j, load(row, j) * factor)
    store_first(target, whole, load_first(row, whole, size - whole) * factor, size - whole)


@njit()
def fill(row, size, value):
    """row[j] = value."""
    for j in range(0, size, LANES):
        store_first(row, j, broadcast(value), size - j)
