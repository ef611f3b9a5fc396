"""Causal attention in vectors: products of tiles whose operands were packed into panels.

Forward, for each head and QUERIES queries: all their scores, a softmax row by row, and the product
with the values, each sum finished in registers. Backward, for each head, tiles of TILE keys by
TILE queries: the scores and the gradients of the probabilities, then three products into dq, dk
and dv. Tiles beyond the diagonal are skipped, and on it what no query of a tile's ROWS sees.

Operands are words (common/cpu_tile): in bfloat16 probabilities and gradients of scores are rounded
to pairs, along the keys where keys are summed and along the queries where those are. A head is one
task of backward, QUERIES queries are one of forward; each sum has a fixed order, whatever the
number of threads. Scratch in float32: forward 8 MB at most, and 0.2 MB a thread for T = 1024;
backward 1.5 MB a thread for T = 1024 and D = 64.
"""

import math
from typing import NamedTuple

import numpy as np
from numba import get_num_threads, prange

from ..common.cache import njit
from ..common.cpu_features import RUNG
from ..common.cpu_math import FAST, FAST_SUM, F, exp2, flat, pointer, stack_array, words
from ..common.cpu_tile import make_add_products, scratch, word_of
from ..common.simd import (
    LANES,
    broadcast,
    lane_numbers,
    load,
    load_first,
    max_lanes,
    maximum,
    multiply_add,
    store,
    store_first,
    sum_lanes,
    where_less,
)
from ..matmul.cpu_pack import pack_across, pack_along
from .cpu_words import store_across, store_along

# A head is often 32 or 64 wide.
ROWS, VECTORS = (6, 1) if RUNG == "avx2" else (12, 2)
COLUMNS = VECTORS * LANES
QUERIES = 48  # rows of scores that are in the cache at the same time
TILE = 96  # whole ROWS and COLUMNS of either kind of vectors
WORDS = 128  # of a panel of values, which all queries use while it is in the cache
PACKED = 1 << 21  # words of keys and values that forward packs before it uses them
LOW = F(np.finfo(np.float32).min)  # of all scores; finite: the difference of two is not NaN
_LOG2_E = F(math.log2(math.e))
_SUMS = QUERIES * COLUMNS

add_products = make_add_products(ROWS, VECTORS, COLUMNS)


class Sizes(NamedTuple):
    """`tasks` heads of all sequences, `length` T, `width` D, `pair` terms in a word; T and D also
    in words."""

    heads: int
    tasks: int
    length: int
    width: int
    pair: int
    word_width: int
    word_length: int
    threads: int


def forward(out, lse, qkv) -> None:
    """out [N,d] and lse [B,H,T] of qkv [N,3d]; see cpu.forward."""
    word, sizes = _sizes(lse, qkv)
    packed = (_up(sizes.length, COLUMNS) * sizes.word_width
              + _up(sizes.width, COLUMNS) * sizes.word_length)
    together = min(sizes.tasks, max(sizes.threads, PACKED // packed))
    row = _up(sizes.length, 2 * LANES) + LANES  # no power of two, for the cache's sake
    scores = scratch("sums", np.float32, sizes.threads * QUERIES * row)
    # In float32 a probability takes the place of its score.
    probabilities = scores if sizes.pair == 1 else scratch("probabilities", word, scores.size // 2)
    _forward(flat(words(out)), flat(lse), flat(words(qkv)), sizes, together, row,
             scratch("a", word, sizes.threads * QUERIES * sizes.word_width),
             scratch("b", word, together * packed), scores, probabilities)


def backward(dqkv, dout, out, lse, qkv) -> None:
    """dqkv [N,3d] of dout, out [N,d], lse [B,H,T] and qkv [N,3d]; see cpu.backward."""
    word, sizes = _sizes(lse, qkv)
    columns, length = _up(sizes.width, COLUMNS), _up(sizes.length, TILE)
    along, down = length * sizes.word_width, columns * sizes.word_length
    tile_along, tile = TILE * sizes.word_width, TILE * TILE // sizes.pair
    word_places = np.cumsum([0, along, along, down, down, tile_along, tile_along,
                             TILE // sizes.pair * columns, tile, tile, tile])
    places = np.cumsum([0, length * columns, TILE * columns, TILE * columns, TILE * TILE,
                        TILE * TILE, length, length])
    _backward(flat(words(dqkv)), flat(words(dout)), flat(words(out)), flat(lse), flat(words(qkv)),
              sizes, word_places, scratch("a", word, sizes.threads * word_places[-1]),
              places, scratch("b", np.float32, sizes.threads * places[-1]))


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _sizes(lse, qkv) -> tuple[type, Sizes]:
    (batch, heads, length), width = lse.shape, qkv.shape[1] // (3 * lse.shape[1])
    word, pair = word_of(qkv)
    return word, Sizes(heads, batch * heads, length, width, pair, -(-width // pair),
                       -(-length // pair), get_num_threads())


@njit()
def _row_of(task, part, parts, sizes):
    """Where a head begins in an array [B*T, parts, H, D]."""
    sequence = task // sizes.heads
    head = task - sequence * sizes.heads
    return ((sequence * sizes.length * parts + part) * sizes.heads + head) * sizes.width


@njit()
def _pack_rows(target, rows_of_panel, source, step, rows, sizes):
    """Rows of a head, `step` apart, into panels of rows with words along D."""
    for r in range(0, rows, rows_of_panel):
        pack_along(pointer(target, r * sizes.word_width), rows_of_panel,
                   pointer(source, r * step), step, rows - r, sizes.width, sizes.pair)


@njit()
def _pack_columns(target, source, step, rows, sizes):
    """Rows of a head, `step` apart, into panels of columns with words down the rows."""
    for j in range(0, sizes.width, COLUMNS):
        pack_across(pointer(target, j * ((rows + sizes.pair - 1) // sizes.pair)), COLUMNS, COLUMNS,
                    pointer(source, j), step, sizes.width - j, rows, sizes.pair)


# Forward


@njit(parallel=True)
def _forward(out, lse, qkv, sizes, together, row, queries, packed, scores, probabilities):
    """A worker takes every so manyth task; heads alternate in which end has the long ones."""
    size = packed.size // together
    blocks = (sizes.length + QUERIES - 1) // QUERIES
    for first in range(0, sizes.tasks, together):
        count = min(together, sizes.tasks - first)
        for i in prange(count):
            _pack_keys_and_values(pointer(packed, i * size), qkv, first + i, sizes)
        for worker in prange(sizes.threads):
            my_queries = pointer(queries, worker * QUERIES * sizes.word_width)
            my_scores = pointer(scores, worker * QUERIES * row)
            mine = pointer(probabilities, worker * QUERIES * (row // sizes.pair))
            for task in range(worker, count * blocks, sizes.threads):
                head = task // blocks
                block = task - head * blocks
                block = blocks - 1 - block if head % 2 == 0 else block
                _attend_block(out, lse, qkv, sizes, first + head, block * QUERIES, row, my_queries,
                              pointer(packed, head * size), my_scores, mine)


@njit()
def _pack_keys_and_values(keys, qkv, task, sizes):
    step = 3 * sizes.heads * sizes.width
    values = pointer(keys, _panels(sizes.length, COLUMNS) * sizes.word_width)
    _pack_rows(keys, COLUMNS, pointer(qkv, _row_of(task, 1, 3, sizes)), step, sizes.length, sizes)
    _pack_columns(values, pointer(qkv, _row_of(task, 2, 3, sizes)), step, sizes.length, sizes)


@njit(forceinline=True)
def _panels(size, step):
    """`size` up to a multiple of `step`."""
    return (size + step - 1) // step * step


@njit(fastmath=FAST)
def _attend_block(out, lse, qkv, sizes, task, first, row, queries, keys, scores, probabilities):
    """QUERIES queries of a head from `first` on."""
    d_model = sizes.heads * sizes.width
    rows = min(QUERIES, sizes.length - first)
    seen = first + rows  # keys
    values = pointer(keys, _panels(sizes.length, COLUMNS) * sizes.word_width)
    scale = F(1.0 / math.sqrt(sizes.width))
    source = pointer(qkv, _row_of(task, 0, 3, sizes) + first * 3 * d_model)
    _pack_rows(queries, ROWS, source, 3 * d_model, rows, sizes)
    for j in range(0, seen, COLUMNS):
        for i in range(0, rows, ROWS):
            if j < first + i + ROWS:
                add_products(pointer(scores, i * row + j), row,
                             pointer(queries, i * sizes.word_width), 1, ROWS,
                             pointer(keys, j * sizes.word_width), sizes.word_width, True)
    inverse = stack_array(QUERIES)
    word_row = row // sizes.pair
    for i in range(rows):
        end = min(first + (i // ROWS + 1) * ROWS, seen)
        largest, total = _softmax(pointer(probabilities, i * word_row), pointer(scores, i * row),
                                  first + i + 1, end, scale * _LOG2_E)
        inverse[i] = F(1.0) / total
        lse[task * sizes.length + first + i] = largest * scale + F(math.log(total))
    sums = stack_array(_SUMS)
    target = _row_of(task, 0, 1, sizes) + first * d_model
    for j in range(0, sizes.width, COLUMNS):
        for k in range(0, sizes.word_length, WORDS):
            for i in range(0, rows, ROWS):
                terms = (min(first + i + ROWS, seen) + sizes.pair - 1) // sizes.pair - k
                if terms > 0:
                    add_products(pointer(sums, i * COLUMNS), COLUMNS,
                                 pointer(probabilities, i * word_row + k), word_row, 1,
                                 pointer(values, j * sizes.word_length + k * COLUMNS),
                                 min(terms, WORDS), k == 0)
        for i in range(rows):
            for c in range(0, min(COLUMNS, sizes.width - j), LANES):
                store_first(out, target + i * d_model + j + c,
                            load(sums, i * COLUMNS + c) * inverse[i], sizes.width - j - c)


@njit(fastmath=FAST_SUM)
def _softmax(probabilities, scores, count, end, scale):
    """exp(scale * (s - max s)) of `count` scores, words of zeros up to `end`; maximum and sum."""
    _hide(scores, count, _panels(end, 2 * LANES), LOW)
    highest = broadcast(LOW)
    for j in range(0, end, 2 * LANES):
        highest = maximum(maximum(load(scores, j), load(scores, j + LANES)), highest)
    largest = max_lanes(highest)
    total = broadcast(F(0.0))
    for j in range(0, end, 2 * LANES):
        a = exp2((load(scores, j) - largest) * scale)
        b = exp2((load(scores, j + LANES) - largest) * scale)
        total = total + (a + b)
        store_along(probabilities, j, a, b)
    return largest, sum_lanes(total)


@njit(forceinline=True)
def _hide(row, count, end, value):
    """`value` in the place of row[count:end]; end is a multiple of LANES."""
    for j in range(count // LANES * LANES, end, LANES):
        store(row, j, where_less(lane_numbers(), F(count - j), load(row, j), value))


# Backward


@njit(parallel=True)
def _backward(dqkv, dout, out, lse, qkv, sizes, word_places, word_scratch, places, float_scratch):
    for worker in prange(sizes.threads):
        my_words = pointer(word_scratch, worker * word_places[-1])
        my_floats = pointer(float_scratch, worker * places[-1])
        for task in range(worker, sizes.tasks, sizes.threads):
            _backward_head(dqkv, dout, out, lse, qkv, sizes, task, word_places, my_words, places,
                           my_floats)


@njit(fastmath=FAST)
def _backward_head(dqkv, dout, out, lse, qkv, sizes, task, word_places, word_scratch, places,
                   float_scratch):
    """dk and dv of a tile of keys are summed over tiles of queries, dq over tiles of keys."""
    d_model, length, pair = sizes.heads * sizes.width, sizes.length, sizes.pair
    step = 3 * d_model
    columns = _panels(sizes.width, COLUMNS)
    scale = F(1.0 / math.sqrt(sizes.width))
    queries = pointer(word_scratch, word_places[0])
    douts = pointer(word_scratch, word_places[1])
    queries_down = pointer(word_scratch, word_places[2])
    douts_down = pointer(word_scratch, word_places[3])
    keys = pointer(word_scratch, word_places[4])
    values = pointer(word_scratch, word_places[5])
    keys_down = pointer(word_scratch, word_places[6])
    probabilities = pointer(word_scratch, word_places[7])
    slopes_down = pointer(word_scratch, word_places[8])
    slopes = pointer(word_scratch, word_places[9])
    dqueries = pointer(float_scratch, places[0])
    dkeys = pointer(float_scratch, places[1])
    dvalues = pointer(float_scratch, places[2])
    scores = pointer(float_scratch, places[3])
    dscores = pointer(float_scratch, places[4])
    row_lse = pointer(float_scratch, places[5])
    delta = pointer(float_scratch, places[6])
    source = pointer(qkv, _row_of(task, 0, 3, sizes))
    upstream = pointer(dout, _row_of(task, 0, 1, sizes))
    target = pointer(dqkv, _row_of(task, 0, 3, sizes))
    _pack_rows(queries, ROWS, source, step, length, sizes)
    _pack_rows(douts, ROWS, upstream, d_model, length, sizes)
    _pack_columns(queries_down, source, step, length, sizes)
    _pack_columns(douts_down, upstream, d_model, length, sizes)
    _row_dots(delta, upstream, pointer(out, _row_of(task, 0, 1, sizes)), d_model, sizes)
    for i in range(_panels(length, TILE)):
        row_lse[i] = lse[task * length + i] * _LOG2_E if i < length else F(0.0)
    for k in range(0, length, TILE):
        n_keys = min(TILE, length - k)
        _pack_rows(keys, COLUMNS, pointer(source, k * step + d_model), step, n_keys, sizes)
        _pack_rows(values, COLUMNS, pointer(source, k * step + 2 * d_model), step, n_keys, sizes)
        _pack_columns(keys_down, pointer(source, k * step + d_model), step, n_keys, sizes)
        word_keys = (n_keys + pair - 1) // pair
        for q in range(k, length, TILE):
            rows = min(TILE, length - q)
            seen = q - k + ROWS  # keys of this tile, for the last of the first ROWS queries
            for j in range(0, n_keys, COLUMNS):
                for i in range(0, rows, ROWS):
                    if j < seen + i:
                        add_products(pointer(scores, i * TILE + j), TILE,
                                     pointer(queries, (q + i) * sizes.word_width), 1, ROWS,
                                     pointer(keys, j * sizes.word_width), sizes.word_width, True)
                        add_products(pointer(dscores, i * TILE + j), TILE,
                                     pointer(douts, (q + i) * sizes.word_width), 1, ROWS,
                                     pointer(values, j * sizes.word_width), sizes.word_width, True)
            if q == k:
                for i in range(_panels(rows, 2)):
                    _hide(pointer(scores, i * TILE), i + 1, TILE, LOW)
                    _hide(pointer(dscores, i * TILE), i + 1, TILE, F(0.0))
            _score_gradients(probabilities, slopes_down, slopes, scores, dscores, rows, pair,
                             pointer(row_lse, q), pointer(delta, q), scale * _LOG2_E)
            for j in range(0, sizes.width, COLUMNS):
                for i in range(0, rows, ROWS):
                    add_products(pointer(dqueries, (q + i) * columns + j), columns,
                                 pointer(slopes, i * TILE // pair), TILE // pair, 1,
                                 pointer(keys_down, j * word_keys),
                                 (min(seen + i, n_keys) + pair - 1) // pair, k == 0)
                for i in range(0, n_keys, ROWS):
                    blind = i if q == k else 0  # queries that see none of these keys
                    panel = j * sizes.word_length + (q + blind) // pair * COLUMNS
                    terms = (rows - blind + pair - 1) // pair
                    add_products(pointer(dvalues, i * columns + j), columns,
                                 pointer(probabilities, blind // pair * TILE + i), 1, TILE,
                                 pointer(douts_down, panel), terms, q == k)
                    add_products(pointer(dkeys, i * columns + j), columns,
                                 pointer(slopes_down, blind // pair * TILE + i), 1, TILE,
                                 pointer(queries_down, panel), terms, q == k)
        _write_rows(pointer(target, k * step + d_model), step, dkeys, n_keys, sizes, scale)
        _write_rows(pointer(target, k * step + 2 * d_model), step, dvalues, n_keys, sizes, F(1.0))
    _write_rows(target, step, dqueries, length, sizes, scale)


@njit(fastmath=FAST)
def _score_gradients(probabilities, slopes_down, slopes, scores, dscores, rows, pair, lse, delta,
                     scale):
    """p = exp(scale * s - lse) and p * (dp - delta) of a tile, two rows of words at a time."""
    for i in range(0, rows, 2):
        for j in range(i * TILE, (i + 1) * TILE, 2 * LANES):
            down = i // pair * TILE + j - i * TILE
            a = exp2(load(scores, j) * scale - lse[i])
            b = exp2(load(scores, j + LANES) * scale - lse[i])
            c = exp2(load(scores, j + TILE) * scale - lse[i + 1])
            d = exp2(load(scores, j + TILE + LANES) * scale - lse[i + 1])
            store_across(probabilities, down, TILE, a, c)
            store_across(probabilities, down + LANES, TILE, b, d)
            a = a * (load(dscores, j) - delta[i])
            b = b * (load(dscores, j + LANES) - delta[i])
            c = c * (load(dscores, j + TILE) - delta[i + 1])
            d = d * (load(dscores, j + TILE + LANES) - delta[i + 1])
            store_across(slopes_down, down, TILE, a, c)
            store_across(slopes_down, down + LANES, TILE, b, d)
            store_along(slopes, j, a, b)
            store_along(slopes, j + TILE, c, d)


@njit(fastmath=FAST_SUM)
def _row_dots(delta, dout, out, step, sizes):
    """delta[i] = dout[i]·out[i], the sum over keys of p * dp; 0 for the queries beyond T."""
    for i in range(_panels(sizes.length, TILE)):
        total = broadcast(F(0.0))
        if i < sizes.length:
            for j in range(0, sizes.width, LANES):
                total = multiply_add(total, load_first(dout, i * step + j, sizes.width - j),
                                     load_first(out, i * step + j, sizes.width - j))
        delta[i] = sum_lanes(total)


@njit()
def _write_rows(target, step, rows, count, sizes, factor):
    """Rows of a head, `step` apart, from scratch of whole COLUMNS."""
    for i in range(count):
        for j in range(0, sizes.width, LANES):
            store_first(target, i * step + j,
                        load(rows, i * _panels(sizes.width, COLUMNS) + j) * factor,
                        sizes.width - j)
