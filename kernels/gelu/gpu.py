"""GPU GELU (tanh form): one thread per 4 elements, limited by memory speed.

`gelu_value` is also the epilogue of matmul.
"""

import math

from ..common.access import ByAccess
from ..common.cuda import Floats, cuda, device_function, float32, int64, kernel
from ..common.launch import ceil_div
from .oracle import SQRT_2_OVER_PI, TAIL

THREADS = 256
_LEFT, _RIGHT = float32(-TAIL), float32(TAIL)


def forward(y, x) -> None:
    """y = GELU(x), any shape."""
    words, elementwise = _forward.choose(x.size, y, x)
    elementwise.launch(ceil_div(x.size, THREADS * words), y, x, x.size)


def backward(dx, dy, x) -> None:
    """dx = dy * GELU'(x); dx may be dy itself."""
    words, elementwise = _backward.choose(x.size, dx, dy, x)
    elementwise.launch(ceil_div(x.size, THREADS * words), dx, dy, x, x.size)


@device_function
def _tanh_u(x):
    """tanh(sqrt(2/pi) * (x + 0.044715 * x^3))"""
    cubic = x + float32(0.044715) * x * x * x
    return math.tanh(float32(SQRT_2_OVER_PI) * cubic)


@device_function
def gelu_value(x):
    """GELU of one float32."""
    x = _LEFT if x < _LEFT else x  # not -infinity * 0
    return float32(0.5) * x * (float32(1.0) + _tanh_u(x))


@device_function
def gelu_slope(x):
    """The derivative of GELU at one float32."""
    x = _LEFT if x < _LEFT else x  # the derivative is constant beyond; max would lose a NaN
    x = _RIGHT if x > _RIGHT else x
    tanh = _tanh_u(x)
    slope = float32(SQRT_2_OVER_PI) * (float32(1.0) + float32(3 * 0.044715) * x * x)
    half_square = float32(0.5) * x * (float32(1.0) - tanh * tanh)
    return float32(0.5) * (float32(1.0) + tanh) + half_square * slope


def _make_forward(words, load, store):
    @kernel(threads=THREADS, name=f"_forward_{words}")
    def _forward(y: Floats, x: Floats, n: int64):
        values = cuda.local.array(words, float32)
        i = words * cuda.grid(1)
        if i < n:
            load(values, x, i)
            for j in range(words):
                values[j] = gelu_value(values[j])
            store(y, i, values)

    return _forward


def _make_backward(words, load, store):
    @kernel(threads=THREADS, name=f"_backward_{words}")
    def _backward(dx: Floats, dy: Floats, x: Floats, n: int64):
        gradients = cuda.local.array(words, float32)
        values = cuda.local.array(words, float32)
        i = words * cuda.grid(1)
        if i < n:
            load(gradients, dy, i)
            load(values, x, i)
            for j in range(words):
                gradients[j] *= gelu_slope(values[j])
            store(dx, i, gradients)

    return _backward


_forward = ByAccess(_make_forward)
_backward = ByAccess(_make_backward)
