"""CPU GELU (tanh form): with u = sqrt(2/pi) (v + 0.044715 v^3), 0.5 (1 + tanh u) is the sigmoid
s = 1 / (1 + exp(-2u)), so GELU = v s: one exponential and one reciprocal per element.
"""

import math

from numba import prange

from ..common.cache import njit
from ..common.cpu_math import BLOCK, FAST, F, exp2_normal, flat
from ..common.simd import reciprocal, where_less
from .oracle import TAIL

_SLOPE = 2.0 * math.sqrt(2.0 / math.pi)  # 2u = _SLOPE * (v + 0.044715 v^3)
_C, _C3 = F(_SLOPE), F(3.0 * 0.044715 * _SLOPE)  # its derivative: _C + _C3 * v^2
_E, _E3 = (F(-c * _SLOPE * math.log2(math.e)) for c in (1.0, 0.044715))  # 2**x = exp(-2u)
_LEFT, _RIGHT = F(-TAIL), F(TAIL)


def forward(y, x) -> None:
    """y = GELU(x), any shape."""
    _forward(flat(y), flat(x), y is x)


def backward(dx, dy, x) -> None:
    """dx = dy * GELU'(x); dx may be dy itself."""
    _backward(flat(dx), flat(dy), flat(x), dx is dy)


@njit(fastmath=FAST, forceinline=True)
def gelu(v):
    """GELU of a float32, or of each lane of a vector."""
    e = exp2_normal(v * (_E + _E3 * (v * v)))
    return where_less(v, _LEFT, F(0.0), v * reciprocal(F(1.0) + e))


@njit(fastmath=FAST, forceinline=True)
def gelu_slope(v):
    """GELU' of a float32, or of each lane of a vector."""
    e = exp2_normal(v * (_E + _E3 * (v * v)))
    s = reciprocal(F(1.0) + e)
    # s (1 - s) d(2u)/dv, with 1 - s = e s free of cancellation
    slope = (e * s) * s * (v * (_C + _C3 * (v * v)))
    s = where_less(_RIGHT, v, F(1.0), s + slope)  # beyond, slope overflows
    return where_less(v, _LEFT, F(0.0), s)


@njit(parallel=True, fastmath=FAST)
def _forward(y, x, in_place):
    size = x.size
    for block in prange((size + BLOCK - 1) // BLOCK):
        lo = block * BLOCK
        hi = min(lo + BLOCK, size)
        source = x[lo:hi]
        target = y[lo:hi]
        if in_place:
            for i in range(target.size):
                target[i] = gelu(target[i])
        else:
            for i in range(target.size):
                target[i] = gelu(source[i])


@njit(parallel=True, fastmath=FAST)
def _backward(dx, dy, x, in_place):
    """Copy, then in place: the vectorised loop needs dx and dy to be one array or apart."""
    size = x.size
    for block in prange((size + BLOCK - 1) // BLOCK):
        lo = block * BLOCK
        hi = min(lo + BLOCK, size)
        gradient = dx[lo:hi]
        value = x[lo:hi]
        if not in_place:
            upstream = dy[lo:hi]
            for i in range(gradient.size):
                gradient[i] = upstream[i]
        for i in range(gradient.size):
            gradient[i] *= gelu_slope(value[i])
