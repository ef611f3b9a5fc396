"""The gradients of causal attention in vectors; see cpu_vector.

For each head, tiles of TILE keys by TILE queries: scores and gradients of probabilities with a row
for each key, then three products into dv, dk and, turned, dq. So left operands lie row by row, as
the products take them (keys, for dq, are read across), and only dq is turned, once for a head.

In bfloat16 probabilities and gradients of scores are rounded to pairs, along the queries where
queries are summed and along the keys where those are. In float32 they take the places of scores and
of gradients of probabilities. A head is one task. Scratch in float32: 1.4 MB a thread for T = 1024
and D = 64.

A head's rows are short and far apart, which no processor foresees: asking for the next keys and
values while the last products of these are made saves 3 %, and writing whole lines past the caches,
which would else be read before, 5 to 9 % (and 1 to 3 % of it with the products that read them).
"""

import functools
import math

import numpy as np
from numba import prange

from ..common.cache import njit
from ..common.cpu_math import FAST, FAST_SUM, F, exp2, flat, pointer, words
from ..common.cpu_threads import fence, take_number
from ..common.cpu_tile import begin_tiles, end_tiles, make_add_products, scratch, up
from ..common.simd import (
    LANES,
    broadcast,
    lane_numbers,
    load,
    load_first,
    multiply_add,
    registers,
    store,
    sum_lanes,
    transpose,
    where_less,
)
from ..matmul.cpu_pack import pack_rows
from .cpu_vector import (
    COLUMNS,
    LOG2_E,
    LOW,
    ROWS,
    VECTORS,
    Sizes,
    add_products,
    ask_for_rows,
    in_whole_vectors,
    pack_along,
    pack_down,
    row_of,
    sizes_of,
    words_of,
    write,
)
from .cpu_words import store_across, store_along

TILE = 96  # keys, and queries: whole rows and columns of tiles of every shape

add_products_of_tile = make_add_products(ROWS, VECTORS, TILE, TILE)  # B: a tile of scores


def backward(dqkv, dout, out, lse, qkv) -> None:
    """dqkv [N,3d] of dout, out [N,d], lse [B,H,T] and qkv [N,3d]; see cpu.backward."""
    word, sizes = sizes_of(lse, qkv)
    word_places, places, tile_places = _places(sizes)
    floats = scratch("b", np.float32, sizes.threads * places[-1])
    tiles = (floats if sizes.pair == 1
             else scratch("probabilities", word, sizes.threads * tile_places[-1]))
    _backward(flat(words(dqkv)), flat(words(dout)), flat(words(out)), flat(lse), flat(words(qkv)),
              sizes, word_places, scratch("a", word, sizes.threads * word_places[-1]), places,
              floats, tile_places, tiles, np.zeros(1, np.int64))


@functools.lru_cache(maxsize=64)
def _places(sizes: Sizes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where in a thread's scratch its arrays begin, and the end: words, float32, words of tiles."""
    columns, length = up(sizes.width, COLUMNS), up(sizes.length, TILE)
    along, down = length * sizes.word_width, columns * sizes.word_length
    tile_along, turned = TILE * sizes.word_width, up(sizes.width, sizes.rows)
    keys_down = TILE // sizes.pair * turned if sizes.pair > 1 else 0
    word_places = np.cumsum([0, along, along, down, down, tile_along, tile_along, keys_down])
    places = np.cumsum([0, length * turned, TILE * columns, TILE * columns, TILE * TILE,
                        TILE * TILE, length, length])
    if sizes.pair == 1:  # where scores and gradients of probabilities are
        return word_places, places, places[[3, 4, 4, -1]]
    return word_places, places, np.arange(4) * (TILE * TILE // sizes.pair)


@njit(parallel=True)
def _backward(dqkv, dout, out, lse, qkv, sizes, word_places, word_scratch, places, float_scratch,
              tile_places, tile_scratch, taken):
    for worker in prange(sizes.threads):
        begin_tiles(word_scratch)
        my_words = pointer(word_scratch, worker * word_places[-1])
        my_floats = pointer(float_scratch, worker * places[-1])
        my_tiles = pointer(tile_scratch, worker * tile_places[-1])
        task = take_number(taken, 0)
        while task < sizes.tasks:
            _backward_head(dqkv, dout, out, lse, qkv, sizes, task, word_places, my_words, places,
                           my_floats, tile_places, my_tiles)
            task = take_number(taken, 0)
        end_tiles(word_scratch)


@njit(fastmath=FAST)
def _backward_head(dqkv, dout, out, lse, qkv, sizes, task, word_places, word_scratch, places,
                   float_scratch, tile_places, tile_scratch):
    """dk and dv of a tile of keys are summed over tiles of queries, dq over tiles of keys."""
    d_model, length, pair, tile_rows = (sizes.heads * sizes.width, sizes.length, sizes.pair,
                                        sizes.rows)
    step, word_width = 3 * d_model, sizes.word_width
    columns, padded = up(sizes.width, COLUMNS), up(length, TILE)
    scale = F(1.0 / math.sqrt(sizes.width))
    queries = pointer(word_scratch, word_places[0])
    douts = pointer(word_scratch, word_places[1])
    queries_down = pointer(word_scratch, word_places[2])
    douts_down = pointer(word_scratch, word_places[3])
    keys = pointer(word_scratch, word_places[4])
    values = pointer(word_scratch, word_places[5])
    keys_down = pointer(word_scratch, word_places[6])
    probabilities = pointer(tile_scratch, tile_places[0])
    slopes = pointer(tile_scratch, tile_places[1])
    slopes_down = pointer(tile_scratch, tile_places[2])
    dqueries = pointer(float_scratch, places[0])
    dkeys = pointer(float_scratch, places[1])
    dvalues = pointer(float_scratch, places[2])
    scores = pointer(float_scratch, places[3])
    dscores = pointer(float_scratch, places[4])
    row_lse = pointer(float_scratch, places[5])
    delta = pointer(float_scratch, places[6])
    source = pointer(qkv, row_of(task, 0, 3, sizes))
    upstream = pointer(dout, row_of(task, 0, 1, sizes))
    target = pointer(dqkv, row_of(task, 0, 3, sizes))
    whole = in_whole_vectors(dqkv, sizes)
    pack_along(queries, source, step, length, sizes)
    pack_along(douts, upstream, d_model, length, sizes)
    pack_down(queries_down, source, step, length, sizes)
    pack_down(douts_down, upstream, d_model, length, sizes)
    _row_dots(delta, upstream, pointer(out, row_of(task, 0, 1, sizes)), d_model, sizes)
    for i in range(padded):
        row_lse[i] = lse[task * length + i] * LOG2_E if i < length else F(0.0)
    for k in range(0, length, TILE):
        n_keys = min(TILE, length - k)
        rows = up(n_keys, tile_rows)
        word_keys = words_of(n_keys, sizes)
        pack_rows(keys, word_width, pointer(source, k * step + d_model), True, step, n_keys,
                  sizes.width, pair, rows)
        pack_rows(values, word_width, pointer(source, k * step + 2 * d_model), True, step, n_keys,
                  sizes.width, pair, rows)
        turned, turned_row, turned_step = keys, 1, word_width
        if pair > 1:  # else a word is one term, and keys are read across
            turned, turned_row, turned_step = keys_down, word_keys, 1
            pack_rows(keys_down, word_keys, pointer(source, k * step + d_model), False, step,
                      sizes.width, n_keys, pair, up(sizes.width, tile_rows))
        for q in range(k, length, TILE):
            n_queries = min(TILE, length - q)
            for part, sums, left, right in ((1, scores, keys, queries),
                                            (2, dscores, values, douts)):
                next_rows = pointer(source, (k + TILE) * step + part * d_model)
                for j in range(0, n_queries, COLUMNS):
                    # On the diagonal, a key is seen by no query before it.
                    for i in range(0, min(rows, q - k + j + COLUMNS), tile_rows):
                        if j == 0 and q + TILE >= length:
                            ask_for_rows(pointer(next_rows, i * step), step, tile_rows, sizes)
                        add_products(pointer(sums, i * TILE + j), TILE,
                                     pointer(left, i * word_width), word_width, 1,
                                     pointer(right, (q + j) * word_width), word_width, True)
            if q == k:
                for i in range(rows):
                    _hide_first(pointer(scores, i * TILE), i, LOW)
                    _hide_first(pointer(dscores, i * TILE), i, F(0.0))
            _score_gradients(probabilities, slopes, slopes_down, scores, dscores, rows,
                             up(n_queries, 2 * LANES), pair, pointer(row_lse, q),
                             pointer(delta, q), scale * LOG2_E)
            for sums, left, right in ((dvalues, probabilities, douts_down),
                                      (dkeys, slopes, queries_down)):
                for j in range(0, sizes.width, COLUMNS):
                    for i in range(0, n_keys, tile_rows):
                        blind = i // pair if q == k else 0  # words of queries that see none
                        add_products(pointer(sums, i * columns + j), columns,
                                     pointer(left, i * TILE // pair + blind), TILE // pair, 1,
                                     pointer(right, j * sizes.word_length
                                             + (q // pair + blind) * COLUMNS),
                                     words_of(n_queries, sizes) - blind, q == k)
            for j in range(0, n_queries, COLUMNS):
                terms = words_of(min(q - k + j + COLUMNS, n_keys), sizes)
                for i in range(0, sizes.width, tile_rows):
                    add_products_of_tile(pointer(dqueries, i * padded + q + j), padded,
                                         pointer(turned, i * turned_row), turned_row, turned_step,
                                         pointer(slopes_down, j), terms, k == 0)
        _write_rows(pointer(target, k * step + d_model), step, dkeys, n_keys, sizes, scale,
                    whole)
        _write_rows(pointer(target, k * step + 2 * d_model), step, dvalues, n_keys, sizes, F(1.0),
                    whole)
    _write_turned(target, step, dqueries, padded, sizes, scale, whole)
    fence()


@njit(forceinline=True)
def _hide_first(row, count, value):
    """`value` in the place of row[:count]."""
    for j in range(0, count, LANES):
        store(row, j, where_less(lane_numbers(), F(count - j), value, load(row, j)))


@njit(fastmath=FAST)
def _score_gradients(probabilities, slopes, slopes_down, scores, dscores, rows, columns, pair, lse,
                     delta, scale):
    """p = exp(scale * s - lse) and p * (dp - delta) of a tile, two rows of keys at a time."""
    for i in range(0, rows, 2):
        for j in range(0, columns, 2 * LANES):
            at = i * TILE + j
            down = i // pair * TILE + j
            a = exp2(load(scores, at) * scale - load(lse, j))
            b = exp2(load(scores, at + LANES) * scale - load(lse, j + LANES))
            c = exp2(load(scores, at + TILE) * scale - load(lse, j))
            d = exp2(load(scores, at + TILE + LANES) * scale - load(lse, j + LANES))
            store_along(probabilities, at, a, b)
            store_along(probabilities, at + TILE, c, d)
            a = a * (load(dscores, at) - load(delta, j))
            b = b * (load(dscores, at + LANES) - load(delta, j + LANES))
            c = c * (load(dscores, at + TILE) - load(delta, j))
            d = d * (load(dscores, at + TILE + LANES) - load(delta, j + LANES))
            store_along(slopes, at, a, b)
            store_along(slopes, at + TILE, c, d)
            store_across(slopes_down, down, a, c)
            store_across(slopes_down, down + LANES, b, d)


@njit(fastmath=FAST_SUM)
def _row_dots(delta, dout, out, step, sizes):
    """delta[i] = dout[i]·out[i], the sum over keys of p * dp; 0 for the queries beyond T."""
    for i in range(up(sizes.length, TILE)):
        total = broadcast(F(0.0))
        if i < sizes.length:
            for j in range(0, sizes.width, LANES):
                total = multiply_add(total, load_first(dout, i * step + j, sizes.width - j),
                                     load_first(out, i * step + j, sizes.width - j))
        delta[i] = sum_lanes(total)


@njit()
def _write_rows(target, step, rows, count, sizes, factor, whole):
    """Rows of a head, `step` apart, from scratch of whole COLUMNS."""
    for i in range(count):
        for j in range(0, sizes.width, LANES):
            write(target, i * step + j, load(rows, i * up(sizes.width, COLUMNS) + j) * factor,
                  sizes.width - j, whole)


@njit()
def _write_turned(target, step, columns, row, sizes, factor, whole):
    """Rows of a head, `step` apart, from scratch that has them as columns."""
    lines = registers(LANES)
    for i in range(0, sizes.length, LANES):
        for j in range(0, sizes.width, LANES):
            for c in range(LANES):
                lines[c] = load(columns, min(j + c, sizes.width - 1) * row + i)
            transpose(lines)
            for r in range(min(LANES, sizes.length - i)):
                write(target, (i + r) * step + j, lines[r] * factor, sizes.width - j, whole)
