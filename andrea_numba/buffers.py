"""Every activation and activation gradient, allocated once before the first step.

`plan` lists name, group and shape of each buffer, so that the bytes can be printed and refused
before anything is allocated; `Buffers` carves them out of one arena and hands out named views,
also for smaller batches and shorter sequences than planned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from .config import ModelConfig
from .memory import HOST
from .parameters import ALIGNMENT


@dataclass(frozen=True)
class Buffer:
    """One planned array of 4-byte elements (8-byte in the float64 reference)."""

    group: str
    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def _block(model: ModelConfig, batch: int, length: int) -> dict[str, tuple[int, ...]]:
    """What one block keeps for its backward pass."""
    n, d = batch * length, model.d_model
    return {
        "ln_1": (n, d), "ln_1_mean": (n,), "ln_1_rstd": (n,),
        "qkv": (n, 3 * d), "attn": (n, d), "lse": (batch, model.n_head, length),
        "x_mid": (n, d),
        "ln_2": (n, d), "ln_2_mean": (n,), "ln_2_rstd": (n,),
        "fc": (n, 4 * d), "fc_gelu": (n, 4 * d),
        "x_out": (n, d),
    }


def plan(model: ModelConfig, batch: int, length: int, training: bool) -> list[Buffer]:
    """The buffers of a forward pass over [batch, length] ids, and of its backward if `training`.

    Without training all blocks share one set, and logits exist for the last position alone.
    """
    n, d, vocabulary = batch * length, model.d_model, model.padded_vocab_size
    shapes = [("activations", "x", (n, d)), ("activations", "delta", (n, d))]
    for layer in range(model.n_layer if training else 1):
        shapes += [("activations", f"blocks.{layer}.{name}", shape)
                   for name, shape in _block(model, batch, length).items()]
    shapes += [("activations", "ln_f", (n, d)), ("activations", "ln_f_mean", (n,)),
               ("activations", "ln_f_rstd", (n,))]
    rows = n if training else batch
    shapes += [("logits", "logits", (rows, vocabulary)), ("logits", "losses", (rows,))]
    if training:
        shapes += [("activation gradients", name, shape) for name, shape in {
            "dx": (n, d), "dbranch": (n, d), "dln": (n, d), "dattn": (n, d),
            "dqkv": (n, 3 * d), "dfc": (n, 4 * d),
        }.items()]
    return [Buffer(*entry) for entry in shapes]


class Buffers:
    """The planned buffers in one arena.

    `views(batch, length)` gives a namespace `.x .delta .blocks[i].qkv … .logits .losses .dx …`
    for any batch and length whose arrays fit into the planned ones.
    """

    def __init__(self, model: ModelConfig, batch: int, length: int, training: bool,
                 dtype=np.float32, memory=HOST):
        self.model, self.training = model, training
        step = ALIGNMENT // np.dtype(dtype).itemsize
        self._offsets: dict[str, int] = {}
        offset = 0
        for buffer in plan(model, batch, length, training):
            self._offsets[buffer.name] = offset
            offset += math.ceil(buffer.size / step) * step
        self._arena = memory.empty(offset, dtype)
        self._views: dict[tuple[int, int], SimpleNamespace] = {}

    def views(self, batch: int, length: int) -> SimpleNamespace:
        if (batch, length) not in self._views:
            self._views[batch, length] = self._make_views(batch, length)
        return self._views[batch, length]

    def _make_views(self, batch: int, length: int) -> SimpleNamespace:
        views = SimpleNamespace(blocks=[])
        for buffer in plan(self.model, batch, length, self.training):
            start = self._offsets[buffer.name]
            array = self._arena[start:start + buffer.size].reshape(buffer.shape)
            *block, short = buffer.name.split(".")
            if block and int(block[1]) == len(views.blocks):
                views.blocks.append(SimpleNamespace())
            setattr(views.blocks[-1] if block else views, short, array)
        if not self.training:
            views.blocks *= self.model.n_layer
        return views
