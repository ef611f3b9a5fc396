"""Shapes, cases and costs of the gradient norm."""

import math
from typing import Any

import numpy as np

from ..common.spec import Case, Function

FUNCTIONS = {
    "forward": Function(
        overwritten={"norm": "1"},
        inputs={"grads": "P", "previous": "1 ?"},
        in_place={"norm": ("previous",)},
        flops=lambda c: 2 * c["P"],
    ),
}

CASES = (
    {"P": 1},
    {"P": 2},
    {"P": 31},
    {"P": 33},
    {"P": 257},
    {"P": 1023},
    {"P": 8449},
    {"P": 256},
    {"P": 100_003},
    {"P": 1_100_000},
    {"P": 1023, "spread": 1e-9},
    {"P": 1023, "spread": 1e9},
    {"P": 33, "previous": 0.0},
    {"P": 1025, "previous": 3.4e38},
    {"P": 33, "previous": math.nan},
    {"P": 32, "previous": math.inf},
    {"P": 8449, "previous": -math.inf},
)
BENCH_CASES = ({"P": 850_000}, {"P": 20_000_000})
GRADIENTS: dict[str, str] = {}
TOLERANCE = 4


def make_inputs(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    previous = np.array([case["previous"]]) if "previous" in case else None
    return {"grads": case.get("spread", 1.0) * rng.standard_normal(case["P"]),
            "previous": previous}
