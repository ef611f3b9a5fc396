"""GELU (tanh form) in NumPy."""

import math

import numpy as np

SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
# From |x| = 10 on tanh u is 1 or -1, in float64 too, and exp(2u) is near the largest float32; far
# beyond x^3 overflows.
TAIL = 10


def forward(y: np.ndarray, x: np.ndarray) -> None:
    """y = x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 * x^3)))."""
    x = np.maximum(x, -TAIL)  # not -infinity * 0
    y[...] = 0.5 * x * (1 + _tanh_u(np.minimum(x, TAIL)))


def backward(dx: np.ndarray, dy: np.ndarray, x: np.ndarray) -> None:
    """dx = dy * GELU'(x); dx may be dy itself."""
    x = np.clip(x, -TAIL, TAIL)  # the derivative is constant beyond
    tanh = _tanh_u(x)
    slope = SQRT_2_OVER_PI * (1 + 3 * 0.044715 * x**2)
    dx[...] = dy * (0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * slope)


def _tanh_u(x: np.ndarray) -> np.ndarray:
    return np.tanh(SQRT_2_OVER_PI * (x + 0.044715 * x**3))
