"""Shapes, cases and costs of AdamW."""

import math
from typing import Any

import numpy as np

from ..common.checks import require_between
from ..common.spec import Arguments, Case, Function


def _require(arguments: Arguments) -> None:
    (P,) = arguments["weights"].shape
    require_between("n_decay", arguments["n_decay"], 0, P, f"there are {P} weights")
    if not arguments["clip"] >= 0:
        raise ValueError(f"clip is {arguments['clip']}, expected 0 or more; "
                         "pass the largest norm that is left as it is, or 0 not to clip")
    for name in ("correction1", "correction2"):
        if not arguments[name] > 0:
            raise ValueError(f"{name} is {arguments[name]}, expected a number above 0; "
                             "pass 1 - beta**step with step counted from 1")


FUNCTIONS = {
    "update": Function(
        updated={"weights": "P", "m": "P", "v": "P"},
        inputs={"grads": "P", "norm": "1"},
        require=_require,
        flops=lambda c: 15 * c["P"],
    ),
}

CASES = (
    {"P": 1, "n_decay": 1, "step": 1},
    {"P": 31, "n_decay": 0, "step": 1},
    {"P": 33, "n_decay": 10, "step": 2},
    {"P": 257, "n_decay": 255, "step": 10},
    {"P": 1023, "n_decay": 1023, "step": 1000},
    {"P": 8449, "n_decay": 31, "step": 3},
    {"P": 255, "n_decay": 128, "step": 2, "clip": 0.0},
    {"P": 256, "n_decay": 32, "step": 2, "clip": 3.0},
    {"P": 65, "n_decay": 32, "step": 2, "norm": math.inf},
    {"P": 65, "n_decay": 32, "step": 2, "norm": -math.inf},
    {"P": 65, "n_decay": 32, "step": 2, "norm": math.nan},
)
BENCH_CASES = (
    {"P": 850_000, "n_decay": 840_000, "step": 10},
    {"P": 20_000_000, "n_decay": 19_900_000, "step": 10},
)
GRADIENTS: dict[str, str] = {}
TOLERANCE = 4


def make_inputs(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    """A state as after some steps; zeros before the first one. One gradient is exactly 0.

    The norm is a number of the case, so that the scale is 3/4 unless the case says otherwise.
    """
    P, step = case["P"], case["step"]
    grads = rng.standard_normal(P)
    grads[-1] = 0
    return {
        "weights": rng.standard_normal(P),
        "m": (step > 1) * 0.1 * rng.standard_normal(P),
        "v": (step > 1) * 0.1 * rng.standard_normal(P) ** 2,
        "grads": grads,
        "norm": np.array([case.get("norm", 2.0)]),
        "n_decay": case["n_decay"],
        "lr": 0.01,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "correction1": 1 - 0.9**step,
        "correction2": 1 - 0.95**step,
        "clip": case.get("clip", 1.5),
    }
