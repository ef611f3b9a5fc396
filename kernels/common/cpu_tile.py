"""The inner product of matrices that the linear layer and attention share: a tile of sums.

A tile of 12 x 32 sums fills 24 of the 32 registers of AVX-512, and one of 6 x 16 fills 12 of the
16 that AVX2 has (a vector takes two there); of its loads B's are used ROWS times, and A's COLUMNS
times. A word is one term in float32, and a pair of bfloat16 whose products are summed in float32.
"""

import threading

import numpy as np

from .cache import njit
from .cpu_features import RUNG
from .cpu_math import F, unknown
from .simd import LANES, broadcast, load, multiply_add, registers, registers_of, store
from .spec import is_bf16

ROWS, VECTORS = (6, 1) if RUNG == "avx2" else (12, 2)
COLUMNS = VECTORS * LANES
_SUMS = ROWS * VECTORS

_thread = threading.local()


@njit()
def add_products(c, c_row, a, a_row, a_step, b, words, fresh):
    """C[i, j] += (fresh: =) sum_t A[i, t] B[t, j] for i < ROWS, j < COLUMNS, in the order of t.

    C[i, j] is c[i * c_row + j], word A[i, t] is a[i * a_row + t * a_step], and word B[t, j] is
    b[t * COLUMNS + j]; all three are pointers.
    """
    a_step = unknown(a_step)  # a loop that is unrolled for a step of 1 spills: 72, not 114 GF/s
    sums = registers(_SUMS)
    line = registers_of(b, VECTORS)
    for i in range(ROWS):
        for j in range(VECTORS):
            sums[i * VECTORS + j] = (broadcast(F(0.0)) if fresh
                                     else load(c, i * c_row + j * LANES))
    for t in range(words):
        for j in range(VECTORS):
            line[j] = load(b, t * COLUMNS + j * LANES)
        for i in range(ROWS):
            x = broadcast(a[i * a_row + t * a_step])
            for j in range(VECTORS):
                sums[i * VECTORS + j] = multiply_add(sums[i * VECTORS + j], x, line[j])
    for i in range(ROWS):
        for j in range(VECTORS):
            store(c, i * c_row + j * LANES, sums[i * VECTORS + j])


def word_of(array: np.ndarray) -> tuple[type, int]:
    """Type of the words of an operand, and the number of terms in one."""
    return (np.int32, 2) if is_bf16(array) else (np.float32, 1)


def scratch(name: str, dtype: type, size: int) -> np.ndarray:
    """Memory of the calling thread by name, kept for its next call and grown when needed."""
    kept = getattr(_thread, name, None)
    if kept is None or kept.size < size:
        kept = np.empty(size, np.float32)
        setattr(_thread, name, kept)
    return kept[:size].view(dtype)
