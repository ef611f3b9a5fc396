"""Shapes, cases and costs of attention."""

from typing import Any

import numpy as np

from ..common.checks import require_between
from ..common.spec import Arguments, Case, Function


def _require_heads(arguments: Arguments) -> None:
    d, H = arguments["out"].shape[1], arguments["lse"].shape[1]
    if d % H:
        fitting = ", ".join(str(n) for n in range(1, d + 1) if d % n == 0)
        raise ValueError(f"{d} features do not divide into {H} heads; use one of {fitting} heads")


def _require_rows(arguments: Arguments) -> None:
    B, _, context, _ = arguments["k_cache"].shape
    rows = arguments["qkv"].shape[0]
    if rows % B:
        raise ValueError(
            f"qkv has {rows} rows, expected a multiple of the caches' {B} sequences; "
            "pass as many new tokens for each sequence"
        )
    T = rows // B
    advice = f"{T} new rows must fit into a cache of {context}"
    require_between("T", T, 1, context, advice)
    if arguments["start"] is not None:
        require_between("start", arguments["start"], 0, context - T, advice)


def _require_position(arguments: Arguments) -> None:
    context = arguments["k_cache"].shape[2]
    require_between("position", arguments["position"], 0, context - 1,
                    f"the cache has {context} rows")


def _itemsize(case: Case) -> int:
    return 2 if case.get("precision") == "bf16" else 4


def _size(B: int, T: int, H: int, D: int, **options: float | str) -> Case:
    return {"B": B, "T": T, "H": H, "D": D, "d": H * D, "rows": B * T, **options}


FUNCTIONS = {
    "forward": Function(
        overwritten={"out": "operand B*T d", "lse": "B H T"},
        inputs={"qkv": "operand B*T 3*d"},
        require=_require_heads,
        flops=lambda c: 2 * c["B"] * c["T"] * (c["T"] + 1) * c["d"],
    ),
    "backward": Function(
        overwritten={"dqkv": "operand B*T 3*d"},
        inputs={"dout": "operand B*T d", "out": "operand B*T d", "lse": "B H T",
                "qkv": "operand B*T 3*d"},
        require=_require_heads,
        flops=lambda c: 5 * c["B"] * c["T"] * (c["T"] + 1) * c["d"],
    ),
    "append": Function(
        updated={"k_cache": "operand B H context D", "v_cache": "operand B H context D"},
        inputs={"qkv": "operand rows 3*H*D", "start": "int32 1 ?"},
        require=_require_rows,
        flops=lambda c: 0,
        bytes_moved=lambda c: 4 * _itemsize(c) * c["B"] * c["T"] * c["d"],
        cases=(
            _size(B=1, T=1, H=1, D=1, context=1, start=0),
            _size(B=2, T=7, H=3, D=10, context=31),
            _size(B=3, T=1, H=2, D=33, context=33, start=32),
            _size(B=2, T=31, H=1, D=64, context=65, start=17),
            _size(B=2, T=7, H=3, D=9, context=31, start=5, precision="bf16"),
            _size(B=2, T=31, H=2, D=64, context=65, start=17, precision="bf16"),
        ),
        bench_cases=(
            _size(B=8, T=64, H=4, D=32, context=128, start=0),
            _size(B=1, T=512, H=12, D=64, context=1024, start=0),
            _size(B=1, T=512, H=12, D=64, context=1024, start=0, precision="bf16"),
        ),
    ),
    "decode": Function(
        overwritten={"out": "operand B H*D"},
        inputs={"qkv": "operand B 3*H*D", "k_cache": "operand B H context D",
                "v_cache": "operand B H context D", "position": "int32 1"},
        require=_require_position,
        flops=lambda c: 4 * c["B"] * (c["position"] + 1) * c["d"],
        bytes_moved=lambda c: 2 * _itemsize(c) * c["B"] * (c["position"] + 2) * c["d"],
        cases=(
            _size(B=1, T=1, H=1, D=1, context=1, position=0),
            _size(B=2, T=1, H=3, D=10, context=33, position=0),
            _size(B=3, T=1, H=2, D=33, context=31, position=30),
            _size(B=1, T=1, H=4, D=64, context=300, position=256),
            _size(B=2, T=1, H=1, D=32, context=257, position=128, spread=6.0),
            _size(B=3, T=1, H=2, D=33, context=31, position=30, precision="bf16"),
            _size(B=1, T=1, H=4, D=64, context=300, position=256, precision="bf16"),
            _size(B=2, T=1, H=1, D=32, context=257, position=128, spread=6.0, precision="bf16"),
        ),
        bench_cases=(
            _size(B=8, T=1, H=4, D=32, context=128, position=100),
            _size(B=1, T=1, H=12, D=64, context=1024, position=1000),
            _size(B=1, T=1, H=12, D=64, context=1024, position=1000, precision="bf16"),
        ),
    ),
}

CASES = (
    _size(B=1, T=1, H=1, D=1),
    _size(B=3, T=7, H=3, D=10),
    _size(B=2, T=33, H=2, D=32),
    _size(B=1, T=31, H=5, D=1),
    _size(B=2, T=65, H=1, D=33),
    _size(B=1, T=129, H=3, D=64),
    _size(B=1, T=257, H=2, D=10),
    _size(B=1, T=255, H=1, D=128),
    _size(B=2, T=64, H=2, D=64, spread=6.0),
    _size(B=2, T=1, H=3, D=64, precision="bf16"),
    _size(B=3, T=31, H=2, D=32, precision="bf16"),
    _size(B=1, T=33, H=3, D=11, precision="bf16"),
    _size(B=2, T=63, H=1, D=64, precision="bf16"),
    _size(B=2, T=64, H=2, D=64, spread=6.0, precision="bf16"),
    _size(B=2, T=65, H=1, D=32, precision="bf16"),
    _size(B=1, T=127, H=1, D=128, precision="bf16"),
    _size(B=1, T=129, H=2, D=64, precision="bf16"),
    _size(B=1, T=200, H=1, D=40, precision="bf16"),
)
BENCH_CASES = (
    _size(B=8, T=128, H=4, D=32),
    _size(B=1, T=1024, H=12, D=64),
    _size(B=2, T=128, H=4, D=32, precision="bf16"),
    _size(B=8, T=1024, H=12, D=64, precision="bf16"),
)
GRADIENTS = {"dqkv": "qkv"}
TOLERANCE = 4


def make_inputs(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    """`spread` makes the scores large and the softmax sharp. Cache rows not in use are NaN."""
    B, T, H, D, d = (case[key] for key in ("B", "T", "H", "D", "d"))
    inputs: dict[str, Any] = {
        "qkv": case.get("spread", 1.0) * rng.standard_normal((B * T, 3 * d)),
        "dout": rng.standard_normal((B * T, d)),
    }
    if "context" in case:
        filled = case["position"] + 1 if "position" in case else case.get("start", 0)
        for name in ("k_cache", "v_cache"):
            inputs[name] = np.full((B, H, case["context"], D), np.nan)
            inputs[name][:, :, :filled] = rng.standard_normal((B, H, filled, D))
        for key in ("start", "position"):
            inputs[key] = np.array([case[key]], np.int32) if key in case else None
    return inputs


def objective(outputs: Arguments, inputs: Arguments) -> float:
    return np.sum(outputs["out"] * inputs["dout"])
