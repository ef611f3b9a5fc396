"""The product of two matrices in vectors, on the threads of Numba: C = A·B, or C += A·B.

    for DEPTH words of the terms at a time:
        pack A into panels of ROWS rows, and B into panels of COLUMNS columns     (cpu_pack)
        for each panel of B, for each panel of A: a tile of C, sums in registers

A word is one term in float32 and two in bfloat16, whose products are summed in float32 all the
same. A tile of 8 x 48 sums fills 24 of the 32 registers of AVX-512, and one of 6 x 16 fills 12 of
the 16 that AVX2 has; of its loads B's are used ROWS times, and A's COLUMNS times. What follows a
product, bias, GELU or a residual stream, is done while the tile is in the cache.

Each element of C is the sum, in order, of the sums over DEPTH words: its bits depend neither on
the number of threads nor on the tasks that they were given. Scratch, kept for each calling thread:
both operands of DEPTH words, 20 MB for the head of andrea-120m; and C in float32 where C itself is
bfloat16 and has more terms than that.
"""

import threading

import numpy as np
from numba import get_num_threads, prange

from ..common.cache import njit
from ..common.cpu_features import RUNG
from ..common.cpu_math import F, flat, pointer, stack_array
from ..common.simd import (
    LANES,
    broadcast,
    load,
    load_first,
    multiply_add,
    registers,
    registers_of,
    store,
    store_first,
)
from ..common.spec import is_bf16
from ..gelu.cpu import gelu, gelu_slope
from .cpu_pack import pack

ROWS, VECTORS = (6, 1) if RUNG == "avx2" else (8, 3)
COLUMNS = VECTORS * LANES
DEPTH = 512
PLAIN, GELU, RESIDUAL, SLOPE = range(4)  # what follows the sum, see `_finish`
MOST_PANELS = 64, 8  # of A and of B that a task multiplies
TASKS = 4  # for each thread, at least, where there are as many tiles
_SUMS = ROWS * VECTORS
_TILE = ROWS * COLUMNS
_NONE = np.empty(0, np.float32)

_thread = threading.local()


def linear(y, pre_gelu, x, w, bias, residual, epilogue: int, transpose_w: bool) -> None:
    """y = x·w + bias, or x·wᵀ + bias, and the epilogue; absent arrays are None."""
    terms = x.shape[1]
    sums = y
    if is_bf16(y) and terms > 2 * DEPTH:
        sums = _scratch("sums", np.float32, y.size)
    _product(y, sums, x, True, w, transpose_w, pre_gelu, bias, residual, epilogue, True)


def add_product(dw, a, b) -> None:
    """dw [rows, columns] += aᵀ·b for a [M, rows] and b [M, columns]."""
    _product(dw, dw, a, False, b, False, None, None, None, PLAIN, False)


def _product(c, sums, a, a_along, b, b_along, pre_gelu, bias, residual, epilogue, fresh) -> None:
    (M, N), K = c.shape, a.shape[a_along]
    word, pair = (np.int32, 2) if is_bf16(a) else (np.float32, 1)
    words = -(-K // pair)
    blocks = -(-words // DEPTH)
    depth = -(-words // (blocks * LANES)) * LANES  # blocks of one length, in whole vectors
    a_panels = _scratch("a", word, -(-M // ROWS) * ROWS * depth)
    b_panels = _scratch("b", word, -(-N // COLUMNS) * COLUMNS * depth)
    arrays = [_NONE if array is None else _words(array) for array in (bias, residual)]
    pre_gelu = _words(c if pre_gelu is None else pre_gelu)  # of the same type in any case
    product(_words(c), _words(sums), _words(a), a_along, _words(b), b_along, pre_gelu, *arrays,
            M, N, K, pair, depth, epilogue, fresh, a_panels, b_panels, get_num_threads())


def _words(array) -> np.ndarray:
    """Flat, and bfloat16 as the uint16 that Numba knows."""
    return flat(array).view(np.uint16 if is_bf16(array) else array.dtype)


def _scratch(name: str, dtype: type, size: int) -> np.ndarray:
    """Memory of the calling thread by name, kept for its next product and grown when needed."""
    kept = getattr(_thread, name, None)
    if kept is None or kept.size < size:
        kept = np.empty(size, np.float32)
        setattr(_thread, name, kept)
    return kept[:size].view(dtype)


@njit()
def product(c, sums, a, a_along, b, b_along, pre_gelu, bias, residual, M, N, K, pair, depth,
            epilogue, fresh, a_panels, b_panels, threads):
    """C [M, N] = A·B (fresh) or C += A·B, all arrays flat; see `_product` above."""
    for first in range(0, K, depth * pair):
        terms = min(depth * pair, K - first)
        pack(a_panels, ROWS, a, a_along, M, K, first, terms, pair)
        pack(b_panels, COLUMNS, b, b_along, N, K, first, terms, pair)
        _multiply(c, sums, pre_gelu, bias, residual, M, N, (terms + pair - 1) // pair,
                  epilogue, fresh and first == 0, first + terms == K, a_panels, b_panels, threads)


@njit(parallel=True)
def _multiply(c, sums, pre_gelu, bias, residual, M, N, words, epilogue, fresh, last, a_panels,
              b_panels, threads):
    rows = (M + ROWS - 1) // ROWS
    columns = (N + COLUMNS - 1) // COLUMNS
    high, wide = MOST_PANELS  # panels of a task
    while wide > 1 and ((rows + high - 1) // high) * ((columns + wide - 1) // wide) < (
            TASKS * threads):
        wide //= 2
    while high > 1 and ((rows + high - 1) // high) * columns < TASKS * threads:
        high //= 2
    down = (rows + high - 1) // high
    for task in prange(down * ((columns + wide - 1) // wide)):
        across = task // down
        top = (task - across * down) * high
        tile = stack_array(_TILE)
        for j in range(across * wide, min((across + 1) * wide, columns)):
            for i in range(top, min(top + high, rows)):
                _sum_tile(tile, pointer(a_panels, i * ROWS * words),
                          pointer(b_panels, j * COLUMNS * words), words)
                _finish(c, sums, pre_gelu, bias, residual, tile, i * ROWS, j * COLUMNS, M, N,
                        epilogue, fresh, last)


@njit()
def _sum_tile(tile, a, b, words):
    """tile = the sums of a panel of A times a panel of B."""
    sums = registers(_SUMS)
    line = registers_of(b, VECTORS)
    for i in range(_SUMS):
        sums[i] = broadcast(F(0.0))
    for k in range(words):
        for j in range(VECTORS):
            line[j] = load(b, k * COLUMNS + j * LANES)
        for i in range(ROWS):
            x = broadcast(a[k * ROWS + i])
            for j in range(VECTORS):
                sums[i * VECTORS + j] = multiply_add(sums[i * VECTORS + j], x, line[j])
    for i in range(_SUMS):
        store(tile, i * LANES, sums[i])


@njit()
def _finish(c, sums, pre_gelu, bias, residual, tile, row, column, M, N, epilogue, fresh, last):
    """Add a tile to the sums so far; if it is the last, write C with what follows the product.

    GELU: the sum goes to pre_gelu, its GELU to C; RESIDUAL: another array is added; SLOPE: times
    GELU'(pre_gelu).
    """
    for i in range(min(ROWS, M - row)):
        for j in range(0, min(COLUMNS, N - column), LANES):
            at = (row + i) * N + column + j
            count = N - column - j
            value = load(tile, i * COLUMNS + j)
            if not fresh:
                value = value + load_first(sums, at, count)
            if not last:
                store_first(sums, at, value, count)
                continue
            if bias.size > 0:
                value = value + load_first(bias, column + j, count)
            if epilogue == GELU:
                store_first(pre_gelu, at, value, count)
                value = gelu(value)
            elif epilogue == RESIDUAL:
                value = value + load_first(residual, at, count)
            elif epilogue == SLOPE:
                value = value * gelu_slope(load_first(pre_gelu, at, count))
            store_first(c, at, value, count)
