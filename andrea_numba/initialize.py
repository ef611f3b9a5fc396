"""Initial weights: normal with std 0.02, residual projections smaller, norms at one.

The two matrices of each block that write into the residual stream (w_o, w_2) are scaled by
1/sqrt(2·n_layer), as in GPT-2, so that the variance of the stream does not grow with depth.
Zero projections would make every block the identity, but with a tied head such a model starts
by predicting its own input: its first loss is above ln V, not at it.
"""

from __future__ import annotations

import math

import numpy as np

from .config import ModelConfig
from .parameters import ParameterTable

STD = 0.02


def initialize(table: ParameterTable, weights: np.ndarray, rng: np.random.Generator) -> None:
    """Fill the flat array `weights` [table.size] (zeros on entry) with initial values."""
    residual_std = STD / math.sqrt(2 * table.model.n_layer)
    for name, tensor in table.unpadded(weights).items():
        if tensor.ndim == 2:
            std = residual_std if name.endswith((".w_o", ".w_2")) else STD
            rng.standard_normal(dtype=np.float32, out=tensor)  # no copy of the largest on the way
            tensor *= np.float32(std)
        elif name.endswith("_gamma"):
            tensor[...] = 1.0


def expected_first_loss(model: ModelConfig) -> float:
    """Mean cross-entropy (nats) of a freshly initialised model: ln V + d_model·std²/2.

    The final norm makes rows of length sqrt(d_model), so a logit is normal with variance
    d_model·std²; the mean of ln Σ exp(logit) over such logits is ln V plus half that variance.
    """
    return math.log(model.vocab_size) + model.d_model * STD**2 / 2
