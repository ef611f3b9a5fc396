"""The list of ops, and their modules by backend."""

import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace

OPS = (
    "embedding",
    "layernorm",
    "matmul",
    "gelu",
    "attention",
    "cross_entropy",
    "adamw",
    "grad_norm",
)

BACKENDS = ("oracle", "cpu", "gpu")


def op_table(backend: str) -> SimpleNamespace:
    """All ops of one backend: ``op_table("cpu").gelu.forward(y, x)``.

    `backend` is "oracle" (NumPy, in the precision of its inputs), "cpu" or "gpu". The functions
    are the backend's own, without the argument checks of the public ones.
    """
    return SimpleNamespace(**{op: load_op(op, backend) for op in OPS})


def load_op(op: str, backend: str) -> ModuleType:
    """The module `kernels.<op>.<backend>`. ValueError for a name that is not in the lists above."""
    if op not in OPS:
        raise ValueError(f"unknown op {op!r}: choose one of {', '.join(OPS)}")
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}: choose one of {', '.join(BACKENDS)}")
    return importlib.import_module(f".{op}.{backend}", __package__)


def load_spec(op: str) -> ModuleType:
    """The module `kernels.<op>.spec`: shapes, cases and costs of the op."""
    return importlib.import_module(f".{op}.spec", __package__)


def problem(backend: str) -> str:
    """Why a backend cannot compute here, in one line; empty when it can. Never raises."""
    if backend != "gpu":
        return ""
    try:
        from .common.cuda import device_problem
    except ImportError as error:
        return str(error)
    return device_problem()


def implementations(op: str) -> tuple[str, ...]:
    """The backends to be measured against the oracle, in order: those whose file exists."""
    folder = Path(__file__).parent / op
    return tuple(name for name in BACKENDS[1:] if (folder / f"{name}.py").exists())
