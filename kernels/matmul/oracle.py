"""Linear layer in NumPy."""

import numpy as np

from ..gelu.oracle import backward as gelu_backward
from ..gelu.oracle import forward as gelu


def forward(
    y: np.ndarray,
    pre_gelu: np.ndarray | None,
    x: np.ndarray,
    w: np.ndarray,
    bias: np.ndarray | None,
    residual: np.ndarray | None,
    transpose_w: bool,
) -> None:
    """y = x · w + bias, or GELU of it with the sum itself in pre_gelu, or plus residual."""
    linear = y if pre_gelu is None else pre_gelu
    linear[:] = x @ (w.T if transpose_w else w)
    if bias is not None:
        linear += bias
    if pre_gelu is not None:
        gelu(y, pre_gelu)
    if residual is not None:
        y += residual


def backward(
    dx: np.ndarray | None,
    dw: np.ndarray,
    dbias: np.ndarray | None,
    dy: np.ndarray,
    x: np.ndarray,
    w: np.ndarray,
    pre_gelu: np.ndarray | None,
    transpose_w: bool,
) -> None:
    """dx = dy · wᵀ, dw += xᵀ · dy, dbias += column sums of dy.

    With pre_gelu, x is GELU(pre_gelu) and dx the gradient of pre_gelu.
    """
    if dx is not None:
        dx[:] = dy @ (w if transpose_w else w.T)
        if pre_gelu is not None:
            gelu_backward(dx, dx, pre_gelu)
    dw += dy.T @ x if transpose_w else x.T @ dy
    if dbias is not None:
        dbias += dy.sum(axis=0)
