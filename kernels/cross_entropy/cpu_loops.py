"""What is done to a row of logits, in plain loops, for processors without the vectors of
cpu_vector. Rows are pointers to float32.

The maximum is taken over integer images of the floats: that vectorises, and a NaN still reaches
the loss through the sum of exponentials.
"""

import numpy as np

from ..common.cache import njit
from ..common.cpu_math import FAST_SUM, F, exp, from_ordered_bits, ordered_bits

_LOWEST = np.int32(-(2**31))


@njit()
def largest_of(row, size):
    """The largest of the first `size` elements, if none is NaN."""
    largest = _LOWEST
    for j in range(size):
        bits = ordered_bits(row[j])
        largest = bits if bits > largest else largest
    return from_ordered_bits(largest)


@njit(fastmath=FAST_SUM)
def exponentials(target, row, size, largest):
    """target[j] = exp(row[j] - largest), and their sum."""
    total = F(0.0)
    for j in range(size):
        e = exp(row[j] - largest)
        total += e
        target[j] = e
    return total


@njit()
def scaled(target, row, size, factor):
    """target[j] = row[j] * factor."""
    for j in range(size):
        target[j] = row[j] * factor


@njit()
def fill(row, size, value):
    """row[j] = value."""
    for j in range(size):
        row[j] = value
