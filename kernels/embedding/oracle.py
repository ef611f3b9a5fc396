"""Token and position embedding in NumPy."""

import numpy as np


def forward(x: np.ndarray, ids: np.ndarray, wte: np.ndarray, wpe: np.ndarray, start: int) -> None:
    """x[b*T + t] = wte[ids[b, t]] + wpe[start + t]."""
    T = ids.shape[1]
    x[:] = (wte[ids] + wpe[start : start + T]).reshape(x.shape)


def backward(
    dwte: np.ndarray, dwpe: np.ndarray, dx: np.ndarray, ids: np.ndarray, start: int
) -> None:
    """Add each row of dx to the row of dwte and the row of dwpe that made it."""
    B, T = ids.shape
    np.add.at(dwte, ids.reshape(-1), dx)
    dwpe[start : start + T] += dx.reshape(B, T, -1).sum(axis=0)
