"""Shapes, cases and costs of the linear layer."""

from typing import Any

import numpy as np

from ..common.spec import Arguments, Case, Function


def _weights(arguments: Arguments) -> str:
    return "N K" if arguments["transpose_w"] else "K N"


FUNCTIONS = {
    "forward": Function(
        overwritten={"y": "M N", "pre_gelu": "M N ?"},
        inputs={"x": "M K", "w": _weights, "bias": "N ?"},
        flops=lambda c: 2 * c["M"] * c["N"] * c["K"],
    ),
    "backward": Function(
        overwritten={"dx": "M K ?"},
        added_to={"dw": _weights, "dbias": "N ?"},
        inputs={"dy": "M N", "x": "M K", "w": _weights},
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
)
BENCH_CASES = (
    {"M": 1024, "N": 512, "K": 128, "gelu": True},
    {"M": 1024, "N": 3072, "K": 768, "gelu": True},
    {"M": 1024, "N": 8576, "K": 768, "transpose_w": True, "bias": False},
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
    if not case.get("gelu", False):
        inputs["pre_gelu"] = None
    if not case.get("bias", True):
        inputs |= {"bias": None, "dbias": None}
    if not case.get("dx", True):
        inputs["dx"] = None
    return inputs


def objective(outputs: Arguments, inputs: Arguments) -> float:
    linear = outputs["y"] if outputs["pre_gelu"] is None else outputs["pre_gelu"]
    return np.sum(linear * inputs["dy"])
