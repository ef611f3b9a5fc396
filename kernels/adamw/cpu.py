"""CPU AdamW: one fused pass over the flat arrays (28 bytes per parameter), at memory speed."""

import math

import numpy as np
from numba import prange

from ..common.cache import njit
from ..common.cpu_math import BLOCK, FAST, F, stored_in, words

_NONE = np.empty(0, np.uint16)


def update(weights, weights_bf16, m, v, grads, norm, rates, n_decay: int, beta1: float,
           beta2: float, eps: float, weight_decay: float, clip: float) -> None:
    """One step on flat float32 arrays [P], in place; decoupled decay on [0, n_decay) only.

    norm [1] is the norm of grads, from kernels.grad_norm; nothing changes if it is not finite.
    rates [3] are lr, correction1 and correction2. weights_bf16, if not None, gets the weights
    rounded.
    """
    lr, correction1, correction2 = rates.tolist()
    length = float(norm[0])
    if not math.isfinite(length):
        return
    grad_scale = clip / length if 0 < clip < length else 1.0
    weights_bf16 = _NONE if weights_bf16 is None else words(weights_bf16)
    _update(weights, weights_bf16, m, v, grads, n_decay, F(1.0 - lr * weight_decay),
            F(lr / correction1), F(1.0 / correction2), F(beta1), F(1.0 - beta1), F(beta2),
            F(1.0 - beta2), F(eps), F(grad_scale))


@njit(parallel=True, fastmath=FAST)
def _update(weights, weights_bf16, m, v, grads, n_decay, keep, step, inverse2, beta1, gain1, beta2,
            gain2, eps, grad_scale):
    size = weights.size
    for block in prange((size + BLOCK - 1) // BLOCK):
        lo = block * BLOCK
        hi = min(lo + BLOCK, size)
        middle = min(max(lo, n_decay), hi)
        for part in range(2):
            first = lo if part == 0 else middle
            last = middle if part == 0 else hi
            factor = keep if part == 0 else F(1.0)
            w_ = weights[first:last]  # slices start at 0: no test for a negative index
            m_ = m[first:last]
            v_ = v[first:last]
            g_ = grads[first:last]
            for i in range(w_.size):
                g = g_[i] * grad_scale
                mean = beta1 * m_[i] + gain1 * g
                square = beta2 * v_[i] + gain2 * (g * g)
                m_[i] = mean
                v_[i] = square
                w_[i] = factor * w_[i] - step * mean / (math.sqrt(square * inverse2) + eps)
        rounded = weights_bf16[lo:hi]
        w_ = weights[lo:hi]
        for i in range(rounded.size):
            rounded[i] = stored_in(rounded, w_[i])
