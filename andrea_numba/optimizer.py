"""One update: global gradient norm, clipping, AdamW over the flat arrays."""

from __future__ import annotations

from .config import OptimizerConfig
from .memory import HOST
from .parameters import ParameterTable


class Optimizer:
    """AdamW (Loshchilov & Hutter, 2019) with global-norm clipping.

    Weight decay applies to every matrix, both embedding tables included (the token table is
    the output projection too when tied), and to no bias, gain or offset.
    `step` counts updates made; `m` and `v` [table.size] are the moments.
    """

    def __init__(self, ops, table: ParameterTable, config: OptimizerConfig, memory=HOST):
        self.ops, self.table, self.config = ops, table, config
        self.step = 0
        self.m = memory.zeros(table.size)
        self.v = memory.zeros(table.size)
        self.norm = memory.zeros(1)

    def gradient_norm(self, grads):
        """L2 norm [1] over all gradients before clipping; not finite when any element is not.

        It stays in `norm` for the update that follows.
        """
        self.ops.grad_norm.forward(self.norm, grads)
        return self.norm

    def update(self, weights, grads, lr: float) -> None:
        """Change `weights` in place; gradients above `clip` in `norm` count as scaled down to it.

        Call `gradient_norm(grads)` first. A norm that is not finite changes nothing at all.
        """
        c = self.config
        self.step += 1
        # float64 on the host: 1 - beta^t loses all digits in float32 for beta near one.
        correction1 = 1.0 - c.beta1**self.step
        correction2 = 1.0 - c.beta2**self.step
        self.ops.adamw.update(weights, self.m, self.v, grads, self.norm, self.table.n_decay, lr,
                              c.beta1, c.beta2, c.eps, c.weight_decay,
                              correction1, correction2, c.clip)


