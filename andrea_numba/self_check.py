"""The first use of a GPU: every kernel in use is compared with the oracle on the CPU.

The model at hand, with one block and a few tokens, makes one training step and decodes one token.
Each op gets its real inputs twice: on the device, and as float64 copies for the oracle. A result
is remembered in the cache of compiled kernels, so it holds for exactly these sources, and
for the GPU, driver and compiler that it names.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np

from kernels.common.cache import cache_folder
from kernels.registry import OPS, load_op, load_spec

from .config import ModelConfig
from .errors import WrongKernel

TOKENS = 48  # of a sequence: more than a warp, and no multiple of a tile
# Of the largest value in an output. Float32 sums of this length are off by 1e-6, those of operands
# that were rounded to bfloat16 on the way by 1e-2; a lost row, a wrong scale or a missing barrier
# by far more.
ALLOWED = {"fp32": 1e-3, "bf16": 3e-2}


class Record:
    """What is known of one machine, kernel source and model shape: a file in the cache."""

    def __init__(self, model: ModelConfig, precision: str, training: bool):
        from kernels.common.cuda import versions

        shape = dataclasses.asdict(dataclasses.replace(model, n_layer=1))
        self._content = json.dumps([versions(), shape, precision, training])
        name = hashlib.sha256(self._content.encode()).hexdigest()[:16]
        self._path = cache_folder() / f"checked-{name}.json"

    def exists(self) -> bool:
        return self._path.exists()

    def write(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(self._content, encoding="utf-8")
        except OSError:
            pass  # checked again at the next start


def checked(ops, memory) -> SimpleNamespace:
    """The op table `ops`, each call of which is compared with the oracle's.

    Raises WrongKernel, naming the op, when an output differs.
    """
    def check(op: str, name: str) -> Callable:
        function, oracle = getattr(getattr(ops, op), name), getattr(load_op(op, "oracle"), name)
        parameters = list(inspect.signature(oracle).parameters)
        outputs = load_spec(op).FUNCTIONS[name].outputs

        def call(*arguments) -> None:
            expected = [_float64(memory.get(a)) if hasattr(a, "shape") else a for a in arguments]
            function(*arguments)
            oracle(*expected)
            for parameter, result, exact in zip(parameters, arguments, expected, strict=True):
                if parameter in outputs and exact is not None:
                    _compare(f"{op}.{name}", parameter, memory.get(result), exact,
                             ALLOWED[memory.precision])

        return call

    return SimpleNamespace(**{
        op: SimpleNamespace(**{name: check(op, name) for name in load_spec(op).FUNCTIONS})
        for op in OPS})


def _float64(array: np.ndarray) -> np.ndarray:
    return array if array.dtype == np.int32 else array.astype(np.float64)


def _compare(function: str, parameter: str, result: np.ndarray, exact: np.ndarray,
             allowed: float) -> None:
    error = float(np.abs(_float64(result) - exact).max())  # NaN if anything is
    allowed *= float(np.abs(exact).max())
    if not error <= allowed:
        raise WrongKernel(f"{function}: {parameter} is off by {error:.3g}, allowed {allowed:.3g}")
