"""Device arrays and streams of other libraries: CuPy, PyTorch, JAX, cuda.core and others."""

import ctypes
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from .checks import dtype_of
from .cuda import core, cuda, default_stream
from .device_array import DeviceArray

LEGACY_STREAM = 1  # the default stream in both protocols, where 0 would be ambiguous
BFLOAT = 4
_CODES = {0: "i", 1: "u", 2: "f", BFLOAT: "V"}  # NumPy has no letter for bfloat16


def to_stream(stream: Any) -> Any:
    """A cuda.core.Stream for a stream of numba, CuPy, PyTorch, cuda.core or an int handle."""
    if isinstance(stream, core.Stream):
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        handle = protocol()[1]
    elif hasattr(stream, "stream"):  # a graph builder records what its stream is given
        return to_stream(stream.stream)
    else:
        names = (name for name in ("cuda_stream", "handle", "ptr") if hasattr(stream, name))
        name = next(names, None)
        handle = getattr(stream, name) if name else stream
    if isinstance(handle, bool) or not hasattr(handle, "__int__") or isinstance(handle, float):
        raise TypeError(f"stream is {type(stream).__name__}, expected a CUDA stream: of numba, "
                        "with __cuda_stream__, .cuda_stream or .handle, or an int handle")
    handle = int(handle)
    if not 0 <= handle < 2**64:
        raise ValueError(f"stream is the handle {handle}, expected 0 to 2**64 - 1; pass the "
                         "library's stream itself")
    return core.Stream.from_handle(handle) if handle else default_stream()


def view_tensors(arguments: dict[str, Any], names: Iterable[str], stream: Any) -> None:
    """Replace DLPack tensors among `arguments` by views, to be written on `stream`.

    So are arrays that have no `shape` beside their ``__cuda_array_interface__``.
    """
    for name in names:
        value = arguments[name]
        if value is None:
            continue
        interface = getattr(value, "__cuda_array_interface__", None)
        if interface is None:
            arguments[name] = DLPackView(value, _handle(stream))
        elif not hasattr(value, "shape"):
            arguments[name] = SimpleNamespace(shape=interface["shape"], owner=value,
                                              __cuda_array_interface__=interface)


def device_arrays(arguments: dict[str, Any], names: Iterable[str], stream: Any) -> None:
    """Replace arrays with ``__cuda_array_interface__`` by `DeviceArray`s over the same memory.

    They have been checked to be C-contiguous. `stream` will wait for whatever stream an array says
    it was last used on.
    """
    writers = set()
    for name in names:
        value = arguments[name]
        if value is None:
            continue
        interface = value.__cuda_array_interface__
        writers.add(interface.get("stream"))
        arguments[name] = DeviceArray(value, interface["data"][0], tuple(interface["shape"]),
                                      dtype_of(interface))
    for writer in writers - {None, _handle(stream)}:
        event = cuda.event(timing=False)
        event.record(cuda.external_stream(writer))
        event.wait(cuda.external_stream(_handle(stream)))


def _handle(stream: Any) -> int:
    return int(stream.handle) or LEGACY_STREAM


class DLPackView:
    """The memory behind a DLPack tensor on the GPU, with ``__cuda_array_interface__``.

    The capsule is kept and never consumed: when it goes, the tensor is released.
    """

    def __init__(self, tensor: Any, stream: int):
        self._capsule = tensor.__dlpack__(stream=stream)
        found = _pointer(self._capsule, b"dltensor")
        content = ctypes.cast(found, ctypes.POINTER(_Tensor)).contents
        dtype = content.dtype
        is_known = dtype.code in _CODES and (dtype.code != BFLOAT or dtype.bits == 16)
        if not is_known or dtype.lanes != 1:
            raise TypeError(f"a DLPack tensor has type code {dtype.code} with {dtype.lanes} lanes, "
                            "expected float32, bfloat16 or int32; convert it")
        itemsize = dtype.bits // 8
        self.shape = tuple(content.shape[: content.ndim])
        strides = content.strides and tuple(content.strides[i] * itemsize
                                            for i in range(content.ndim))
        self.__cuda_array_interface__ = {
            "shape": self.shape,
            "strides": strides or None,
            "data": ((content.data or 0) + content.byte_offset, False),
            "typestr": f"<{_CODES[dtype.code]}{itemsize}",
            "version": 3,
        }


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    """DLTensor of dlpack.h, with which a DLManagedTensor begins."""

    _fields_ = (("data", ctypes.c_void_p), ("device_type", ctypes.c_int32),
                ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32), ("dtype", _DataType),
                ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64))


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
