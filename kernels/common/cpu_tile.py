"""The inner product of matrices that the linear layer and attention share: a tile of sums.

A word is one term in float32, and a pair of bfloat16 whose products are summed in float32. In
vectors a tile takes, of the 32 registers of AVX-512, 24 for sums, and 12 of the 16 of AVX2, where a
vector takes two. Pairs of bfloat16 on a processor with a matrix unit are multiplied there, 16 words
at a time: its tile has 32 x 32 sums, whatever shape those of vectors have.
"""

import threading
from collections.abc import Callable

import numpy as np
from numba import types
from numba.extending import overload, register_jitable

from . import amx
from .cpu_features import AVX512, TILES
from .cpu_math import F
from .host_array import aligned_zeros
from .simd import LANES, broadcast, load, multiply_add, registers, registers_of, store
from .spec import is_bf16

CACHE_LINE = 64
# Words at a time: half as many instructions beside the products, 3 to 11 % faster. With 6 rows,
# on AVX2, no more than 2, so that causal rows end with whole steps.
UNROLL = 4 if AVX512 else 2

_thread = threading.local()


def make_add_products(rows: int, vectors: int, b_row: int, tile_b_row: int) -> Callable:
    """The function of tiles of `rows` rows and 16 * `vectors` columns, in vectors.

    Of its loads B's are used `rows` times, and A's `vectors` times. Words of B are `b_row` apart,
    and `tile_b_row` on the matrix unit.
    """
    count = rows * vectors

    def add_products(c, c_row, a, a_row, a_step, b, words, fresh):
        """C[i, j] += (fresh: =) sum_t A[i, t] B[t, j], in the order of t; all three are pointers.

        C[i, j] is c[i * c_row + j], word A[i, t] is a[i * a_row + t * a_step], and word B[t, j] is
        b[t * b_row + j]. `words` is a multiple of what `tile_shape` gives; on the matrix unit the
        tile is 32 x 32, and a_step is 1.
        """

    def in_vectors(c, c_row, a, a_row, a_step, b, words, fresh):
        sums = registers(count)
        line = registers_of(b, vectors)
        for i in range(rows):
            for j in range(vectors):
                sums[i * vectors + j] = (broadcast(F(0.0)) if fresh
                                         else load(c, i * c_row + j * LANES))
        for first in range(0, words, UNROLL):
            for t in range(UNROLL):
                for j in range(vectors):
                    line[j] = load(b, (first + t) * b_row + j * LANES)
                for i in range(rows):
                    x = broadcast(a[i * a_row + (first + t) * a_step])
                    for j in range(vectors):
                        sums[i * vectors + j] = multiply_add(sums[i * vectors + j], x, line[j])
        for i in range(rows):
            for j in range(vectors):
                store(c, i * c_row + j * LANES, sums[i * vectors + j])

    def in_tiles(c, c_row, a, a_row, a_step, b, words, fresh):
        below, beside = amx.ROWS, amx.WORDS
        if fresh:
            amx.zero(0)
            amx.zero(1)
            amx.zero(2)
            amx.zero(3)
        else:
            amx.load(0, c, 0, c_row)
            amx.load(1, c, beside, c_row)
            amx.load(2, c, below * c_row, c_row)
            amx.load(3, c, below * c_row + beside, c_row)
        for t in range(0, words, amx.WORDS):
            amx.load(4, a, t, a_row)
            amx.load(6, b, t * tile_b_row, tile_b_row)
            amx.load(5, a, t + below * a_row, a_row)
            amx.load(7, b, t * tile_b_row + beside, tile_b_row)
            amx.multiply_add(0, 4, 6)
            amx.multiply_add(1, 4, 7)
            amx.multiply_add(2, 5, 6)
            amx.multiply_add(3, 5, 7)
        amx.store(0, c, 0, c_row)
        amx.store(1, c, beside, c_row)
        amx.store(2, c, below * c_row, c_row)
        amx.store(3, c, below * c_row + beside, c_row)

    @overload(add_products, jit_options={"error_model": "numpy"})
    def _(c, c_row, a, a_row, a_step, b, words, fresh):
        return in_tiles if TILES and a.dtype == types.int32 else in_vectors

    return add_products


def tile_shape(pair: int, rows: int, columns: int) -> tuple[int, int, int]:
    """Rows and columns of a tile, and words of which there must be a multiple, for words of `pair`
    terms; `rows` and `columns` in vectors."""
    if TILES and pair == 2:
        return 2 * amx.ROWS, 2 * amx.WORDS, amx.WORDS
    return rows, columns, UNROLL


@register_jitable
def up(size: int, step: int) -> int:
    """`size` up to a multiple of `step`."""
    return (size + step - 1) // step * step


def begin_tiles(operand):
    """Before the first add_products of a thread."""


@overload(begin_tiles)
def _(operand):
    if TILES and operand.dtype == types.int32:
        return lambda operand: amx.configure()
    return lambda operand: None


def end_tiles(operand):
    """After the last."""


@overload(end_tiles)
def _(operand):
    if TILES and operand.dtype == types.int32:
        return lambda operand: amx.release()
    return lambda operand: None


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
