"""Shapes, cases and costs of layer normalization."""

from typing import Any

import numpy as np

from ..common.spec import Arguments, Case, Function


def _require(arguments: Arguments) -> None:
    parameters = {name: arguments[name] for name in arguments if name.endswith(("gamma", "beta"))}
    absent = [name for name, value in parameters.items() if value is None]
    if absent and len(absent) < len(parameters):
        raise ValueError(
            f"{', '.join(absent)} is None, expected {', '.join(parameters)} to be None together; "
            "pass all of them, or none for a norm without parameters"
        )


FUNCTIONS = {
    "forward": Function(
        overwritten={"y": "operand N d", "mean": "N", "rstd": "N"},
        inputs={"x": "N d", "gamma": "d ?", "beta": "d ?"},
        require=_require,
        flops=lambda c: 8 * c["N"] * c["d"],
    ),
    "backward": Function(
        overwritten={"dx": "N d", "dx_bf16": "bfloat16 N d ?"},
        added_to={"dgamma": "d ?", "dbeta": "d ?"},
        inputs={"dy": "operand N d", "x": "N d", "mean": "N", "rstd": "N", "gamma": "d ?",
                "residual": "N d ?"},
        in_place={"dx": ("residual",)},
        require=_require,
        flops=lambda c: 15 * c["N"] * c["d"],
    ),
}

CASES = (
    {"N": 1, "d": 3},
    {"N": 7, "d": 30},
    {"N": 31, "d": 33},
    {"N": 255, "d": 10},
    {"N": 256, "d": 31},
    {"N": 257, "d": 64},
    {"N": 1023, "d": 7},
    {"N": 1024, "d": 10},
    {"N": 1025, "d": 32},
    {"N": 3, "d": 1023},
    {"N": 2, "d": 8449},
    {"N": 3, "d": 2052},
    {"N": 33, "d": 255, "affine": False},
    {"N": 5, "d": 257, "offset": 100.0},
    {"N": 3, "d": 32, "offset": 3.0, "spread": 0.0},
    {"N": 33, "d": 31, "residual": False},
    {"N": 1, "d": 3, "precision": "bf16"},
    {"N": 31, "d": 33, "precision": "bf16"},
    {"N": 513, "d": 30, "precision": "bf16"},
    {"N": 1025, "d": 32, "precision": "bf16"},
    {"N": 3, "d": 1023, "precision": "bf16"},
    {"N": 9, "d": 1024, "precision": "bf16"},
    {"N": 2, "d": 1025, "precision": "bf16"},
    {"N": 3, "d": 2052, "precision": "bf16"},
    {"N": 33, "d": 254, "affine": False, "precision": "bf16"},
    {"N": 7, "d": 256, "residual": False, "precision": "bf16"},
    {"N": 5, "d": 257, "offset": 100.0, "precision": "bf16"},
)
BENCH_CASES = (
    {"N": 1024, "d": 128},
    {"N": 1024, "d": 768},
    {"N": 1024, "d": 768, "precision": "bf16"},
    {"N": 8192, "d": 768, "precision": "bf16"},
)
GRADIENTS = {"dx": "x", "dx_bf16": "x", "dgamma": "gamma", "dbeta": "beta"}
TOLERANCE = 4


def make_inputs(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    N, d = case["N"], case["d"]
    x = case.get("offset", 0.5) + case.get("spread", 2.0) * rng.standard_normal((N, d))
    inputs = {
        "x": x,
        "gamma": 1 + 0.5 * rng.standard_normal(d),
        "beta": rng.standard_normal(d),
        "eps": 1e-5,
        "dy": rng.standard_normal((N, d)),
        "residual": rng.standard_normal((N, d)),
    }
    if not case.get("residual", True):
        inputs["residual"] = None
    if case.get("precision") != "bf16":
        inputs["dx_bf16"] = None
    if not case.get("affine", True):
        inputs |= dict.fromkeys(("gamma", "beta", "dgamma", "dbeta"))
    return inputs


def objective(outputs: Arguments, inputs: Arguments) -> float:
    """Through the norm, and the straight way past it, whose gradient is `residual`."""
    straight = 0.0 if inputs["residual"] is None else np.sum(inputs["x"] * inputs["residual"])
    return np.sum(outputs["y"] * inputs["dy"]) + straight
