"""The product of two matrices in vectors, on the threads of Numba: C = A·B, or C += A·B.

    for DEPTH words of the terms at a time, for each task, a group of columns with a band of rows:
        pack B's columns into panels as wide as a tile of sums, and A's rows  (cpu_pack)
        for each tile's rows, for each panel: a tile of C, sums in registers  (cpu_tile)

A word is one term in float32 and two in bfloat16, whose products are summed in float32 all the
same. A tile of 8 x 48 sums fills 24 of the 32 registers of AVX-512, and one of 6 x 16 fills 12 of
the 16 that AVX2 has; at the right edge of C it is as narrow as what is left. Pairs of bfloat16 in a
matrix unit have tiles of 32 x 32. What follows a product, bias, GELU or a residual stream, is done
while the tile is in the cache.

Each thread packs what it multiplies, so panels never leave its cache: with all of B packed before,
products took 7 % longer, and weight gradients, all of A packed too, 15 % (Emerald Rapids, 1024 rows
and widths of 768 and 3072). Rows of A that lie as the product reads them are not packed. Then a
thread keeps its panels from task to task, else its rows (weight gradients: 3 % faster); it begins
with a share of its own, so that little is packed twice (3 to 5 %). A thread that is done helps
another, so that a slower core has less to do. Each element of C is the sum, in order, of the sums
over DEPTH words: its bits depend neither on the number of threads nor on the tasks. Scratch, kept
for each calling thread: 2.3 MB a thread; and C in float32 where C itself is bfloat16 and has more
terms.
"""

import functools

import numpy as np
from numba import get_num_threads, prange

from ..common.cache import njit
from ..common.cpu_features import RUNG, TILES
from ..common.cpu_math import F, flat, pointer, stack_array, words
from ..common.cpu_threads import take_number
from ..common.cpu_tile import (
    begin_tiles,
    end_tiles,
    make_add_products,
    scratch,
    tile_shape,
    up,
    word_of,
)
from ..common.simd import (
    LANES,
    broadcast,
    load,
    load_first,
    prefetch,
    store_first,
)
from ..common.spec import is_bf16
from ..gelu.cpu import gelu, gelu_slope
from .cpu_pack import pack_panels, pack_rows

ROWS, VECTORS = (6, 1) if RUNG == "avx2" else (8, 3)
COLUMNS = VECTORS * LANES
SHAPES = {pair: tile_shape(pair, ROWS, COLUMNS) for pair in (1, 2)}
DEPTH, LONG_DEPTH = 512, 768  # words of a block; of float32 that lies along K: 4 % faster
PLAIN, GELU, RESIDUAL, SLOPE, SUMS = range(5)  # what follows the sum, see `finish`
CACHED = 3 << 16  # words of B's panels, 768 KB, that all rows of a band meet
KEPT = 2 * CACHED  # words of A's rows that are packed together
# The cost of packing a row, by terms in a word, as a part of the products of a tile.
PACKING = {1: 0.05, 2: 0.1 if TILES else 0.05}
FETCHED = 0.7  # of that, for a row of A that is read from a farther cache
MORE_BANDS = 15
_TILE = max(rows * columns for rows, columns, _ in SHAPES.values())
_NONE = np.empty(0, np.float32)

# Tiles whose columns are in so many vectors, for the right edge of C.
_sum_tile, _sum_narrow_tile, _sum_single_tile = (
    make_add_products(ROWS, vectors, COLUMNS, SHAPES[2][1])
    for vectors in (VECTORS, max(1, VECTORS - 1), 1))


def linear(y, pre_gelu, x, w, bias, residual, transpose_w: bool) -> None:
    """y = x·w + bias, or x·wᵀ + bias, and what follows; see cpu.forward."""
    epilogue = epilogue_of(pre_gelu, residual)
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
    _finish_row(*epilogue_arrays(y, pre_gelu, bias, residual), sums, y.size,
                epilogue_of(pre_gelu, residual))


def epilogue_of(pre_gelu, residual) -> int:
    if pre_gelu is not None:
        return GELU
    return PLAIN if residual is None else RESIDUAL


def epilogue_arrays(c, pre_gelu, bias, residual):
    """Flat; what is absent is empty, or C itself."""
    c = flat(words(c))
    return (c, c if pre_gelu is None else flat(words(pre_gelu)),
            _NONE if bias is None else flat(bias), _NONE if residual is None else flat(residual))


def _product(c, a, a_along, b, b_along, pre_gelu, bias, residual, epilogue, fresh) -> None:
    (M, N), K = c.shape, a.shape[a_along]
    word, pair = word_of(a)
    rows, columns, step = SHAPES[pair]
    threads = get_num_threads()
    blocks, depth, in_place, group, bands, most_rows = _cut(M, N, K, pair, a_along, threads)
    sums = flat(c) if not is_bf16(c) else scratch("sums", np.float32, c.size * (blocks > 1))
    a, b = flat(words(a)), flat(words(b))
    panels = scratch("a", word, threads * (group * columns + most_rows) * depth)
    product(*epilogue_arrays(c, pre_gelu, bias, residual), sums, a, a_along, b, b_along, M, N, K,
            pair, depth, epilogue, fresh, a.view(word) if in_place else panels, panels, in_place,
            rows, columns, step, group, bands, threads, np.zeros(blocks * threads, np.int64))


@functools.lru_cache(maxsize=1024)
def _cut(M: int, N: int, K: int, pair: int, a_along: bool,
         threads: int) -> tuple[int, int, bool, int, int, int]:
    """Blocks of K, and words of each, of one length in whole vectors; whether A is read in place;
    panels in a group, bands of A's rows, and rows of a band to pack at most.

    The least time, in products of a tile, of the thread that does most. It packs one operand once
    for its share and the other for every task, for which A's rows are also fetched into the
    nearest cache; half a task is lost when the threads do not end together.
    """
    rows, columns, step = SHAPES[pair]
    blocks = -(-K // ((LONG_DEPTH if pair == 1 and a_along else DEPTH) * pair))
    depth = up(-(-K // (blocks * pair)), LANES)
    in_place = a_along and M % rows == 0 and K % (pair * step) == 0
    down, across = -(-M // rows), -(-N // columns)
    most_panels = max(1, CACHED // (columns * depth))
    fewest_bands = 1 if in_place else -(-M * depth // KEPT)

    def cost(choice: tuple[int, int]) -> float:
        group, bands = choice
        groups, band = -(-across // group), -(-down // bands)
        tasks = -(-groups * bands // threads)
        pack_a, pack_b = band * rows * PACKING[pair], group * columns * PACKING[pair]
        multiply = (band * group + FETCHED * pack_a) * (tasks + 0.5)
        if in_place:
            return multiply + pack_b * -(-groups // threads)
        return multiply + pack_b * tasks + pack_a * -(-bands // threads)

    group, bands = min(((group, bands) for group in range(1, min(most_panels, across) + 1)
                        for bands in range(fewest_bands, min(down, fewest_bands + MORE_BANDS) + 1)),
                       key=cost)
    return blocks, depth, in_place, group, bands, 0 if in_place else -(-down // bands) * rows


@njit(parallel=True)
def product(c, pre_gelu, bias, residual, sums, a, a_along, b, b_along, M, N, K, pair, depth,
            epilogue, fresh, a_rows, panels, in_place, tile_rows, tile_columns, step, group, bands,
            threads, taken):
    """C [M, N] = A·B (fresh) or C += A·B, all arrays flat; see `_product` above."""
    down = (M + tile_rows - 1) // tile_rows
    across = (N + tile_columns - 1) // tile_columns
    groups = (across + group - 1) // group
    tasks = groups * bands
    for first in range(0, K, depth * pair):
        terms = min(depth * pair, K - first)
        words = up((terms + pair - 1) // pair, step)
        last = first + terms == K
        a_row = K // pair if in_place else words
        for worker in prange(threads):
            begin_tiles(panels)
            tile = stack_array(_TILE)
            b_panels = pointer(panels, worker * (panels.size // threads))
            a_packed = pointer(b_panels, group * tile_columns * depth)
            packed_group = packed_band = -1
            shares = first // (depth * pair) * threads
            task = _next_task(taken, shares, worker, threads, tasks)
            while task < tasks:
                g, band = divmod(task, bands) if in_place else divmod(task, groups)[::-1]
                left = g * group * tile_columns
                count = min(group, across - g * group)
                if g != packed_group:
                    pack_panels(b_panels, words,
                                pointer(b, left * K + first if b_along else first * N + left),
                                b_along, K if b_along else N, N - left, terms, pair, tile_columns,
                                count * tile_columns)
                    packed_group = g
                top = band * down // bands * tile_rows
                end = (band + 1) * down // bands * tile_rows
                if not in_place and band != packed_band:
                    pack_rows(a_packed, words,
                              pointer(a, top * K + first if a_along else first * M + top), a_along,
                              K if a_along else M, M - top, terms, pair, end - top)
                    packed_band = band
                a_band = pointer(a_rows, first // pair + top * a_row) if in_place else a_packed
                for row in range(top, end, tile_rows):
                    a_tile = pointer(a_band, (row - top) * a_row)
                    for p in range(count):
                        column = left + p * tile_columns
                        b_panel = pointer(b_panels, p * tile_columns * words)
                        if last and epilogue == SLOPE:
                            _ask_for(pre_gelu, row, column, tile_rows, tile_columns, M, N)
                        if last and epilogue == RESIDUAL:
                            _ask_for(residual, row, column, tile_rows, tile_columns, M, N)
                        if N - column > tile_columns - LANES:
                            _sum_tile(tile, tile_columns, a_tile, a_row, 1, b_panel, words, True)
                        elif N - column > LANES:
                            _sum_narrow_tile(tile, tile_columns, a_tile, a_row, 1, b_panel, words,
                                             True)
                        else:
                            _sum_single_tile(tile, tile_columns, a_tile, a_row, 1, b_panel, words,
                                             True)
                        finish(c, pre_gelu, bias, residual, sums, tile, tile_rows, tile_columns,
                               row, column, M, N, epilogue if last else SUMS, fresh and first == 0)
                task = _next_task(taken, shares, worker, threads, tasks)
            end_tiles(panels)


@njit()
def _next_task(taken, shares, worker, threads, tasks):
    """A task of this worker's share, or of another's when that is done; `tasks` if none is left.

    taken[shares + w] is how many are taken of worker w's.
    """
    for turn in range(threads):
        share = (worker + turn) % threads
        task = share * tasks // threads + take_number(taken, shares + share)
        if task < (share + 1) * tasks // threads:
            return task
    return tasks


@njit()
def _ask_for(array, row, column, rows, columns, M, N):
    """Fetch a tile of [M, N] while its sums are made: 1 to 10 % of a product with it."""
    for i in range(min(rows, M - row)):
        for j in range(0, min(columns, N - column), LANES):
            prefetch(array, (row + i) * N + column + j)


@njit()
def finish(c, pre_gelu, bias, residual, sums, tile, tile_rows, tile_columns, row, column, M, N,
           epilogue, fresh):
    """Add a tile to the sums so far, and write those, or C with what follows the product.

    GELU: the sum goes to pre_gelu, its GELU to C; RESIDUAL: another array is added; SLOPE: times
    GELU'(pre_gelu).
    """
    rows, columns = min(tile_rows, M - row), min(tile_columns, N - column)
    for j in range(0, columns, LANES):
        count = columns - j
        offset = (load_first(bias, column + j, count) if bias.size > 0 and epilogue != SUMS
                  else broadcast(F(0.0)))
        for i in range(rows):
            at = (row + i) * N + column + j
            value = load(tile, i * tile_columns + j)
            if not fresh:
                value = value + load_first(sums, at, count)
            if epilogue == SUMS:
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
        finish(c, pre_gelu, bias, residual, sums, pointer(sums, column), 1, COLUMNS, 0, column, 1,
               N, epilogue, True)
