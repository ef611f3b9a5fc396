"""AdamW in NumPy."""

import numpy as np


def update(
    weights: np.ndarray,
    weights_bf16: np.ndarray | None,
    m: np.ndarray,
    v: np.ndarray,
    grads: np.ndarray,
    norm: np.ndarray,
    rates: np.ndarray,
    n_decay: int,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    clip: float,
) -> None:
    """One step of AdamW with clipping to a global norm; nothing changes if norm is not finite.

    rates [3] are lr, correction1 and correction2. Weight decay on elements [0, n_decay) only.
    """
    lr, correction1, correction2 = rates
    if not np.isfinite(norm[0]):
        return
    g = grads * (clip / norm[0] if 0 < clip < norm[0] else 1)
    m[:] = beta1 * m + (1 - beta1) * g
    v[:] = beta2 * v + (1 - beta2) * g**2
    weights[:n_decay] -= lr * weight_decay * weights[:n_decay]
    weights -= lr * (m / correction1) / (np.sqrt(v / correction2) + eps)
    if weights_bf16 is not None:
        weights_bf16[:] = weights
