"""Shapes, cases and costs of the gradient norm."""

from typing import Any

import numpy as np

from ..common.spec import Case, Function

FUNCTIONS = {
    "forward": Function(
        overwritten={"norm": "1"},
        inputs={"grads": "P"},
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
)
BENCH_CASES = ({"P": 850_000}, {"P": 20_000_000})
GRADIENTS: dict[str, str] = {}
TOLERANCE = 4


def make_inputs(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    return {"grads": case.get("spread", 1.0) * rng.standard_normal(case["P"])}
