"""How long a call takes, by the clock on the CPU, by events in the stream on the GPU; and where."""

import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

BATCH = 10  # calls that are put into the stream together: the host must not be what is measured


def processor_name() -> str:
    """The processor's model as the system names it; else its architecture."""
    described = Path("/proc/cpuinfo")
    lines = described.read_text(encoding="utf-8").splitlines() if described.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def measure(call: Callable[[], None], seconds: float, at_least: int) -> list[float]:
    """Seconds of each call, after one that is not counted; for `seconds`, `at_least` calls."""
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < at_least or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def measure_gpu(call: Callable[[], None], seconds: float, at_least: int) -> list[float]:
    """The same on the GPU's clock.

    Before each call a buffer of four times the L2 cache's size is written: the call finds its
    arrays in memory, as in a training step, and the host has the time to get ahead of the GPU.
    """
    from .cuda import clear_cache, cuda

    call()
    clear_cache()
    pairs = [(cuda.event(), cuda.event()) for _ in range(BATCH)]
    times: list[float] = []
    end = time.perf_counter() + seconds  # a short call takes less than what surrounds it
    while len(times) < at_least or time.perf_counter() < end:
        for start, stop in pairs:
            clear_cache()
            start.record()
            call()
            stop.record()
        cuda.synchronize()
        times += [1e-3 * cuda.event_elapsed_time(*pair) for pair in pairs]
    return times


def copy_rate(nbytes: int, seconds: float, at_least: int) -> float:
    """Bytes a second that a copy within device memory reads and writes."""
    from .cuda import cuda

    source, target = (cuda.device_array(nbytes, np.uint8) for _ in range(2))
    times = measure_gpu(lambda: target.copy_to_device(source), seconds, at_least)
    return 2 * nbytes / statistics.median(times)
