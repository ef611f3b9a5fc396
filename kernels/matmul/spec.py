"""Shapes, cases and costs of the linear layer."""

from typing import Any

import numpy as np

from ..common.spec import Arguments, Case, Function
from ..gelu.oracle import forward as gelu


def _weights(arguments: Arguments) -> str:
    return "N K" if arguments["transpose_w"] else "K N"


def _operand(arguments: Arguments) -> str:
    return f"operand {_weights(arguments)}"


def _sum(arguments: Arguments) -> str:
    return "operand M N" if arguments["residual"] is None else "M N"


def _one_epilogue(arguments: Arguments) -> None:
    if arguments["pre_gelu"] is not None and arguments["residual"] is not None:
        raise ValueError("pre_gelu and residual are both given, expected one of them at most; "
                         "pass None for the other")


FUNCTIONS = {
    "forward": Function(
        overwritten={"y": _sum, "pre_gelu": "operand M N ?"},
        inputs={"x": "operand M K", "w": _operand, "bias": "N ?", "residual": "M N ?"},
        flops=lambda c: 2 * c["M"] * c["N"] * c["K"],
        require=_one_epilogue,
    ),
    "backward": Function(
        overwritten={"dx": "operand M K ?"},
        added_to={"dw": _weights, "dbias": "N ?"},
        inputs={"dy": "operand M N", "x": "operand M K", "w": _operand,
                "pre_gelu": "operand M K ?"},
        flops=lambda c: 4 * c["M"] * c["N"] * c["K"],
    ),
}

CASES = (
    {"M": 1, "N": 1, "K": 1},
    {"M": 21, "N": 90, "K": 30},
    {"M": 21, "N": 120, "K": 30, "gelu": True},
    {"M": 33, "N": 31, "K": 257, "bias": False},
    {"M": 255, "N": 33, "K": 64, "gelu": True, "bias": False},
    {"M": 257, "N": 65, "K": 31, "dx": False},
    {"M": 1023, "N": 10, "K": 7},
    {"M": 1, "N": 1023, "K": 255, "gelu": True},
    {"M": 1, "N": 1, "K": 1, "transpose_w": True},
    {"M": 31, "N": 128, "K": 30, "transpose_w": True, "bias": False},
    {"M": 7, "N": 257, "K": 33, "transpose_w": True, "gelu": True},
    {"M": 3, "N": 8576, "K": 10, "transpose_w": True},
    {"M": 1025, "N": 7, "K": 33, "transpose_w": True, "bias": False, "dx": False},
    {"M": 1, "N": 33, "K": 65, "residual": True},
    {"M": 22, "N": 44, "K": 60, "residual": True, "bias": False},
    {"M": 65, "N": 31, "K": 128, "transpose_w": True, "residual": True},
    {"M": 1, "N": 1, "K": 1, "precision": "bf16"},
    {"M": 8, "N": 257, "K": 33, "precision": "bf16", "transpose_w": True, "gelu": True},
    {"M": 5, "N": 264, "K": 520, "precision": "bf16", "residual": True},
    {"M": 9, "N": 31, "K": 257, "precision": "bf16", "bias": False, "gelu": True},
    {"M": 65, "N": 136, "K": 64, "precision": "bf16", "residual": True},
    {"M": 129, "N": 264, "K": 72, "precision": "bf16", "gelu": True},
    {"M": 257, "N": 127, "K": 40, "precision": "bf16", "transpose_w": True, "residual": True},
    {"M": 127, "N": 120, "K": 31, "precision": "bf16", "transpose_w": True, "dx": False},
    {"M": 1100, "N": 8, "K": 16, "precision": "bf16"},
)
BENCH_CASES = (
    {"M": 1024, "N": 512, "K": 128, "gelu": True},
    {"M": 1024, "N": 3072, "K": 768, "gelu": True},
    {"M": 1024, "N": 8576, "K": 768, "transpose_w": True, "bias": False},
    {"M": 1024, "N": 512, "K": 128, "precision": "bf16", "gelu": True},
    {"M": 8192, "N": 3072, "K": 768, "precision": "bf16", "gelu": True},
    {"M": 8192, "N": 768, "K": 3072, "precision": "bf16", "residual": True},
    {"M": 1, "N": 2304, "K": 768, "precision": "bf16"},
)
GRADIENTS = {"dx": "x", "dw": "w", "dbias": "bias"}
TOLERANCE = 4


def make_inputs(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    M, N, K = case["M"], case["N"], case["K"]
    transpose_w = case.get("transpose_w", False)
    inputs: dict[str, Any] = {
        "x": rng.standard_normal((M, K)),
        "w": rng.standard_normal((N, K) if transpose_w else (K, N)) / np.sqrt(K),
        "bias": rng.standard_normal(N),
        "transpose_w": transpose_w,
        "dy": rng.standard_normal((M, N)),
    }
    inputs["pre_gelu"] = None  # of forward an output, of backward an input
    if case.get("gelu"):
        inputs["pre_gelu"] = rng.standard_normal((M, K))
        inputs["x"] = _gelu(inputs["pre_gelu"])
    inputs["residual"] = rng.standard_normal((M, N)) if case.get("residual") else None
    if not case.get("bias", True):
        inputs |= {"bias": None, "dbias": None}
    if not case.get("dx", True):
        inputs["dx"] = None
    return inputs


def objective(outputs: Arguments, inputs: Arguments) -> float:
    linear = outputs["y"]
    if inputs["pre_gelu"] is not None:  # dx is the slope along pre_gelu: it is moved as x was
        x, pre_gelu = inputs["x"], inputs["pre_gelu"]
        x = _gelu(pre_gelu + (x - _gelu(pre_gelu)))
        linear = x @ (inputs["w"].T if inputs["transpose_w"] else inputs["w"])
        linear = linear if inputs["bias"] is None else linear + inputs["bias"]
    return np.sum(linear * inputs["dy"])


def _gelu(x: np.ndarray) -> np.ndarray:
    y = np.empty_like(x)
    gelu(y, x)
    return y
