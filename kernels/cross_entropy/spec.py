"""Shapes, cases and costs of the cross-entropy."""

from typing import Any

import numpy as np

from ..common.checks import require_between
from ..common.spec import Arguments, Case, Function


def _require(arguments: Arguments) -> None:
    vocab_size, columns = arguments["vocab_size"], arguments["logits"].shape[1]
    require_between("vocab_size", vocab_size, 1, columns, f"the logits have {columns} columns")
    require_between("targets", arguments["targets"], -1, vocab_size - 1,
                    f"{vocab_size} tokens are in the vocabulary and -1 marks an ignored row")


FUNCTIONS = {
    "forward": Function(
        overwritten={"losses": "N"},
        inputs={"logits": "operand N Vp", "targets": "int32 N"},
        require=_require,
        flops=lambda c: 4 * c["N"] * c["V"],
    ),
    "backward": Function(
        overwritten={"losses": "N", "dlogits": "operand N Vp"},
        inputs={"logits": "operand N Vp", "targets": "int32 N"},
        in_place={"dlogits": ("logits",)},
        require=_require,
        flops=lambda c: 7 * c["N"] * c["V"],
    ),
}

CASES = (
    {"N": 1, "V": 1, "Vp": 1},
    {"N": 3, "V": 61, "Vp": 128},
    {"N": 33, "V": 65, "Vp": 128},
    {"N": 7, "V": 257, "Vp": 384},
    {"N": 31, "V": 256, "Vp": 256},
    {"N": 5, "V": 8449, "Vp": 8576},
    {"N": 257, "V": 31, "Vp": 33},
    {"N": 1023, "V": 3, "Vp": 128},
    {"N": 10, "V": 255, "Vp": 256, "spread": 50.0},
    {"N": 3, "V": 12033, "Vp": 12036},
    {"N": 1, "V": 1, "Vp": 1, "precision": "bf16"},
    {"N": 33, "V": 65, "Vp": 128, "precision": "bf16"},
    {"N": 7, "V": 257, "Vp": 260, "precision": "bf16"},
    {"N": 31, "V": 256, "Vp": 256, "precision": "bf16"},
    {"N": 5, "V": 8449, "Vp": 8576, "precision": "bf16"},
    {"N": 9, "V": 31, "Vp": 33, "precision": "bf16"},
    {"N": 10, "V": 255, "Vp": 256, "spread": 50.0, "precision": "bf16"},
    {"N": 3, "V": 24071, "Vp": 24072, "precision": "bf16"},
)
BENCH_CASES = (
    {"N": 1024, "V": 256, "Vp": 256},
    {"N": 1024, "V": 8449, "Vp": 8576},
    {"N": 256, "V": 8449, "Vp": 8576, "precision": "bf16"},
    {"N": 8192, "V": 8449, "Vp": 8576, "precision": "bf16"},
)
GRADIENTS = {"dlogits": "logits"}
TOLERANCE = 4


def make_inputs(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    """Padding columns hold NaN, so that any use of them shows; every fifth row is ignored."""
    N, V, Vp = case["N"], case["V"], case["Vp"]
    logits = np.full((N, Vp), np.nan)
    logits[:, :V] = case.get("spread", 2.0) * rng.standard_normal((N, V))
    targets = rng.integers(V, size=N, dtype=np.int32)
    targets[0] = V - 1
    targets[4::5] = -1
    return {"logits": logits, "targets": targets, "vocab_size": V, "scale": 1 / N}


def objective(outputs: Arguments, inputs: Arguments) -> float:
    return inputs["scale"] * np.sum(outputs["losses"])
