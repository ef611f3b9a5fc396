"""Global norm of the gradients in NumPy."""

import numpy as np


def forward(norm: np.ndarray, grads: np.ndarray, previous: np.ndarray | None) -> None:
    """norm[0] = sqrt(sum(grads^2)), but NaN if previous[0] is not finite."""
    stopped = previous is not None and not np.isfinite(previous[0])
    norm[0] = np.nan if stopped else np.sqrt(np.sum(grads**2))
