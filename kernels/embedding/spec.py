"""Shapes, cases and costs of the embedding."""

from typing import Any

import numpy as np

from ..common.checks import require_between
from ..common.spec import Arguments, Case, Function


def _require(arguments: Arguments) -> None:
    wte = arguments.get("wte", arguments.get("dwte"))
    wpe = arguments.get("wpe", arguments.get("dwpe"))
    ids, start = arguments["ids"], arguments.get("start")
    tokens, context, T = wte.shape[0], wpe.shape[0], ids.shape[1]
    require_between("ids", ids, 0, tokens - 1,
                    f"the table has {tokens} rows: encode the text with it")
    advice = f"{T} columns must fit into the {context} positions"
    require_between("T", T, 1, context, advice)
    if start is not None:
        require_between("start", start, 0, context - T, advice)


CASES = (
    {"B": 1, "T": 1, "d": 1, "Vp": 1, "context": 1},
    {"B": 3, "T": 7, "d": 30, "Vp": 61, "context": 9},
    {"B": 2, "T": 33, "d": 257, "Vp": 255, "context": 64},
    {"B": 31, "T": 10, "d": 33, "Vp": 2, "context": 10},
    {"B": 1, "T": 1023, "d": 5, "Vp": 3, "context": 1024},
    {"B": 1, "T": 257, "d": 31, "Vp": 2432, "context": 257},
    {"B": 9, "T": 127, "d": 132, "Vp": 65, "context": 128},
)

FUNCTIONS = {
    "forward": Function(
        overwritten={"x": "B*T d"},
        inputs={"ids": "int32 B T", "wte": "Vp d", "wpe": "context d", "start": "int32 1 ?"},
        require=_require,
        cases=(
            *CASES,
            {"B": 3, "T": 7, "d": 30, "Vp": 61, "context": 9, "start": 2},
            {"B": 2, "T": 33, "d": 257, "Vp": 255, "context": 64, "start": 31},
            {"B": 1, "T": 1, "d": 32, "Vp": 65, "context": 128, "start": 127},
        ),
        flops=lambda c: c["B"] * c["T"] * c["d"],
        bytes_moved=lambda c: 4 * c["T"] * (2 * c["B"] * c["d"] + c["d"] + c["B"]),
    ),
    "backward": Function(
        added_to={"dwte": "Vp d", "dwpe": "context d"},
        inputs={"dx": "B*T d", "ids": "int32 B T"},
        require=_require,
        flops=lambda c: 2 * c["B"] * c["T"] * c["d"],
        bytes_moved=lambda c: 4 * c["T"] * (3 * c["B"] * c["d"] + 2 * c["d"] + c["B"]),
    ),
}

BENCH_CASES = (
    {"B": 8, "T": 128, "d": 128, "Vp": 256, "context": 128},
    {"B": 1, "T": 1024, "d": 768, "Vp": 8576, "context": 1024},
)
GRADIENTS = {"dwte": "wte", "dwpe": "wpe"}
TOLERANCE = 4


def make_inputs(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    B, T, d, Vp, context = (case[key] for key in ("B", "T", "d", "Vp", "context"))
    ids = rng.integers(Vp, size=(B, T), dtype=np.int32)
    ids[0, 0], ids[-1, -1] = 0, Vp - 1
    return {
        "ids": ids,
        "wte": rng.standard_normal((Vp, d)),
        "wpe": rng.standard_normal((context, d)),
        "start": np.array([case["start"]], np.int32) if "start" in case else None,
        "dx": rng.standard_normal((B * T, d)),
    }


def objective(outputs: Arguments, inputs: Arguments) -> float:
    return np.sum(outputs["x"] * inputs["dx"])
