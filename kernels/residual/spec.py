"""Shapes, cases and costs of the residual addition."""

from typing import Any

import numpy as np

from ..common.spec import Arguments, Case, Function

FUNCTIONS = {
    "forward": Function(
        overwritten={"out": "N d"},
        inputs={"x": "N d", "delta": "N d"},
        in_place={"out": ("x",)},
        flops=lambda c: c["N"] * c["d"],
    ),
    "backward": Function(
        overwritten={"dx": "N d"},
        inputs={"dout": "N d", "dbranch": "N d"},
        in_place={"dx": ("dout", "dbranch")},
        flops=lambda c: c["N"] * c["d"],
    ),
}

CASES = (
    {"N": 1, "d": 1},
    {"N": 21, "d": 30},
    {"N": 33, "d": 257},
    {"N": 255, "d": 31},
    {"N": 1023, "d": 33},
    {"N": 1, "d": 8449},
    {"N": 65, "d": 132},
)
BENCH_CASES = ({"N": 1024, "d": 128}, {"N": 1024, "d": 768})
GRADIENTS = {"dx": "x"}
TOLERANCE = 4


def make_inputs(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    names = ("x", "delta", "dout", "dbranch")
    return {name: rng.standard_normal((case["N"], case["d"])) for name in names}


def objective(outputs: Arguments, inputs: Arguments) -> float:
    """The straight path, and a sublayer whose gradient with respect to x is dbranch."""
    return np.sum(outputs["out"] * inputs["dout"]) + np.sum(inputs["x"] * inputs["dbranch"])
