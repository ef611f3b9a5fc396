"""The checkpoint file of the published ANDREA models: numbers alone, little-endian.

    int32 step    int32 n    n float32 weights    n float32 AdamW m    n float32 AdamW v

The file names neither shape nor variant; n tells them apart (`layouts`). The order of the weights
was published as far as: embeddings, blocks, output head. Within a block we assume the order below,
with matrices as [out, in]. No published file was available to check that against.

    wte [V, d]  wpe [T, d]
    every block:  ln_1 gain and offset;  wq, wk, wv, wo [d, d], each with its bias;
                  ln_2 gain and offset;  w_1 [4d, d] and bias;  w_2 [d, 4d] and bias
    final norm's gain and offset;  output head [V, d]

What a variant does not have (biases, norm parameters, the head of a tied model) is left out.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .checkpoint_files import open_regular
from .config import PRESETS, ModelConfig
from .errors import UserError
from .parameters import ParameterTable

SUFFIX = ".bin"
FLOAT = np.dtype("<f4")
# Two sizes are published for 12M and 480M.
VOCABULARIES = {"nano": (257,), "andrea-12m": (2305, 4353), "andrea-480m": (8449, 16641)}


def layouts() -> dict[int, list[ModelConfig]]:
    """Number of parameters to the models that have it: every variant of every preset."""
    found: dict[int, list[ModelConfig]] = {}
    for name, preset in PRESETS.items():
        shape = ModelConfig(**preset.get("model", {}))
        for vocabulary in VOCABULARIES.get(name, (shape.vocab_size,)):
            for tied, bias, norm_affine in itertools.product((True, False), repeat=3):
                model = dataclasses.replace(shape, vocab_size=vocabulary, tied=tied, bias=bias,
                                            norm_affine=norm_affine)
                found.setdefault(ParameterTable(model).count, []).append(model)
    return found


def _layout(count: int, what: str) -> ModelConfig:
    models = layouts().get(count, [])
    if len(models) != 1:
        kind = "more than one variant" if models else "no variant"
        raise UserError(f"{what} {count:,} parameters, the number of {kind} of the presets "
                        f"({', '.join(PRESETS)}): the legacy format cannot hold it")
    return models[0]


def _pieces(model: ModelConfig, tensors: dict[str, np.ndarray]) -> Iterator[np.ndarray]:
    """Views of our tensors in the order, and turned the way, that the file has them in."""
    def block(layer: int) -> Iterator[np.ndarray | None]:
        def of(name: str) -> np.ndarray | None:
            return tensors.get(f"blocks.{layer}.{name}")

        yield from (of("ln_1_gamma"), of("ln_1_beta"))
        for part in range(3):
            columns = slice(part * model.d_model, (part + 1) * model.d_model)
            yield of("w_qkv")[:, columns].T
            yield of("b_qkv")[columns] if model.bias else None
        yield from (of("w_o").T, of("b_o"), of("ln_2_gamma"), of("ln_2_beta"),
                    of("w_1").T, of("b_1"), of("w_2").T, of("b_2"))

    blocks = itertools.chain.from_iterable(map(block, range(model.n_layer)))
    ends = (tensors.get(name) for name in ("ln_f_gamma", "ln_f_beta", "w_head"))
    for piece in itertools.chain((tensors["wte"], tensors["wpe"]), blocks, ends):
        if piece is not None:
            yield piece


def encode(model: ModelConfig, step: int, arrays: list[np.ndarray]) -> Iterator[bytes]:
    """The bytes of a file in pieces; `arrays` are weights, m and v, each flat [table.size].

    Raises UserError for a model that could not be recognised in it.
    """
    table = ParameterTable(model)
    if _layout(table.count, "this model has") != model:
        raise UserError(f"this model has {table.count:,} parameters, as another variant of the "
                        "presets has: the legacy format cannot hold it")
    if step >= 1 << 31:
        raise UserError(f"step {step:,} is more than the legacy format can hold")
    yield step.to_bytes(4, "little") + table.count.to_bytes(4, "little")
    for flat in arrays:
        for piece in _pieces(model, table.unpadded(flat)):
            yield piece.astype(FLOAT).tobytes()


def read(file: Path, regions: int = 1) -> tuple[int, ModelConfig, list[np.ndarray]]:
    """Step, model and the first `regions` of weights, m and v, each flat float32 [table.size].

    Raises UserError for a file of another length than its header says, and for a number of
    parameters that no variant of a preset has.
    """
    with open_regular(file) as stream:
        step, count = (int.from_bytes(stream.read(4), "little", signed=True) for _ in range(2))
        expected, found = 8 + 3 * count * FLOAT.itemsize, file.stat().st_size
        if step < 0 or count < 1:
            raise UserError(f"{file} is not a legacy ANDREA file ({found} bytes): it does not "
                            "begin with a step and a number of parameters")
        if found != expected:
            raise UserError(f"{file} is not a legacy ANDREA file, or not complete: of {count:,} "
                            f"parameters it would have {expected} bytes, found {found}")
        model = _layout(count, f"{file} has")
        table = ParameterTable(model)
        arrays = [table.zeros() for _ in range(regions)]
        for flat in arrays:
            for piece in _pieces(model, table.unpadded(flat)):
                piece[...] = np.fromfile(stream, FLOAT, piece.size).reshape(piece.shape)
    return step, model, arrays
