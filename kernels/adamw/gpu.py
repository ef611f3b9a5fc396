"""GPU AdamW: one launch over the flat arrays, one thread per 4 parameters, at memory speed.

The norm is read where grad_norm left it, so that the host need not wait for it.
"""

import math

from ..common.access import ByAccess
from ..common.cuda import Floats, cuda, float32, int64, kernel
from ..common.launch import ceil_div

THREADS = 256


def update(weights, m, v, grads, norm, n_decay: int, lr: float, beta1: float, beta2: float,
           eps: float, weight_decay: float, correction1: float, correction2: float,
           clip: float) -> None:
    """One step on flat float32 arrays [P], in place; decoupled decay on [0, n_decay) only.

    norm [1] is the norm of grads, from kernels.grad_norm; nothing changes if it is not finite.
    """
    words, step = _update.choose(weights.size, weights, m, v, grads)
    step.launch(ceil_div(weights.size, THREADS * words), weights, m, v, grads, norm, weights.size,
                n_decay, 1 - lr * weight_decay, lr / correction1, 1 / correction2,
                beta1, 1 - beta1, beta2, 1 - beta2, eps, clip)


def _make_update(words, load, store):
    @kernel(threads=THREADS, name=f"_update_{words}")
    def _update(weights: Floats, m: Floats, v: Floats, grads: Floats, norm: Floats, n: int64,
                n_decay: int64, keep: float32, step: float32, inverse2: float32, beta1: float32,
                gain1: float32, beta2: float32, gain2: float32, eps: float32, clip: float32):
        w_ = cuda.local.array(words, float32)
        m_ = cuda.local.array(words, float32)
        v_ = cuda.local.array(words, float32)
        g_ = cuda.local.array(words, float32)
        i = words * cuda.grid(1)
        length = norm[0]
        if i < n and abs(length) < float32(math.inf):  # false for NaN too
            scale = float32(1.0)
            if float32(0.0) < clip < length:
                scale = clip / length
            load(w_, weights, i)
            load(m_, m, i)
            load(v_, v, i)
            load(g_, grads, i)
            for j in range(words):
                g = g_[j] * scale
                m_[j] = beta1 * m_[j] + gain1 * g
                v_[j] = beta2 * v_[j] + gain2 * (g * g)
                factor = keep if i + j < n_decay else float32(1.0)
                w_[j] = factor * w_[j] - step * m_[j] / (math.sqrt(v_[j] * inverse2) + eps)
            store(weights, i, w_)
            store(m, i, m_)
            store(v, i, v_)

    return _update


_update = ByAccess(_make_update)
