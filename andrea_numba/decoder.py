"""The model as a sampler sees it: read a prompt, then one token at a time."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from kernels.matmul.cpu_stored import store

from . import model
from .buffers import PRECISIONS, Buffers
from .config import ModelConfig
from .memory import HOST


class Decoder:
    """Next-token logits for one sequence of at most `context` tokens.

    With `cache` the keys and values of earlier tokens are kept, so a step reads each weight
    once; without it a step runs the whole window again. The logits are the same up to rounding.
    """

    def __init__(self, config: ModelConfig, p, ops, cache: bool = True,
                 buffers: Buffers | None = None, memory=HOST, stored: str = ""):
        """`p` (a `ParameterTable`'s views) and `buffers` lie in `memory`; `buffers` lends those of
        a trainer of the same model, by default the decoder has its own. With `stored` (fp32, bf16
        or int8) it makes a copy of `p`, of which a CPU reads the matrices of products faster."""
        self.context = config.context
        self.length = 0
        self._config, self._ops, self._memory = config, ops, memory
        self._p = _stored(p, stored) if stored else p
        self._buffers = buffers or Buffers(config, 1, config.context, False, memory=memory)
        self._transfers, self._graphs = memory.transfers(config.context), memory.graphs()
        self._ids = np.zeros((1, config.context), np.int32)
        self._cache = None
        if cache:
            shape = (1, config.n_head, config.context, config.head_dim)
            size, dtype = config.context * config.d_model, PRECISIONS[memory.precision]
            self._cache = [SimpleNamespace(k=memory.zeros(size, dtype).reshape(shape),
                                           v=memory.zeros(size, dtype).reshape(shape))
                           for _ in range(config.n_layer)]

    def prefill(self, ids: np.ndarray) -> np.ndarray:
        """Start afresh with `ids` [1 … context]; logits [vocab_size] for what comes next."""
        if not 1 <= len(ids) <= self.context:
            raise ValueError(f"prefill takes 1 to {self.context} tokens, got {len(ids)}")
        self.length = len(ids)
        self._ids[0, :self.length] = ids
        return self._read_all()

    def step(self, token: int) -> np.ndarray:
        """Append one token; logits [vocab_size] for what comes next."""
        if self.length == self.context:
            raise ValueError(f"the window of {self.context} tokens is full: prefill again")
        self._ids[0, self.length] = token
        self.length += 1
        if self._cache is None:
            return self._read_all()
        ids, start = self._transfers.upload(self._ids[:, self.length - 1:self.length],
                                            np.array([self.length - 1], np.int32))
        self._graphs.replay("decode", (ids, start), lambda: self._run(ids, start))
        return self._logits()

    def _read_all(self) -> np.ndarray:
        ids, = self._transfers.upload(np.ascontiguousarray(self._ids[:, :self.length]))
        self._run(ids, None)
        return self._logits()

    def _run(self, ids, start) -> None:
        a = self._buffers.views(*ids.shape)
        model.forward(self._ops, self._p, a, ids, start, self._cache)
        model.head(self._ops, self._p, a.logits[:1], a.ln_f[-1:])                   # [1, V]

    def _logits(self) -> np.ndarray:
        logits = self._memory.get(self._buffers.views(1, 1).logits)[0]
        return logits[:self._config.vocab_size].astype(np.float32)


def _stored(p, kind: str) -> SimpleNamespace:
    """A copy of float32 views whose matrices of products are `StoredMatrix`."""
    top = {name: _kept(name, value, kind) for name, value in vars(p).items()
           if name not in ("blocks", "head", "w_head")}
    blocks = [SimpleNamespace(**{name: _kept(name, value, kind)
                                 for name, value in vars(block).items()}) for block in p.blocks]
    return SimpleNamespace(**top, blocks=blocks, head=store(p.head, kind, True))


def _kept(name: str, value: np.ndarray | None, kind: str):
    if value is None:
        return None
    return store(value, kind, False) if name.startswith("w_") else value.copy()
