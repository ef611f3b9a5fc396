"""CUDA causal attention in bf16 on tensor cores: FlashAttention-2, forward.

A block owns 128 queries of one head (64 where rows are 128 wide), each of its four warps 32 of
them, and walks over tiles of 64 (32) keys and values up to the diagonal:

    q fragments <- q                                            once, in registers
    per tile    wait for k, v, begin to copy the next tile
                scores = q · kᵀ                                 tensor cores
                hide later keys                                 on the diagonal only
                p = exp2(scores - running maximum), running sum
                sums = sums * rescale + p · v                   tensor cores
    out = sums / running sum, lse

    shared memory    | q, then out | k v | k v |      two stages: one is read, one arrives
                     16 KB for q and 32 KB for the stages where rows are 64 wide

A row of scores lies in the four lanes of a quad, so a row's maximum takes two shuffles; its sum is
kept per lane until the end. p goes into the second product as the registers hold it. There is one
barrier in a turn: it says that the next tile has arrived and that nobody reads the last one, whose
memory the copies that begin after it fill. Blocks with the most keys start first, and no block
depends on another. Who owns what, and how tiles lie: gpu_tensor_tile.py.

Reference: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning"
(2023).
"""

import math

from ..common.cuda import Bfloats, Floats, address, cuda, float32, int32, int64, kernel, uint32
from ..common.launch import aligned, ceil_div, scratch
from ..common.ptx import (
    cp_async_commit,
    cp_async_wait_0,
    cp_async_wait_1,
    dynamic_shared,
    exp2,
)
from ..common.unroll import unroll, unrolled
from .gpu_tensor_backward import backward
from .gpu_tensor_tile import (
    THREADS,
    WIDTHS,
    block_place,
    copy_rows,
    lane_index,
    make_tensor_functions,
    quad_max,
    quad_sum,
    warp_index,
    whole_chunks,
)
from .gpu_tile import HIDDEN, LN_2, LOG2_E, padded_width

__all__ = ["backward", "forward"]

# width: row tiles of a warp, streamed keys
SHAPES = {32: (2, 64), 64: (2, 64), 128: (1, 32)}
MIN_BLOCKS = 2  # on a multiprocessor, for 255 registers a thread
# Where a maximum is larger, in units of log(2), it is subtracted before the scores are scaled. Then
# the largest p is 1 whatever the rounding; below, one multiply-add does for both.
LARGE = 1024.0


def forward(out, lse, qkv) -> None:
    """out [N,d] = softmax(q·kᵀ/sqrt(D), causal)·v per head; lse [B,H,T] natural log-sum-exp."""
    batch, heads, length = lse.shape
    head_dim = out.shape[1] // heads
    width, whole, scale = padded_width(head_dim), whole_chunks(head_dim), 1 / math.sqrt(head_dim)
    if head_dim == whole and aligned(out, qkv):
        _launch(width, out, lse, qkv, head_dim, scale)
        return
    n_rows = batch * length * heads
    wide_qkv = address(scratch(2 * n_rows * whole))
    wide_out = wide_qkv + 6 * n_rows * whole
    copy_rows(wide_qkv, whole, qkv, head_dim, 3 * n_rows)
    _launch(width, wide_out, lse, wide_qkv, whole, scale)
    copy_rows(out, head_dim, wide_out, whole, n_rows)


def _launch(width: int, out, lse, qkv, head_dim: int, scale: float) -> None:
    """Rows of `head_dim` columns, a multiple of 8; arrays or addresses, at multiples of 16."""
    batch, heads, length = lse.shape
    tiles = make_tensor_functions(width, *SHAPES[width])
    _FORWARD[width].launch(
        batch * heads * ceil_div(length, tiles.rows), out, lse, qkv, length, heads, head_dim,
        scale * LOG2_E, shared=tiles.stationary_bytes + 4 * tiles.streamed_bytes)


def _make_forward(width: int):
    row_tiles, n_keys = SHAPES[width]
    tiles = make_tensor_functions(width, row_tiles, n_keys)
    rows, own_rows, own_bytes = tiles.rows, tiles.own_rows, tiles.own_bytes
    queries_bytes, tile_bytes = tiles.stationary_bytes, tiles.streamed_bytes
    fragments_size, scores_size = tiles.fragments_size, tiles.scores_size
    weights_size, sums_size = tiles.weights_size, tiles.sums_size
    n_rows = 2 * row_tiles  # of a lane
    score_tiles, sum_tiles = n_keys // 8, width // 8
    copy, load, dots, pack = tiles.copy, tiles.load, tiles.dots, tiles.pack
    clear, add_product, store = tiles.clear, tiles.add_product, tiles.store

    @unrolled
    def hide(scores, ahead):
        """The scores of keys that are later than the query; `ahead` is the lane's key - query."""
        for i in unroll(n_rows):
            for n in unroll(score_tiles):
                own = 4 * (score_tiles * (i // 2) + n) + 2 * (i % 2)
                if ahead > 8 * (i - n):
                    scores[own] = HIDDEN
                if ahead > 8 * (i - n) - 1:
                    scores[own + 1] = HIDDEN

    @unrolled
    def soften(scores, sums, largest, total, factor):
        """Scores -> p, with the running maximum and sum, and the sums rescaled to them."""
        shifts = cuda.local.array(n_rows, float32)
        worst = float32(0.0)
        for i in unroll(n_rows):
            high = largest[i]
            for n in unroll(score_tiles):
                own = 4 * (score_tiles * (i // 2) + n) + 2 * (i % 2)
                high = max(max(high, scores[own]), scores[own + 1])
            high = quad_max(high)
            rescale = exp2((largest[i] - high) * factor)
            largest[i] = high
            total[i] *= rescale
            for n in unroll(sum_tiles):
                own = 4 * (sum_tiles * (i // 2) + n) + 2 * (i % 2)
                sums[own] *= rescale
                sums[own + 1] *= rescale
            shifts[i] = high * factor
            worst = max(worst, abs(shifts[i]))
        if worst > float32(LARGE):
            for i in unroll(n_rows):
                for n in unroll(score_tiles):
                    own = 4 * (score_tiles * (i // 2) + n) + 2 * (i % 2)
                    scores[own] -= largest[i]
                    scores[own + 1] -= largest[i]
                shifts[i] = float32(0.0)
        for i in unroll(n_rows):
            for n in unroll(score_tiles):
                own = 4 * (score_tiles * (i // 2) + n) + 2 * (i % 2)
                scores[own] = exp2(scores[own] * factor - shifts[i])
                scores[own + 1] = exp2(scores[own + 1] * factor - shifts[i])
                total[i] += scores[own]
                total[i] += scores[own + 1]

    @unrolled
    def finish(lse, start, count, sums, largest, total, factor, lane):
        """Sums -> their weighted means; lse of rows 0..count - 1 of the warp's own."""
        for i in unroll(n_rows):
            all_lanes = quad_sum(total[i])
            inverse = float32(1.0) / all_lanes
            for n in range(sum_tiles):
                sums[4 * (sum_tiles * (i // 2) + n) + 2 * (i % 2)] *= inverse
                sums[4 * (sum_tiles * (i // 2) + n) + 2 * (i % 2) + 1] *= inverse
            row = int32(lane >> uint32(2)) + 8 * i
            if lane & uint32(3) == 0 and row < count:
                lse[start + row] = (largest[i] * (factor * float32(LN_2)) + math.log(all_lanes))

    @unrolled
    def soften_rows(state, diagonal, ahead, factor):
        for i in unroll(n_rows):
            soften(i, state, diagonal, ahead, factor)

    @kernel(threads=THREADS, min_blocks=MIN_BLOCKS, name=f"forward_{width}")
    def forward(out: Bfloats, lse: Floats, qkv: Bfloats, length: int32, heads: int32,
                head_dim: int32, factor: float32):
        fragments = cuda.local.array(fragments_size, uint32)  # q
        scores = cuda.local.array(scores_size, float32)
        weights = cuda.local.array(weights_size, uint32)  # p
        sums = cuda.local.array(sums_size, float32)
        largest = cuda.local.array(n_rows, float32)
        total = cuda.local.array(n_rows, float32)
        lane, warp = lane_index(), warp_index()
        tile, n_tiles, head, sequence, own_head = block_place(rows, length, heads)
        first = int32(n_tiles - 1 - tile) * rows
        d_model = int32(heads * head_dim)
        token = int64(sequence) * length  # the first of the sequence
        column = int32(own_head * head_dim)
        layout = int32(3 * d_model), head_dim
        k = token * (3 * d_model) + column + d_model
        queries = dynamic_shared()
        own_queries = uint32(queries + warp * uint32(own_bytes))
        keys = uint32(queries + uint32(queries_bytes))  # k, v; then k, v of the next tile
        own_first = int32(first + int32(warp) * own_rows)
        visible = min(int32(first + rows), length)  # keys that some query of the block sees

        copy(queries, rows, qkv, k + (int64(3 * first) - 1) * d_model, length - first, layout)
        cp_async_commit()
        copy(keys, n_keys, qkv, k, visible, layout)
        copy(uint32(keys + uint32(tile_bytes)), n_keys, qkv, k + d_model, visible, layout)
        cp_async_commit()
        cp_async_wait_1()
        cuda.syncthreads()
        load(fragments, own_queries, lane)
        clear(sums)
        for i in range(n_rows):
            largest[i] = HIDDEN
            total[i] = float32(0.0)
        turn = uint32(0)
        for start in range(int32(0), visible, n_keys):
            cp_async_wait_0()
            cuda.syncthreads()  # the tile is there, and the last one has been read
            stage = uint32(keys + turn)
            turn ^= uint32(2 * tile_bytes)
            following = int32(start + n_keys)
            if following < visible:
                place, rest = k + int64(3 * following) * d_model, int32(visible - following)
                copy(uint32(keys + turn), n_keys, qkv, place, rest, layout)
                copy(uint32(keys + turn + uint32(tile_bytes)), n_keys, qkv, place + d_model,
                     rest, layout)
                cp_async_commit()
            if start < own_first + own_rows:  # else all of the warp's queries are earlier
                dots(scores, fragments, stage, lane)
                if start + n_keys > own_first + 1:
                    hide(scores, int32(start + int32(uint32(2) * (lane & uint32(3))) - own_first
                                       - int32(lane >> uint32(2))))
                soften(scores, sums, largest, total, factor)
                pack(weights, scores)
                add_product(sums, weights, uint32(stage + uint32(tile_bytes)), lane)

        finish(lse, int64(head) * length + own_first, length - own_first, sums, largest, total,
               factor, lane)
        store(out, (token + own_first) * d_model + column, length - own_first,
              (d_model, head_dim), sums, float32(1.0), own_queries, lane)

    return forward


_FORWARD = {width: _make_forward(width) for width in WIDTHS}
