"""Kernel launches: packing of arguments, refusals, and the work that goes into a stream."""

from __future__ import annotations

import ctypes
import struct
from collections import deque
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from . import machine, numerics
from .device import Refused, device
from .modules import LoadedKernel, assemble, loaded_kernel
from .options import current
from .report import VirtualGPUError
from .streams import Stream, stream_of

CHECKED = (ctypes.c_byte, ctypes.c_int, ctypes.c_longlong)  # others wrap integers around
LITTLE = {1: "<B", 2: "<H", 4: "<I", 8: "<Q"}


@dataclass
class LaunchRecord:
    """One executed launch."""

    kernel: str  # readable name
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_shared: int
    statistics: machine.LaunchStatistics


launches: deque[LaunchRecord] = deque(maxlen=1000)  # the newest last


def sizes(value) -> tuple[int, int, int]:
    """Grid or block sizes, an int or up to three of them, as three."""
    given = tuple(map(int, value)) if isinstance(value, (tuple, list)) else (int(value),)
    if len(given) > 3:
        raise VirtualGPUError("bad launch", f"sizes {value} have more than three dimensions")
    return (*given, 1, 1)[:3]


class LaunchConfig:
    """Stands in for cuda.core.LaunchConfig, which asks the driver when it is cooperative."""

    def __init__(self, grid=(1, 1, 1), cluster=None, block=(1, 1, 1), shmem_size: int = 0,
                 is_cooperative: bool = False, programmatic_stream_serialization: bool = False):
        if cluster is not None:
            raise VirtualGPUError("bad launch", "thread block clusters are not supported")
        if programmatic_stream_serialization:
            raise VirtualGPUError("bad launch", "programmatic stream serialization is not "
                                  "supported")
        self.grid, self.block, self.cluster = sizes(grid), sizes(block), cluster
        self.shmem_size, self.is_cooperative = int(shmem_size), is_cooperative


def launch(stream, config: LaunchConfig, kernel: LoadedKernel, *arguments) -> None:
    """Stands in for cuda.core.launch: arguments are ints, floats, ctypes or NumPy scalars."""
    handle = getattr(stream, "handle", stream)
    with device.lock:
        try:
            device.check_process()
            submit(stream_of(handle or 0), loaded_kernel(kernel), config.grid, config.block,
                   config.shmem_size, pack(kernel, arguments), config.is_cooperative)
        except Refused as refused:
            device.refuse(refused)
            raise refused.error() from None


def submit(stream: Stream, kernel: LoadedKernel, grid, block, dynamic_shared: int,
           parameters: bytes, cooperative: bool = False) -> None:
    """Check a launch and put it into a stream; `parameters` are the .param bytes."""
    device.limits.check_launch(kernel, grid, block, dynamic_shared, cooperative)

    def run():
        if not kernel.module.live:  # in a graph; what is only queued runs before the unloading
            raise _refusal(kernel, "the kernel's module was unloaded")
        numerics.set_approximation(current.approx)
        statistics = machine.launch(kernel.code, grid, block, parameters, dynamic_shared, current,
                                    device.arena, cooperative)
        launches.append(LaunchRecord(kernel.code.title, grid, block, dynamic_shared, statistics))
    stream.submit("kernel", run)


def pack(kernel: LoadedKernel, arguments) -> bytes:
    """The bytes of the kernel's parameters; refused if their number or a size differs."""
    parameters = kernel.code.parameters
    if len(arguments) != len(parameters):
        raise _refusal(kernel, f"{len(arguments)} arguments for {len(parameters)} parameters")
    packed = bytearray(kernel.code.parameter_bytes)
    for index, (argument, parameter) in enumerate(zip(arguments, parameters, strict=True)):
        size = parameter.size
        data = _bytes_of(argument, size)
        if len(data) != size:
            raise _refusal(kernel, f"argument {index} ({type(argument).__name__}) has "
                           f"{len(data)} bytes, the parameter has {size}")
        packed[parameter.offset:parameter.offset + size] = data
    return bytes(packed)


def _bytes_of(argument, size: int) -> bytes:
    """An argument as the driver would read it; Python's ints fit every size they fit into."""
    if isinstance(argument, int):
        bits = 8 * size
        if size in LITTLE and -(1 << bits - 1) <= argument < 1 << bits:
            return struct.pack(LITTLE[size], argument & (1 << bits) - 1)
        return argument.to_bytes(8, "little", signed=argument < 0)
    if isinstance(argument, float):
        return struct.pack("<d", argument)
    if isinstance(argument, complex):
        return struct.pack("<dd", argument.real, argument.imag)
    if isinstance(argument, np.generic):
        return argument.tobytes()
    if isinstance(argument, (ctypes._SimpleCData, ctypes.Structure, ctypes.Array)):
        return bytes(argument)
    return struct.pack("<Q", int(getattr(argument, "handle", argument)))


def read_parameters(kernel: LoadedKernel, pointers) -> bytes:
    """The parameters behind the `kernelParams` of cuLaunchKernel, in any form of cuda.bindings.

    pointers: None or 0; the address of an array of pointers, or such an array with the buffer
    protocol; or a tuple of values and one of ctypes types, where type None stands for a handle
    or a ctypes structure. What cuda.bindings refuses is refused.
    """
    parameters = kernel.code.parameters
    if isinstance(pointers, (tuple, list)):
        if [type(part) for part in pointers] != [tuple, tuple] \
                or len(pointers[0]) != len(pointers[1]):
            raise _refusal(kernel, "arguments that are neither addresses nor a tuple of values "
                           "and as long a tuple of types")
        return pack(kernel, [_typed(kernel, index, value, kind)
                             for index, (value, kind) in enumerate(zip(*pointers, strict=True))])
    if pointers is None or (isinstance(pointers, int) and pointers == 0):
        return pack(kernel, ())
    if not isinstance(pointers, int):
        buffer = np.frombuffer(pointers, np.uint64)
        if buffer.size < len(parameters):
            raise _refusal(kernel,
                           f"{buffer.size} arguments for {len(parameters)} parameters")
        pointers = buffer.ctypes.data
    addresses = (ctypes.c_void_p * len(parameters)).from_address(pointers)
    packed = bytearray(kernel.code.parameter_bytes)
    for address, parameter in zip(addresses, parameters, strict=True):
        packed[parameter.offset:parameter.offset + parameter.size] = \
            ctypes.string_at(address, parameter.size)
    return bytes(packed)


def _typed(kernel: LoadedKernel, index: int, value, kind):
    """One argument of type `kind`, by the rules of cuda.bindings."""
    handle = callable(getattr(value, "getPtr", None))
    if kind is ctypes.c_void_p and handle:
        raise _refusal(kernel, f"argument {index} ({type(value).__name__}) has the type c_void_p,"
                       " which passes the address of the Python object; the type is None")
    if kind is None:
        fits = handle or isinstance(value, (ctypes.Structure, IntEnum))
    elif kind is ctypes.c_void_p:
        fits = isinstance(value, (int, ctypes.c_void_p))
    elif isinstance(value, ctypes._SimpleCData):
        fits = isinstance(value, kind) or (kind, type(value)) == (ctypes.c_double, ctypes.c_float)
    else:
        fits = isinstance(kind, type) and issubclass(kind, ctypes._SimpleCData)
        if fits and kind in CHECKED and isinstance(value, int):
            bound = 1 << 8 * ctypes.sizeof(kind) - 1
            fits = -bound <= value < bound
    try:
        if fits:
            plain = getattr(value, "value", value)
            return value if kind in (None, ctypes.c_void_p) else kind(plain)
    except TypeError:
        pass
    name = getattr(kind, "__name__", kind)
    raise _refusal(kernel, f"argument {index}, {value!r} ({type(value).__name__}), does not fit "
                   f"its type {name}")


def run_ptx(text: str, name: str, grid, block, arguments,
            dynamic_shared: int = 0) -> machine.LaunchStatistics:
    """See vgpu.run_ptx."""
    code = assemble(text)
    with device.lock:
        kernel = code.get_kernel(name)
        if kernel.max_dynamic_shared is None:
            kernel.max_dynamic_shared = device.limits.optin_shared
        arrays = [a for a in arguments if isinstance(a, np.ndarray)]
        addresses = {id(a): device.allocate(max(a.nbytes, 1), f"argument {i}")
                     for i, a in enumerate(arguments) if isinstance(a, np.ndarray)}
        try:
            for array in arrays:
                device.arena.write(addresses[id(array)], array)
            values = [addresses.get(id(a), a) for a in arguments]
            device.limits.check_launch(kernel, sizes(grid), sizes(block), dynamic_shared, False)
            numerics.set_approximation(current.approx)
            statistics = machine.launch(kernel.code, sizes(grid), sizes(block),
                                        pack(kernel, values), dynamic_shared, current,
                                        device.arena)
            for array in arrays:
                data = device.arena.read(addresses[id(array)], array.nbytes)
                array[...] = data.view(array.dtype).reshape(array.shape)
        finally:
            for address in addresses.values():
                device.free(address)
    return statistics


def _refusal(kernel: LoadedKernel, detail: str) -> VirtualGPUError:
    return VirtualGPUError("bad launch", detail, kernel=kernel.code.title)
