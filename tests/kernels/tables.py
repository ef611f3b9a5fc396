"""The implementations of an op, all callable with NumPy arrays."""

import importlib.util
from types import SimpleNamespace

import numpy as np

from kernels.common.verify import download, upload
from kernels.registry import implementations, load_op, load_spec


def tables(op):
    """{"oracle": functions, "cpu": functions, "gpu": functions}; "gpu" where numba-cuda is."""
    found = {"oracle": load_op(op, "oracle"), "cpu": load_op(op, "cpu")}
    if "gpu" in implementations(op) and importlib.util.find_spec("numba_cuda"):
        names = load_spec(op).FUNCTIONS
        found["gpu"] = SimpleNamespace(**{name: _on_the_gpu(op, name) for name in names})
    return found


def _on_the_gpu(op, name):
    """The function on copies of its arrays in device memory, which are copied back."""

    def call(*arguments):
        copies = {id(a): upload(a, "gpu") for a in arguments if isinstance(a, np.ndarray)}
        getattr(load_op(op, "gpu"), name)(*(copies.get(id(a), a) for a in arguments))
        for argument in arguments:
            if id(argument) in copies:
                argument[...] = download(copies[id(argument)], "gpu")

    return call
