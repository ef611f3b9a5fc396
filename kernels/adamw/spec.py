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
    rates = arguments["rates"]
    if isinstance(rates, np.ndarray) and not (rates[1:] > 0).all():
        raise ValueError(f"rates[1:] is {rates[1:].tolist()}, expected numbers above 0; "
                         "pass 1 - beta**step with step counted from 1")


FUNCTIONS = {
    "update": Function(
        updated={"weights": "P", "weights_bf16": "bfloat16 P ?", "m": "P", "v": "P"},
        inputs={"grads": "P", "norm": "1", "rates": "3"},
        require=_require,
        flops=lambda c: 15 * c["P"],
        bytes_moved=lambda c: c["P"] * (30 if c.get("precision") == "bf16" else 28),
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
    {"P": 1, "n_decay": 1, "step": 1, "precision": "bf16"},
    {"P": 33, "n_decay": 10, "step": 2, "precision": "bf16"},
    {"P": 1023, "n_decay": 1000, "step": 1, "lr": 0.3, "precision": "bf16"},
    {"P": 1028, "n_decay": 510, "step": 1, "lr": 0.3, "precision": "bf16"},
    {"P": 64, "n_decay": 32, "step": 2, "norm": math.nan, "precision": "bf16"},
)
BENCH_CASES = (
    {"P": 850_000, "n_decay": 840_000, "step": 10},
    {"P": 20_000_000, "n_decay": 19_900_000, "step": 10},
    {"P": 850_000, "n_decay": 840_000, "step": 10, "precision": "bf16"},
    {"P": 20_000_000, "n_decay": 19_900_000, "step": 10, "precision": "bf16"},
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
    weights = rng.standard_normal(P)
    return {
        "weights": weights,
        "weights_bf16": weights.copy() if case.get("precision") == "bf16" else None,
        "m": (step > 1) * 0.1 * rng.standard_normal(P),
        "v": (step > 1) * 0.1 * rng.standard_normal(P) ** 2,
        "grads": grads,
        "norm": np.array([case.get("norm", 2.0)]),
        "rates": np.array([case.get("lr", 0.01), 1 - 0.9**step, 1 - 0.95**step]),
        "n_decay": case["n_decay"],
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "clip": case.get("clip", 1.5),
    }
