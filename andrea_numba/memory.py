"""Where arrays live: host memory here, a GPU's in `device_memory.py`.

Parameters, buffers, optimizer, trainer, evaluator and decoder get a memory and do not know which
one it is. Both offer

    empty(size, dtype), zeros(size, dtype)   a flat array; its slices and reshapes are views
    put(array), get(array)     a host array brought here; an array from here as a host array
    clear(array)               set to zero
    transfers(size)            ids in and losses out, without stopping the work
    graphs()                   its replay(key, arrays, work) calls work(), or repeats what that
                               asked for in an earlier call with this key and these arrays
    wait()                     until all that was asked for is done
    queue()                    context manager: kernels run in this memory's order
    free_bytes(), held_bytes() what can still be allocated, and what is taken already; 0 where the
                               system does not say
    precision                  of the operands of products: fp32 or bf16
    kind                       what messages call it
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable

import numpy as np

from kernels.common import cpu_clear
from kernels.common.host_array import aligned_zeros

from .metrics import available_memory, resident_memory


class HostMemory:
    """NumPy arrays: nothing has to move, and everything asked for is done at once."""

    kind = "memory"

    def __init__(self, precision: str = "fp32"):
        self.precision = precision

    def empty(self, size: int, dtype=np.float32) -> np.ndarray:
        return aligned_zeros(size, dtype)

    def zeros(self, size: int, dtype=np.float32) -> np.ndarray:
        return aligned_zeros(size, dtype)

    def put(self, array: np.ndarray) -> np.ndarray:
        return array

    def get(self, array: np.ndarray) -> np.ndarray:
        return array

    def clear(self, array: np.ndarray) -> None:
        cpu_clear.clear(array)

    def transfers(self, size: int) -> HostTransfers:
        return HostTransfers()

    def graphs(self) -> HostGraphs:
        return HostGraphs()

    def wait(self) -> None:
        pass

    def queue(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def free_bytes(self) -> int:
        return available_memory()

    def held_bytes(self) -> int:
        return resident_memory()


class HostTransfers:
    """Traffic of at most `size` elements at a time that arrives as soon as it is sent."""

    def upload(self, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        """The int32 arrays where kernels can read them, until the next upload."""
        return arrays

    def download(self, array: np.ndarray, receive: Callable[[np.ndarray], None]) -> None:
        """Call `receive` with the values that `array` has at this point of the work."""
        receive(array)

    def finish(self) -> None:
        """Wait until every download was received."""


class HostGraphs:
    """Nothing is recorded."""

    def replay(self, key: Hashable, arrays: tuple, work: Callable[[], None]) -> None:
        work()


HOST = HostMemory()
