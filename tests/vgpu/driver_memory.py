"""Driver calls for device memory, page-locked host memory, copies and fills."""

from __future__ import annotations

import ctypes
import mmap
import operator

import numpy as np
from cuda.bindings import driver as bindings

from . import capture, streams
from .device import Refused, device
from .driver import call
from .options import current
from .report import VirtualGPUError
from .streams import Stream, legacy, stream_of

_host_blocks: dict[int, mmap.mmap] = {}  # memory of cuMemHostAlloc by address


def host_address(pointer) -> int:
    """A host pointer as cuda.bindings takes it: a number, None, or an object with a buffer."""
    if pointer is None:
        return 0
    try:
        return operator.index(pointer)
    except TypeError:
        try:
            return np.frombuffer(pointer, np.uint8).ctypes.data
        except (TypeError, ValueError, BufferError):
            return int(pointer)


def host_bytes(address: int, nbytes: int) -> np.ndarray:
    """A view (uint8) of host memory."""
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


@call(1)
def cuMemAlloc(nbytes):
    capture.forbid("cuMemAlloc")
    if nbytes == 0:
        raise Refused("CUDA_ERROR_INVALID_VALUE", "allocation of 0 bytes")
    return bindings.CUdeviceptr(device.allocate(int(nbytes)))


@call()
def cuMemFree(pointer):
    capture.forbid("cuMemFree")
    address = int(pointer)
    if address:
        streams.when_idle(lambda: device.free(address))


@call(1)
def cuMemAllocAsync(nbytes, stream):
    if stream_of(stream).capture is not None:
        raise VirtualGPUError("not supported", "cuMemAllocAsync inside a capture")
    if nbytes == 0:
        raise Refused("CUDA_ERROR_INVALID_VALUE", "allocation of 0 bytes")
    return bindings.CUdeviceptr(device.allocate(int(nbytes)))


@call()
def cuMemFreeAsync(pointer, stream):
    if stream_of(stream).capture is not None:
        raise VirtualGPUError("not supported", "cuMemFreeAsync inside a capture")
    address = int(pointer)
    stream_of(stream).submit("free", lambda: device.free(address), host=True)


@call(2)
def cuMemGetInfo():
    return current.memory - device.used, current.memory


@call(2)
def cuMemGetAddressRange(pointer):
    found = device.arena.find(int(pointer))
    if found is None:
        raise Refused("CUDA_ERROR_NOT_FOUND", device.arena.describe(int(pointer), 1))
    return bindings.CUdeviceptr(found.address), found.nbytes


@call(1)
def cuPointerGetAttribute(attribute, pointer):
    return _pointer_attribute(attribute, int(pointer))


@call(1)
def cuPointerGetAttributes(count, attributes, pointer):
    return [_pointer_attribute(a, int(pointer)) for a in attributes[:count]]


def _pointer_attribute(attribute, address: int):
    name = bindings.CUpointer_attribute(int(attribute)).name.removeprefix("CU_POINTER_ATTRIBUTE_")
    found = device.arena.find(address)
    pinned = found is None and device.is_pinned(address, 1)
    if found is None and not pinned:
        raise Refused("CUDA_ERROR_INVALID_VALUE",
                      f"neither device nor page-locked memory: {address:#x}")
    kinds = bindings.CUmemorytype
    if name == "MEMORY_TYPE":
        return kinds.CU_MEMORYTYPE_HOST if pinned else kinds.CU_MEMORYTYPE_DEVICE
    if name == "DEVICE_POINTER" and not pinned:
        return bindings.CUdeviceptr(address)
    if name == "HOST_POINTER" and pinned:
        return address
    if name == "RANGE_START_ADDR" and not pinned:
        return bindings.CUdeviceptr(found.address)
    if name == "RANGE_SIZE" and not pinned:
        return found.nbytes
    if name in ("IS_MANAGED", "DEVICE_ORDINAL"):
        return 0
    raise VirtualGPUError("bad driver call", f"pointer attribute {name} is not modelled")


@call(1)
def cuMemHostAlloc(nbytes, flags):
    if flags & bindings.CU_MEMHOSTALLOC_DEVICEMAP:
        raise VirtualGPUError("not supported", "host memory that is mapped into the device")
    return _allocate_host(nbytes)


@call(1)
def cuMemAllocHost(nbytes):
    return _allocate_host(nbytes)


def _allocate_host(nbytes: int) -> int:
    capture.forbid("allocation of host memory")
    if nbytes == 0:
        raise Refused("CUDA_ERROR_INVALID_VALUE", "allocation of 0 bytes")
    block = mmap.mmap(-1, nbytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(block))
    host_bytes(address, nbytes)[:] = 0xCB
    _host_blocks[address] = block
    device.pinned[address] = nbytes
    return address


@call()
def cuMemFreeHost(pointer):
    capture.forbid("cuMemFreeHost")
    address = int(pointer)
    if address not in _host_blocks:
        raise Refused("CUDA_ERROR_INVALID_VALUE", f"no page-locked allocation at {address:#x}")
    streams.when_idle(lambda: _release_host(address))


def _release_host(address: int) -> None:
    del _host_blocks[address], device.pinned[address]


@call()
def cuMemHostRegister(pointer, nbytes, flags):
    capture.forbid("cuMemHostRegister")
    address = host_address(pointer)
    if flags & bindings.CU_MEMHOSTREGISTER_DEVICEMAP:
        raise VirtualGPUError("not supported", "host memory that is mapped into the device")
    if any(start < address + nbytes and address < start + size
           for start, size in device.pinned.items()):
        raise Refused("CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
                      f"{nbytes} bytes at {address:#x}")
    device.pinned[address] = nbytes


@call()
def cuMemHostUnregister(pointer):
    address = host_address(pointer)
    if address not in device.pinned or address in _host_blocks:
        raise Refused("CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", f"{address:#x}")
    streams.flush()
    del device.pinned[address]


@call(1)
def cuMemHostGetDevicePointer(pointer, flags):
    raise VirtualGPUError("not supported", "host memory that is mapped into the device")


@call()
def cuMemcpyHtoD(destination, source, nbytes):
    capture.forbid("cuMemcpyHtoD")
    _host_to_device(legacy, int(destination), host_address(source), nbytes)
    legacy.synchronize()


@call()
def cuMemcpyHtoDAsync(destination, source, nbytes, stream):
    _host_to_device(stream_of(stream), int(destination), host_address(source), nbytes)


@call()
def cuMemcpyDtoH(destination, source, nbytes):
    capture.forbid("cuMemcpyDtoH")
    _device_to_host(legacy, host_address(destination), int(source), nbytes)
    legacy.synchronize()


@call()
def cuMemcpyDtoHAsync(destination, source, nbytes, stream):
    _device_to_host(stream_of(stream), host_address(destination), int(source), nbytes)


@call()
def cuMemcpyDtoD(destination, source, nbytes):
    _device_to_device(legacy, int(destination), int(source), nbytes)


@call()
def cuMemcpyDtoDAsync(destination, source, nbytes, stream):
    _device_to_device(stream_of(stream), int(destination), int(source), nbytes)


@call()
def cuMemcpy(destination, source, nbytes):
    capture.forbid("cuMemcpy")
    _any_copy(legacy, int(destination), int(source), nbytes)
    legacy.synchronize()


@call()
def cuMemcpyAsync(destination, source, nbytes, stream):
    _any_copy(stream_of(stream), int(destination), int(source), nbytes)


def _any_copy(stream: Stream, destination: int, source: int, nbytes: int) -> None:
    to_device = device.arena.find(destination) is not None
    from_device = device.arena.find(source) is not None
    if not (to_device or from_device):
        raise VirtualGPUError("bad driver call", "a copy that touches no device memory: "
                              + device.arena.describe(destination, nbytes))
    copy = _device_to_device if to_device and from_device else \
        _host_to_device if to_device else _device_to_host
    copy(stream, destination, source, nbytes)


def _host_to_device(stream: Stream, destination: int, source: int, nbytes: int) -> None:
    """From page-locked memory the bytes are read when the copy runs, else now."""
    if not nbytes:
        return
    device.check(destination, nbytes, "copy to")
    data = host_bytes(source, nbytes)
    pinned = device.is_pinned(source, nbytes)
    if not pinned:
        _refuse_pageable(stream)
        data = data.copy() if current.lazy_streams else data

    def run():
        if pinned:
            _check_pinned(source, nbytes)
        device.arena.write(destination, data)
    stream.submit("memcpy", run)


def _device_to_host(stream: Stream, destination: int, source: int, nbytes: int) -> None:
    """Into page-locked memory the bytes arrive when the copy runs, else before the return."""
    if not nbytes:
        return
    device.check(source, nbytes, "copy from")
    pinned = device.is_pinned(destination, nbytes)
    if not pinned:
        _refuse_pageable(stream)

    def run():
        if pinned:
            _check_pinned(destination, nbytes)
        host_bytes(destination, nbytes)[:] = device.arena.read(source, nbytes)
    stream.submit("memcpy", run)
    if not pinned:
        stream.synchronize()


def _device_to_device(stream: Stream, destination: int, source: int, nbytes: int) -> None:
    if not nbytes:
        return
    device.check(destination, nbytes, "copy to")
    device.check(source, nbytes, "copy from")
    stream.submit("memcpy", lambda: device.arena.copy(destination, source, nbytes))


def _refuse_pageable(stream: Stream) -> None:
    if stream.capture is not None:
        raise stream.capture.invalidate(
            "UNSUPPORTED", "a copy of pageable host memory during a capture; pin the memory")


def _check_pinned(address: int, nbytes: int) -> None:
    if not device.is_pinned(address, nbytes):
        raise VirtualGPUError("use after free", f"a queued copy of {nbytes} bytes at {address:#x}:"
                              " the page-locked host memory was released before it ran")


def _fill(stream: Stream, pointer, value: int, dtype: type, count: int) -> None:
    if not count:
        return
    value, count = int(value), int(count)
    if not 0 <= value <= np.iinfo(dtype).max:
        raise VirtualGPUError("bad driver call", f"memset of {np.dtype(dtype)} to {value}")
    word = np.array(value, dtype)
    address = int(pointer)
    if address % word.itemsize:
        raise Refused("CUDA_ERROR_INVALID_VALUE", f"memset of misaligned address {address:#x}")
    device.check(address, count * word.itemsize, "fill of")

    def run():
        if dtype is np.uint8:
            device.arena.fill(address, int(word), count)
        else:
            device.arena.write(address, np.full(count, word))
    stream.submit("memset", run)


@call()
def cuMemsetD8(pointer, value, count):
    _fill(legacy, pointer, value, np.uint8, count)


@call()
def cuMemsetD16(pointer, value, count):
    _fill(legacy, pointer, value, np.uint16, count)


@call()
def cuMemsetD32(pointer, value, count):
    _fill(legacy, pointer, value, np.uint32, count)


@call()
def cuMemsetD8Async(pointer, value, count, stream):
    _fill(stream_of(stream), pointer, value, np.uint8, count)


@call()
def cuMemsetD16Async(pointer, value, count, stream):
    _fill(stream_of(stream), pointer, value, np.uint16, count)


@call()
def cuMemsetD32Async(pointer, value, count, stream):
    _fill(stream_of(stream), pointer, value, np.uint32, count)
