"""CUDA causal attention, in float32 here: tiles of a head, online softmax, nothing of size [T, T].

Forward: a block owns `rows` queries of one head, walks over tiles of keys and values up to the
diagonal, and keeps the running maximum, sum and weighted values of its queries in registers.
Scores are in units of log(2), so that the exponential is one instruction. Blocks with the most
keys start first. Backward and the cache: gpu_backward.py, gpu_cache.py; the products of tiles:
gpu_tile.py. All sums have a fixed order, and no block depends on another.

Arrays in bf16 go to the tensor cores: gpu_tensor.py and the files named after it.
"""

import math

from ..common.cuda import Floats, cuda, float32, int32, int64, kernel
from ..common.launch import aligned, ceil_div
from ..common.ptx import exp2
from ..common.spec import is_bf16
from . import gpu_backward, gpu_tensor
from .gpu_cache import append, decode
from .gpu_tile import (
    HIDDEN,
    LANES,
    LN_2,
    LOG2_E,
    MIN_BLOCKS,
    SHAPES,
    lane_max,
    lane_sum,
    make_tile_functions,
    padded_width,
    thread_index,
    zero,
)

__all__ = ["append", "backward", "decode", "forward"]


def forward(out, lse, qkv) -> None:
    """out [N,d] = softmax(q·kᵀ/sqrt(D), causal)·v per head; lse [B,H,T] natural log-sum-exp."""
    if is_bf16(qkv):
        gpu_tensor.forward(out, lse, qkv)
        return
    batch, heads, length = lse.shape
    head_dim = out.shape[1] // heads
    width = padded_width(head_dim)
    _FORWARD[width].launch(
        batch * heads * ceil_div(length, SHAPES[width][0]), out, lse, qkv, length, heads, head_dim,
        LOG2_E / math.sqrt(head_dim), head_dim % 4 == 0 and aligned(out, qkv))


def backward(dqkv, dout, out, lse, qkv) -> None:
    """dqkv [N,3d] from dout, out [N,d], lse [B,H,T] and qkv [N,3d] of forward."""
    module = gpu_tensor if is_bf16(qkv) else gpu_backward
    module.backward(dqkv, dout, out, lse, qkv)


def _make_forward(width: int):
    tiles = make_tile_functions(width)
    rows, own_rows, n_keys = tiles.rows, tiles.own_rows, tiles.streamed
    per_lane = tiles.per_lane
    fetch, put, load, store = tiles.fetch, tiles.put, tiles.load, tiles.store
    dots, share, add_product = tiles.dots, tiles.share, tiles.add_product
    stationary_size, streamed_size = tiles.stationary_size, tiles.streamed_size
    weights_size, fetched_size = tiles.weights_size, tiles.fetched_size
    scores_size, sums_size = tiles.scores_size, tiles.sums_size
    n_columns = sums_size // own_rows

    @kernel(threads=tiles.threads, min_blocks=MIN_BLOCKS, name=f"forward_{width}")
    def forward(out: Floats, lse: Floats, qkv: Floats, length: int32, heads: int32,
                head_dim: int32, factor: float32, is_aligned: int32):
        queries = cuda.shared.array(stationary_size, float32, alignment=16)  # q * factor
        streamed = cuda.shared.array(streamed_size, float32, alignment=16)  # k, then v
        weights = cuda.shared.array(weights_size, float32, alignment=16)  # p
        fetched = cuda.local.array(fetched_size, float32)
        scores = cuda.local.array(scores_size, float32)
        sums = cuda.local.array(sums_size, float32)
        largest = cuda.local.array(own_rows, float32)
        total = cuda.local.array(own_rows, float32)
        lane, group = thread_index() % LANES, thread_index() // LANES
        n_tiles = (length + rows - 1) // rows
        n_heads = cuda.gridDim.x // n_tiles  # of all sequences
        first = (n_tiles - 1 - cuda.blockIdx.x // n_heads) * rows
        head = cuda.blockIdx.x % n_heads
        token = int64(head // heads) * length  # the first of the sequence
        d_model, column = heads * head_dim, head % heads * head_dim
        stride = 3 * d_model
        q = token * stride + column
        k, v = q + d_model, q + 2 * d_model
        layout = stride, head_dim, is_aligned

        load(queries, qkv, q + first * stride, length - first, layout, factor)
        zero(sums)
        for i in range(own_rows):
            largest[i] = HIDDEN
            total[i] = float32(0.0)
        visible = min(first + rows, length)  # keys that some query of the tile sees
        fetch(fetched, qkv, k, visible, layout)
        for start in range(0, visible, n_keys):
            cuda.syncthreads()  # the values of the last tile have been read
            put(streamed, fetched)
            cuda.syncthreads()
            fetch(fetched, qkv, v + start * stride, visible - start, layout)
            dots(scores, queries, streamed, head_dim, group, lane)
            ahead = int32(start + per_lane * lane - first - own_rows * group)  # key - query
            for i in range(own_rows):
                high = largest[i]
                for j in range(per_lane):
                    if ahead > i - j:
                        scores[per_lane * i + j] = HIDDEN
                    high = max(high, scores[per_lane * i + j])
                high = lane_max(high)
                rescale = exp2(largest[i] - high)
                largest[i] = high
                total[i] *= rescale
                for j in range(per_lane):
                    p = exp2(scores[per_lane * i + j] - high)
                    scores[per_lane * i + j] = p
                    total[i] += p
                for c in range(n_columns):
                    sums[n_columns * i + c] *= rescale
            share(weights, scores, group, lane)
            cuda.syncthreads()  # the keys have been read
            put(streamed, fetched)
            cuda.syncthreads()
            following = start + n_keys
            fetch(fetched, qkv, k + following * stride, visible - following, layout)
            add_product(sums, weights, streamed, visible - start, group, lane)

        for i in range(own_rows):
            all_lanes = lane_sum(total[i])
            inverse = float32(1.0) / all_lanes
            for c in range(n_columns):
                sums[n_columns * i + c] *= inverse
            query = first + own_rows * group + i
            if lane == 0 and query < length:
                lse[int64(head) * length + query] = (largest[i] * float32(LN_2)
                                                     + math.log(all_lanes))
        store(out, (token + first) * d_model + column, length - first,
              (d_model, head_dim, is_aligned), sums, float32(1.0), group, lane)

    return forward


_FORWARD = {width: _make_forward(width) for width in SHAPES}
