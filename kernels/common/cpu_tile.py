"""The inner product of matrices that the linear layer and attention share: a tile of sums.

A word is one term in float32, and a pair of bfloat16 whose products are summed in float32. Of the
32 registers of AVX-512 a tile takes 24 for sums; of the 16 of AVX2, where a vector takes two, 12.
"""

import threading
from collections.abc import Callable

import numpy as np

from .cache import njit
from .cpu_math import F, unknown
from .simd import LANES, broadcast, load, multiply_add, registers, registers_of, store
from .spec import is_bf16

CACHE_LINE = 64

_thread = threading.local()


def make_add_products(rows: int, vectors: int, columns: int) -> Callable:
    """The function of tiles of `rows` rows and 16 * `vectors` columns, panels of B `columns` wide.

    Of its loads B's are used `rows` times, and A's `vectors` times.
    """
    count = rows * vectors

    @njit()
    def add_products(c, c_row, a, a_row, a_step, b, words, fresh):
        """C[i, j] += (fresh: =) sum_t A[i, t] B[t, j], in the order of t; all three are pointers.

        C[i, j] is c[i * c_row + j], word A[i, t] is a[i * a_row + t * a_step], and word B[t, j]
        is b[t * columns + j].
        """
        a_step = unknown(a_step)  # a loop that is unrolled for a step of 1 spills: 72, not 114 GF/s
        sums = registers(count)
        line = registers_of(b, vectors)
        for i in range(rows):
            for j in range(vectors):
                sums[i * vectors + j] = (broadcast(F(0.0)) if fresh
                                         else load(c, i * c_row + j * LANES))
        for t in range(words):
            for j in range(vectors):
                line[j] = load(b, t * columns + j * LANES)
            for i in range(rows):
                x = broadcast(a[i * a_row + t * a_step])
                for j in range(vectors):
                    sums[i * vectors + j] = multiply_add(sums[i * vectors + j], x, line[j])
        for i in range(rows):
            for j in range(vectors):
                store(c, i * c_row + j * LANES, sums[i * vectors + j])

    return add_products


def word_of(array: np.ndarray) -> tuple[type, int]:
    """Type of the words of an operand, and the number of terms in one."""
    return (np.int32, 2) if is_bf16(array) else (np.float32, 1)


def scratch(name: str, dtype: type, size: int) -> np.ndarray:
    """Memory of the calling thread by name, kept for its next call and grown when needed."""
    kept = getattr(_thread, name, None)
    if kept is None or kept.size < size:
        kept = aligned_zeros(size, np.float32)
        setattr(_thread, name, kept)
    return kept[:size].view(dtype)


def aligned_zeros(size: int, dtype: type) -> np.ndarray:
    """Zeros whose vectors lie in one cache line each."""
    itemsize = np.dtype(dtype).itemsize
    raw = np.zeros(size + CACHE_LINE // itemsize, dtype)
    skip = -raw.ctypes.data % CACHE_LINE // itemsize
    return raw[skip:skip + size]
