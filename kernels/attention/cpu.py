"""CPU causal attention, in float32 or bfloat16 as on a GPU.

Forward and backward are products of tiles in vectors where the processor has them (cpu_vector,
cpu_vector_backward), and NumPy's elsewhere (cpu_blas); no [T, T] array exists at any time.
"""

import math

import numpy as np
from numba import prange

from ..common.cache import njit
from ..common.cpu_features import VECTORS
from ..common.cpu_math import FAST_SUM, F, as_float, exp, pointer, stored_in, words
from ..common.cpu_tile import CACHE_LINE
from ..common.simd import prefetch
from . import cpu_blas, cpu_vector, cpu_vector_backward
from .cpu_vector import LOW

AHEAD = 6144  # bytes

_forward, _backward = ((cpu_vector.forward, cpu_vector_backward.backward) if VECTORS
                       else (cpu_blas.forward, cpu_blas.backward))


def forward(out, lse, qkv) -> None:
    """out [N,d] = softmax(q·kᵀ/sqrt(D), causal)·v per head; lse [B,H,T] natural log-sum-exp."""
    _forward(out, lse, qkv)


def backward(dqkv, dout, out, lse, qkv) -> None:
    """dqkv [N,3d] from dout, out [N,d], lse [B,H,T] and qkv [N,3d] of forward."""
    _backward(dqkv, dout, out, lse, qkv)


def append(k_cache, v_cache, qkv, start) -> None:
    """Rows start..start+T-1 of k_cache and v_cache [B,H,context,D] from qkv [B*T,3d].

    start [1] is 0 where it is None. Caches may be of bfloat16 beside a qkv of float32.
    """
    batch, _, context, _ = k_cache.shape
    first = 0 if start is None else int(start[0])
    stop = first + len(qkv) // batch
    if first < 0 or stop > context:
        raise ValueError(f"positions {first}..{stop - 1} do not fit a key/value cache of "
                         f"{context} positions: start a new window")
    arguments = words(k_cache), words(v_cache), words(qkv), first
    if len(qkv) == 1:
        _append_row(*arguments, 0)
    else:
        _append(*arguments)


def decode(out, qkv, k_cache, v_cache, position) -> None:
    """out [B,d]: the query of qkv [B,3d] over rows 0..position of the caches [B,H,context,D].

    position [1]: in memory, as on a GPU. Caches may be of bfloat16 beside out and qkv of float32:
    they are half of what is read.
    """
    last = int(position[0])
    if not 0 <= last < k_cache.shape[2]:
        raise ValueError(f"position {last} is outside a key/value cache of "
                         f"{k_cache.shape[2]} positions")
    _decode(words(out), words(qkv), words(k_cache), words(v_cache), last,
            F(1.0 / math.sqrt(k_cache.shape[3])))


@njit(parallel=True)
def _append(k_cache, v_cache, qkv, first):
    for row in prange(qkv.shape[0]):
        _append_row(k_cache, v_cache, qkv, first, row)


@njit()
def _append_row(k_cache, v_cache, qkv, first, row):
    """A single one is copied before other threads are awake."""
    batch, heads, context, head_dim = k_cache.shape
    length = qkv.shape[0] // batch
    b = row // length
    t = first + row - b * length
    for h in range(heads):
        key = pointer(qkv, (row * 3 * heads + heads + h) * head_dim)
        value = pointer(key, heads * head_dim)
        at = ((b * heads + h) * context + t) * head_dim
        kept_key, kept_value = pointer(k_cache, at), pointer(v_cache, at)
        for j in range(head_dim):
            kept_key[j] = stored_in(k_cache, as_float(key[j]))
        for j in range(head_dim):
            kept_value[j] = stored_in(v_cache, as_float(value[j]))


@njit(parallel=True, fastmath=FAST_SUM)
def _decode(out, qkv, k_cache, v_cache, position, scale):
    """Rows of a cache are asked for AHEAD of their use, after the keys the values, and then the
    next head's keys: 1.2 times as fast in float32, 1.5 times in bfloat16, if they are in memory.
    """
    batch, heads, context, head_dim = k_cache.shape
    line = CACHE_LINE // k_cache.itemsize
    ahead = min(AHEAD // (head_dim * k_cache.itemsize), position + 1)
    for head in prange(batch * heads):
        b = head // heads
        h = head - b * heads
        keys = pointer(k_cache, head * context * head_dim)
        values = pointer(v_cache, head * context * head_dim)
        following = pointer(keys, context * head_dim)
        query = np.empty(head_dim, np.float32)
        for j in range(head_dim):
            query[j] = as_float(qkv[b, h * head_dim + j])
        weights = np.empty(position + 1, np.float32)
        largest = LOW
        for t in range(weights.size):
            _ask_for_row(keys, values, t + ahead, position + 1, head_dim, line)
            row = t * head_dim
            product = F(0.0)
            for j in range(head_dim):
                product += query[j] * as_float(keys[row + j])
            weights[t] = product * scale
            largest = weights[t] if weights[t] > largest else largest
        total = F(0.0)
        for t in range(weights.size):
            e = exp(weights[t] - largest)
            weights[t] = e
            total += e
        sums = np.zeros(head_dim, np.float32)
        for t in range(weights.size):
            _ask_for_row(values, following, t + ahead, position + 1, head_dim, line)
            row = t * head_dim
            for j in range(head_dim):
                sums[j] += weights[t] * as_float(values[row + j])
        result = out[b, h * head_dim:(h + 1) * head_dim]
        for j in range(head_dim):
            result[j] = stored_in(out, sums[j] / total)


@njit(forceinline=True)
def _ask_for_row(rows, others, t, count, width, line):
    """Row t of `rows`, or of `others`, which will be read after `count` of them."""
    source, at = (rows, t) if t < count else (others, t - count)
    for j in range(0, width, line):
        prefetch(source, at * width + j)
