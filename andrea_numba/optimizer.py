"""One update: global gradient norm, clipping, AdamW over the flat arrays."""

from __future__ import annotations

import numpy as np

from kernels.common.spec import BFLOAT16

from .config import OptimizerConfig
from .memory import HOST
from .parameters import ParameterTable

RATES = 3  # numbers that change from step to step: learning rate and both bias corrections


class Optimizer:
    """AdamW (Loshchilov & Hutter, 2019) with global-norm clipping.

    Weight decay applies to every matrix, both embedding tables included (the token table is
    the output projection too when tied), and to no bias, gain or offset.
    `step` counts updates asked for; `m` and `v` [table.size] are the moments, `norm` [1] the
    gradient norm before clipping. Once it is not finite it stays so, and no update changes
    anything, until it is set to zero.
    """

    def __init__(self, ops, table: ParameterTable, config: OptimizerConfig, memory=HOST):
        self.ops, self.table, self.config = ops, table, config
        self.step = 0
        self.m = memory.zeros(table.size)
        self.v = memory.zeros(table.size)
        self.norm = memory.zeros(1)
        self._transfers, self._graphs = memory.transfers(RATES), memory.graphs()

    def require_finite(self, values) -> None:
        """Make `norm` not finite if any of the float32 `values` is not."""
        self.ops.grad_norm.forward(self.norm, values, self.norm)

    def update(self, weights, operands, grads, lr: float) -> None:
        """Change `weights` in place, and `operands`, the same in bfloat16, if it is not None.

        Gradients longer than `clip` count as scaled down to it.
        """
        c = self.config
        self.step += 1
        # float64 on the host: 1 - beta^t loses all digits in float32 for beta near one.
        rates = np.array([lr, 1.0 - c.beta1**self.step, 1.0 - c.beta2**self.step], np.float32)
        rates = self._transfers.upload(rates.view(np.int32))[0].view(np.float32)

        def work():
            self.require_finite(grads)
            self.ops.adamw.update(weights, operands, self.m, self.v, grads, self.norm, rates,
                                  self.table.n_decay, c.beta1, c.beta2, c.eps, c.weight_decay,
                                  c.clip)

        self._graphs.replay("update", (weights, grads, rates), work)


def as_operands(memory, weights):
    """The float32 `weights` as operands of products in this memory; None where they are that."""
    if memory.precision == "fp32":
        return None
    return memory.put(memory.get(weights).astype(BFLOAT16))
