"""The key-value cache on CUDA in bf16; see gpu_cache.py.

A thread reads eight columns at once, 16 bytes, and computes with them in float32.
"""

import math

from ..common.access import unpack_eight
from ..common.cuda import (
    Bfloats,
    Ints,
    cuda,
    device_function,
    float32,
    int32,
    int64,
    kernel,
    uint32,
)
from ..common.launch import aligned
from ..common.octet import OCTET as OWN  # columns of a thread
from ..common.octet import pair
from ..common.ptx import exp2, load4_words, pack_bf16, store4_shared, store4_words
from ..common.reduce import sum_over
from ..common.unroll import unroll, unrolled
from .gpu_tile import HIDDEN, LOG2_E, SHAPES, padded_width, thread_index

_THREADS = 256
_AT_ONCE = 4  # positions of a team whose rows are on their way together


def append(k_cache, v_cache, qkv, start) -> None:
    """Rows start..start+T-1 of k_cache and v_cache [B,H,context,D] from qkv [B*T,3d]."""
    batch, heads, context, head_dim = k_cache.shape
    n_tokens = qkv.shape[0] // batch
    is_aligned = head_dim % OWN == 0 and aligned(k_cache, v_cache, qkv)
    _append.launch(batch * n_tokens, k_cache, v_cache, qkv, start, n_tokens, heads, context,
                   head_dim, is_aligned, start is not None)


def decode(out, qkv, k_cache, v_cache, position) -> None:
    """out [B,d]: the query of qkv [B,3d] over rows 0..position of the caches [B,H,context,D]."""
    batch, heads, context, head_dim = k_cache.shape
    is_aligned = head_dim % OWN == 0 and aligned(out, qkv, k_cache, v_cache)
    _DECODE[padded_width(head_dim)].launch(
        batch * heads, out, qkv, k_cache, v_cache, position, heads, context, head_dim,
        LOG2_E / math.sqrt(head_dim), is_aligned)


@device_function
def _read(values, first, source, place, n_columns, is_aligned):
    """values[first :] = source[place :], eight of them; zeros from column n_columns on."""
    a = b = c = d = uint32(0)
    if is_aligned:
        if n_columns > 0:
            a, b, c, d = load4_words(source, place)
    else:
        a, b = pair(source, place, n_columns), pair(source, place + 2, n_columns - 2)
        c, d = pair(source, place + 4, n_columns - 4), pair(source, place + 6, n_columns - 6)
    unpack_eight(values, first, a, b, c, d)


@device_function
def _copy(target, to, source, place, n_columns, is_aligned):
    """target[to :] = source[place :], eight of them or n_columns."""
    if is_aligned:
        a, b, c, d = load4_words(source, place)
        store4_words(target, to, a, b, c, d)
    else:
        for column in range(min(n_columns, 8)):
            target[to + column] = source[place + column]


@kernel(threads=_THREADS, name="append_bf16")
def _append(k_cache: Bfloats, v_cache: Bfloats, qkv: Bfloats, start: Ints, n_tokens: int32,
            heads: int32, context: int32, head_dim: int32, is_aligned: int32, has_start: int32):
    """One block copies the keys and values of one token, 16 bytes of a head a thread."""
    sequence, row = cuda.blockIdx.x // n_tokens, cuda.blockIdx.x % n_tokens
    if has_start:
        row += start[0]
    if row < 0 or row >= context:
        return
    chunks = (head_dim + OWN - 1) // OWN
    source = int64(cuda.blockIdx.x) * 3 * heads * head_dim
    for item in range(cuda.threadIdx.x, heads * chunks, _THREADS):
        head, column = item // chunks, item % chunks * OWN
        n_columns = head_dim - column
        k = source + (heads + head) * head_dim + column
        target = (((int64(sequence) * heads + head) * context + row) * head_dim
                  + column)
        _copy(k_cache, target, qkv, k, n_columns, is_aligned)
        _copy(v_cache, target, qkv, k + heads * head_dim, n_columns, is_aligned)


def _make_decode(width: int):
    team = width // OWN  # threads: lanes of a warp
    teams = _THREADS // team
    team_sum = sum_over(team)
    values_size, sums_size = OWN * _AT_ONCE, teams * width

    @unrolled
    def read_rows(scores, values, query, k_cache, v_cache, place, step, count, n_columns,
                  is_aligned):
        """The lane's share of the scores of _AT_ONCE positions, and their values."""
        keys = cuda.local.array(OWN, float32)
        for n in unroll(_AT_ONCE):
            there = n_columns if n * teams < count else 0
            _read(keys, 0, k_cache, place + n * step, there, is_aligned)
            _read(values, OWN * n, v_cache, place + n * step, there, is_aligned)
            scores[n] = float32(0.0)
            for c in unroll(OWN // 4):
                scores[n] += ((query[4 * c] * keys[4 * c] + query[4 * c + 1] * keys[4 * c + 1])
                              + (query[4 * c + 2] * keys[4 * c + 2]
                                 + query[4 * c + 3] * keys[4 * c + 3]))

    @unrolled
    def add_rows(sums, scores, values, high):
        """sums += p · values; returns the sum of p."""
        total = float32(0.0)
        for n in unroll(_AT_ONCE):
            p = exp2(scores[n] - high)
            total += p
            for c in unroll(OWN):
                sums[c] += p * values[OWN * n + c]
        return total

    @kernel(threads=_THREADS, name=f"decode_bf16_{width}")
    def decode(out: Bfloats, qkv: Bfloats, k_cache: Bfloats, v_cache: Bfloats, position: Ints,
               heads: int32, context: int32, head_dim: int32, factor: float32,
               is_aligned: int32):
        largest_of = cuda.shared.array(teams, float32)
        total_of = cuda.shared.array(teams, float32)
        sums_of = cuda.shared.array(sums_size, float32, alignment=16)  # [teams, width]
        query = cuda.local.array(OWN, float32)
        sums = cuda.local.array(OWN, float32)
        scores = cuda.local.array(_AT_ONCE, float32)
        values = cuda.local.array(values_size, float32)  # [positions, OWN]
        sequence, head = cuda.blockIdx.x // heads, cuda.blockIdx.x % heads
        own, column = thread_index() // team, thread_index() % team * OWN
        n_columns = head_dim - column
        place = int64(sequence) * 3 * heads * head_dim + head * head_dim + column
        cache = int64(cuda.blockIdx.x) * context * head_dim + column

        _read(query, 0, qkv, place, n_columns, is_aligned)
        last = position[0] if 0 <= position[0] < context else int32(-1)  # -1: NaN
        largest, total = HIDDEN, float32(0.0)
        for c in range(OWN):
            sums[c] = float32(0.0)
        for first in range(0, last + 1, teams * _AT_ONCE):
            t = first + own
            read_rows(scores, values, query, k_cache, v_cache, cache + t * head_dim,
                      teams * head_dim, last + 1 - t, n_columns, is_aligned)
            high = largest
            for n in range(_AT_ONCE):
                score = factor * team_sum(scores[n])
                if first + n * teams + own > last:
                    score = HIDDEN
                scores[n] = score
                high = max(high, score)
            rescale = exp2(largest - high)
            largest = high
            total *= rescale
            for c in range(OWN):
                sums[c] *= rescale
            total += add_rows(sums, scores, values, high)
        if column == 0:
            largest_of[own], total_of[own] = largest, total
        for c in range(0, OWN, 4):
            store4_shared(sums_of, own * width + column + c, sums[c], sums[c + 1], sums[c + 2],
                          sums[c + 3])
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
            place = int64(cuda.blockIdx.x) * head_dim + cuda.threadIdx.x
            out[place] = pack_bf16(weighted / total, float32(0.0))

    return decode


_DECODE = {width: _make_decode(width) for width in SHAPES}
