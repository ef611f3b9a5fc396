"""CPU linear layer, in float32 or bfloat16 as on a GPU.

Products are made of vectors where the processor has them (cpu_product), and by NumPy's BLAS
elsewhere (cpu_blas). A single row reads each weight once: plain loops stream them at the speed of
memory. Generation has weights stored for that (cpu_stored).
"""

import numpy as np
from numba import prange

from ..common.cache import njit
from ..common.cpu_features import VECTORS
from ..common.cpu_math import FAST, FAST_SUM, F, as_float, words
from . import cpu_blas, cpu_product, cpu_stored

ROW_BLOCKS = 16  # fixed number of partial column sums, whatever the number of threads

products = cpu_product if VECTORS else cpu_blas


def forward(y, pre_gelu, x, w, bias, residual, transpose_w: bool) -> None:
    """y = x·w + bias; with pre_gelu, that is its value, and y = GELU(pre_gelu).

    x [M,K]; w [K,N], or [N,K] with transpose_w; y, pre_gelu and residual [M,N]; residual is added
    to y. pre_gelu, bias and residual may be None. w may be a `cpu_stored.StoredMatrix`.
    """
    if isinstance(w, cpu_stored.StoredMatrix):
        if x.shape[0] <= cpu_stored.FEW:
            cpu_stored.forward(y, pre_gelu, x, w, bias, residual)
            return
        w, transpose_w = cpu_stored.dense(w, y.shape[1], x.shape[1]), True
    if x.shape[0] > 1:
        products.linear(y, pre_gelu, x, w, bias, residual, transpose_w)
        return
    sums = np.empty(y.shape[1], np.float32)
    if transpose_w:
        _row_times_transposed(sums, words(x[0]), words(w))
    else:
        _row_times(sums, words(x[0]), words(w), _partial_sums(w))
    products.finish_row(y, pre_gelu, sums, bias, residual)


def backward(dx, dw, dbias, dy, x, w, pre_gelu, transpose_w: bool) -> None:
    """dx [M,K] is overwritten (None: not wanted); dw and dbias (may be None) are added to.

    With pre_gelu [M,K], where x = GELU(pre_gelu), dx is the gradient of that.
    """
    if dx is not None:
        products.input_gradient(dx, dy, w, pre_gelu, transpose_w)
    if transpose_w:
        products.add_product(dw, dy, x)
    else:
        products.add_product(dw, x, dy)
    if dbias is not None:
        _add_column_sums(dbias, words(dy), _partial_sums(dy))


def _partial_sums(rows) -> np.ndarray:
    """Zeros for the column sums of each block of rows."""
    return np.zeros((min(ROW_BLOCKS, rows.shape[0]), rows.shape[1]), np.float32)


@njit(parallel=True)
def _add_column_sums(dbias, dy, partial):
    rows, width = dy.shape
    blocks = partial.shape[0]
    for block in prange(blocks):
        sums = partial[block]
        row = block * rows // blocks
        last = (block + 1) * rows // blocks
        while row + 4 <= last:
            r0 = dy[row]
            r1 = dy[row + 1]
            r2 = dy[row + 2]
            r3 = dy[row + 3]
            for j in range(width):
                sums[j] += ((as_float(r0[j]) + as_float(r1[j]))
                            + (as_float(r2[j]) + as_float(r3[j])))
            row += 4
        while row < last:
            r0 = dy[row]
            for j in range(width):
                sums[j] += as_float(r0[j])
            row += 1
    for block in range(blocks):
        sums = partial[block]
        for j in range(width):
            dbias[j] += sums[j]


@njit(parallel=True, fastmath=FAST_SUM)
def _row_times_transposed(y, x, w):
    """y [N] = w·x for w [N,K]: one streamed row at a time (BLAS reaches half the memory speed)."""
    for n in prange(w.shape[0]):
        row = w[n]
        total = F(0.0)
        for k in range(row.size):
            total += as_float(row[k]) * as_float(x[k])
        y[n] = total


@njit(parallel=True, fastmath=FAST)
def _row_times(y, x, w, partial):
    """y [N] = x·w for w [K,N]: fixed blocks of rows are streamed, then their sums added."""
    rows, width = w.shape
    blocks = partial.shape[0]
    for block in prange(blocks):
        sums = partial[block]
        k = block * rows // blocks
        last = (block + 1) * rows // blocks
        while k + 4 <= last:  # four rows share one load and store of the sums
            r0 = w[k]
            r1 = w[k + 1]
            r2 = w[k + 2]
            r3 = w[k + 3]
            x0 = as_float(x[k])
            x1 = as_float(x[k + 1])
            x2 = as_float(x[k + 2])
            x3 = as_float(x[k + 3])
            for j in range(width):
                sums[j] += (x0 * as_float(r0[j]) + x1 * as_float(r1[j])
                            + x2 * as_float(r2[j]) + x3 * as_float(r3[j]))
            k += 4
        while k < last:
            row = w[k]
            factor = as_float(x[k])
            for j in range(width):
                sums[j] += factor * as_float(row[j])
            k += 1
    for j in range(width):
        y[j] = F(0.0)
    for block in range(blocks):
        sums = partial[block]
        for j in range(width):
            y[j] += sums[j]
