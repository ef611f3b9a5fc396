"""The gradients of CUDA attention in two launches, without atomics; see gpu.py.

p is recomputed from lse, so no [T, T] array is kept. The first kernel owns a tile of queries and
streams keys: it writes dq, and delta = sum(dout * out) per query for the second. That one owns a
tile of keys and streams the queries that see them: it writes dk and dv. Both hold two stationary
tiles, and stream the third operand twice rather than keep a fourth tile in shared memory.
"""

import math

from ..common.cuda import Floats, cuda, float32, int32, int64, kernel
from ..common.launch import aligned, ceil_div, scratch
from ..common.ptx import exp2, load4_shared
from .gpu_tile import (
    LANES,
    LOG2_E,
    MIN_BLOCKS,
    SHAPES,
    lane_sum,
    make_tile_functions,
    padded_width,
    read4,
    thread_index,
    zero,
)


def backward(dqkv, dout, out, lse, qkv) -> None:
    """dqkv [N,3d] from dout, out [N,d], lse [B,H,T] and qkv [N,3d] of forward."""
    batch, heads, length = lse.shape
    head_dim = out.shape[1] // heads
    width = padded_width(head_dim)
    grid = batch * heads * ceil_div(length, SHAPES[width][0])
    delta = scratch(batch * heads * length)
    scale = 1 / math.sqrt(head_dim)
    is_aligned = head_dim % 4 == 0 and aligned(dqkv, dout, out, qkv)
    _QUERIES[width].launch(grid, dqkv, delta, dout, out, lse, qkv, length, heads, head_dim,
                           scale, is_aligned)
    _KEYS[width].launch(grid, dqkv, dout, delta, lse, qkv, length, heads, head_dim, scale,
                        is_aligned)


def _make_queries(width: int):
    tiles = make_tile_functions(width)
    rows, own_rows, n_keys = tiles.rows, tiles.own_rows, tiles.streamed
    per_lane, strips = tiles.per_lane, tiles.strips
    fetch, put, load, store = tiles.fetch, tiles.put, tiles.load, tiles.store
    dots, share, add_product = tiles.dots, tiles.share, tiles.add_product
    stationary_size, streamed_size = tiles.stationary_size, tiles.streamed_size
    weights_size, fetched_size = tiles.weights_size, tiles.fetched_size
    scores_size, sums_size = tiles.scores_size, tiles.sums_size

    @kernel(threads=tiles.threads, min_blocks=MIN_BLOCKS, name=f"backward_queries_{width}")
    def backward_queries(dqkv: Floats, delta: Floats, dout: Floats, out: Floats, lse: Floats,
                         qkv: Floats, length: int32, heads: int32, head_dim: int32,
                         scale: float32, is_aligned: int32):
        queries = cuda.shared.array(stationary_size, float32, alignment=16)  # q * scale / log(2)
        douts = cuda.shared.array(stationary_size, float32, alignment=16)
        streamed = cuda.shared.array(streamed_size, float32, alignment=16)  # k, v, k again
        weights = cuda.shared.array(weights_size, float32, alignment=16)  # ds
        fetched = cuda.local.array(fetched_size, float32)
        scores = cuda.local.array(scores_size, float32)
        dscores = cuda.local.array(scores_size, float32)
        dqueries = cuda.local.array(sums_size, float32)
        log2_sums = cuda.local.array(own_rows, float32)
        deltas = cuda.local.array(own_rows, float32)
        lane, group = thread_index() % LANES, thread_index() // LANES
        n_tiles = (length + rows - 1) // rows
        n_heads = cuda.gridDim.x // n_tiles  # of all sequences
        first = (n_tiles - 1 - cuda.blockIdx.x // n_heads) * rows  # those with most keys start
        head = cuda.blockIdx.x % n_heads
        token = int64(head // heads) * length  # the first of the sequence
        d_model, head_column = heads * head_dim, head % heads * head_dim
        stride = 3 * d_model
        q = token * stride + head_column
        k, v = q + d_model, q + 2 * d_model
        q += first * stride  # from here on: the first query of the tile
        o = (token + first) * d_model + head_column
        layout, out_layout = (stride, head_dim, is_aligned), (d_model, head_dim, is_aligned)

        load(queries, qkv, q, length - first, layout, scale * float32(LOG2_E))
        load(douts, dout, o, length - first, out_layout, float32(1.0))
        cuda.syncthreads()
        for i in range(own_rows):
            query = first + own_rows * group + i
            product = float32(0.0)
            log2_sums[i] = float32(0.0)
            if query < length:
                for strip in range(strips):
                    place = (own_rows * group + i) * width + strip * 32 + (lane ^ group % 8) * 4
                    a, b, c, d = load4_shared(douts, place)
                    column = strip * 32 + 4 * lane
                    e, f, g, h = read4(out, o + (own_rows * group + i) * d_model + column,
                                       head_dim - column, is_aligned)
                    product += a * e
                    product += b * f
                    product += c * g
                    product += d * h
                log2_sums[i] = lse[int64(head) * length + query] * float32(LOG2_E)
            deltas[i] = lane_sum(product)
            if lane == 0 and query < length:
                delta[int64(head) * length + query] = deltas[i]

        zero(dqueries)
        visible = min(first + rows, length)  # keys that some query of the tile sees
        fetch(fetched, qkv, k, visible, layout)
        for start in range(0, visible, n_keys):
            following = start + n_keys
            cuda.syncthreads()
            put(streamed, fetched)  # k
            cuda.syncthreads()
            fetch(fetched, qkv, v + start * stride, visible - start, layout)
            dots(scores, queries, streamed, head_dim, group, lane)
            cuda.syncthreads()
            put(streamed, fetched)  # v
            cuda.syncthreads()
            fetch(fetched, qkv, k + start * stride, visible - start, layout)
            dots(dscores, douts, streamed, head_dim, group, lane)
            ahead = int32(start + per_lane * lane - first - own_rows * group)  # key - query
            for own in range(scores_size):
                i, j = own // per_lane, own % per_lane
                ds = exp2(scores[own] - log2_sums[i]) * (dscores[own] - deltas[i])
                dscores[own] = float32(0.0) if ahead > i - j else ds
            share(weights, dscores, group, lane)
            cuda.syncthreads()
            put(streamed, fetched)  # k
            cuda.syncthreads()
            fetch(fetched, qkv, k + following * stride, visible - following, layout)
            add_product(dqueries, weights, streamed, visible - start, group, lane)

        store(dqkv, q, length - first, layout, dqueries, scale, group, lane)

    return backward_queries


def _make_keys(width: int):
    tiles = make_tile_functions(width)
    rows, own_rows, n_queries = tiles.rows, tiles.own_rows, tiles.streamed
    per_lane = tiles.per_lane
    fetch, put, load, store = tiles.fetch, tiles.put, tiles.load, tiles.store
    dots, share, add_product = tiles.dots, tiles.share, tiles.add_product
    stationary_size, streamed_size = tiles.stationary_size, tiles.streamed_size
    weights_size, fetched_size = tiles.weights_size, tiles.fetched_size
    scores_size, sums_size = tiles.scores_size, tiles.sums_size

    # Two blocks only: with the sums of two gradients a thread needs more than 168 registers.
    @kernel(threads=tiles.threads, min_blocks=2, name=f"backward_keys_{width}")
    def backward_keys(dqkv: Floats, dout: Floats, delta: Floats, lse: Floats, qkv: Floats,
                      length: int32, heads: int32, head_dim: int32, scale: float32,
                      is_aligned: int32):
        keys = cuda.shared.array(stationary_size, float32, alignment=16)  # k * scale / log(2)
        values = cuda.shared.array(stationary_size, float32, alignment=16)
        streamed = cuda.shared.array(streamed_size, float32, alignment=16)  # q, dout, q
        weights = cuda.shared.array(weights_size, float32, alignment=16)  # p, then ds
        fetched = cuda.local.array(fetched_size, float32)
        scores = cuda.local.array(scores_size, float32)  # transposed: [keys, queries]
        dscores = cuda.local.array(scores_size, float32)
        dkeys = cuda.local.array(sums_size, float32)
        dvalues = cuda.local.array(sums_size, float32)
        log2_sums = cuda.local.array(per_lane, float32)
        deltas = cuda.local.array(per_lane, float32)
        lane, group = thread_index() % LANES, thread_index() // LANES
        n_tiles = (length + rows - 1) // rows
        n_heads = cuda.gridDim.x // n_tiles  # of all sequences
        first = cuda.blockIdx.x // n_heads * rows  # the first keys, which most queries see, start
        head = cuda.blockIdx.x % n_heads
        token = int64(head // heads) * length  # the first of the sequence
        d_model, column = heads * head_dim, head % heads * head_dim
        stride = 3 * d_model
        q, o = token * stride + column, token * d_model + column
        k = q + first * stride + d_model  # the first key of the tile
        v = k + d_model
        layout, out_layout = (stride, head_dim, is_aligned), (d_model, head_dim, is_aligned)
        sums = int64(head) * length  # of the head, in lse and delta

        load(keys, qkv, k, length - first, layout, scale * float32(LOG2_E))
        load(values, qkv, v, length - first, layout, float32(1.0))
        zero(dkeys)
        zero(dvalues)
        fetch(fetched, qkv, q + first * stride, length - first, layout)
        for start in range(first, length, n_queries):
            following = start + n_queries
            cuda.syncthreads()
            put(streamed, fetched)  # q
            cuda.syncthreads()
            fetch(fetched, dout, o + start * d_model, length - start, out_layout)
            query = start + per_lane * lane
            for j in range(per_lane):
                log2_sums[j] = float32(0.0)
                if query + j < length:
                    log2_sums[j] = lse[sums + query + j] * float32(LOG2_E)
            dots(scores, keys, streamed, head_dim, group, lane)
            ahead = int32(first + own_rows * group - start - per_lane * lane)  # key - query
            for own in range(scores_size):
                i, j = own // per_lane, own % per_lane
                p = exp2(scores[own] - log2_sums[j])
                scores[own] = float32(0.0) if ahead > j - i else p
            share(weights, scores, group, lane)
            cuda.syncthreads()
            put(streamed, fetched)  # dout
            cuda.syncthreads()
            fetch(fetched, qkv, q + start * stride, length - start, layout)
            for j in range(per_lane):
                deltas[j] = float32(0.0)
                if query + j < length:
                    deltas[j] = delta[sums + query + j]
            dots(dscores, values, streamed, head_dim, group, lane)
            add_product(dvalues, weights, streamed, length - start, group, lane)
            for own in range(scores_size):
                dscores[own] = scores[own] * (dscores[own] - deltas[own % per_lane])
            cuda.syncthreads()
            share(weights, dscores, group, lane)
            put(streamed, fetched)  # q
            cuda.syncthreads()
            fetch(fetched, qkv, q + following * stride, length - following, layout)
            add_product(dkeys, weights, streamed, length - start, group, lane)

        store(dqkv, k, length - first, layout, dkeys, scale, group, lane)
        store(dqkv, v, length - first, layout, dvalues, float32(1.0), group, lane)

    return backward_keys


_QUERIES = {width: _make_queries(width) for width in SHAPES}
_KEYS = {width: _make_keys(width) for width in SHAPES}
