"""One update: global gradient norm, clipping, AdamW over the flat arrays."""

from __future__ import annotations

import numpy as np

from .config import OptimizerConfig
from .parameters import ParameterTable


class Optimizer:
    """AdamW (Loshchilov & Hutter, 2019) with global-norm clipping.

    Weight decay applies to every matrix, both embedding tables included (the token table is
    the output projection too when tied), and to no bias, gain or offset.
    `step` counts updates made; `m` and `v` [table.size] are the moments.
    """

    def __init__(self, ops, table: ParameterTable, config: OptimizerConfig):
        self.ops, self.table, self.config = ops, table, config
        self.step = 0
        self.m = table.zeros()
        self.v = table.zeros()
        self._norm = np.zeros(1, np.float32)

    def gradient_norm(self, grads: np.ndarray) -> float:
        """L2 norm over all gradients before clipping; not finite when any element is not."""
        self.ops.grad_norm.forward(self._norm, grads)
        return float(self._norm[0])

    def update(self, weights: np.ndarray, grads: np.ndarray, lr: float, grad_norm: float) -> None:
        """Change `weights` in place; the gradients count as scaled down to norm `clip`."""
        c = self.config
        self.step += 1
        # float64 on the host: 1 - beta^t loses all digits in float32 for beta near one.
        correction1 = 1.0 - c.beta1**self.step
        correction2 = 1.0 - c.beta2**self.step
        scale = c.clip / grad_norm if c.clip and grad_norm > c.clip else 1.0
        self.ops.adamw.update(weights, self.m, self.v, grads, self.table.n_decay, lr,
                              c.beta1, c.beta2, c.eps, c.weight_decay,
                              correction1, correction2, scale)


