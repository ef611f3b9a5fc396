"""Where to compute: asked once, never raising for `auto`, said in one line."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import kernels

from .errors import UserError
from .program import say


@dataclass(frozen=True)
class Device:
    """The chosen backend: its kernel table and the line that says what was chosen and why."""

    name: str
    ops: SimpleNamespace
    line: str


def op_table(backend: str) -> SimpleNamespace:
    """The kernels of one backend, after a look at whose `kernels` package was found."""
    if getattr(kernels, "IDENTITY", None) != "andrea-numba":
        raise UserError(f"the package `kernels` at {kernels.__path__[0]} belongs to another "
                        "project of that name; install andrea-numba in an environment of its own")
    from kernels import registry

    return registry.op_table(backend)


def compile_notice() -> None:
    """Say that the first use will take a while, when no compiled kernels are in the cache."""
    from kernels.common.cache import cache_folder

    if not cache_folder().exists():
        say("compiling kernels for this machine: once, up to a minute")


def cuda_problem() -> str:
    """Why CUDA cannot be used here; empty when it can."""
    return "this version has no CUDA kernels"


def choose(device: str) -> Device:
    """The backend for `--device` auto, cpu or cuda; UserError when cuda is asked for in vain."""
    if device == "cpu":
        return Device("cpu", op_table("cpu"), "device: cpu")
    problem = cuda_problem()
    if device == "cuda":
        raise UserError(f"--device cuda: {problem}; use --device cpu")
    return Device("cpu", op_table("cpu"), f"device: cpu ({problem})")
