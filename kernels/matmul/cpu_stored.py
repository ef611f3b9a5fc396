"""Products of a few rows, as in generation, with weights that are stored for them alone.

Rows of the stored matrix lie along K, so that each output is one stream of weights times x; every
weight is read once for all rows of x. As int8 a row has one scale, its largest magnitude / 127.
A sum has one order, whatever the number of rows of x and of threads: samples that are generated
together are what they are alone. The next weights are asked for ahead: a processor looks no further
than a page, 4 to 5 rows of int8. Without that, one row of x reads int8 at 15 GB/s and bfloat16 at
14, with it at 32 and 20 (Emerald Rapids), and 8 rows take 31 cycles for 16 weights of float32, with
it 13 (Zen 4).

With int8, x is rounded to int16 times a power of two for each row, an error of at most 2**-14 of
the row's largest element, and products are of integers, 32 to an instruction with VNNI, their sums
exact. 8 rows take 0.6 of the time that weights converted to float32 took, one row 0.94 (Emerald
Rapids).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numba import prange, types
from numba.extending import overload

from ..common.cache import njit
from ..common.cpu_features import RUNG, VECTORS
from ..common.cpu_math import (
    FAST,
    FAST_SUM,
    F,
    as_float,
    from_ordered_bits,
    ordered_bits,
    pointer,
    words,
)
from ..common.cpu_tile import CACHE_LINE, aligned_zeros, scratch
from ..common.simd import (
    LANES,
    broadcast,
    load,
    load_first,
    multiply_add,
    prefetch,
    registers,
    store_lanes,
    sum_lanes,
    sums_of_lanes,
    where_less,
)
from ..common.simd import store as store_vector
from ..common.simd_int import (
    PAIRS,
    as_floats,
    integers,
    load_int16_pairs,
    multiply_add_pairs,
    store_int16,
)
from ..common.spec import BFLOAT16
from ..gelu.cpu import gelu
from . import cpu_blas, cpu_product

KINDS = {"fp32": np.dtype(np.float32), "bf16": BFLOAT16, "int8": np.dtype(np.int8)}
TASK = 64  # rows of weights
FEW = 32  # rows of x; more are multiplied with a float32 copy of the matrix
SAMPLES = 2 if RUNG == "avx2" else 4  # rows of x, of several, whose sums are in registers
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
    (M, K), (N, width) = x.shape, w.values.shape
    if M > FEW:
        dense = scratch("dense", np.float32, N * K).reshape(N, -1)
        _unpack(dense, w.values, w.scales)
        _products.linear(y, pre_gelu, x, dense, bias, residual, True)
        return
    together = SAMPLES if M > 1 else 1
    rows = -(-M // together) * together
    packed = scratch("a", np.float32, rows * width)
    if VECTORS and w.values.dtype == np.int8:
        packed = packed.view(np.int16)[:rows * width]
    _few_rows(y, _NO_ROWS if pre_gelu is None else pre_gelu, x, w.values, w.scales,
              _NOTHING if bias is None else bias, _NO_ROWS if residual is None else residual,
              together, _bits(width), packed, scratch("sums", np.float32, rows * N))


def _bits(width: int) -> int:
    """Of the whole numbers for x: the sum of a lane of products with int8 stays an int32."""
    return min(14, 31 - (127 * width // LANES).bit_length())


@njit(parallel=True)
def _unpack(dense, values, scales):
    for n in prange(dense.shape[0]):
        row = dense[n]
        source = values[n]
        for k in range(row.size):
            row[k] = as_float(source[k]) * scales[n]


@njit(parallel=True, fastmath=FAST)
def _few_rows(y, pre_gelu, x, values, scales, bias, residual, together, bits, packed, sums):
    """`packed` and `sums` are scratch."""
    N, width = values.shape
    rows = packed.size // width
    totals = sums.reshape(rows, N)
    row_scales = np.ones(rows, np.float32)
    _interleave(packed, row_scales, x, width, together, bits)
    for task in prange((N + TASK - 1) // TASK):
        first = task * TASK
        last = min(first + TASK, N)
        if together == 1:
            _dots_of_one(totals, first, last, packed, values)
        else:
            _dots_of_some(totals, first, last, packed, values)
        _finish(y, pre_gelu, totals, row_scales, scales, bias, residual, first, last)


@njit(fastmath=FAST)
def _finish(y, pre_gelu, sums, row_scales, scales, bias, residual, first, last):
    """Scales, bias, GELU and residual on columns `first` to `last` of the sums.

    In loops that LLVM vectorises, though y may be the residual: one loop took 5 cycles an element.
    """
    scale = scales[first:last]
    for m in range(y.shape[0]):
        row = sums[m, first:last]
        for i in range(row.size):
            row[i] *= scale[i] * row_scales[m]
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


def _interleave(packed, row_scales, x, width, together, bits):
    """packed[m // together, k // C, m % together, k % C] = x[m, k], zeros beyond its ends; C are
    the columns of a cache line.

    Read front to back: rows that lie a multiple of 4 KB apart would share a set of the cache. As
    int16 a row is divided by its scale, a power of two: `bits` and a sign are left. A row with NaN
    or infinity has the scale NaN.
    """


def _interleave_floats(packed, row_scales, x, width, together, bits):
    for m in range(row_scales.size):
        start = m // together * together * width + m % together * LANES
        row = pointer(x, m * x.shape[1])
        for k in range(0, width, LANES):
            count = x.shape[1] - k if m < x.shape[0] else 0
            if VECTORS:
                store_vector(packed, start + k * together, load_first(row, k, count))
            else:
                for i in range(LANES):
                    packed[start + k * together + i] = row[k + i] if i < count else F(0.0)


def _interleave_int16(packed, row_scales, x, width, together, bits):
    for m in range(row_scales.size):
        start = m // together * together * width + m % together * PAIRS
        row = pointer(x, m * x.shape[1])
        columns = x.shape[1] if m < x.shape[0] else 0
        largest = np.int32(0)
        for k in range(columns):
            largest = max(largest, ordered_bits(abs(row[k])))
        exponent = max(largest >> 23, 15) - 126 - bits  # largest < 2 ** (exponent + bits)
        row_scales[m] = F(math.ldexp(1.0, exponent)) + from_ordered_bits(largest) * F(0.0)
        inverse, most = F(math.ldexp(1.0, -exponent)), F(32767.0)
        for k in range(0, width, LANES):
            value = load_first(row, k, columns - k) * inverse
            value = where_less(value, most, where_less(-most, value, value, F(0.0)), F(0.0))
            store_int16(packed, start + k // PAIRS * PAIRS * together + k % PAIRS, value)


@overload(_interleave, jit_options={"error_model": "numpy"})
def _(packed, row_scales, x, width, together, bits):
    return _interleave_int16 if packed.dtype == types.int16 else _interleave_floats


def _make_dots(samples: int) -> Callable:
    """The function of products of so many rows of x."""
    lines = 1 if RUNG == "avx2" else 2  # rows of weights whose sums are in registers
    int8_lines = 2 * lines
    count, halves, int8_count = samples * lines * 2, lines * 2, samples * int8_lines

    def dots(sums, first, last, x, values):
        """sums[m, n] = x[m]·values[n] for all rows m, and n from `first` to `last`; x interleaved.
        """

    def of_floats(sums, first, last, x, values):
        rows, K = sums.shape[0], values.shape[1]
        p = pointer(values, 0)
        ahead = lines * K * max(1, AHEAD // (lines * K * values.itemsize))
        for n in range(first, last, lines):
            for m in range(0, rows, samples):
                total = registers(count)  # two vectors each
                line = registers(halves)
                for i in range(count):
                    total[i] = broadcast(F(0.0))
                for k in range(0, K, 2 * LANES):
                    for i in range(lines):
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
                        for i in range(lines):
                            t = 2 * (j * lines + i)
                            total[t] = multiply_add(total[t], line[2 * i], a)
                            total[t + 1] = multiply_add(total[t + 1], line[2 * i + 1], b)
                for j in range(samples):
                    for i in range(lines):
                        t = 2 * (j * lines + i)
                        sums[m + j, min(n + i, last - 1)] = sum_lanes(total[t] + total[t + 1])

    def of_int8(sums, first, last, x, values):
        rows, K = sums.shape[0], values.shape[1]
        p, flat_sums = pointer(values, 0), pointer(sums, 0)
        ahead = int8_lines * K * max(1, AHEAD // (int8_lines * K))
        # What is asked for while a group of rows of x is multiplied, in all and in a step.
        share = int8_lines * K * samples // rows
        step = share * PAIRS // K
        for n in range(first, last, int8_lines):
            for m in range(0, rows, samples):
                ask = n * K + ahead + m // samples * share
                total, one = integers(int8_count), registers(LANES)
                line = integers(int8_lines)
                for i in range(int8_count):
                    total[i] = broadcast(np.int32(0))
                for k in range(0, K, PAIRS):
                    for i in range(int8_lines):
                        at = min(n + i, last - 1) * K + k
                        line[i] = load_int16_pairs(p, at)
                    for c in range(0, int8_lines * PAIRS, CACHE_LINE):
                        if c < step:
                            prefetch(p, ask + c)
                    ask += step
                    for j in range(samples):
                        a = load_int16_pairs(x, m * K + k * samples + j * PAIRS)
                        for i in range(int8_lines):
                            t = j * int8_lines + i
                            total[t] = multiply_add_pairs(total[t], line[i], a)
                # Each sum of LANES is one lane.
                for t in range(LANES):
                    one[t] = as_floats(total[min(t, int8_count - 1)])
                each = sums_of_lanes(one)
                for j in range(samples):
                    store_lanes(flat_sums, (m + j) * sums.shape[1] + n, each, j * int8_lines,
                                min(int8_lines, last - n))

    def in_loops(sums, first, last, x, values):
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

    @overload(dots, jit_options={"error_model": "numpy", "fastmath": FAST_SUM})
    def _(sums, first, last, x, values):
        if not VECTORS:
            return in_loops
        return of_int8 if values.dtype == types.int8 else of_floats

    return dots


_dots_of_one, _dots_of_some = _make_dots(1), _make_dots(SAMPLES)
