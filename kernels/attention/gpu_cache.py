"""The key-value cache on CUDA: appending rows, and one query per sequence over the cached rows.

Decode: a block per sequence and head. A team of width / 4 threads reads a row of keys and one of
values at once, 16 bytes a thread, and takes every n-th position; each team keeps a running
maximum, sum and weighted values, and the teams are combined in order at the end. Caches in bf16:
gpu_tensor_cache.py.
"""

import math

from ..common.cuda import Floats, Ints, cuda, float32, int32, int64, kernel
from ..common.launch import aligned
from ..common.ptx import exp2, store4_shared
from ..common.reduce import sum_over
from ..common.spec import is_bf16
from . import gpu_tensor_cache
from .gpu_tile import HIDDEN, LOG2_E, SHAPES, padded_width, read4, thread_index, write4

_THREADS = 256
_AT_ONCE = 4  # positions of a team whose rows are on their way together


def append(k_cache, v_cache, qkv, start) -> None:
    """Rows start..start+T-1 of k_cache and v_cache [B,H,context,D] from qkv [B*T,3d].

    start [1] is 0 where it is None; rows outside the caches are dropped.
    """
    batch, heads, context, head_dim = k_cache.shape
    n_tokens = qkv.shape[0] // batch
    if n_tokens > context:
        raise ValueError(f"{n_tokens} positions do not fit a key/value cache of {context}: start a "
                         "new window")
    if is_bf16(qkv):
        gpu_tensor_cache.append(k_cache, v_cache, qkv, start)
        return
    is_aligned = head_dim % 4 == 0 and aligned(k_cache, v_cache, qkv)
    _append.launch(batch * n_tokens, k_cache, v_cache, qkv, start, n_tokens, heads, context,
                   head_dim, is_aligned, start is not None)


def decode(out, qkv, k_cache, v_cache, position) -> None:
    """out [B,d]: the query of qkv [B,3d] over rows 0..position of the caches [B,H,context,D].

    position [1]; outside of the caches it makes out NaN.
    """
    batch, heads, context, head_dim = k_cache.shape
    if is_bf16(qkv):
        gpu_tensor_cache.decode(out, qkv, k_cache, v_cache, position)
        return
    is_aligned = head_dim % 4 == 0 and aligned(out, qkv, k_cache, v_cache)
    _DECODE[padded_width(head_dim)].launch(
        batch * heads, out, qkv, k_cache, v_cache, position, heads, context, head_dim,
        LOG2_E / math.sqrt(head_dim), is_aligned)


@kernel(threads=_THREADS)
def _append(k_cache: Floats, v_cache: Floats, qkv: Floats, start: Ints, n_tokens: int32,
            heads: int32, context: int32, head_dim: int32, is_aligned: int32, has_start: int32):
    """One block copies the keys and values of one token, four columns of a head a thread."""
    sequence, row = cuda.blockIdx.x // n_tokens, cuda.blockIdx.x % n_tokens
    if has_start:
        row += start[0]
    if row < 0 or row >= context:
        return
    chunks = (head_dim + 3) // 4
    source = int64(cuda.blockIdx.x) * 3 * heads * head_dim
    for item in range(cuda.threadIdx.x, heads * chunks, _THREADS):
        head, column = item // chunks, item % chunks * 4
        n_columns = head_dim - column
        k = source + (heads + head) * head_dim + column
        target = ((int64(sequence) * heads + head) * context + row) * head_dim + column
        a, b, c, d = read4(qkv, k, n_columns, is_aligned)
        write4(k_cache, target, n_columns, is_aligned, a, b, c, d)
        a, b, c, d = read4(qkv, k + heads * head_dim, n_columns, is_aligned)
        write4(v_cache, target, n_columns, is_aligned, a, b, c, d)


def _make_decode(width: int):
    team = width // 4  # threads: 8, 16 or 32 lanes of a warp
    teams = _THREADS // team
    team_sum = sum_over(team)
    values_size, sums_size = 4 * _AT_ONCE, teams * width

    @kernel(threads=_THREADS, name=f"decode_{width}")
    def decode(out: Floats, qkv: Floats, k_cache: Floats, v_cache: Floats, position: Ints,
               heads: int32, context: int32, head_dim: int32, factor: float32,
               is_aligned: int32):
        largest_of = cuda.shared.array(teams, float32)
        total_of = cuda.shared.array(teams, float32)
        sums_of = cuda.shared.array(sums_size, float32, alignment=16)  # [teams, width]
        scores = cuda.local.array(_AT_ONCE, float32)
        values = cuda.local.array(values_size, float32)  # [positions, 4 columns]
        sequence, head = cuda.blockIdx.x // heads, cuda.blockIdx.x % heads
        own, column = thread_index() // team, thread_index() % team * 4
        n_columns = head_dim - column
        query = int64(sequence) * 3 * heads * head_dim + head * head_dim + column
        cache = int64(cuda.blockIdx.x) * context * head_dim + column

        q0, q1, q2, q3 = read4(qkv, query, n_columns, is_aligned)
        last = position[0] if 0 <= position[0] < context else int32(-1)  # -1: NaN
        largest, total = HIDDEN, float32(0.0)
        s0 = s1 = s2 = s3 = float32(0.0)
        for first in range(0, last + 1, teams * _AT_ONCE):
            for n in range(_AT_ONCE):
                t = first + n * teams + own
                k0 = k1 = k2 = k3 = v0 = v1 = v2 = v3 = float32(0.0)
                if t <= last:
                    place = cache + t * head_dim
                    k0, k1, k2, k3 = read4(k_cache, place, n_columns, is_aligned)
                    v0, v1, v2, v3 = read4(v_cache, place, n_columns, is_aligned)
                scores[n] = (q0 * k0 + q1 * k1) + (q2 * k2 + q3 * k3)
                values[4 * n], values[4 * n + 1] = v0, v1
                values[4 * n + 2], values[4 * n + 3] = v2, v3
            high = largest
            for n in range(_AT_ONCE):
                score = factor * team_sum(scores[n])
                if first + n * teams + own > last:
                    score = HIDDEN
                scores[n] = score
                high = max(high, score)
            rescale = exp2(largest - high)
            largest = high
            total, s0, s1, s2, s3 = (total * rescale, s0 * rescale, s1 * rescale, s2 * rescale,
                                     s3 * rescale)
            for n in range(_AT_ONCE):
                p = exp2(scores[n] - high)
                total += p
                s0 += p * values[4 * n]
                s1 += p * values[4 * n + 1]
                s2 += p * values[4 * n + 2]
                s3 += p * values[4 * n + 3]
        if column == 0:
            largest_of[own], total_of[own] = largest, total
        store4_shared(sums_of, own * width + column, s0, s1, s2, s3)
        cuda.syncthreads()

        if cuda.threadIdx.x < head_dim:
            high = HIDDEN
            for other in range(teams):
                high = max(high, largest_of[other])
            total, weighted = float32(0.0), float32(0.0)
            for other in range(teams):  # a team without a row has the largest HIDDEN: factor 0
                rescale = exp2(largest_of[other] - high)
                total += rescale * total_of[other]
                weighted += rescale * sums_of[other * width + cuda.threadIdx.x]
            out[int64(cuda.blockIdx.x) * head_dim + cuda.threadIdx.x] = weighted / total

    return decode


_DECODE = {width: _make_decode(width) for width in SHAPES}
