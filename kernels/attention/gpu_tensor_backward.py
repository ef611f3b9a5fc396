"""The gradients of CUDA attention in bf16 on tensor cores, in two launches and without atomics.

p is recomputed from lse. Blocks of four warps own 64 rows of a head, each warp 16 of them; what
they own is held as fragments in registers, so its memory is free for what they walk over:

    backward_queries, owns q and dout         backward_keys, owns k and v; all is transposed
    delta = sum(dout * out), for both         per tile of 64 queries, from the diagonal on
    per tile of 64 keys, to the diagonal        pᵀ  = exp2(k · qᵀ - lse)
      p  = exp2(q · kᵀ - lse)                   dv += pᵀ · dout
      ds = p * (dout · vᵀ - delta)              dsᵀ = pᵀ * (v · doutᵀ - delta)
      dq += ds · k                              dk += dsᵀ · q

Because the scores of the second one are transposed, pᵀ and dsᵀ leave the first products as the
second ones want them. Each gradient has one owner and one order of its sums. That takes seven
products instead of the five of a single kernel, whose blocks would have to add to dq together.

The product with v, or dout, starts at -delta instead of 0. The first launch writes lse in units of
log(2) and -delta of each query, side by side, up to a whole tile, for the second to copy along.
Two stages and one barrier in a turn, as in gpu_tensor.py; tiles as in gpu_tensor_tile.py (fewer
rows where they are 128 wide).
"""

import math

from ..common.access import high_bf16, low_bf16
from ..common.cuda import (
    Bfloats,
    Floats,
    Ints,
    address,
    cuda,
    device_function,
    float32,
    int32,
    int64,
    kernel,
    uint32,
)
from ..common.launch import aligned, ceil_div, scratch
from ..common.ptx import (
    bits_float,
    cp_async,
    cp_async_commit,
    cp_async_wait_0,
    dynamic_shared,
    exp2,
    load4_words_shared,
)
from ..common.unroll import unroll, unrolled
from .gpu_tensor_tile import (
    THREADS,
    WIDTHS,
    block_place,
    copy_rows,
    lane_index,
    make_tensor_functions,
    quad_sum,
    warp_index,
    whole_chunks,
)
from .gpu_tile import LOG2_E, padded_width

ROWS = 64  # stationary rows of a block, 16 of a warp
# width: streamed keys, streamed queries, blocks of queries that shall fit on a multiprocessor.
# More than 16 queries of width 128 would not fit into 255 registers beside the sums of both
# gradients.
SHAPES = {32: (64, 64, 3), 64: (64, 64, 3), 128: (32, 16, 2)}
NOT_THERE = 3.0e38  # log-sum-exp of queries beyond the last one: their p is 0
ROW_STATISTICS = 2  # floats of a query: log-sum-exp in units of log(2), and -delta
STATISTICS_BYTES = 4 * ROW_STATISTICS


def backward(dqkv, dout, out, lse, qkv) -> None:
    """dqkv [N,3d] from dout, out [N,d], lse [B,H,T] and qkv [N,3d] of forward."""
    batch, heads, length = lse.shape
    head_dim = out.shape[1] // heads
    width, whole, scale = padded_width(head_dim), whole_chunks(head_dim), 1 / math.sqrt(head_dim)
    n_statistics = batch * heads * ceil_div(length, ROWS) * ROWS * ROW_STATISTICS
    if head_dim == whole and aligned(dqkv, dout, out, qkv):
        _launch(width, dqkv, dout, out, lse, qkv, scratch(n_statistics), head_dim, scale)
        return
    n_rows = batch * length * heads
    statistics = address(scratch(n_statistics + 8 * n_rows * whole // 2))
    wide_qkv = statistics + 4 * n_statistics
    wide_dqkv = wide_qkv + 6 * n_rows * whole
    wide_out = wide_dqkv + 6 * n_rows * whole
    wide_dout = wide_out + 2 * n_rows * whole
    copy_rows(wide_qkv, whole, qkv, head_dim, 3 * n_rows)
    copy_rows(wide_out, whole, out, head_dim, n_rows)
    copy_rows(wide_dout, whole, dout, head_dim, n_rows)
    _launch(width, wide_dqkv, wide_dout, wide_out, lse, wide_qkv, statistics, whole, scale)
    copy_rows(dqkv, head_dim, wide_dqkv, whole, 3 * n_rows)


def _launch(width: int, dqkv, dout, out, lse, qkv, statistics, head_dim: int,
            scale: float) -> None:
    """Rows of `head_dim` columns, a multiple of 8; arrays or addresses, at multiples of 16."""
    batch, heads, length = lse.shape
    grid = batch * heads * ceil_div(length, ROWS)
    n_keys, n_queries, _ = SHAPES[width]
    _QUERIES[width].launch(grid, dqkv, statistics, dout, out, lse, qkv, length, heads, head_dim,
                           scale, shared=_memory_bytes(width, n_keys))
    _KEYS[width].launch(grid, dqkv, dout, statistics, qkv, length, heads, head_dim, scale,
                        shared=(_memory_bytes(width, n_queries)
                                + 2 * n_queries * STATISTICS_BYTES))


def _memory_bytes(width: int, streamed: int) -> int:
    """Shared memory for two stationary tiles, or afterwards for two stages of two streamed ones."""
    return 2 * width * max(2 * ROWS, 4 * streamed)


def _make_queries(width: int):
    n_keys, _, min_blocks = SHAPES[width]
    tiles = make_tensor_functions(width, 1, n_keys)
    tile_bytes, own_bytes = tiles.streamed_bytes, tiles.own_bytes
    queries_bytes = tiles.stationary_bytes
    fragments_size, scores_size = tiles.fragments_size, tiles.scores_size
    weights_size, sums_size = tiles.weights_size, tiles.sums_size
    steps, score_tiles = width // 16, n_keys // 8
    copy, load, dots, add_dots = tiles.copy, tiles.load, tiles.dots, tiles.add_dots
    clear, weigh, pack = tiles.clear, tiles.weigh, tiles.pack
    add_product, store = tiles.add_product, tiles.store

    @unrolled
    def delta_of(i, fragments, out, place, count):
        """The lane's share of sum(dout * out) of one of its two rows."""
        product = float32(0.0)
        for half in unroll(2 * steps):
            if 8 * half < count:
                word, other = out[place + 4 * half], fragments[2 * half + i]
                product += low_bf16(word) * low_bf16(other)
                product += high_bf16(word) * high_bf16(other)
        return quad_sum(product)

    @unrolled
    def soften(scores, dscores, sums, minus_deltas, factor):
        """Scores -> p, and dscores -> -delta."""
        for i in unroll(2):
            for n in range(score_tiles):
                own = 4 * n + 2 * i
                scores[own] = exp2(scores[own] * factor - sums[i])
                scores[own + 1] = exp2(scores[own + 1] * factor - sums[i])
                dscores[own] = dscores[own + 1] = minus_deltas[i]

    @unrolled
    def hide(dscores, ahead):
        """Zero for keys that are later than the query; `ahead` is the lane's key - query."""
        for i in unroll(2):
            for n in range(score_tiles):
                if ahead > 8 * (i - n):
                    dscores[4 * n + 2 * i] = float32(0.0)
                if ahead > 8 * (i - n) - 1:
                    dscores[4 * n + 2 * i + 1] = float32(0.0)

    @kernel(threads=THREADS, min_blocks=min_blocks, name=f"backward_queries_{width}")
    def backward_queries(dqkv: Bfloats, statistics: Floats, dout: Bfloats, out: Ints,
                         lse: Floats, qkv: Bfloats, length: int32, heads: int32,
                         head_dim: int32, scale: float32):
        queries = cuda.local.array(fragments_size, uint32)
        douts = cuda.local.array(fragments_size, uint32)
        scores = cuda.local.array(scores_size, float32)
        dscores = cuda.local.array(scores_size, float32)
        weights = cuda.local.array(weights_size, uint32)  # ds
        dqueries = cuda.local.array(sums_size, float32)
        log2_sums = cuda.local.array(2, float32)
        minus_deltas = cuda.local.array(2, float32)
        lane, warp = lane_index(), warp_index()
        tile, n_tiles, head, sequence, own_head = block_place(ROWS, length, heads)
        first = int32(n_tiles - 1 - tile) * ROWS
        d_model = int32(heads * head_dim)
        token = int64(sequence) * length  # the first of the sequence
        column = int32(own_head * head_dim)
        k = token * (3 * d_model) + column + d_model
        q = k + (int64(3 * first) - 1) * d_model
        o = (token + first) * d_model + column
        layout = int32(3 * d_model), head_dim
        memory = dynamic_shared()
        own_first = int32(first + int32(uint32(16) * warp))
        visible = min(int32(first + ROWS), length)  # keys that some query of the block sees

        copy(memory, ROWS, qkv, q, length - first, layout)
        copy(uint32(memory + uint32(queries_bytes)), ROWS, dout, o, length - first,
             (d_model, head_dim))
        cp_async_commit()
        cp_async_wait_0()
        cuda.syncthreads()
        own = uint32(memory + warp * uint32(own_bytes))
        load(queries, own, lane)
        load(douts, uint32(own + uint32(queries_bytes)), lane)
        cuda.syncthreads()  # the memory is free for keys and values
        copy(memory, n_keys, qkv, k, visible, layout)
        copy(uint32(memory + uint32(tile_bytes)), n_keys, qkv, k + d_model, visible, layout)
        cp_async_commit()
        for i in range(2):
            row = int32(own_first + int32(lane >> uint32(2)) + 8 * i)
            word = 2 * int32(lane & uint32(3))
            place = (token + row) * d_model + column + word >> 1
            minus_deltas[i] = -delta_of(i, douts, out, place, head_dim if row < length else 0)
            log2_sums[i] = float32(NOT_THERE)
            if row < length:
                log2_sums[i] = lse[int64(head) * length + row] * float32(LOG2_E)
            if word == 0:
                place = (int64(head) * n_tiles * ROWS + row) * ROW_STATISTICS
                statistics[place] = log2_sums[i]
                statistics[place + 1] = minus_deltas[i]
        clear(dqueries)
        turn = uint32(0)
        for start in range(int32(0), visible, n_keys):
            cp_async_wait_0()
            cuda.syncthreads()  # the tile is there, and the last one has been read
            keys = uint32(memory + turn)
            values = uint32(keys + uint32(tile_bytes))
            turn ^= uint32(2 * tile_bytes)
            following = int32(start + n_keys)
            if following < visible:
                place, rest = k + int64(3 * following) * d_model, int32(visible - following)
                copy(uint32(memory + turn), n_keys, qkv, place, rest, layout)
                copy(uint32(memory + turn + uint32(tile_bytes)), n_keys, qkv, place + d_model,
                     rest, layout)
                cp_async_commit()
            dots(scores, queries, keys, lane)
            soften(scores, dscores, log2_sums, minus_deltas, scale * float32(LOG2_E))
            add_dots(dscores, douts, values, lane)
            weigh(dscores, scores)
            if start + n_keys > own_first + 1:
                hide(dscores, int32(start + int32(uint32(2) * (lane & uint32(3))) - own_first
                                    - int32(lane >> uint32(2))))
            pack(weights, dscores)
            add_product(dqueries, weights, keys, lane)

        cuda.syncthreads()  # the last tile has been read
        store(dqkv, q + int64(3 * d_model) * int32(uint32(16) * warp), length - own_first, layout,
              dqueries, scale, own, lane)

    return backward_queries


def _make_keys(width: int):
    _, n_queries, _ = SHAPES[width]
    tiles = make_tensor_functions(width, 1, n_queries)
    tile_bytes, own_bytes = tiles.streamed_bytes, tiles.own_bytes
    keys_bytes, memory_bytes = tiles.stationary_bytes, _memory_bytes(width, n_queries)
    fragments_size, scores_size = tiles.fragments_size, tiles.scores_size
    weights_size, sums_size = tiles.weights_size, tiles.sums_size
    score_tiles = n_queries // 8
    statistics_bytes = n_queries * STATISTICS_BYTES
    copy, load, dots, add_dots = tiles.copy, tiles.load, tiles.dots, tiles.add_dots
    clear, weigh, pack = tiles.clear, tiles.weigh, tiles.pack
    add_product, store = tiles.add_product, tiles.store

    @device_function
    def copy_statistics(target, source, start):
        """Begin to copy those of a tile of queries, 16 bytes a thread."""
        thread = uint32(cuda.threadIdx.x)
        if thread < uint32(n_queries // 2):
            cp_async(uint32(target + uint32(16) * thread), source,
                     ROW_STATISTICS * start + int32(uint32(4) * thread), int32(16))

    @unrolled
    def soften(scores, dscores, statistics, lane, factor):
        """Scores -> p, and dscores -> -delta."""
        own = uint32(statistics + uint32(16) * (lane & uint32(3)))
        for n in unroll(score_tiles):
            sum_0, delta_0, sum_1, delta_1 = load4_words_shared(uint32(own + uint32(64 * n)))
            for i in unroll(2):
                scores[4 * n + 2 * i] = exp2(scores[4 * n + 2 * i] * factor - bits_float(sum_0))
                scores[4 * n + 2 * i + 1] = exp2(scores[4 * n + 2 * i + 1] * factor
                                                 - bits_float(sum_1))
                dscores[4 * n + 2 * i] = bits_float(delta_0)
                dscores[4 * n + 2 * i + 1] = bits_float(delta_1)

    @unrolled
    def hide(scores, ahead):
        """Zero for queries that are earlier than the key; `ahead` is the lane's key - query."""
        for i in unroll(2):
            for n in range(score_tiles):
                if ahead > 8 * (n - i):
                    scores[4 * n + 2 * i] = float32(0.0)
                if ahead > 8 * (n - i) + 1:
                    scores[4 * n + 2 * i + 1] = float32(0.0)

    @kernel(threads=THREADS, min_blocks=2, name=f"backward_keys_{width}")
    def backward_keys(dqkv: Bfloats, dout: Bfloats, statistics: Floats, qkv: Bfloats,
                      length: int32, heads: int32, head_dim: int32, scale: float32):
        keys = cuda.local.array(fragments_size, uint32)
        values = cuda.local.array(fragments_size, uint32)
        scores = cuda.local.array(scores_size, float32)  # transposed: [keys, queries]
        dscores = cuda.local.array(scores_size, float32)
        weights = cuda.local.array(weights_size, uint32)  # p, then ds
        dkeys = cuda.local.array(sums_size, float32)
        dvalues = cuda.local.array(sums_size, float32)
        lane, warp = lane_index(), warp_index()
        tile, n_tiles, head, sequence, own_head = block_place(ROWS, length, heads)
        first = tile * ROWS
        d_model = int32(heads * head_dim)
        token = int64(sequence) * length  # the first of the sequence
        column = int32(own_head * head_dim)
        q = (token + first) * (3 * d_model) + column
        o = (token + first) * d_model + column
        sums = int64(head) * n_tiles * ROWS
        layout, out_layout = (int32(3 * d_model), head_dim), (d_model, head_dim)
        memory = dynamic_shared()
        own_first = int32(first + int32(uint32(16) * warp))

        copy(memory, ROWS, qkv, q + d_model, length - first, layout)
        copy(uint32(memory + uint32(keys_bytes)), ROWS, qkv, q + 2 * d_model, length - first,
             layout)
        cp_async_commit()
        cp_async_wait_0()
        cuda.syncthreads()
        own = uint32(memory + warp * uint32(own_bytes))
        load(keys, own, lane)
        load(values, uint32(own + uint32(keys_bytes)), lane)
        cuda.syncthreads()  # the memory is free for queries and dout
        copy(memory, n_queries, qkv, q, length - first, layout)
        copy(uint32(memory + uint32(tile_bytes)), n_queries, dout, o, length - first, out_layout)
        copy_statistics(uint32(memory + uint32(memory_bytes)), statistics, sums + first)
        cp_async_commit()
        clear(dkeys)
        clear(dvalues)
        turn = uint32(0)
        for start in range(first, length, n_queries):
            cp_async_wait_0()
            cuda.syncthreads()  # the tile is there, and the last one has been read
            queries = uint32(memory + turn * uint32(2 * tile_bytes))
            douts = uint32(queries + uint32(tile_bytes))
            rows = uint32(memory + uint32(memory_bytes) + turn * uint32(statistics_bytes))
            turn ^= uint32(1)
            following = int32(start + n_queries)
            if following < length:
                place = uint32(memory + turn * uint32(2 * tile_bytes))
                gone, rest = int32(following - first), int32(length - following)
                copy(place, n_queries, qkv, q + int64(gone) * (3 * d_model), rest, layout)
                copy(uint32(place + uint32(tile_bytes)), n_queries, dout,
                     o + int64(gone) * d_model, rest, out_layout)
                copy_statistics(
                    uint32(memory + uint32(memory_bytes) + turn * uint32(statistics_bytes)),
                    statistics, sums + following)
                cp_async_commit()
            dots(scores, keys, queries, lane)
            soften(scores, dscores, rows, lane, scale * float32(LOG2_E))
            if own_first + 15 > start:
                hide(scores, int32(own_first + int32(lane >> uint32(2)) - start
                                   - int32(uint32(2) * (lane & uint32(3)))))
            pack(weights, scores)
            add_product(dvalues, weights, douts, lane)
            add_dots(dscores, values, douts, lane)
            weigh(dscores, scores)
            pack(weights, dscores)
            add_product(dkeys, weights, queries, lane)

        cuda.syncthreads()  # the last tile has been read
        k = q + int64(3 * d_model) * int32(uint32(16) * warp) + d_model
        store(dqkv, k, length - own_first, layout, dkeys, scale, own, lane)
        cuda.syncwarp()  # the gradient of the keys has been read
        store(dqkv, k + d_model, length - own_first, layout, dvalues, float32(1.0), own, lane)

    return backward_keys


_QUERIES = {width: _make_queries(width) for width in WIDTHS}
_KEYS = {width: _make_keys(width) for width in WIDTHS}
