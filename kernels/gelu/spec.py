"""Shapes, cases and costs of GELU."""

import math
from typing import Any

import numpy as np

from ..common.spec import Arguments, Case, Function

FUNCTIONS = {
    "forward": Function(
        overwritten={"y": "..."},
        inputs={"x": "..."},
        flops=lambda c: 10 * math.prod(c["shape"]),
    ),
    "backward": Function(
        overwritten={"dx": "..."},
        inputs={"dy": "...", "x": "..."},
        in_place={"dx": ("dy",)},
        flops=lambda c: 18 * math.prod(c["shape"]),
    ),
}

CASES = (
    {"shape": (1,)},
    {"shape": (31,)},
    {"shape": (33, 1)},
    {"shape": (7, 30)},
    {"shape": (3, 5, 17)},
    {"shape": (255, 33)},
    {"shape": (1023,), "spread": 8.0},
    {"shape": (257, 128), "spread": 0.01},
)
BENCH_CASES = ({"shape": (1024, 512)}, {"shape": (1024, 3072)})
GRADIENTS = {"dx": "x"}
TOLERANCE = 4


def make_inputs(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    return {
        "x": case.get("spread", 1.5) * rng.standard_normal(case["shape"]),
        "dy": rng.standard_normal(case["shape"]),
    }


def objective(outputs: Arguments, inputs: Arguments) -> float:
    return np.sum(outputs["y"] * inputs["dy"])
