"""Causal attention in vectors: products of tiles whose operands were packed into panels.

For each head and some queries: all their scores, a softmax of two rows at a time, and the product
with the values, each sum finished in registers. What lies beyond the diagonal is skipped, and on it
what no query of a tile of sums sees. Two rows, as each waits for its maximum and its sum, and the
next queries fetched meanwhile: 3 % for T = 1024, 14 % for 256. Backward is in cpu_vector_backward.

Operands are words (common/cpu_tile): in bfloat16 probabilities are rounded to pairs along the keys.
Some queries of a head are one task; each sum has a fixed order, whatever the number of threads.
Scratch in float32: 8 MB at most, and 0.3 MB a thread for T = 1024.
"""

import math
from typing import NamedTuple

import numpy as np
from numba import get_num_threads, prange

from ..common.cache import njit
from ..common.cpu_features import RUNG
from ..common.cpu_math import FAST, FAST_SUM, F, exp2, flat, pointer, stack_array, words
from ..common.cpu_threads import fence, take_number
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
    lane_numbers,
    load,
    max_lanes,
    maximum,
    prefetch,
    store,
    store_first,
    store_uncached,
    sum_lanes,
    where_less,
)
from ..matmul.cpu_pack import pack_panels, pack_rows
from .cpu_words import store_along

# A head is often 32 or 64 wide.
ROWS, VECTORS = (6, 1) if RUNG == "avx2" else (8, 2)
COLUMNS = VECTORS * LANES
# By terms in a word: rows of a tile, and words of which there must be a multiple.
SHAPES = {pair: tile_shape(pair, ROWS, COLUMNS) for pair in (1, 2)}
MOST_QUERIES = 64  # rows of scores that are in the cache at the same time, whole tiles
WORDS = 128  # of a panel of values, which all queries use while it is in the cache
PACKED = 1 << 21  # words of keys and values that forward packs before it uses them
LOW = F(np.finfo(np.float32).min)  # of all scores; finite: the difference of two is not NaN
LOG2_E = F(math.log2(math.e))
_SUMS = MOST_QUERIES * COLUMNS

add_products = make_add_products(ROWS, VECTORS, COLUMNS, COLUMNS)


class Sizes(NamedTuple):
    """`tasks` heads of all sequences, `length` T, `width` D, `pair` terms in a word; T and D also
    in words, whole steps of a product. A product has `rows` rows, forward `queries` at a time."""

    heads: int
    tasks: int
    length: int
    width: int
    pair: int
    word_width: int
    word_length: int
    rows: int
    step: int
    queries: int
    threads: int


def forward(out, lse, qkv) -> None:
    """out [N,d] and lse [B,H,T] of qkv [N,3d]; see cpu.forward."""
    word, sizes = sizes_of(lse, qkv)
    packed = (up(sizes.length, COLUMNS) * sizes.word_width
              + up(sizes.width, COLUMNS) * sizes.word_length)
    together = min(sizes.tasks, max(sizes.threads, PACKED // packed))
    # Whole cache lines of words, and no power of two, for the cache's sake.
    row = up(sizes.length, 2 * LANES * sizes.pair) + LANES * sizes.pair
    scores = scratch("sums", np.float32, sizes.threads * sizes.queries * row)
    # In float32 a probability takes the place of its score.
    probabilities = (scores if sizes.pair == 1
                     else scratch("probabilities", word, scores.size // 2))
    _forward(flat(words(out)), flat(lse), flat(words(qkv)), sizes, together, row,
             scratch("a", word, sizes.threads * sizes.queries * sizes.word_width),
             scratch("b", word, together * packed), scores, probabilities,
             np.zeros(-(-sizes.tasks // together), np.int64))


def sizes_of(lse, qkv) -> tuple[type, Sizes]:
    (batch, heads, length), width = lse.shape, qkv.shape[1] // (3 * lse.shape[1])
    word, pair = word_of(qkv)
    rows, _, step = SHAPES[pair]
    return word, Sizes(heads, batch * heads, length, width, pair, up(-(-width // pair), step),
                       up(-(-length // pair), step), rows, step, MOST_QUERIES // rows * rows,
                       get_num_threads())


@njit()
def row_of(task, part, parts, sizes):
    """Where a head begins in an array [B*T, parts, H, D]."""
    sequence = task // sizes.heads
    head = task - sequence * sizes.heads
    return ((sequence * sizes.length * parts + part) * sizes.heads + head) * sizes.width


@njit()
def pack_along(target, source, step, rows, sizes):
    """Rows of a head, `step` apart, into panels of rows with words along D."""
    pack_panels(target, sizes.word_width, source, True, step, rows, sizes.width, sizes.pair,
                COLUMNS, up(rows, COLUMNS))


@njit()
def pack_down(target, source, step, rows, sizes):
    """Rows of a head, `step` apart, into panels of columns with words down the rows."""
    pack_panels(target, sizes.word_length, source, False, step, sizes.width, rows, sizes.pair,
                COLUMNS, up(sizes.width, COLUMNS))


@njit(forceinline=True)
def ask_for_rows(rows, step, count, sizes):
    """Rows of a head, `step` apart, that will be read soon."""
    for i in range(count):
        for j in range(0, sizes.width, LANES):
            prefetch(rows, i * step + j)


@njit(forceinline=True)
def in_whole_vectors(array, sizes):
    """Whether each head's part of a row can be written past the caches."""
    return (sizes.width % LANES == 0
            and array.ctypes.data % (LANES * array.itemsize) == 0)


@njit(forceinline=True)
def write(target, at, vector, count, whole):
    """The first `count` lanes; of `whole` vectors no line is read before it is written."""
    if whole:
        store_uncached(target, at, vector)
    else:
        store_first(target, at, vector, count)


@njit(forceinline=True)
def words_of(terms, sizes):
    """Words of a product with so many terms."""
    return up((terms + sizes.pair - 1) // sizes.pair, sizes.step)


@njit(parallel=True)
def _forward(out, lse, qkv, sizes, together, row, queries, packed, scores, probabilities, taken):
    """A worker takes the next task when it is done with one; a head's long ones are the first."""
    size = packed.size // together
    blocks = (sizes.length + sizes.queries - 1) // sizes.queries
    for first in range(0, sizes.tasks, together):
        count = min(together, sizes.tasks - first)
        for i in prange(count):
            _pack_keys_and_values(pointer(packed, i * size), qkv, first + i, sizes)
        for worker in prange(sizes.threads):
            begin_tiles(packed)
            my_queries = pointer(queries, worker * sizes.queries * sizes.word_width)
            my_scores = pointer(scores, worker * sizes.queries * row)
            mine = pointer(probabilities, worker * sizes.queries * (row // sizes.pair))
            task = take_number(taken, first // together)
            while task < count * blocks:
                following = take_number(taken, first // together)
                head, block = _place(task, blocks)
                next_head, next_block = _place(following, blocks)
                next_queries = (row_of(first + next_head, 0, 3, sizes)
                                + next_block * sizes.queries * 3 * sizes.heads * sizes.width)
                _attend_block(out, lse, qkv, sizes, first + head, block * sizes.queries,
                              next_queries, row, my_queries, pointer(packed, head * size),
                              my_scores, mine)
                task = following
            fence()
            end_tiles(packed)


@njit(forceinline=True)
def _place(task, blocks):
    """Head and block of queries: of a head, those that see most keys are the first."""
    head = task // blocks
    return head, (head + 1) * blocks - 1 - task


@njit()
def _pack_keys_and_values(keys, qkv, task, sizes):
    step = 3 * sizes.heads * sizes.width
    values = pointer(keys, up(sizes.length, COLUMNS) * sizes.word_width)
    pack_along(keys, pointer(qkv, row_of(task, 1, 3, sizes)), step, sizes.length, sizes)
    pack_down(values, pointer(qkv, row_of(task, 2, 3, sizes)), step, sizes.length, sizes)


@njit(fastmath=FAST)
def _attend_block(out, lse, qkv, sizes, task, first, next_queries, row, queries, keys, scores,
                  probabilities):
    """Some queries of a head from `first` on; meanwhile those that follow are fetched."""
    d_model, tile_rows = sizes.heads * sizes.width, sizes.rows
    rows = min(sizes.queries, sizes.length - first)
    seen = first + rows  # keys
    values = pointer(keys, up(sizes.length, COLUMNS) * sizes.word_width)
    scale = F(1.0 / math.sqrt(sizes.width))
    source = pointer(qkv, row_of(task, 0, 3, sizes) + first * 3 * d_model)
    pack_rows(queries, sizes.word_width, source, True, 3 * d_model, rows, sizes.width, sizes.pair,
              up(rows, tile_rows))
    for j in range(0, seen, COLUMNS):
        for i in range(0, rows, tile_rows):
            if j < first + i + tile_rows:
                add_products(pointer(scores, i * row + j), row,
                             pointer(queries, i * sizes.word_width), sizes.word_width, 1,
                             pointer(keys, j * sizes.word_width), sizes.word_width, True)
    largest, total = stack_array(MOST_QUERIES), stack_array(MOST_QUERIES)
    word_row = row // sizes.pair
    for i in range(0, rows, 2):
        ask_for_rows(pointer(qkv, next_queries + i * 3 * d_model), 3 * d_model, 2, sizes)
        end = min(first + (i // tile_rows + 1) * tile_rows, seen)
        largest[i], largest[i + 1], total[i], total[i + 1] = _softmax(
            pointer(probabilities, i * word_row), word_row, pointer(scores, i * row), row,
            first + i + 1, end, scale * LOG2_E)
    for i in range(rows):
        lse[task * sizes.length + first + i] = largest[i] * scale + F(math.log(total[i]))
        total[i] = F(1.0) / total[i]
    sums = stack_array(_SUMS)
    whole = in_whole_vectors(out, sizes)
    target = row_of(task, 0, 1, sizes) + first * d_model
    for j in range(0, sizes.width, COLUMNS):
        for k in range(0, sizes.word_length, WORDS):
            for i in range(0, rows, tile_rows):
                terms = words_of(min(first + i + tile_rows, seen), sizes) - k
                if terms > 0:
                    add_products(pointer(sums, i * COLUMNS), COLUMNS,
                                 pointer(probabilities, i * word_row + k), word_row, 1,
                                 pointer(values, j * sizes.word_length + k * COLUMNS),
                                 min(terms, WORDS), k == 0)
        for i in range(rows):
            for c in range(0, min(COLUMNS, sizes.width - j), LANES):
                write(out, target + i * d_model + j + c, load(sums, i * COLUMNS + c) * total[i],
                      sizes.width - j - c, whole)


@njit(fastmath=FAST_SUM)
def _softmax(probabilities, word_row, scores, row, count, end, scale):
    """exp(scale * (s - max s)) of two rows of scores, `count` and one more, and words of zeros up
    to `end`; their maxima and their sums."""
    p, q, s, t = probabilities, pointer(probabilities, word_row), scores, pointer(scores, row)
    _hide(s, count, up(end, 2 * LANES), LOW)
    _hide(t, count + 1, up(end, 2 * LANES), LOW)
    s_highest = t_highest = broadcast(LOW)
    for j in range(0, end, 2 * LANES):
        s_highest = maximum(maximum(load(s, j), load(s, j + LANES)), s_highest)
        t_highest = maximum(maximum(load(t, j), load(t, j + LANES)), t_highest)
    s_largest, t_largest = max_lanes(s_highest), max_lanes(t_highest)
    s_total = t_total = broadcast(F(0.0))
    for j in range(0, end, 2 * LANES):
        a = exp2((load(s, j) - s_largest) * scale)
        b = exp2((load(s, j + LANES) - s_largest) * scale)
        c = exp2((load(t, j) - t_largest) * scale)
        d = exp2((load(t, j + LANES) - t_largest) * scale)
        s_total = s_total + (a + b)
        t_total = t_total + (c + d)
        store_along(p, j, a, b)
        store_along(q, j, c, d)
    return s_largest, t_largest, sum_lanes(s_total), sum_lanes(t_total)


@njit(forceinline=True)
def _hide(row, count, end, value):
    """`value` in the place of row[count:end]; end is a multiple of LANES."""
    for j in range(count // LANES * LANES, end, LANES):
        store(row, j, where_less(lane_numbers(), F(count - j), load(row, j), value))


