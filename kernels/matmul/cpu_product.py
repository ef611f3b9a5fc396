"""The product of two matrices in vectors, on the threads of Numba: C = A·B, or C += A·B.

    for DEPTH words of the terms at a time:
        pack A into panels of ROWS rows, and B into panels of COLUMNS columns     (cpu_pack)
        for each panel of B, for each panel of A: a tile of C, sums in registers

A word is one term in float32 and two in bfloat16, whose products are summed in float32 all the
same. A tile of 8 x 48 sums fills 24 of the 32 registers of AVX-512, and one of 6 x 16 fills 12 of
the 16 that AVX2 has; at the right edge of C it is as narrow as what is left. What follows a
product, bias, GELU or a residual stream, is done while the tile is in the cache.

Each element of C is the sum, in order, of the sums over DEPTH words: its bits depend neither on
the number of threads nor on the tasks that they were given. An A of float32 that lies across, with
whole panels, is not packed: a panel's ROWS neighbours are read where they are, which makes weight
gradients 4 to 25 % faster. Scratch, kept for each calling thread: both operands of DEPTH words, 20
MB for the head of andrea-120m; and C in float32 where C itself is bfloat16 and has more terms.
"""

import numpy as np
from numba import get_num_threads, prange

from ..common.cache import njit
from ..common.cpu_features import RUNG
from ..common.cpu_math import F, flat, pointer, stack_array, words
from ..common.cpu_tile import make_add_products, scratch, word_of
from ..common.simd import LANES, broadcast, load, load_first, store_first
from ..common.spec import is_bf16
from ..gelu.cpu import gelu, gelu_slope
from .cpu_pack import pack_strip

ROWS, VECTORS = (6, 1) if RUNG == "avx2" else (8, 3)
COLUMNS = VECTORS * LANES
DEPTH = 512
PLAIN, GELU, RESIDUAL, SLOPE = range(4)  # what follows the sum, see `_finish`
A_STRIP = 8  # panels of A that are packed at the same time
MOST_PANELS = 32  # of A, half a megabyte
_TILE = ROWS * COLUMNS
_NONE = np.empty(0, np.float32)

# Tiles whose columns are in so many vectors, for the right edge of C.
_sum_tile, _sum_narrow_tile, _sum_single_tile = (
    make_add_products(ROWS, vectors, COLUMNS) for vectors in (VECTORS, max(1, VECTORS - 1), 1))


def linear(y, pre_gelu, x, w, bias, residual, transpose_w: bool) -> None:
    """y = x·w + bias, or x·wᵀ + bias, and what follows; see cpu.forward."""
    epilogue = _epilogue(pre_gelu, residual)
    _product(y, x, True, w, transpose_w, pre_gelu, bias, residual, epilogue, True)


def input_gradient(dx, dy, w, pre_gelu, transpose_w: bool) -> None:
    """dx = dy·wᵀ, or dy·w, times GELU'(pre_gelu) if that is given."""
    epilogue = PLAIN if pre_gelu is None else SLOPE
    _product(dx, dy, True, w, not transpose_w, pre_gelu, None, None, epilogue, True)


def add_product(dw, a, b) -> None:
    """dw [rows, columns] += aᵀ·b for a [M, rows] and b [M, columns]."""
    _product(dw, a, False, b, False, None, None, None, PLAIN, False)


def finish_row(y, pre_gelu, sums, bias, residual) -> None:
    """Bias, and GELU or residual, on sums [N] of one row."""
    sums = np.append(sums, np.zeros(COLUMNS, np.float32))  # read in whole vectors
    _finish_row(*_epilogue_arrays(y, pre_gelu, bias, residual), sums, y.size,
                _epilogue(pre_gelu, residual))


def _epilogue(pre_gelu, residual) -> int:
    if pre_gelu is not None:
        return GELU
    return PLAIN if residual is None else RESIDUAL


def _epilogue_arrays(c, pre_gelu, bias, residual):
    """Flat; what is absent is empty, or of the type of C."""
    pre_gelu = c if pre_gelu is None else pre_gelu
    return (*(flat(words(a)) for a in (c, pre_gelu)),
            *(_NONE if a is None else flat(a) for a in (bias, residual)))


def _product(c, a, a_along, b, b_along, pre_gelu, bias, residual, epilogue, fresh) -> None:
    (M, N), K = c.shape, a.shape[a_along]
    word, pair = word_of(a)
    blocks = -(-K // (DEPTH * pair))
    depth = -(-K // (blocks * pair * LANES)) * LANES  # blocks of one length, in whole vectors
    sums = flat(c) if not is_bf16(c) else scratch("sums", np.float32, c.size * (blocks > 1))
    a, b = flat(words(a)), flat(words(b))
    in_place = not a_along and pair == 1 and M % ROWS == 0
    for_a = 0 if in_place else -(-M // ROWS) * ROWS * depth
    panels = scratch("a", word, for_a + -(-N // COLUMNS) * COLUMNS * depth)
    product(*_epilogue_arrays(c, pre_gelu, bias, residual), sums, a, a_along, b, b_along, M, N, K,
            pair, depth, epilogue, fresh, a if in_place else panels[:for_a], panels[for_a:],
            in_place, get_num_threads())


@njit(parallel=True)
def product(c, pre_gelu, bias, residual, sums, a, a_along, b, b_along, M, N, K, pair, depth,
            epilogue, fresh, a_panels, b_panels, in_place, threads):
    """C [M, N] = A·B (fresh) or C += A·B, all arrays flat; see `_product` above."""
    rows = (M + ROWS - 1) // ROWS
    columns = (N + COLUMNS - 1) // COLUMNS
    high = min(MOST_PANELS, (rows + threads - 1) // threads)
    a_strips = 0 if in_place else (rows + A_STRIP - 1) // A_STRIP
    for first in range(0, K, depth * pair):
        terms = min(depth * pair, K - first)
        words = (terms + pair - 1) // pair
        for strip in prange(a_strips + columns):
            if strip < a_strips:
                pack_strip(a_panels, ROWS, a, a_along, M, K, first, terms, pair,
                           strip * A_STRIP * ROWS, A_STRIP * ROWS)
            else:
                pack_strip(b_panels, COLUMNS, b, b_along, N, K, first, terms, pair,
                           (strip - a_strips) * COLUMNS, COLUMNS)
        # Where A begins, and how far apart its panels and the words of a row are.
        start, panel, step = (first * M, ROWS, M) if in_place else (0, ROWS * words, ROWS)
        for worker in prange(threads):
            tile = stack_array(_TILE)
            first_tile = worker * rows * columns // threads
            for t in range(first_tile, (worker + 1) * rows * columns // threads):
                # Down `high` panels of A, which stay in the cache, for each panel of B in turn.
                top = t // (high * columns) * high
                within = t - top * columns
                height = min(high, rows - top)
                j = within // height
                i = top + within - j * height
                p = pointer(a_panels, start + i * panel)
                q = pointer(b_panels, j * COLUMNS * words)
                if N - j * COLUMNS > COLUMNS - LANES:
                    _sum_tile(tile, COLUMNS, p, 1, step, q, words, True)
                elif N - j * COLUMNS > LANES:
                    _sum_narrow_tile(tile, COLUMNS, p, 1, step, q, words, True)
                else:
                    _sum_single_tile(tile, COLUMNS, p, 1, step, q, words, True)
                _finish(c, pre_gelu, bias, residual, sums, tile, i * ROWS, j * COLUMNS, M, N,
                        epilogue, fresh and first == 0, first + terms == K)


@njit()
def _finish(c, pre_gelu, bias, residual, sums, tile, row, column, M, N, epilogue, fresh, last):
    """Add a tile to the sums so far; if it is the last, write C with what follows the product.

    GELU: the sum goes to pre_gelu, its GELU to C; RESIDUAL: another array is added; SLOPE: times
    GELU'(pre_gelu).
    """
    for j in range(0, min(COLUMNS, N - column), LANES):
        count = N - column - j
        offset = load_first(bias, column + j, count) if bias.size > 0 else broadcast(F(0.0))
        for i in range(min(ROWS, M - row)):
            at = (row + i) * N + column + j
            value = load(tile, i * COLUMNS + j)
            if not fresh:
                value = value + load_first(sums, at, count)
            if not last:
                store_first(sums, at, value, count)
                continue
            value = value + offset
            if epilogue == GELU:
                store_first(pre_gelu, at, value, count)
                value = gelu(value)
            elif epilogue == RESIDUAL:
                value = value + load_first(residual, at, count)
            elif epilogue == SLOPE:
                value = value * gelu_slope(load_first(pre_gelu, at, count))
            store_first(c, at, value, count)


@njit()
def _finish_row(c, pre_gelu, bias, residual, sums, N, epilogue):
    for column in range(0, N, COLUMNS):
        _finish(c, pre_gelu, bias, residual, sums, pointer(sums, column), 0, column, 1, N,
                epilogue, True, True)
