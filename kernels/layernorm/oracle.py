"""Layer normalization in NumPy."""

import numpy as np


def forward(
    y: np.ndarray,
    mean: np.ndarray,
    rstd: np.ndarray,
    x: np.ndarray,
    gamma: np.ndarray | None,
    beta: np.ndarray | None,
    eps: float,
) -> None:
    """y = gamma * (x - mean) * rstd + beta, with rstd = 1 / sqrt(var + eps) of each row."""
    mean[:] = x.mean(axis=1)
    centred = x - mean[:, None]
    rstd[:] = 1 / np.sqrt((centred**2).mean(axis=1) + eps)
    xhat = centred * rstd[:, None]
    y[:] = xhat if gamma is None else gamma * xhat + beta


def backward(
    dx: np.ndarray,
    dx_bf16: np.ndarray | None,
    dgamma: np.ndarray | None,
    dbeta: np.ndarray | None,
    dy: np.ndarray,
    x: np.ndarray,
    mean: np.ndarray,
    rstd: np.ndarray,
    gamma: np.ndarray | None,
    residual: np.ndarray | None,
) -> None:
    """dx = residual + rstd * (g - mean(g) - xhat * mean(g * xhat)) with g = gamma * dy."""
    xhat = (x - mean[:, None]) * rstd[:, None]
    g = dy if gamma is None else gamma * dy
    through_mean = g.mean(axis=1, keepdims=True)
    through_rstd = (g * xhat).mean(axis=1, keepdims=True)
    through_norm = rstd[:, None] * (g - through_mean - xhat * through_rstd)
    dx[:] = through_norm if residual is None else residual + through_norm
    if dx_bf16 is not None:
        dx_bf16[:] = dx
    if gamma is not None:
        dgamma += (dy * xhat).sum(axis=0)
        dbeta += dy.sum(axis=0)
