"""Every activation and activation gradient, allocated once before the first step.

`plan` lists name, group, shape, dtype and place of each buffer, so that the bytes can be printed
and refused before anything is allocated; `Buffers` carves them out of one arena for each dtype and
hands out named views, also for smaller batches and shorter sequences than planned. Gradients of
activations lie where the logits were, which the backward pass reads first and never again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from kernels.common.host_array import ALIGNMENT
from kernels.common.spec import BFLOAT16

from .config import ModelConfig
from .memory import HOST

PRECISIONS = {"fp32": np.dtype(np.float32), "bf16": BFLOAT16}  # of the operands of products
FLOAT = PRECISIONS["fp32"]


@dataclass(frozen=True)
class Buffer:
    """One planned array, and its first element in the arena of its dtype."""

    group: str
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    start: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """Where the next one may start."""
        step = ALIGNMENT // self.dtype.itemsize
        return self.start + math.ceil(self.size / step) * step


def _block(model: ModelConfig, batch: int, length: int, operand: np.dtype) -> dict[str, tuple]:
    """What one block keeps for its backward pass: shape and dtype by name."""
    n, d = batch * length, model.d_model
    return {
        "ln_1": ((n, d), operand), "ln_1_mean": ((n,), FLOAT), "ln_1_rstd": ((n,), FLOAT),
        "qkv": ((n, 3 * d), operand), "attn": ((n, d), operand),
        "lse": ((batch, model.n_head, length), FLOAT), "x_mid": ((n, d), FLOAT),
        "ln_2": ((n, d), operand), "ln_2_mean": ((n,), FLOAT), "ln_2_rstd": ((n,), FLOAT),
        "fc": ((n, 4 * d), operand), "fc_gelu": ((n, 4 * d), operand),
        "x_out": ((n, d), FLOAT),
    }


def plan(model: ModelConfig, batch: int, length: int, training: bool,
         precision: str = "fp32") -> list[Buffer]:
    """The buffers of a forward pass over [batch, length] ids, and of its backward if `training`.

    Without training all blocks share one set, and logits exist for the last position alone. In
    "bf16" the operands of products are bfloat16; the residual stream, its gradient and all
    statistics stay float32.
    """
    n, d, vocabulary = batch * length, model.d_model, model.padded_vocab_size
    operand = PRECISIONS[precision]
    groups = {"activations": {"x": ((n, d), FLOAT)}}
    for layer in range(model.n_layer if training else 1):
        groups["activations"] |= {f"blocks.{layer}.{name}": entry for name, entry
                                  in _block(model, batch, length, operand).items()}
    rows = n if training else batch
    groups["activations"] |= {"ln_f": ((n, d), operand), "ln_f_mean": ((n,), FLOAT),
                              "ln_f_rstd": ((n,), FLOAT), "losses": ((rows,), FLOAT)}
    if training:
        groups["activation gradients"] = {
            "dln": ((n, d), operand), "dx": ((n, d), FLOAT), "dattn": ((n, d), operand),
            "dqkv": ((n, 3 * d), operand), "dfc": ((n, 4 * d), operand),
        }
        if precision == "bf16":
            groups["activation gradients"]["dx_bf16"] = (n, d), operand
    groups["logits"] = {"logits": ((rows, vocabulary), operand)}
    buffers: dict[str, Buffer] = {}
    places: dict[np.dtype, int] = {}
    for group, entries in groups.items():
        for name, (shape, dtype) in entries.items():
            start = places.get(dtype, 0)
            if name == "logits" and training:  # over all that comes after the head's gradient
                start = buffers["dln"].end
            buffers[name] = Buffer(group, name, shape, dtype, start)
            places[dtype] = buffers[name].end
    return list(buffers.values())


def arenas(buffers: Iterable[Buffer]) -> dict[np.dtype, int]:
    """Elements of the arena of each dtype that these buffers need."""
    sizes: dict[np.dtype, int] = {}
    for buffer in buffers:
        sizes[buffer.dtype] = max(sizes.get(buffer.dtype, 0), buffer.end)
    return sizes


class Buffers:
    """The planned buffers, in one arena for each dtype.

    `views(batch, length)` gives a namespace `.x .blocks[i].qkv … .logits .losses .dx …` for any
    batch and length whose arrays fit into the planned ones. `.dx_operand` is the gradient of the
    residual stream as products read it: `.dx_bf16`, or `.dx` itself in float32. `dtype` float64
    is for the reference.
    """

    def __init__(self, model: ModelConfig, batch: int, length: int, training: bool,
                 dtype=np.float32, memory=HOST):
        self.model, self.training, self.precision = model, training, memory.precision
        planned = plan(model, batch, length, training, self.precision)
        self._starts = {buffer.name: buffer.start for buffer in planned}
        self._arenas = {kind: memory.empty(size, dtype if kind == FLOAT else kind)
                        for kind, size in arenas(planned).items()}
        self._views: dict[tuple[int, int], SimpleNamespace] = {}

    def views(self, batch: int, length: int) -> SimpleNamespace:
        if (batch, length) not in self._views:
            self._views[batch, length] = self._make_views(batch, length)
        return self._views[batch, length]

    def _make_views(self, batch: int, length: int) -> SimpleNamespace:
        views = SimpleNamespace(blocks=[], dx_bf16=None)
        for buffer in plan(self.model, batch, length, self.training, self.precision):
            start = self._starts[buffer.name]
            arena = self._arenas[buffer.dtype]
            array = arena[start:start + buffer.size].reshape(buffer.shape)
            *block, short = buffer.name.split(".")
            if block and int(block[1]) == len(views.blocks):
                views.blocks.append(SimpleNamespace())
            setattr(views.blocks[-1] if block else views, short, array)
        if self.training:
            views.dx_operand = views.dx if views.dx_bf16 is None else views.dx_bf16
        else:
            views.blocks *= self.model.n_layer
        return views
