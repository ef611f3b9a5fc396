"""Where to compute: asked once, never raising for `auto`, said in one line."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import kernels.registry

from .errors import UserError


@dataclass(frozen=True)
class Device:
    """The chosen backend: its kernel table and the line that says what was chosen and why."""

    name: str
    ops: SimpleNamespace
    line: str


def cuda_problem() -> str:
    """Why CUDA cannot be used here; empty when it can."""
    return "this version has no CUDA kernels"


def choose(device: str) -> Device:
    """The backend for `--device` auto, cpu or cuda; UserError when cuda is asked for in vain."""
    if device == "cpu":
        return Device("cpu", kernels.registry.op_table("cpu"), "device: cpu")
    problem = cuda_problem()
    if device == "cuda":
        raise UserError(f"--device cuda: {problem}; use --device cpu")
    return Device("cpu", kernels.registry.op_table("cpu"), f"device: cpu ({problem})")
