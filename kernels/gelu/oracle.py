"""GELU (tanh form) in NumPy."""

import math

import numpy as np

SQRT_2_OVER_PI = math.sqrt(2 / math.pi)


def forward(y: np.ndarray, x: np.ndarray) -> None:
    """y = x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 * x^3)))."""
    y[...] = 0.5 * x * (1 + np.tanh(SQRT_2_OVER_PI * (x + 0.044715 * x**3)))


def backward(dx: np.ndarray, dy: np.ndarray, x: np.ndarray) -> None:
    """dx = dy * GELU'(x); dx may be dy itself."""
    tanh = np.tanh(SQRT_2_OVER_PI * (x + 0.044715 * x**3))
    slope = SQRT_2_OVER_PI * (1 + 3 * 0.044715 * x**2)
    dx[...] = dy * (0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * slope)
