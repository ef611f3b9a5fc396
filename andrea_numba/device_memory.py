"""A GPU's memory: what `memory.py` describes, with the host running ahead of the device.

Kernels, fills and downloads are queued on one stream, uploads on another, so the next batch
travels while this one is computed; neither waits for the legacy default stream. The host stops in
`get`, `wait` and `finish`, and when it is two batches ahead.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable

import numpy as np

from kernels.common.cuda import cuda, driver
from kernels.common.device_array import DeviceArray
from kernels.common.launch import using_stream

from .errors import UserError
from .graphs import Graphs
from .memory import HostGraphs
from .program import SMALLER_RUN

NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
UPLOADS, DOWNLOADS = 2, 4  # places; a step downloads twice, its losses and its norm


class DeviceMemory:
    """Arrays on the current CUDA device, and the streams on which work for them is queued."""

    kind = "GPU memory"

    def __init__(self, precision: str = "fp32", graph: bool = True, smaller: str = SMALLER_RUN):
        self.precision = precision
        self.compute, self.copies = _stream(), _stream()
        self._graph = graph  # whether `graphs` record
        self._smaller = smaller  # what needs less memory

    def empty(self, size: int, dtype=np.float32) -> DeviceArray:
        dtype = np.dtype(dtype)
        try:
            owner = cuda.device_array(size, dtype)
        except Exception as error:
            if "OUT_OF_MEMORY" not in str(error):
                raise
            raise UserError(f"the GPU has no {size * dtype.itemsize:,} bytes left; "
                            f"{self._smaller}, and --device cpu needs none of them") from None
        return DeviceArray(owner, owner.device_ctypes_pointer.value, (size,), dtype)

    def zeros(self, size: int, dtype=np.float32) -> DeviceArray:
        array = self.empty(size, dtype)
        self.clear(array)
        return array

    def put(self, array: np.ndarray) -> DeviceArray:
        copy = self.empty(array.size, array.dtype).reshape(array.shape)
        driver.cuMemcpyHtoDAsync(copy.address, array.ctypes.data, array.nbytes, self.compute.handle)
        self.wait()
        return copy

    def get(self, array: DeviceArray) -> np.ndarray:
        copy = np.empty(array.shape, array.dtype)
        driver.cuMemcpyDtoHAsync(copy.ctypes.data, array.address, array.nbytes, self.compute.handle)
        self.wait()
        return copy

    def clear(self, array: DeviceArray) -> None:
        driver.cuMemsetD8Async(array.address, 0, array.nbytes, self.compute.handle)

    def transfers(self, size: int) -> DeviceTransfers:
        return DeviceTransfers(self, size)

    def graphs(self) -> Graphs | HostGraphs:
        return Graphs(self.compute) if self._graph else HostGraphs()

    def transfer_bytes(self, size: int) -> int:
        """What `transfers(size)` takes of this memory."""
        return UPLOADS * 2 * size * np.dtype(np.int32).itemsize

    def wait(self) -> None:
        self.compute.synchronize()

    def queue(self) -> contextlib.AbstractContextManager:
        return using_stream(self.compute)

    def free_bytes(self) -> int:
        return _memory_info().free

    def held_bytes(self) -> int:
        free, total = _memory_info()
        return total - free


class DeviceTransfers:
    """Ids to the device and float32 arrays back, through page-locked host memory."""

    def __init__(self, memory: DeviceMemory, size: int):
        self._compute, self._copies = memory.compute, memory.copies
        self._uploads = itertools.cycle([_Upload(memory, size) for _ in range(UPLOADS)])
        self._downloads = [_Download(size) for _ in range(DOWNLOADS)]
        self._upload: _Upload | None = None  # the newest

    def upload(self, *arrays: np.ndarray) -> tuple[DeviceArray, ...]:
        if self._upload is not None:  # whatever reads the last batch is queued by now
            self._upload.read.record(self._compute)
        place = self._upload = next(self._uploads)
        place.arrived.synchronize()  # the batch before the last has left the host's side
        place.read.wait(self._copies)  # … and was read on the device's side
        views, start = [], 0
        for array in arrays:
            stop = start + array.size
            place.host[start:stop] = array.reshape(-1)
            views.append(place.device[start:stop].reshape(array.shape))
            start = stop
        driver.cuMemcpyHtoDAsync(place.device.address, place.host.ctypes.data,
                                 start * place.host.itemsize, self._copies.handle)
        place.arrived.record(self._copies)
        place.arrived.wait(self._compute)
        return tuple(views)

    def download(self, array: DeviceArray, receive: Callable[[np.ndarray], None]) -> None:
        place = self._downloads.pop(0)
        self._downloads.append(place)
        place.deliver()
        host = place.host[:array.size]
        driver.cuMemcpyDtoHAsync(host.ctypes.data, array.address, array.nbytes,
                                 self._compute.handle)
        place.done.record(self._compute)
        place.receive = lambda: receive(host)

    def finish(self) -> None:
        for place in tuple(self._downloads):  # the oldest is first
            place.deliver()


class _Upload:
    """A place for one batch, ids and targets, on the host and on the device."""

    def __init__(self, memory: DeviceMemory, size: int):
        self.host = cuda.pinned_array(2 * size, np.int32)
        self.device = memory.empty(2 * size, np.int32)
        self.arrived, self.read = cuda.event(timing=False), cuda.event(timing=False)


class _Download:
    """A place for one array on its way to the host, and what to do when it is there."""

    def __init__(self, size: int):
        self.host = cuda.pinned_array(size, np.float32)
        self.done = cuda.event(timing=False)
        self.receive: Callable[[], None] | None = None

    def deliver(self) -> None:
        if self.receive is not None:
            receive, self.receive = self.receive, None
            self.done.synchronize()
            receive()


def _memory_info():
    """Free and total bytes of the device."""
    context = cuda.current_context()
    context.memory_manager.deallocations.clear()  # numba keeps arrays for a while after their end
    return context.get_memory_info()


def _stream():
    """A stream that does not wait for the legacy default stream, nor that one for it."""
    return cuda.external_stream(int(driver.cuStreamCreate(NON_BLOCKING)))
