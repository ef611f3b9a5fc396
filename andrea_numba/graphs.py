"""Work for a GPU that is asked for again and again: recorded once, then replayed by one call.

A training step is hundreds of launches, and each costs the host some microseconds. A CUDA graph
holds them all. The first call with a key runs as usual, which compiles kernels and allocates
scratch memory; the second is recorded; later ones replay the recording. So grids, addresses and
numbers in the launches must be the same in every call with a key: what changes from step to step,
as the learning rate does, is read from device memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from kernels.common.cuda import cuda, driver

THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: only this thread must not allocate


class Graphs:
    """Recorded work of one stream. Whose it is must keep the arrays that the work uses."""

    def __init__(self, stream):
        self._stream = int(stream.handle)
        self._recorded: dict[Hashable, object | None] = {}  # None: has run once

    def replay(self, key: Hashable, arrays: tuple, work: Callable[[], None]) -> None:
        """Do on the stream what `work()` asks for; `arrays` are those that may differ by call."""
        key = key, tuple((array.address, array.shape) for array in arrays)
        if key not in self._recorded:
            work()
            self._recorded[key] = None
            return
        if self._recorded[key] is None:
            self._recorded[key] = self._record(work)
        driver.cuGraphLaunch(self._recorded[key], self._stream)

    def _record(self, work: Callable[[], None]):
        # Freeing memory would end the recording, so numba shall not while it lasts.
        with cuda.defer_cleanup():
            driver.cuStreamBeginCapture(self._stream, THREAD_LOCAL)
            try:
                work()
            finally:  # also after an error, or the stream could not be used again
                graph = driver.cuStreamEndCapture(self._stream)
        executable = driver.cuGraphInstantiate(graph, 0)
        driver.cuGraphDestroy(graph)
        return executable
