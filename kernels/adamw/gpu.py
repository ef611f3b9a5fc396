"""GPU AdamW: one launch over the flat arrays, one thread per 4 parameters, at memory speed.

The norm is read where grad_norm left it, so that the host need not wait for it, and the rates from
memory, so that a recorded launch can be repeated with others.
"""

import math

from ..common.access import BFLOATS, ByAccess
from ..common.cuda import Bfloats, Floats, cuda, float32, int32, int64, kernel
from ..common.launch import ceil_div

THREADS = 256


def update(weights, weights_bf16, m, v, grads, norm, rates, n_decay: int, beta1: float,
           beta2: float, eps: float, weight_decay: float, clip: float) -> None:
    """One step on flat float32 arrays [P], in place; decoupled decay on [0, n_decay) only.

    norm [1] is the norm of grads, from kernels.grad_norm; nothing changes if it is not finite.
    rates [3] are lr, correction1 and correction2. weights_bf16 [P], if given, gets the new
    weights rounded.
    """
    words, step = _update.choose(weights.size, weights, weights_bf16, m, v, grads)
    step.launch(ceil_div(weights.size, THREADS * words), weights, weights_bf16, m, v, grads, norm,
                rates, weights.size, n_decay, weight_decay, beta1, 1 - beta1, beta2, 1 - beta2,
                eps, clip, weights_bf16 is not None)


def _make_update(words, load, store):
    store_bf16 = BFLOATS[words].store

    @kernel(threads=THREADS, name=f"_update_{words}")
    def _update(weights: Floats, weights_bf16: Bfloats, m: Floats, v: Floats, grads: Floats,
                norm: Floats, rates: Floats, n: int64, n_decay: int64, weight_decay: float32,
                beta1: float32, gain1: float32, beta2: float32, gain2: float32, eps: float32,
                clip: float32, rounded: int32):
        w_ = cuda.local.array(words, float32)
        m_ = cuda.local.array(words, float32)
        v_ = cuda.local.array(words, float32)
        g_ = cuda.local.array(words, float32)
        i = words * cuda.grid(1)
        length = norm[0]
        if i < n and abs(length) < float32(math.inf):  # false for NaN too
            keep = float32(1.0) - rates[0] * weight_decay
            step = rates[0] / rates[1]
            inverse2 = float32(1.0) / rates[2]
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
            if rounded:
                store_bf16(weights_bf16, i, w_)
            store(m, i, m_)
            store(v, i, v_)

    return _update


_update = ByAccess(_make_update)
