"""Products by NumPy's BLAS, for processors without the vectors that cpu_product needs.

Scratch: 4 MB per calling thread, the block of a weight gradient that is added to dw while it is
still in the cache.
"""

import numpy as np
from numba import prange

from ..common.cache import njit
from ..common.cpu_tile import scratch
from ..gelu.cpu import backward as times_gelu_slope
from ..gelu.cpu import forward as gelu

SCRATCH_ELEMENTS = 1 << 20


def linear(y, pre_gelu, x, w, bias, residual, transpose_w: bool) -> None:
    """y = x·w + bias, or x·wᵀ + bias, and what follows; see cpu.forward."""
    sums = y if pre_gelu is None else pre_gelu
    np.matmul(x, w.T if transpose_w else w, out=sums)
    finish_row(y, pre_gelu, sums, bias, residual)


def finish_row(y, pre_gelu, sums, bias, residual) -> None:
    """Bias, and GELU or residual, on sums [N] of one row; or [M, N], which y or pre_gelu may be."""
    if bias is not None:
        sums += bias
    if pre_gelu is not None:
        pre_gelu[...] = sums
        gelu(y, pre_gelu)
    else:
        np.add(sums, 0 if residual is None else residual, out=y)


def input_gradient(dx, dy, w, pre_gelu, transpose_w: bool) -> None:
    """dx = dy·wᵀ, or dy·w, times GELU'(pre_gelu) if that is given."""
    np.matmul(dy, w if transpose_w else w.T, out=dx)
    if pre_gelu is not None:
        times_gelu_slope(dx, dx, pre_gelu)


def add_product(dw, a, b) -> None:
    """dw [rows, columns] += aᵀ·b for a [M, rows] and b [M, columns].

    In blocks along dw's longer side, so that a block of any shape stays squarish.
    """
    rows, columns = dw.shape
    longer, shorter = max(rows, columns), min(rows, columns)
    blocks = -(-longer * shorter // SCRATCH_ELEMENTS)
    size = min((-(-longer // blocks) + 15) // 16 * 16, max(1, SCRATCH_ELEMENTS // shorter))
    for lo in range(0, longer, size):
        part = slice(lo, min(lo + size, longer))
        target = dw[part] if rows >= columns else dw[:, part]
        block = scratch("b", np.float32, target.size).reshape(target.shape)
        if rows >= columns:
            np.matmul(a[:, part].T, b, out=block)
        else:
            np.matmul(a.T, b[:, part], out=block)
        _add_block(target, block)


@njit(parallel=True)
def _add_block(target, block):
    for row in prange(block.shape[0]):
        t = target[row]
        s = block[row]
        for j in range(s.size):
            t[j] += s[j]
