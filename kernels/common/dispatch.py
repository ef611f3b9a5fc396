"""The public functions of an op: check the arguments, then call the backend of their array type."""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from .checks import check_arguments, check_scalar
from .spec import Arguments, Function


def by_array_type(package: str, name: str) -> Callable[..., None]:
    """The public function `name` of the op `package`.

    NumPy arrays go to `<package>.cpu`, anything with ``__cuda_array_interface__`` to
    `<package>.gpu`; both are imported on the first call. Raises TypeError for other arrays and
    wrong dtypes, ValueError for shapes, layouts and values that do not fit.
    """
    reference = getattr(importlib.import_module(".oracle", package), name)
    function: Function = importlib.import_module(".spec", package).FUNCTIONS[name]
    signature = inspect.signature(reference)
    scalars = {
        parameter.name: parameter.annotation
        for parameter in signature.parameters.values()
        if parameter.annotation in (bool, int, float)
    }
    title = f"{package.rpartition('.')[2]}.{name}"

    @functools.wraps(reference)
    def public(*args: Any, **kwargs: Any) -> None:
        arguments = signature.bind(*args, **kwargs).arguments
        try:
            for scalar, kind in scalars.items():
                arguments[scalar] = check_scalar(scalar, arguments[scalar], kind)
            backend = _backend(function, arguments)
            check_arguments(function, arguments)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{title}: {error}") from None
        module = importlib.import_module(f".{backend}", package)
        getattr(module, name)(*arguments.values())

    arrays = "\n".join(f"    {line}" for line in function.describe())
    public.__doc__ = f"{inspect.getdoc(reference)}\n\nArrays:\n{arrays}"
    return public


def _backend(function: Function, arguments: Arguments) -> str:
    """"cpu" or "gpu", from the first array; every other array must be of the same kind."""
    backends: dict[str, str] = {}
    for name in function.arrays:
        value = arguments[name]
        if value is None:
            continue
        if isinstance(value, np.ndarray):
            backends[name] = "cpu"
        elif hasattr(value, "__cuda_array_interface__"):
            backends[name] = "gpu"
        else:
            raise TypeError(
                f"{name} is {type(value).__name__}, expected a NumPy array or an array with "
                f"__cuda_array_interface__; convert it, for example with np.asarray({name})"
            )
    first = next(iter(backends), None)
    if first is None:
        raise TypeError("no array was given, expected the arrays of the signature; pass them")
    for name, backend in backends.items():
        if backend != backends[first]:
            raise TypeError(
                f"{first} is in {_PLACE[backends[first]]} but {name} in {_PLACE[backend]}, "
                "expected all arrays in one place; copy one of them"
            )
    return backends[first]


_PLACE = {"cpu": "host memory", "gpu": "device memory"}
