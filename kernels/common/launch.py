"""What launchers need on the host: the stream, scratch memory, and small arithmetic."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from .cuda import address, cuda, default_stream, device_number, thread
from .interop import to_stream

VECTOR_BYTES = 16  # the widest access of a thread
MAX_INT32 = 2**31 - 1  # also the most blocks of a grid along x
MAX_GRID_Y = 65535


@contextlib.contextmanager
def using_stream(stream: Any) -> Iterator[None]:
    """Launches of this thread inside the block go to `stream`; None leaves the stream as it is.

    A stream of numba, CuPy, PyTorch or cuda.core, a graph builder, or an int handle.
    """
    outer = thread.stream
    if stream is not None:
        thread.stream = to_stream(stream)
    try:
        yield
    finally:
        thread.stream = outer


def current_stream() -> Any:
    """The cuda.core.Stream that launches of this thread go to."""
    return thread.stream or default_stream()


class _Scratch(threading.local):
    """Buffers of one host thread: two threads may use one stream, each in the middle of an op."""

    def __init__(self):
        self.buffers: dict[tuple[int, int], Any] = {}  # by device and stream


_scratch = _Scratch()


def scratch(size: int) -> Any:
    """A float32 device array of at least `size` elements, for partial results within one op.

    It is the same memory at every call on this stream, so an op calls it once and divides it.
    The contents are undefined. Only a call for more than any before allocates.
    """
    key = device_number(), int(current_stream().handle)
    buffer = _scratch.buffers.get(key)
    if buffer is None or buffer.size < size:
        buffer = _scratch.buffers[key] = cuda.device_array(size, np.float32)
    return buffer


def ceil_div(a: int, b: int) -> int:
    """The smallest integer that is not less than a / b."""
    return -(-a // b)


def check_sizes(limit: int, **sizes: int) -> None:
    """ValueError if a size, by its name in the op's table, is more than its kernel can count."""
    for name, size in sizes.items():
        if size > limit:
            raise ValueError(f"{name} is {size}, expected at most {limit} on a GPU; "
                             "use smaller arrays, or the CPU")


def aligned(*arrays: Any) -> bool:
    """Whether 128-bit accesses may begin where each of the arrays begins (None: no array)."""
    return all(address(array) % VECTOR_BYTES == 0 for array in arrays)
