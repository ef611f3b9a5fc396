"""The product of two matrices in vectors, on the threads of Numba: C = A·B, or C += A·B.

    for DEPTH words of the terms at a time, for each task, a group of columns with a part of A:
        pack the columns into panels as wide as a tile of sums                       (cpu_pack)
        for each tile's rows of A, packed row by row unless they lie so:
            for each panel: a tile of C, sums in registers                           (cpu_tile)

A word is one term in float32 and two in bfloat16, whose products are summed in float32 all the
same. A tile of 8 x 48 sums fills 24 of the 32 registers of AVX-512, and one of 6 x 16 fills 12 of
the 16 that AVX2 has; at the right edge of C it is as narrow as what is left. Pairs of bfloat16 in a
matrix unit have tiles of 32 x 32. What follows a product, bias, GELU or a residual stream, is done
while the tile is in the cache.

Each thread packs what it multiplies, so panels never leave its cache: with all of B packed before,
products took 7 % longer, and weight gradients, all of A packed too, 15 % (Emerald Rapids, 1024 rows
and widths of 768 and 3072). It keeps panels that its next task needs too, and begins with a share
of its own, so that few groups are packed twice (3 to 5 %); a thread that is done helps another, so
that a slower core has less to do. Each element of C is the sum, in order, of the sums over DEPTH
words: its bits depend neither on the number of threads nor on the tasks. Scratch, kept for each
calling thread: 1 MB a thread; and C in float32 where C itself is bfloat16 and has more terms.
"""

import functools

import numpy as np
from numba import get_num_threads, prange

from ..common.cache import njit
from ..common.cpu_features import RUNG, TILES
from ..common.cpu_math import F, flat, pointer, stack_array, words
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
    take_number,
)
from ..common.spec import is_bf16
from ..gelu.cpu import gelu, gelu_slope
from .cpu_pack import pack_panels, pack_rows

ROWS, VECTORS = (6, 1) if RUNG == "avx2" else (8, 3)
COLUMNS = VECTORS * LANES
SHAPES = {pair: tile_shape(pair, ROWS, COLUMNS) for pair in (1, 2)}
DEPTH, LONG_DEPTH = 512, 768  # words of a block; of float32 that lies along K: 4 % faster
PLAIN, GELU, RESIDUAL, SLOPE, SUMS = range(5)  # what follows the sum, see `_finish`
CACHED = 3 << 16  # words of B's panels, 768 KB, that all rows of a part of A meet
PACKED_ROWS = 48  # of A that are packed at a time, about: whole vectors
# The cost of packing a row, by terms in a word, as a part of the products of a tile.
PACKING = {1: 0.05, 2: 0.1 if TILES else 0.05}
MOST_PARTS = 16
_TILE = max(rows * columns for rows, columns, _ in SHAPES.values())
_NONE = np.empty(0, np.float32)

# Tiles whose columns are in so many vectors, for the right edge of C.
_sum_tile, _sum_narrow_tile, _sum_single_tile = (
    make_add_products(ROWS, vectors, COLUMNS, SHAPES[2][1])
    for vectors in (VECTORS, max(1, VECTORS - 1), 1))


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
    rows, columns, step = SHAPES[pair]
    threads = get_num_threads()
    blocks, depth, in_place, together, group, splits = _cut(M, N, K, pair, a_along, threads)
    sums = flat(c) if not is_bf16(c) else scratch("sums", np.float32, c.size * (blocks > 1))
    a, b = flat(words(a)), flat(words(b))
    panels = scratch("a", word, threads * (group * columns + together * rows) * depth)
    product(*_epilogue_arrays(c, pre_gelu, bias, residual), sums, a, a_along, b, b_along, M, N, K,
            pair, depth, epilogue, fresh, a.view(word) if in_place else panels, panels, in_place,
            rows, columns, step, group, splits, together, threads,
            np.zeros(blocks * threads, np.int64))


@functools.lru_cache(maxsize=1024)
def _cut(M: int, N: int, K: int, pair: int, a_along: bool,
         threads: int) -> tuple[int, int, bool, int, int, int]:
    """Blocks of K and words of each, of one length in whole vectors; whether A is read in place,
    else tiles whose rows are packed together; panels in a group and parts of A's rows."""
    rows, columns, step = SHAPES[pair]
    blocks = -(-K // ((LONG_DEPTH if pair == 1 and a_along else DEPTH) * pair))
    depth = up(-(-K // (blocks * pair)), LANES)
    in_place = a_along and M % rows == 0 and K % (pair * step) == 0
    together = 1 if in_place else max(1, PACKED_ROWS // rows)
    return blocks, depth, in_place, together, *_tasks(
        -(-M // rows), -(-N // columns), max(1, CACHED // (columns * depth)),
        rows * PACKING[pair] / (1 + in_place), columns * PACKING[pair], threads)


def _tasks(down: int, across: int, most: int, a_cost: float, b_cost: float,
           threads: int) -> tuple[int, int]:
    """Panels of B in a group, at most `most`, and parts of A's rows: a task is a group with a part.

    A task packs its rows, at so many products of a tile each, and half as many to fetch rows that
    are not packed; a thread packs the groups of its share; half a task is lost when the threads do
    not end together.
    """
    def cost(choice: tuple[int, int]) -> float:
        group, splits = choice
        rows = -(-down // splits)
        tasks = -(-across // group) * splits
        task = rows * (group + a_cost)
        panels = -(-across // (group * threads)) * group * b_cost
        return task * (-(-tasks // threads) + 0.5) + panels

    return min(((group, splits) for group in range(1, min(most, across) + 1)
                for splits in range(1, min(down, MOST_PARTS) + 1)), key=cost)


@njit(parallel=True)
def product(c, pre_gelu, bias, residual, sums, a, a_along, b, b_along, M, N, K, pair, depth,
            epilogue, fresh, a_rows, panels, in_place, tile_rows, tile_columns, step, group, splits,
            together, threads, taken):
    """C [M, N] = A·B (fresh) or C += A·B, all arrays flat; see `_product` above."""
    down = (M + tile_rows - 1) // tile_rows
    across = (N + tile_columns - 1) // tile_columns
    tasks = (across + group - 1) // group * splits
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
            packed = -1
            shares = first // (depth * pair) * threads
            task = _next_task(taken, shares, worker, threads, tasks)
            while task < tasks:
                part = task // splits
                split = task - part * splits
                left = part * group * tile_columns
                count = min(group, across - part * group)
                if part != packed:
                    pack_panels(b_panels, words,
                                pointer(b, left * K + first if b_along else first * N + left),
                                b_along, K if b_along else N, N - left, terms, pair, tile_columns,
                                count * tile_columns)
                    packed = part
                top, end = split * down // splits, (split + 1) * down // splits
                for i in range(top, end):
                    row = i * tile_rows
                    if not in_place and (i - top) % together == 0:
                        pack_rows(a_packed, words,
                                  pointer(a, row * K + first if a_along else first * M + row),
                                  a_along, K if a_along else M, M - row, terms, pair,
                                  min(together, end - i) * tile_rows)
                    a_tile = (pointer(a_rows, first // pair + row * a_row) if in_place
                              else pointer(a_packed, (i - top) % together * tile_rows * words))
                    for p in range(count):
                        column = left + p * tile_columns
                        b_panel = pointer(b_panels, p * tile_columns * words)
                        if epilogue == SLOPE and last:
                            _ask_for(pre_gelu, row, column, min(tile_rows, M - row),
                                     min(tile_columns, N - column), N)
                        if N - column > tile_columns - LANES:
                            _sum_tile(tile, tile_columns, a_tile, a_row, b_panel, words, True)
                        elif N - column > LANES:
                            _sum_narrow_tile(tile, tile_columns, a_tile, a_row, b_panel, words,
                                             True)
                        else:
                            _sum_single_tile(tile, tile_columns, a_tile, a_row, b_panel, words,
                                             True)
                        _finish(c, pre_gelu, bias, residual, sums, tile, tile_rows, tile_columns,
                                row, column, M, N, epilogue if last else SUMS,
                                fresh and first == 0)
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
def _ask_for(array, row, column, rows, columns, N):
    """Fetch a tile of [M, N] while its sums are made: 3 to 9 % of a product with SLOPE."""
    for i in range(rows):
        for j in range(0, columns, LANES):
            prefetch(array, (row + i) * N + column + j)


@njit()
def _finish(c, pre_gelu, bias, residual, sums, tile, tile_rows, tile_columns, row, column, M, N,
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
        _finish(c, pre_gelu, bias, residual, sums, pointer(sums, column), 1, COLUMNS, 0, column, 1,
                N, epilogue, True)
