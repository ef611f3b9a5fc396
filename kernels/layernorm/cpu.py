"""CPU LayerNorm: each row is read once from memory; its later passes run in the cache.

Scratch of backward: 2 * 16 rows of d floats (98 KB for d = 768).
"""

import functools
import math

import numpy as np
from numba import prange

from ..common.cache import njit
from ..common.cpu_math import FAST_SUM, F, as_float, stored_in, words

ROW_BLOCKS = 16  # fixed number of partial column sums, whatever the number of threads
FEW = 1 << 13  # elements that one thread norms before others are awake: a token has 25 norms
_NONE = np.empty((0, 0), np.uint16)


def forward(y, mean, rstd, x, gamma, beta, eps: float) -> None:
    """y = gamma * (x - mean) * rstd + beta for each row of x [N,d]; stores mean and rstd [N]."""
    if gamma is None:
        gamma, beta = _identity(x.shape[1])
    arguments = words(y), mean, rstd, x, gamma, beta, F(eps)
    if x.size <= FEW:
        _norm_rows(0, len(x), *arguments)
    else:
        _forward(*arguments)


def backward(dx, dx_bf16, dgamma, dbeta, dy, x, mean, rstd, gamma, residual) -> None:
    """dx = residual + the gradient through the norm; dx_bf16, if not None, gets dx rounded.

    dgamma and dbeta [d] are added to; they are None when the norm has none.
    """
    dy = words(dy)
    dx_bf16 = _NONE if dx_bf16 is None else words(dx_bf16)
    if residual is None:
        residual = _identity(x.shape[1])[1].reshape(1, -1)  # zeros, one row for all
    if gamma is None:
        gamma, _ = _identity(x.shape[1])
        _backward_input(dx, dx_bf16, dy, x, mean, rstd, gamma, residual, dx is residual)
    else:
        _backward(dx, dx_bf16, dgamma, dbeta, dy, x, mean, rstd, gamma, residual, dx is residual)


@functools.lru_cache(maxsize=4)
def _identity(width: int):
    return np.ones(width, np.float32), np.zeros(width, np.float32)


@njit(parallel=True)
def _forward(y, mean, rstd, x, gamma, beta, eps):
    for row in prange(x.shape[0]):
        _norm_rows(row, row + 1, y, mean, rstd, x, gamma, beta, eps)


@njit(fastmath=FAST_SUM)
def _norm_rows(first, last, y, mean, rstd, x, gamma, beta, eps):
    width = x.shape[1]
    inverse_width = F(1.0) / F(width)
    for row in range(first, last):
        xr = x[row]
        yr = y[row]
        total = F(0.0)
        for j in range(width):
            total += xr[j]
        mu = total * inverse_width
        squares = F(0.0)
        for j in range(width):
            squares += (xr[j] - mu) * (xr[j] - mu)
        scale = F(1.0) / math.sqrt(squares * inverse_width + eps)
        for j in range(width):
            yr[j] = stored_in(y, (xr[j] - mu) * scale * gamma[j] + beta[j])
        mean[row] = mu
        rstd[row] = scale


@njit(fastmath=FAST_SUM, forceinline=True)
def _row_gradient(dxr, dxr_bf16, dyr, xr, mu, scale, gamma, straight, in_place):
    """dx = residual + rstd * (g - mean(g) - xhat * mean(g * xhat)) with g = dy * gamma."""
    width = xr.size
    sum_g = F(0.0)
    sum_gx = F(0.0)
    for j in range(width):
        g = as_float(dyr[j]) * gamma[j]
        sum_g += g
        sum_gx += g * (xr[j] - mu)
    mean_g = sum_g / F(width)
    slope = sum_gx * scale * scale / F(width)
    if in_place:  # one pointer: LLVM's overlap test would send it to a scalar loop
        for j in range(width):
            dxr[j] += scale * (as_float(dyr[j]) * gamma[j] - mean_g - (xr[j] - mu) * slope)
    else:
        for j in range(width):
            dxr[j] = straight[j] + scale * (as_float(dyr[j]) * gamma[j] - mean_g
                                            - (xr[j] - mu) * slope)
    for j in range(dxr_bf16.size):
        dxr_bf16[j] = stored_in(dxr_bf16, dxr[j])


@njit(parallel=True, fastmath=FAST_SUM)
def _backward_input(dx, dx_bf16, dy, x, mean, rstd, gamma, residual, in_place):
    for row in prange(x.shape[0]):
        straight = residual[row] if residual.shape[0] > 1 else residual[0]
        _row_gradient(dx[row], dx_bf16[row], dy[row], x[row], mean[row], rstd[row], gamma, straight,
                      in_place)


@njit(parallel=True, fastmath=FAST_SUM)
def _backward(dx, dx_bf16, dgamma, dbeta, dy, x, mean, rstd, gamma, residual, in_place):
    rows, width = x.shape
    blocks = min(ROW_BLOCKS, rows)
    partial = np.zeros((2, blocks, width), np.float32)
    for block in prange(blocks):
        sums_gamma = partial[0, block]
        sums_beta = partial[1, block]
        for row in range(block * rows // blocks, (block + 1) * rows // blocks):
            xr = x[row]
            dyr = dy[row]
            mu = mean[row]
            scale = rstd[row]
            for j in range(width):
                sums_gamma[j] += as_float(dyr[j]) * ((xr[j] - mu) * scale)
                sums_beta[j] += as_float(dyr[j])
            straight = residual[row] if residual.shape[0] > 1 else residual[0]
            _row_gradient(dx[row], dx_bf16[row], dyr, xr, mu, scale, gamma, straight, in_place)
    for block in range(blocks):
        sums_gamma = partial[0, block]
        sums_beta = partial[1, block]
        for j in range(width):
            dgamma[j] += sums_gamma[j]
        for j in range(width):
            dbeta[j] += sums_beta[j]
