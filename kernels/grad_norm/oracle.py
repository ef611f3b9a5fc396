"""Global norm of the gradients in NumPy."""

import numpy as np


def forward(norm: np.ndarray, grads: np.ndarray) -> None:
    """norm[0] = sqrt(sum(grads^2))."""
    norm[0] = np.sqrt(np.sum(grads**2))
