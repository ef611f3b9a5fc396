"""Argument checks of the public functions: a clear error instead of a wrong result.

Each message says what was given, what was expected and what to do. NumPy and device arrays are
looked at through their array interface; conditions on values are checked for NumPy arrays only,
because reading a device array would stop the caller's stream.
"""

import numbers
from dataclasses import dataclass
from typing import Any

import numpy as np

from .spec import BFLOAT16, DTYPES, Arguments, Array, Function, parse


@dataclass(frozen=True)
class Memory:
    """The bytes of a contiguous array."""

    start: int
    stop: int

    def overlaps(self, other: "Memory") -> bool:
        return self.start < other.stop and other.start < self.stop


def array_interface(value: Any) -> dict[str, Any] | None:
    """The (CUDA) array interface of an array, None for anything else."""
    if isinstance(value, np.ndarray):
        return value.__array_interface__
    return getattr(value, "__cuda_array_interface__", None)


def dtype_of(interface: dict[str, Any]) -> np.dtype:
    """The dtype in an array interface, in which bfloat16 stands as two bytes of anything."""
    dtype = np.dtype(interface["typestr"])
    return BFLOAT16 if dtype == np.dtype("V2") else dtype


def check_arguments(function: Function, arguments: Arguments) -> None:
    """Raise TypeError or ValueError unless the arguments fit the function's table.

    Checked: array type, dtype, number of dimensions, sizes that agree with each other,
    C-contiguity, writable outputs that overlap nothing they must not, and `function.require`.
    """
    sizes: dict[str, Any] = {}
    memory: dict[str, Memory] = {}
    arrays = {name: parse(shape, arguments) for name, shape in function.arrays.items()}
    present = {name: array for name, array in arrays.items() if arguments[name] is not None}
    for name, array in arrays.items():
        if name not in present and not array.optional:
            raise TypeError(f"{name} is None, expected an array {array}; pass one")
    operand = None
    for name, array in present.items():
        memory[name] = _check_array(name, array, arguments[name], name in function.outputs)
        if array.dtype == "operand":
            operand = operand or name
            _check_same_dtype(operand, name, arguments)
        bind(array, arguments[name].shape, sizes)
    for name, array in present.items():
        _check_shape(name, array, arguments[name].shape, sizes)
    _check_overlap(function, memory)
    if function.require:
        function.require(arguments)


def _check_array(name: str, array: Array, value: Any, is_output: bool) -> Memory:
    interface = array_interface(value)
    if interface is None:
        raise TypeError(
            f"{name} is {type(value).__name__}, expected an array {array}; "
            f"pass np.asarray({name}, dtype={_type_name(DTYPES[array.dtype][0])})"
        )
    if interface.get("mask") is not None:
        raise TypeError(f"{name} has a mask, expected an array without one; "
                        "fill the masked elements and pass the array alone")
    dtype, expected = dtype_of(interface), DTYPES[array.dtype]
    if dtype not in expected:
        names = " or ".join(map(str, expected))
        raise TypeError(f"{name} has dtype {dtype}, expected {names}; "
                        f"convert it with {name}.astype({_type_name(expected[0])})")
    shape = interface["shape"]
    if array.dims != ("...",) and len(shape) != len(array.dims):
        raise ValueError(
            f"{name} has shape {shape}, expected {len(array.dims)} dimensions "
            f"[{', '.join(array.dims)}]; reshape it"
        )
    if 0 in shape:
        raise ValueError(f"{name} has shape {shape}, expected at least 1 in each dimension; "
                         "skip the call when there is nothing to compute")
    if not _is_contiguous(interface, dtype.itemsize):
        advice = "allocate it with np.empty" if is_output else f"pass np.ascontiguousarray({name})"
        raise ValueError(f"{name} is not C-contiguous, expected a C-contiguous array; {advice}")
    address, read_only = interface["data"]
    if is_output and read_only:
        raise ValueError(f"{name} is read-only, expected a writable array; pass a copy")
    return Memory(address, address + dtype.itemsize * int(np.prod(shape, dtype=np.int64)))


def _check_same_dtype(first: str, name: str, arguments: Arguments) -> None:
    wanted, found = (dtype_of(array_interface(arguments[n])) for n in (first, name))
    if found != wanted:
        raise TypeError(f"{name} has dtype {found}, expected {wanted} as {first} has; "
                        f"convert it with {name}.astype({_type_name(wanted)})")


def _type_name(dtype: np.dtype) -> str:
    return f"ml_dtypes.{dtype}" if dtype == BFLOAT16 else f"np.{dtype}"


def _is_contiguous(interface: dict[str, Any], itemsize: int) -> bool:
    strides, expected = interface.get("strides"), itemsize
    if strides is None:
        return True
    for size, stride in zip(reversed(interface["shape"]), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def bind(array: Array, shape: tuple[int, ...], sizes: dict[str, Any]) -> None:
    """Let the first array that names a symbol give its size."""
    if array.dims == ("...",):
        sizes.setdefault("shape", tuple(shape))
        return
    for dim, size in zip(array.dims, shape, strict=True):
        if dim.isidentifier():
            sizes.setdefault(dim, size)


def _check_shape(name: str, array: Array, shape: tuple[int, ...], sizes: dict[str, Any]) -> None:
    expected = array.shape(sizes)
    if tuple(shape) != expected:
        symbols = ", ".join(array.dims)
        raise ValueError(
            f"{name} has shape {tuple(shape)}, expected {expected} [{symbols}] to fit the other "
            "arguments; pass arrays whose sizes agree"
        )


def _check_overlap(function: Function, memory: dict[str, Memory]) -> None:
    for name in memory.keys() & function.outputs.keys():
        for other, place in memory.items():
            if other == name or not memory[name].overlaps(place):
                continue
            allowed = function.in_place.get(name, ()), function.in_place.get(other, ())
            if memory[name] == place and (other in allowed[0] or name in allowed[1]):
                continue
            raise ValueError(
                f"{name} overlaps {other} in memory, expected separate arrays; "
                f"allocate {name} on its own"
            )


def check_scalar(name: str, value: Any, kind: type) -> bool | int | float:
    """`value` as a Python `kind` (bool, int or float); TypeError if it is something else."""
    if kind is bool:
        accepted = isinstance(value, (bool, np.bool_))
    else:
        wanted = numbers.Integral if kind is int else numbers.Real
        accepted = isinstance(value, wanted) and not isinstance(value, (bool, np.bool_))
    if not accepted:
        raise TypeError(f"{name} is {value!r}, expected {kind.__name__}; pass a Python number")
    return kind(value)


def require_between(name: str, value: Any, low: int, high: int, advice: str) -> None:
    """ValueError unless low <= value <= high for a number or for every element of an array."""
    if array_interface(value) is None:
        if not low <= value <= high:
            raise ValueError(f"{name} is {value}, expected {low} to {high}; {advice}")
    elif isinstance(value, np.ndarray):
        wrong = (value < low) | (value > high)
        if wrong.any():
            place = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise ValueError(
                f"{name}[{', '.join(map(str, place))}] is {value[place]}, "
                f"expected {low} to {high}; {advice}"
            )
