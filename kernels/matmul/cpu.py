"""CPU matrix products: those of small models in Numba, large ones by NumPy's BLAS.

BLAS has a thread pool of its own, and waking it for a product of 1 ms costs as much as the product.
From LARGE multiplications on it pays, as its blocking suits wide rows better: (1024, 3072, 768)
runs at 66 to 97 GFLOP/s a core here and 102 there, (1024, 384, 1536) at 95 to 101 and 103. Scratch
of large products: 4 MB per calling thread, the block of a weight gradient that is added to dw
while it is still in the cache.
"""

import threading

import numpy as np
from numba import get_num_threads, prange

from ..common.cache import njit
from ..common.cpu_math import FAST, FAST_SUM, F, flat
from ..gelu.cpu import backward as times_gelu_slope
from ..gelu.cpu import gelu
from .cpu_product import product

LARGE = 1 << 30  # multiplications of a product
SCRATCH_ELEMENTS = 1 << 20
ROW_BLOCKS = 16  # fixed number of partial column sums, whatever the number of threads

_thread = threading.local()


def forward(y, pre_gelu, x, w, bias, residual, transpose_w: bool) -> None:
    """y = x·w + bias; with pre_gelu, that is its value, and y = GELU(pre_gelu).

    x [M,K]; w [K,N], or [N,K] with transpose_w; y, pre_gelu and residual [M,N]; residual is added
    to y. pre_gelu, bias and residual may be None.
    """
    linear = y if pre_gelu is None else pre_gelu
    if x.shape[0] > 1:
        _multiply(linear, x, w.T if transpose_w else w)
    elif transpose_w:
        _row_times_transposed(linear[0], x[0], w)
    else:
        _row_times(linear[0], x[0], w, _partial_sums(w))
    if bias is None and (pre_gelu is not None or residual is not None):
        bias = np.zeros(y.shape[1], np.float32)
    if pre_gelu is not None:  # whole rows: on panels of 32 columns this takes 3 times as long
        _bias_gelu(y, pre_gelu, bias)
    elif residual is not None:
        _add_bias_residual(y, bias, residual)
    elif bias is not None:
        _add_bias(y, bias)


def backward(dx, dw, dbias, dy, x, w, pre_gelu, transpose_w: bool) -> None:
    """dx [M,K] is overwritten (None: not wanted); dw and dbias (may be None) are added to.

    With pre_gelu [M,K], where x = GELU(pre_gelu), dx is the gradient of that.
    """
    if dx is not None:
        _multiply(dx, dy, w if transpose_w else w.T)
        if pre_gelu is not None:
            times_gelu_slope(dx, dx, pre_gelu)
    if transpose_w:
        _multiply_add(dw, dy.T, x)
    else:
        _multiply_add(dw, x.T, dy)
    if dbias is not None:
        _add_column_sums(dbias, dy, _partial_sums(dy))


def _multiply(c, a, b) -> None:
    """c = a·b, where a and b may be transposed views."""
    if _is_large(a, b):
        np.matmul(a, b, out=c)
    else:
        _product(c, a, b, True)


def _multiply_add(c, a, b) -> None:
    """c += a·b, where a and b may be transposed views."""
    if _is_large(a, b):
        _add_product(c, a, b)
    else:
        _product(c, a, b, False)


def _is_large(a, b) -> bool:
    return a.size * b.shape[1] >= LARGE


def _product(c, a, b, fresh) -> None:
    a_row, a_column = (step // a.itemsize for step in a.strides)
    b_row, b_column = (step // b.itemsize for step in b.strides)
    product(flat(c), _elements(a), a_row, a_column, _elements(b), b_row, b_column,
            (a.shape[0], b.shape[1], a.shape[1]), fresh, get_num_threads())


def _partial_sums(rows) -> np.ndarray:
    """Zeros for the column sums of each block of rows."""
    return np.zeros((min(ROW_BLOCKS, rows.shape[0]), rows.shape[1]), np.float32)


def _elements(a) -> np.ndarray:
    return flat(a if a.flags.c_contiguous else a.T)


def _add_product(dw, a, b) -> None:
    """dw += a·b in blocks along dw's longer side, so that a block of any shape stays squarish."""
    if not hasattr(_thread, "scratch"):
        _thread.scratch = np.empty(SCRATCH_ELEMENTS, np.float32)
    rows, columns = dw.shape
    longer, shorter = max(rows, columns), min(rows, columns)
    blocks = -(-longer * shorter // SCRATCH_ELEMENTS)
    size = min((-(-longer // blocks) + 15) // 16 * 16, max(1, SCRATCH_ELEMENTS // shorter))
    for lo in range(0, longer, size):
        part = slice(lo, min(lo + size, longer))
        target = dw[part] if rows >= columns else dw[:, part]
        block = _thread.scratch[:target.size].reshape(target.shape)
        if rows >= columns:
            np.matmul(a[part], b, out=block)
        else:
            np.matmul(a, b[:, part], out=block)
        _add_block(target, block)


@njit(parallel=True)
def _add_block(target, block):
    for row in prange(block.shape[0]):
        t = target[row]
        s = block[row]
        for j in range(s.size):
            t[j] += s[j]


@njit(parallel=True)
def _add_bias(y, bias):
    for row in prange(y.shape[0]):
        yr = y[row]
        for j in range(yr.size):
            yr[j] += bias[j]


@njit(parallel=True)
def _add_bias_residual(y, bias, residual):
    for row in prange(y.shape[0]):
        yr = y[row]
        other = residual[row]
        for j in range(yr.size):
            yr[j] += bias[j] + other[j]


@njit(parallel=True, fastmath=FAST)
def _bias_gelu(y, pre_gelu, bias):
    for row in prange(y.shape[0]):
        yr = y[row]
        pre = pre_gelu[row]
        for j in range(yr.size):
            v = pre[j] + bias[j]
            pre[j] = v
            yr[j] = gelu(v)


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
                sums[j] += (r0[j] + r1[j]) + (r2[j] + r3[j])
            row += 4
        while row < last:
            r0 = dy[row]
            for j in range(width):
                sums[j] += r0[j]
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
            total += row[k] * x[k]
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
            x0 = x[k]
            x1 = x[k + 1]
            x2 = x[k + 2]
            x3 = x[k + 3]
            for j in range(width):
                sums[j] += x0 * r0[j] + x1 * r1[j] + x2 * r2[j] + x3 * r3[j]
            k += 4
        while k < last:
            row = w[k]
            factor = x[k]
            for j in range(width):
                sums[j] += factor * row[j]
            k += 1
    for j in range(width):
        y[j] = F(0.0)
    for block in range(blocks):
        sums = partial[block]
        for j in range(width):
            y[j] += sums[j]
