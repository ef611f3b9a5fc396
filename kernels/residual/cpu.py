"""CPU residual addition: one parallel pass, limited by memory speed."""

from numba import prange

from ..common.cache import njit
from ..common.cpu_math import BLOCK, flat


def forward(out, x, delta) -> None:
    """out = x + delta, any shape; out may be x."""
    _add(flat(out), flat(x), flat(delta), out is x)


def backward(dx, dout, dbranch) -> None:
    """dx = dout + dbranch: the stream was used twice; dx may be either."""
    if dx is dbranch:
        dout, dbranch = dbranch, dout
    _add(flat(dx), flat(dout), flat(dbranch), dx is dout)


@njit(parallel=True)
def _add(out, x, delta, in_place):
    size = out.size
    for block in prange((size + BLOCK - 1) // BLOCK):
        lo = block * BLOCK
        hi = min(lo + BLOCK, size)
        target = out[lo:hi]
        addend = delta[lo:hi]
        if in_place:  # one pointer: LLVM's overlap test would send out = x to a scalar loop
            for i in range(target.size):
                target[i] += addend[i]
        else:
            source = x[lo:hi]
            for i in range(target.size):
                target[i] = source[i] + addend[i]
