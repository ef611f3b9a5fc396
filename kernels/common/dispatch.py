"""The public functions of an op: check the arguments, then call the backend of their array type."""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from .checks import check_arguments, check_scalar
from .spec import Arguments, Function, has_bf16, is_bf16

DLPACK_CUDA = 2  # DLPack's number for memory of an NVIDIA GPU
_PLACE = {"cpu": "host memory", "gpu": "device memory"}


def by_array_type(package: str, name: str) -> Callable[..., None]:
    """The public function `name` of the op `package`.

    NumPy arrays go to `<package>.cpu`; device arrays, which are those with
    ``__cuda_array_interface__`` or DLPack tensors on a GPU, to `<package>.gpu`. Both are imported
    on the first call. Raises TypeError for other arrays and wrong dtypes, ValueError for shapes,
    layouts and values that do not fit.
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
    def public(*args: Any, stream: Any = None, **kwargs: Any) -> None:
        arguments = signature.bind(*args, **kwargs).arguments
        try:
            for scalar, kind in scalars.items():
                arguments[scalar] = check_scalar(scalar, arguments[scalar], kind)
            backend = _backend(function, arguments)
            if backend == "gpu":
                _call_gpu(package, name, function, arguments, stream)
                return
            if stream is not None:
                raise TypeError("stream is for device arrays, and these are NumPy arrays; "
                                "leave it out")
            check_arguments(function, arguments)
            _refuse_bf16(function, arguments)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{title}: {error}") from None
        module = importlib.import_module(".cpu", package)
        getattr(module, name)(*arguments.values())

    arrays = "\n".join(f"    {line}" for line in function.describe())
    public.__doc__ = f"{inspect.getdoc(reference)}\n\nArrays:\n{arrays}\n{_STREAM}"
    keyword = inspect.Parameter("stream", inspect.Parameter.KEYWORD_ONLY, default=None)
    public.__signature__ = signature.replace(
        parameters=[*signature.parameters.values(), keyword])
    return public


_STREAM = """
With device arrays the work is put into `stream`, by default CUDA's default stream, and may not
be finished when the function returns."""


def _call_gpu(package: str, name: str, function: Function, arguments: dict[str, Any],
              stream: Any) -> None:
    """Call `<package>.gpu` on device arrays over the same memory, on `stream`."""
    from .interop import device_arrays, view_tensors
    from .launch import current_stream, using_stream

    with using_stream(stream):
        view_tensors(arguments, function.arrays, current_stream())
        check_arguments(function, arguments)
        device_arrays(arguments, function.arrays, current_stream())
        getattr(importlib.import_module(".gpu", package), name)(*arguments.values())


def _refuse_bf16(function: Function, arguments: Arguments) -> None:
    for name in function.arrays:
        if arguments[name] is not None and is_bf16(arguments[name]) and not has_bf16("cpu"):
            raise TypeError(f"{name} is bfloat16, and this processor has no avx512_bf16; "
                            f"convert it with {name}.astype(np.float32)")


def _backend(function: Function, arguments: Arguments) -> str:
    """"cpu" or "gpu", from the first array; every other array must be of the same kind."""
    backends = {name: _backend_of(name, arguments[name]) for name in function.arrays
                if arguments[name] is not None}
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


def _backend_of(name: str, value: Any) -> str:
    if isinstance(value, np.ndarray):
        return "cpu"
    try:
        if hasattr(value, "__cuda_array_interface__"):
            return "gpu"
    except RuntimeError as error:  # PyTorch: a tensor that requires gradients
        raise TypeError(f"{name}: {error}") from None
    dlpack_device = getattr(value, "__dlpack_device__", None)
    if dlpack_device is not None and dlpack_device()[0] == DLPACK_CUDA:
        return "gpu"
    raise TypeError(
        f"{name} is {type(value).__name__}, expected a NumPy array or a device array; convert it, "
        f"for example with np.asarray({name}) or numba.cuda.to_device({name})"
    )
