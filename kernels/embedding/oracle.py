"""Token and position embedding in NumPy."""

import numpy as np


def forward(x: np.ndarray, ids: np.ndarray, wte: np.ndarray, wpe: np.ndarray,
            start: np.ndarray | None) -> None:
    """x[b*T + t] = wte[ids[b, t]] + wpe[start + t]; start is 0 where it is None."""
    first, T = 0 if start is None else start[0], ids.shape[1]
    x[:] = (wte[ids] + wpe[first : first + T]).reshape(x.shape)


def backward(dwte: np.ndarray, dwpe: np.ndarray, dx: np.ndarray, ids: np.ndarray) -> None:
    """Add each row of dx to the row of dwte and the row of dwpe that made it."""
    B, T = ids.shape
    np.add.at(dwte, ids.reshape(-1), dx)
    dwpe[:T] += dx.reshape(B, T, -1).sum(axis=0)
