"""Products of a few rows, as in generation, with weights that are stored for them alone.

Weights lie as they are read: in panels of WIDE outputs, and in a panel word by word along K. A word
is one term of float32, or two of bfloat16 or int8; each lane of a vector is an output. So a thread
reads one stream, and each weight once for up to SAMPLES rows of x. The next weights are asked for
ahead: without that, one row took 1.3 times as long with int8 and bfloat16, and 8 rows 1.6 times
with any kind (Emerald Rapids, K = 768). As int8 the weights of an output have one scale, their
largest magnitude / 127.

With int8, x is rounded to int16 times a power of two for each row, an error of at most 2**-14 of
the row's largest element, and products are of integers, 32 to an instruction with VNNI, their sums
exact for CHUNK words. A sum has one order, whatever the number of rows of x, up to FEW, and of
threads: samples that are generated together are what they are alone. Without the vectors of simd.py
x is not rounded, and a word is one term.
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
    F,
    as_float,
    flat,
    from_ordered_bits,
    ordered_bits,
    pointer,
    stack_array,
    words,
)
from ..common.cpu_tile import CACHE_LINE, scratch, up
from ..common.host_array import aligned_zeros
from ..common.simd import (
    LANES,
    broadcast,
    high_halves,
    load,
    load_first,
    load_pairs,
    low_halves,
    multiply_add,
    prefetch,
    registers_of,
)
from ..common.simd import store as store_vector
from ..common.simd_int import as_floats, load_int16_pairs, multiply_add_pairs, store_int16
from ..common.simd_ir import f32x16
from ..common.spec import BFLOAT16
from . import cpu_blas, cpu_product

KINDS = {"fp32": np.dtype(np.float32), "bf16": BFLOAT16, "int8": np.dtype(np.int8)}
TERMS = {"fp32": 1, "bf16": 2, "int8": 2} if VECTORS else dict.fromkeys(KINDS, 1)  # of a word
LINES, SAMPLES = (1, 4) if RUNG == "avx2" else (2, 8)  # vectors of outputs by rows of x, summed
WIDE = LINES * LANES  # in registers
BITS = 14  # of x beside a sign, with int8
CHUNK = 512  # words; 1,024 products of BITS and 7 bits are less than 2**31
FEW = 32  # rows of x; more are multiplied with the dense matrix
TASK = 2  # panels
AHEAD = 6144  # bytes of weights between what is asked for and what is multiplied
_TILE = SAMPLES * WIDE


class StoredMatrix(NamedTuple):
    """Weights `values` [panel, word, output, term], to be multiplied by `scales` [panel * WIDE].

    Zeros fill the last panel and the last word. Values are of float32, of uint16, the bits of
    bfloat16, or of int8.
    """

    values: np.ndarray
    scales: np.ndarray


def store(w: np.ndarray, kind: str, transpose_w: bool) -> StoredMatrix:
    """The float32 w [K,N], or [N,K] with transpose_w, as one of KINDS."""
    rows, terms = w if transpose_w else w.T, TERMS[kind]
    N, K = rows.shape
    panels, length = -(-N // WIDE), -(-K // terms)
    scales = aligned_zeros(panels * WIDE, np.float32)
    scales[:N] = 1
    if kind == "int8":
        scales[:N] = np.abs(rows).max(axis=1) / np.float32(127)
    filled = np.zeros((panels * WIDE, length * terms), KINDS[kind])
    with np.errstate(invalid="ignore"):  # what a NaN becomes in int8 does not matter: its scale is
        if kind == "int8":
            rows = np.rint(rows / np.where(scales > 0, scales, 1)[:N, None])
        filled[:N, :K] = rows
    values = aligned_zeros(filled.size, KINDS[kind]).reshape(panels, length, WIDE, terms)
    values[...] = filled.reshape(panels, WIDE, length, terms).transpose(0, 2, 1, 3)
    return StoredMatrix(words(values), scales)


def forward(y, pre_gelu, x, w: StoredMatrix, bias, residual) -> None:
    """As `cpu.forward` for at most FEW rows of x, all arrays of float32."""
    M, K = x.shape
    x = flat(x).reshape(M, K)
    if not VECTORS:
        sums = np.empty(y.shape, np.float32)
        _sums_in_loops(sums, x, w.values, w.scales)
        cpu_blas.finish_row(y, pre_gelu, sums, bias, residual)
        return
    together = SAMPLES if M > 1 else 1
    rows = up(M, together)
    size = rows * up(K, LANES)
    packed = (scratch("a", np.int32, size // 2) if w.values.dtype == np.int8
              else scratch("a", np.float32, size))
    _few_rows(*cpu_product.epilogue_arrays(y, pre_gelu, bias, residual), x, w.values, w.scales,
              together, cpu_product.epilogue_of(pre_gelu, residual), packed,
              scratch("scales", np.float32, rows))


def dense(w: StoredMatrix, N: int, K: int) -> np.ndarray:
    """The weights [N,K] in float32, in scratch memory."""
    rows = scratch("dense", np.float32, N * K).reshape(N, K)
    _unpack(rows, w.values, w.scales)
    return rows


@njit(parallel=True)
def _unpack(rows, values, scales):
    N, K = rows.shape
    panels, length, _, terms = values.shape
    for panel in prange(panels):
        first = panel * WIDE
        for start in range(0, length, LANES):  # words that stay in the cache for all outputs
            count = min(LANES * terms, K - start * terms)
            for n in range(first, min(first + WIDE, N)):
                source = pointer(values, ((panel * length + start) * WIDE + n - first) * terms)
                row = pointer(rows, n * K + start * terms)
                scale = scales[n]
                for h in range(terms):
                    for k in range(h, count, terms):
                        row[k] = as_float(source[(k - h) * WIDE + h]) * scale


@njit(parallel=True, fastmath=FAST)
def _sums_in_loops(sums, x, values, scales):
    """For processors without the vectors of simd.py, where a word is one term of any kind."""
    N = sums.shape[1]
    for panel in prange(values.shape[0]):
        first = panel * WIDE
        for m in range(x.shape[0]):
            total = np.zeros(WIDE, np.float32)
            for k in range(x.shape[1]):
                line = values[panel, k, :, 0]
                for i in range(WIDE):
                    total[i] += as_float(line[i]) * x[m, k]
            for i in range(min(WIDE, N - first)):
                sums[m, first + i] = total[i] * scales[first + i]


@njit(parallel=True, fastmath=FAST)
def _few_rows(y, pre_gelu, bias, residual, x, values, scales, together, epilogue, packed,
              row_scales):
    """`packed` and `row_scales` are scratch, as long as all rows to be summed."""
    panels, length, _, terms = values.shape
    M, rows = x.shape[0], row_scales.size
    N, x_row = y.size // M, packed.size // rows
    _pack(packed, row_scales, x)
    for task in prange((panels + TASK - 1) // TASK):
        tile = stack_array(_TILE)
        for panel in range(task * TASK, min((task + 1) * TASK, panels)):
            w = pointer(values, panel * length * WIDE * terms)
            column = panel * WIDE
            for m in range(0, rows, together):
                if together == 1:
                    _dots_of_one(tile, pointer(packed, m * x_row), x_row, w, length)
                else:
                    _dots_of_some(tile, pointer(packed, m * x_row), x_row, w, length)
                _scale(tile, scales, column, pointer(row_scales, m), together)
                cpu_product.finish(y, pre_gelu, bias, residual, y, tile, together, WIDE, m, column,
                                   M, N, epilogue, True)


@njit(fastmath=FAST)
def _scale(tile, scales, column, row_scales, rows):
    for i in range(0, WIDE, LANES):
        scale = load(scales, column + i)
        for j in range(rows):
            at = j * WIDE + i
            store_vector(tile, at, load(tile, at) * scale * row_scales[j])


def _pack(packed, row_scales, x):
    """Rows of x one after the other, zeros beyond its ends.

    As int16, two to a word, a row is divided by its scale, a power of two: BITS and a sign are
    left. A row with NaN or infinity has the scale NaN, and any numbers.
    """


def _pack_floats(packed, row_scales, x):
    row_scales[:] = F(1.0)
    length = packed.size // row_scales.size
    for m in range(row_scales.size):
        row = packed[m * length:(m + 1) * length]
        columns = x.shape[1] if m < x.shape[0] else 0
        row[:columns] = x[m, :columns]
        row[columns:] = F(0.0)


def _pack_int16(packed, row_scales, x):
    numbers = packed.view(np.int16)
    length = numbers.size // row_scales.size
    for m in range(row_scales.size):
        row = pointer(x, m * x.shape[1])
        columns = x.shape[1] if m < x.shape[0] else 0
        largest = np.int32(0)
        for k in range(columns):
            largest = max(largest, ordered_bits(abs(row[k])))
        exponent = max(largest >> 23, 15) - 126 - BITS  # largest < 2 ** (exponent + BITS)
        row_scales[m] = F(math.ldexp(1.0, exponent)) + from_ordered_bits(largest) * F(0.0)
        inverse = F(math.ldexp(1.0, -exponent))
        for k in range(0, length, LANES):
            store_int16(numbers, m * length + k, load_first(row, k, columns - k) * inverse)


@overload(_pack, jit_options={"error_model": "numpy"})
def _(packed, row_scales, x):
    return _pack_int16 if packed.dtype == types.int32 else _pack_floats


def _words(w, at):
    """16 words of weights."""


@overload(_words, jit_options={"forceinline": True})
def _(w, at):
    if w.dtype == types.float32:
        return lambda w, at: load(w, at)
    if w.dtype == types.uint16:
        return lambda w, at: load_pairs(w, at, 2 * LANES)
    return lambda w, at: load_int16_pairs(w, at)


def _add_word(total, weights, x, t):
    """total + weights times word t of x."""


@overload(_add_word, jit_options={"forceinline": True})
def _(total, weights, x, t):
    if x.dtype == types.int32:
        return lambda total, weights, x, t: multiply_add_pairs(total, weights, broadcast(x[t]))
    if weights == f32x16:
        return lambda total, weights, x, t: multiply_add(total, weights, broadcast(x[t]))
    return lambda total, weights, x, t: multiply_add(
        multiply_add(total, low_halves(weights), broadcast(x[2 * t])),
        high_halves(weights), broadcast(x[2 * t + 1]))


def _make_dots(samples: int) -> Callable:
    """The function of products of so many rows of x with a panel."""
    count = samples * LINES

    def dots(tile, x, x_row, w, length):
        """tile[j, n] = sum over words t of x[j, t]·w[t, n], for all outputs n of the panel."""

    def in_vectors(kind: type, terms: int, itemsize: int):
        zero, line = kind(0), LANES * terms

        def dots(tile, x, x_row, w, length):
            for first in range(0, length, CHUNK):
                total = registers_of(x, count)
                for i in range(count):
                    total[i] = broadcast(zero)
                for t in range(first, min(first + CHUNK, length)):
                    at = t * LINES * line
                    for i in range(0, LINES * line * itemsize, CACHE_LINE):
                        prefetch(w, at + (AHEAD + i) // itemsize)
                    for j in range(samples):
                        for i in range(LINES):
                            total[j * LINES + i] = _add_word(
                                total[j * LINES + i], _words(w, at + i * line),
                                pointer(x, j * x_row), t)
                for i in range(count):
                    value = as_floats(total[i])
                    if first > 0:
                        value = value + load(tile, i * LANES)
                    store_vector(tile, i * LANES, value)

        return dots

    @overload(dots, jit_options={"error_model": "numpy"})
    def _(tile, x, x_row, w, length):
        itemsize = w.dtype.bitwidth // 8
        return in_vectors(np.int32 if itemsize == 1 else np.float32, 1 if itemsize == 4 else 2,
                          itemsize)

    return dots


_dots_of_one, _dots_of_some = _make_dots(1), _make_dots(SAMPLES)
