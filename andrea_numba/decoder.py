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
    """Next-token logits for up to `batch` sequences of one length, at most `context` tokens.

    With `cache` the keys and values of earlier tokens are kept, so a step reads each weight
    once, for all sequences; without it, which is for one sequence, a step runs the whole window
    again. The logits are the same up to rounding.
    """

    def __init__(self, config: ModelConfig, p, ops, cache: bool = True,
                 buffers: Buffers | None = None, memory=HOST, stored: str = "", batch: int = 1):
        """`p` (a `ParameterTable`'s views) and `buffers` lie in `memory`; `buffers` lends those of
        a trainer of the same model, by default the decoder has its own. With `stored` (fp32, bf16
        or int8) it makes a copy of `p`, of which a CPU reads the matrices of products faster; with
        bf16 or int8 keys and values are kept in bfloat16."""
        self.context = config.context
        self.length = 0
        self._config, self._ops, self._memory = config, ops, memory
        self._p = stored_views(p, stored) if stored else p
        self._buffers = buffers or Buffers(config, batch, -(-config.context // batch), False,
                                           memory=memory)  # one sequence is read at a time
        self._transfers, self._graphs = memory.transfers(config.context), memory.graphs()
        self._ids = np.zeros((batch, config.context), np.int32)
        self._cache = None
        if cache:
            kept = memory.precision if stored in ("", "fp32") else "bf16"
            size, dtype = config.context * config.d_model, PRECISIONS[kept]
            self._cache = [[memory.zeros(batch * size, dtype) for _ in "kv"]
                           for _ in range(config.n_layer)]

    def prefill(self, ids: np.ndarray) -> np.ndarray:
        """Start afresh with `ids` [1 … context]; logits [vocab_size] for what comes next."""
        return self.prefill_rows(np.asarray(ids)[None])[0]

    def prefill_rows(self, ids: np.ndarray) -> np.ndarray:
        """Start each sequence afresh with a row of `ids`; a row of logits for each."""
        if not 1 <= ids.shape[1] <= self.context:
            raise ValueError(f"prefill takes 1 to {self.context} tokens, got {ids.shape[1]}")
        self.length = ids.shape[1]
        self._ids[:len(ids), :self.length] = ids
        self._whole_cache = self._cache_of(0, len(ids))
        first = self._read_all(0)
        if len(ids) > 1 and (ids == ids[0]).all():  # samples of one prompt
            for kept in self._whole_cache:
                kept.k[1:, :, :self.length] = kept.k[0, :, :self.length]
                kept.v[1:, :, :self.length] = kept.v[0, :, :self.length]
            return np.repeat(first, len(ids), axis=0)
        return np.concatenate([first, *(self._read_all(row) for row in range(1, len(ids)))])

    def step(self, token: int) -> np.ndarray:
        """Append one token; logits [vocab_size] for what comes next."""
        return self.step_rows(np.array([token]))[0]

    def step_rows(self, tokens: np.ndarray) -> np.ndarray:
        """Append a token to each sequence; a row of logits for each."""
        if self.length == self.context:
            raise ValueError(f"the window of {self.context} tokens is full: prefill again")
        batch = len(tokens)
        self._ids[:batch, self.length] = tokens
        self.length += 1
        if self._cache is None:
            return self._read_all(0)
        ids, start = self._transfers.upload(
            np.ascontiguousarray(self._ids[:batch, self.length - 1:self.length]),
            np.array([self.length - 1], np.int32))
        self._graphs.replay("decode", (ids, start),
                            lambda: self._run(ids, start, self._whole_cache))
        return self._logits(batch)

    def _read_all(self, row: int) -> np.ndarray:
        ids, = self._transfers.upload(np.ascontiguousarray(self._ids[row:row + 1, :self.length]))
        self._run(ids, None, self._cache_of(row, 1))
        return self._logits(1)

    def _run(self, ids, start, cache) -> None:
        batch = len(ids)
        a = self._buffers.views(*ids.shape)
        model.forward(self._ops, self._p, a, ids, start, cache)
        model.head(self._ops, self._p, a.logits[:batch], a.ln_f[-batch:])           # [B, V]

    def _cache_of(self, row: int, batch: int) -> list[SimpleNamespace] | None:
        """Keys and values of `batch` sequences from `row` on."""
        if self._cache is None:
            return None
        size = self.context * self._config.d_model
        shape = (batch, self._config.n_head, self.context, self._config.head_dim)
        return [SimpleNamespace(**{name: flat[row * size:(row + batch) * size].reshape(shape)
                                   for name, flat in zip("kv", pair, strict=True)})
                for pair in self._cache]

    def _logits(self, batch: int) -> np.ndarray:
        logits = self._memory.get(self._buffers.views(batch, 1).logits)
        return logits[:, :self._config.vocab_size].astype(np.float32)


def stored_views(p, kind: str) -> SimpleNamespace:
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
