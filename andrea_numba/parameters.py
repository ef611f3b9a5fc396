"""The model's parameters: one flat array, and a table that says what lies where in it.

Weights, gradients and both AdamW moments are four arrays with the same layout, so clearing,
the gradient norm, the optimizer and a checkpoint are each one pass over one array. Each tensor
starts at a multiple of 256 bytes (a GPU's widest transaction, and whole cache lines on a CPU);
the gaps and the padded rows of the vocabulary hold zeros and stay zero, because their gradient
is zero and decay keeps zero at zero.

Matrices come first and vectors last: weight decay applies to the first `n_decay` elements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from kernels.common.host_array import ALIGNMENT, aligned_zeros

from .config import ModelConfig


@dataclass(frozen=True)
class Tensor:
    """One named parameter: its shape in memory and its first element in the flat array."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def _shapes(model: ModelConfig) -> dict[str, tuple[int, ...] | None]:
    """Name to shape of every parameter a model can have; None for one that is switched off."""
    d, vocabulary = model.d_model, model.padded_vocab_size

    def bias(width: int) -> tuple[int, ...] | None:
        return (width,) if model.bias else None

    norm = (d,) if model.norm_affine else None
    shapes = {
        "wte": (vocabulary, d),
        "wpe": (model.context, d),
        "w_head": None if model.tied else (vocabulary, d),
        "ln_f_gamma": norm,
        "ln_f_beta": norm,
    }
    for layer in range(model.n_layer):
        block = {
            "ln_1_gamma": norm, "ln_1_beta": norm,
            "w_qkv": (d, 3 * d), "b_qkv": bias(3 * d),
            "w_o": (d, d), "b_o": bias(d),
            "ln_2_gamma": norm, "ln_2_beta": norm,
            "w_1": (d, 4 * d), "b_1": bias(4 * d),
            "w_2": (4 * d, d), "b_2": bias(d),
        }
        shapes |= {f"blocks.{layer}.{name}": shape for name, shape in block.items()}
    return shapes


class ParameterTable:
    """Layout of the flat parameter array of one model.

    Attributes: `tensors` (name to Tensor), `size` (elements of the flat array, padding included),
    `n_decay` (elements before the first vector), `count` (unique parameters, padding excluded),
    `count_untied` (the same with a shared embedding table counted once per use).
    """

    def __init__(self, model: ModelConfig):
        self.model = model
        self.shapes = _shapes(model)
        matrices = [(n, s) for n, s in self.shapes.items() if s is not None and len(s) == 2]
        vectors = [(n, s) for n, s in self.shapes.items() if s is not None and len(s) == 1]
        self.tensors: dict[str, Tensor] = {}
        offset = 0
        step = ALIGNMENT // 4
        for group in (matrices, vectors):
            for name, shape in group:
                self.tensors[name] = Tensor(name, shape, offset)
                offset += math.ceil(math.prod(shape) / step) * step
            if group is matrices:
                self.n_decay = offset
        self.size = offset

        padding = (model.padded_vocab_size - model.vocab_size) * model.d_model
        tables = 1 if model.tied else 2
        self.count = sum(t.size for t in self.tensors.values()) - tables * padding
        self.count_untied = self.count + (model.vocab_size * model.d_model if model.tied else 0)

    def zeros(self, dtype=np.float32) -> np.ndarray:
        """A flat array [size] of zeros with this layout."""
        return aligned_zeros(self.size, dtype)

    def view(self, flat: np.ndarray, name: str) -> np.ndarray | None:
        """The tensor `name` inside `flat`; None when the model has no such parameter."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        return flat[tensor.offset:tensor.offset + tensor.size].reshape(tensor.shape)

    def views(self, flat: np.ndarray, operands: np.ndarray | None = None) -> SimpleNamespace:
        """Named views: `.wte .wpe .head .ln_f_gamma .ln_f_beta .blocks[i].w_qkv …`.

        `.head` [padded vocabulary, d_model] is `wte` itself when the model is tied. The matrices
        of products come from `operands` [size], the same values in another dtype, if given.
        """
        operands = flat if operands is None else operands
        views = SimpleNamespace(blocks=[SimpleNamespace() for _ in range(self.model.n_layer)])
        for name in self.shapes:
            *block, short = name.split(".")
            owner = views.blocks[int(block[1])] if block else views
            setattr(owner, short, self.view(operands if short.startswith("w_") else flat, name))
        views.head = self.view(operands, "wte" if self.model.tied else "w_head")
        return views

    def unpadded(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """Name to tensor without the padded vocabulary rows: what a checkpoint stores."""
        rows = {"wte": self.model.vocab_size, "w_head": self.model.vocab_size}
        return {name: self.view(flat, name)[:rows.get(name)] for name in self.tensors}

    def unpadded_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name to shape of what `unpadded` gives; allocates nothing of the size of the model."""
        of_no_size = np.broadcast_to(np.float32(0), self.size)
        return {name: tensor.shape for name, tensor in self.unpadded(of_no_size).items()}
