"""Driver calls for initialisation, devices, contexts, the profiler and error names."""

from __future__ import annotations

import threading

from cuda.bindings import driver as bindings

from . import streams
from .device import Refused, device
from .driver import call
from .modules import loaded_modules
from .options import current
from .report import VirtualGPUError

VERSION = 13000
NAME = "Virtual GPU"
UUID = b"virtual-gpu\0\0\0\0\0"
CONTEXT = bindings.CUcontext(0x4000_0000)  # numba-cuda compares contexts by identity
NO_CONTEXT = bindings.CUcontext(0)


class _Thread(threading.local):
    def __init__(self):
        self.contexts: list = []


_thread = _Thread()


def context_stack() -> list:
    """The calling thread's stack of current contexts."""
    return _thread.contexts


def _check_device(number) -> None:
    if int(number) != 0:
        raise Refused("CUDA_ERROR_INVALID_DEVICE", f"device {int(number)}; there is only device 0")


def _check_context(context) -> None:
    if int(context) != int(CONTEXT):
        raise Refused("CUDA_ERROR_INVALID_CONTEXT", f"no context {int(context):#x}")


@call()
def cuInit(flags):
    pass


@call(1)
def cuDriverGetVersion():
    return VERSION


@call(1)
def cuDeviceGetCount():
    return 1


@call(1)
def cuDeviceGet(ordinal):
    _check_device(ordinal)
    return bindings.CUdevice(0)


@call(1)
def cuDeviceGetAttribute(attribute, number):
    _check_device(number)
    name = bindings.CUdevice_attribute(int(attribute)).name
    return device.limits.attribute(name.removeprefix("CU_DEVICE_ATTRIBUTE_"))


@call(2)
def cuDeviceComputeCapability(number):
    _check_device(number)
    return current.cc


@call(1)
def cuDeviceGetName(length, number):
    _check_device(number)
    return NAME.encode()[:length]


@call(1)
def cuDeviceGetUuid(number):
    _check_device(number)
    uuid = bindings.CUuuid()
    uuid.bytes = UUID
    return uuid


@call(1)
def cuDeviceTotalMem(number):
    _check_device(number)
    return current.memory


@call(1)
def cuDeviceGetPCIBusId(length, number):
    _check_device(number)
    return b"0000:00:00.0"[:length]


@call(1)
def cuDeviceCanAccessPeer(number, peer):
    return 0


@call(1)
def cuDevicePrimaryCtxRetain(number):
    _check_device(number)
    return CONTEXT


@call()
def cuDevicePrimaryCtxRelease(number):
    _check_device(number)


@call(2)
def cuDevicePrimaryCtxGetState(number):
    _check_device(number)
    return 0, 1


@call()
def cuDevicePrimaryCtxReset(number):
    """Everything that lives in the context goes: queued work, modules, memory."""
    _check_device(number)
    streams.synchronize_device()
    for module in loaded_modules():
        module.unload()
    for allocation in device.allocations():
        device.free(allocation.address)


@call(1)
def cuCtxGetCurrent():
    return _thread.contexts[-1] if _thread.contexts else NO_CONTEXT


@call()
def cuCtxSetCurrent(context):
    if int(context):
        _check_context(context)
    _thread.contexts[-1:] = [CONTEXT] if int(context) else []


@call()
def cuCtxPushCurrent(context):
    _check_context(context)
    _thread.contexts.append(CONTEXT)


@call(1)
def cuCtxPopCurrent():
    if not _thread.contexts:
        raise Refused("CUDA_ERROR_INVALID_CONTEXT", "the thread has no current context")
    return _thread.contexts.pop()


@call(1)
def cuCtxGetDevice():
    if not _thread.contexts:
        raise Refused("CUDA_ERROR_INVALID_CONTEXT", "the thread has no current context")
    return bindings.CUdevice(0)


@call(1)
def cuCtxGetFlags():
    return 0


@call(1)
def cuCtxGetApiVersion(context):
    return VERSION


@call()
def cuCtxSynchronize():
    streams.synchronize_device()


@call(2)
def cuCtxGetStreamPriorityRange():
    return 0, -5


@call()
def cuProfilerStart():
    pass


@call()
def cuProfilerStop():
    pass


@call(1)
def cuGetErrorName(error):
    return bindings.CUresult(int(error)).name.encode()


@call(1)
def cuGetErrorString(error):
    return bindings.CUresult(int(error)).name.encode()


class FakeDevice:
    """Stands in for cuda.core.Device in numba-cuda."""

    def __init__(self, ordinal: int | None = None):
        if ordinal not in (None, 0):
            raise VirtualGPUError("bad driver call", f"device {ordinal}; there is only device 0")
        self.device_id = 0
        self.compute_capability = current.cc
        self.name = f"{NAME} (sm_{current.cc[0]}{current.cc[1]})"
        self.uuid = "00000000-0000-0000-0000-000000000000"
        self.context = FakeContext()

    def set_current(self, context=None) -> None:
        if not _thread.contexts:
            _thread.contexts.append(CONTEXT)


class FakeContext:
    """Stands in for cuda.core.Context: a handle."""

    handle = CONTEXT
