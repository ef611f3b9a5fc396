"""Products of a few rows, as in generation, with weights that are stored for them alone.

Rows of the stored matrix lie along K, so that each output is one stream of weights times x; every
weight is read once for all rows of x. As int8 a row has one scale, its largest magnitude / 127.
A sum has one order, whatever the number of rows of x and of threads: samples that are generated
together are what they are alone. The next weights are asked for ahead: a processor looks no further
than a page, 4 to 5 rows of int8. Without that, one row of x reads int8 at 15 GB/s and bfloat16 at
14, with it at 32 and 20 (Emerald Rapids), and 8 rows take 31 cycles for 16 weights of float32, with
it 13 (Zen 4; there 8 rows in the cache run at 0.92 of one multiply-add of 16 lanes a cycle, of any
kind of weights: the conversion of int8 and bfloat16 hides behind it).
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numba import prange

from ..common.cache import njit
from ..common.cpu_features import RUNG, VECTORS
from ..common.cpu_math import FAST, FAST_SUM, F, as_float, pointer, words
from ..common.cpu_tile import aligned_zeros, scratch
from ..common.simd import LANES, broadcast, load, multiply_add, prefetch, registers, sum_lanes
from ..common.spec import BFLOAT16
from ..gelu.cpu import gelu
from . import cpu_blas, cpu_product

KINDS = {"fp32": np.dtype(np.float32), "bf16": BFLOAT16, "int8": np.dtype(np.int8)}
TASK = 32  # rows of weights
FEW = 32  # rows of x; more are multiplied with a float32 copy of the matrix
# Rows of x, of several, and of weights whose sums are in registers.
SAMPLES, LINES = (2, 1) if RUNG == "avx2" else (4, 2)
AHEAD = 6144  # bytes of weights, about, between what is asked for and what is multiplied
_NO_ROWS, _NOTHING = np.empty((0, 0), np.float32), np.empty(0, np.float32)

_products = cpu_product if VECTORS else cpu_blas


class StoredMatrix(NamedTuple):
    """Weights `values` [N, K], to be multiplied by `scales` [N]; zeros fill K up to whole vectors.

    Values are of float32, of uint16, the bits of bfloat16, or of int8.
    """

    values: np.ndarray
    scales: np.ndarray


def store(w: np.ndarray, kind: str, transpose_w: bool) -> StoredMatrix:
    """The float32 w [K,N], or [N,K] with transpose_w, as one of KINDS."""
    rows = w if transpose_w else w.T
    N, K = rows.shape
    scales = np.ones(N, np.float32)
    if kind == "int8":
        scales = np.abs(rows).max(axis=1) / np.float32(127)
        rows = np.rint(rows / np.where(scales > 0, scales, 1)[:, None])
    width = -(-K // (2 * LANES)) * 2 * LANES
    values = aligned_zeros(N * width, KINDS[kind]).reshape(N, width)
    with np.errstate(invalid="ignore"):  # what a NaN becomes in int8 does not matter: its scale is
        values[:, :K] = rows
    return StoredMatrix(words(values), scales)


def forward(y, pre_gelu, x, w: StoredMatrix, bias, residual) -> None:
    """As `cpu.forward`, all arrays of float32."""
    N, width = w.values.shape
    if len(x) > FEW:
        dense = scratch("dense", np.float32, N * x.shape[1]).reshape(N, -1)
        _unpack(dense, w.values, w.scales)
        _products.linear(y, pre_gelu, x, dense, bias, residual, True)
        return
    together = SAMPLES if len(x) > 1 else 1
    rows = -(-len(x) // together) * together
    _few_rows(y, _NO_ROWS if pre_gelu is None else pre_gelu, x, w.values, w.scales,
              _NOTHING if bias is None else bias, _NO_ROWS if residual is None else residual,
              together, scratch("a", np.float32, rows * (width + N)))


@njit(parallel=True)
def _unpack(dense, values, scales):
    for n in prange(dense.shape[0]):
        row = dense[n]
        source = values[n]
        for k in range(row.size):
            row[k] = as_float(source[k]) * scales[n]


@njit(parallel=True, fastmath=FAST)
def _few_rows(y, pre_gelu, x, values, scales, bias, residual, together, both):
    """`both` is scratch of rows of x and of sums."""
    rows = both.size // (values.shape[0] + values.shape[1])
    packed = both[:rows * values.shape[1]]
    sums = both[packed.size:].reshape(rows, values.shape[0])
    _interleave(packed, x, values.shape[1], together)
    for task in prange((y.shape[1] + TASK - 1) // TASK):
        first = task * TASK
        last = min(first + TASK, y.shape[1])
        if together == 1:
            _dots_of_one(sums, first, last, packed, values)
        else:
            _dots_of_some(sums, first, last, packed, values)
        _finish(y, pre_gelu, sums, scales, bias, residual, first, last)


@njit(fastmath=FAST)
def _finish(y, pre_gelu, sums, scales, bias, residual, first, last):
    """Scale, bias, GELU and residual on columns `first` to `last` of the sums.

    In loops that LLVM vectorises, though y may be the residual: one loop took 5 cycles an element.
    """
    scale = scales[first:last]
    for m in range(y.shape[0]):
        row = sums[m, first:last]
        for i in range(row.size):
            row[i] *= scale[i]
        if bias.size > 0:
            offset = bias[first:last]
            for i in range(row.size):
                row[i] += offset[i]
        if pre_gelu.size > 0:
            pre_gelu[m, first:last] = row
            for i in range(row.size):
                row[i] = gelu(row[i])
        if residual.size > 0:
            other = residual[m, first:last]
            for i in range(row.size):
                row[i] += other[i]
        y[m, first:last] = row


@njit()
def _interleave(packed, x, width, together):
    """packed[m // together, k // 16, m % together, k % 16] = x[m, k], zeros beyond its ends.

    Read front to back: rows that lie a multiple of 4 KB apart would share a set of the cache.
    """
    for m in range(packed.size // width):
        group = m // together * together
        start = group * width + (m - group) * LANES
        for k in range(0, width, LANES):
            target = packed[start + k * together:start + k * together + LANES]
            for i in range(LANES):
                target[i] = x[m, k + i] if m < x.shape[0] and k + i < x.shape[1] else F(0.0)


def _dots_in_vectors(samples: int) -> Callable:
    """sums[m, n] = x[m]·values[n] for all rows m, and n from `first` to `last`; x interleaved.

    So many rows of x and LINES of weights have their sums in registers, in two vectors each.
    """
    count, halves = samples * LINES * 2, LINES * 2

    @njit(fastmath=FAST_SUM)
    def dots(sums, first, last, x, values):
        rows, K = sums.shape[0], values.shape[1]
        p = pointer(values, 0)
        ahead = LINES * K * max(1, AHEAD // (LINES * K * values.itemsize))
        for n in range(first, last, LINES):
            for m in range(0, rows, samples):
                total = registers(count)
                line = registers(halves)
                for i in range(count):
                    total[i] = broadcast(F(0.0))
                for k in range(0, K, 2 * LANES):
                    for i in range(LINES):
                        at = min(n + i, last - 1) * K + k
                        line[2 * i] = load(p, at)
                        line[2 * i + 1] = load(p, at + LANES)
                        prefetch(p, at + ahead)
                        if values.itemsize == 4:  # a vector is a line
                            prefetch(p, at + ahead + LANES)
                    for j in range(samples):
                        at = m * K + k * samples + j * LANES
                        a = load(x, at)
                        b = load(x, at + samples * LANES)
                        for i in range(LINES):
                            t = 2 * (j * LINES + i)
                            total[t] = multiply_add(total[t], line[2 * i], a)
                            total[t + 1] = multiply_add(total[t + 1], line[2 * i + 1], b)
                for j in range(samples):
                    for i in range(LINES):
                        t = 2 * (j * LINES + i)
                        sums[m + j, min(n + i, last - 1)] = sum_lanes(total[t] + total[t + 1])

    return dots


def _dots_in_loops(samples: int) -> Callable:
    """The same on processors without vectors."""

    @njit(fastmath=FAST_SUM)
    def dots(sums, first, last, x, values):
        K = values.shape[1]
        for n in range(first, last):
            row = values[n]
            for m in range(sums.shape[0]):
                start = m // samples * samples * K + m % samples * LANES
                total = F(0.0)
                for k in range(0, K, LANES):
                    other = x[start + k * samples:start + k * samples + LANES]
                    line = row[k:k + LANES]
                    for i in range(LANES):
                        total += as_float(line[i]) * other[i]
                sums[m, n] = total

    return dots


_make_dots = _dots_in_vectors if VECTORS else _dots_in_loops
_dots_of_one, _dots_of_some = _make_dots(1), _make_dots(SAMPLES)
