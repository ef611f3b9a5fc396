"""The model as a sampler sees it: read a prompt, then one token at a time."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from . import model
from .buffers import Buffers
from .config import ModelConfig
from .memory import HOST
from .parameters import ParameterTable


class Decoder:
    """Next-token logits for one sequence of at most `context` tokens.

    With `cache` the keys and values of earlier tokens are kept, so a step reads each weight
    once; without it a step runs the whole window again. The logits are the same up to rounding.
    """

    def __init__(self, config: ModelConfig, weights, ops, cache: bool = True,
                 buffers: Buffers | None = None, memory=HOST):
        """`weights` and `buffers` lie in `memory`; `buffers` lends those of a trainer of the same
        model, by default the decoder has its own."""
        self.context = config.context
        self.length = 0
        self._config, self._ops, self._memory = config, ops, memory
        self._p = ParameterTable(config).views(weights)
        self._buffers = buffers or Buffers(config, 1, config.context, False, memory=memory)
        self._transfers = memory.transfers(config.context)
        self._ids = np.zeros((1, config.context), np.int32)
        self._cache = None
        if cache:
            shape = (1, config.n_head, config.context, config.head_dim)
            size = config.context * config.d_model
            self._cache = [SimpleNamespace(k=memory.zeros(size).reshape(shape),
                                           v=memory.zeros(size).reshape(shape))
                           for _ in range(config.n_layer)]

    def prefill(self, ids: np.ndarray) -> np.ndarray:
        """Start afresh with `ids` [1 … context]; logits [vocab_size] for what comes next."""
        if not 1 <= len(ids) <= self.context:
            raise ValueError(f"prefill takes 1 to {self.context} tokens, got {len(ids)}")
        self.length = len(ids)
        self._ids[0, :self.length] = ids
        return self._logits(self._ids[:, :self.length], 0)

    def step(self, token: int) -> np.ndarray:
        """Append one token; logits [vocab_size] for what comes next."""
        if self.length == self.context:
            raise ValueError(f"the window of {self.context} tokens is full: prefill again")
        self._ids[0, self.length] = token
        self.length += 1
        if self._cache is None:
            return self._logits(self._ids[:, :self.length], 0)
        return self._logits(self._ids[:, self.length - 1:self.length], self.length - 1)

    def _logits(self, ids: np.ndarray, start: int) -> np.ndarray:
        ids, = self._transfers.upload(np.ascontiguousarray(ids))
        a = self._buffers.views(*ids.shape)
        model.forward(self._ops, self._p, a, ids, start, self._cache)
        logits = a.logits[:1]
        model.head(self._ops, self._p, logits, a.ln_f[-1:])                         # [1, V]
        return self._memory.get(logits)[0, :self._config.vocab_size]
