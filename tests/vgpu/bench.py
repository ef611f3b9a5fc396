"""How fast the virtual GPU is: `python -m tests.vgpu.bench` prints a table.

Times are medians of several runs of one process on one core; everything is compiled beforehand,
except in the rows that say otherwise. The targets are for the machine the table was first made on.
"""

import importlib.metadata
import os
import platform
import statistics
import time
import warnings

import numpy as np
from numba import cuda
from numba.cuda.core.errors import NumbaPerformanceWarning

from . import install, launch, options
from .examples import matmul, nano_gpt, reductions, tensor_core

RUNS = 5


def seconds(function) -> float:
    """The median time of a call, after one call that is not counted."""
    function()
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def instructions(function) -> int:
    """Thread instructions that a call executes on the device."""
    launch.launches.clear()
    function()
    return sum(record.statistics.instructions for record in launch.launches)


def tiled(size: int):
    """A tiled float32 product of size x size matrices that lie on the device."""
    a, b, c = (cuda.to_device(np.ones((size, size), np.float32)) for _ in range(3))
    return lambda: matmul.launch_matmul(a, b, c)


def tensor(size: int):
    """A bfloat16 tensor-core product of size x size matrices that lie on the device."""
    a, b = (cuda.to_device(np.full((size, size), 0x3F80, np.uint16)) for _ in range(2))
    c = cuda.device_array((size, size), np.float32)
    return lambda: tensor_core.bf16_matmul[(size // 64, size // 64), 128](a, b, c)


def training():
    """One step of the default nano-GPT."""
    config = nano_gpt.Config()
    model = nano_gpt.NanoGPT(config, nano_gpt.initial_parameters(config))
    tokens, targets = np.random.default_rng(0).integers(
        0, config.vocabulary, (2, config.rows), np.int32)
    return lambda: model.step(tokens, targets)


def first_call() -> float:
    """What a kernel's first call takes beyond numba's compilation to LTO-IR, median of kernels."""
    x, out = (cuda.to_device(np.ones((8, 70), np.float32)) for _ in range(2))
    row, column = (cuda.to_device(np.ones(n, np.float32)) for n in (70, 8))
    calls = [
        (matmul.tiled_matmul, (5, 1), (16, 16), (x, x, out)),
        (reductions.softmax_rows, 8, 128, (x, out)),
        (reductions.layernorm_rows, 2, (32, 4), (x, row, row, out, column, column)),
    ]
    times = []
    for kernel, grid, block, arguments in calls:
        kernel[grid, block](*arguments)
        fresh = cuda.jit(kernel.py_func)
        signature = tuple(map(fresh.typeof_pyval, arguments))
        start = time.perf_counter()
        cuda.compile(kernel.py_func, signature, device=False, abi="numba", output="ltoir")
        compiled = time.perf_counter()
        fresh[grid, block](*arguments)
        times.append(time.perf_counter() - compiled - (compiled - start))
    return statistics.median(times)


def main() -> None:
    """Measure, and print the table."""
    install()
    warnings.simplefilter("ignore", NumbaPerformanceWarning)
    names = ("numpy", "numba", "numba-cuda", "cuda-core")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    print(f"{platform.machine()}, {os.cpu_count()} cores, "
          f"Python {platform.python_version()}, {versions}\n")
    print(f"{'what':44}{'seconds':>9}{'target':>9}{'million instructions/s':>25}")

    def row(name, time_of, target="", count=0):
        rate = f"{count / time_of / 1e6:.0f}" if count else ""
        print(f"{name:44}{time_of:9.3f}{target:>9}{rate:>25}", flush=True)

    row("first call of a kernel beyond compilation", first_call(), "0.3")
    for name, function, target in (
        ("tiled matmul 64^3", tiled(64), ""),
        ("tiled matmul 256^3", tiled(256), "0.8"),
        ("bf16 tensor-core matmul 256^3", tensor(256), "0.2"),
        ("nano-GPT training step", training(), "1.2"),
    ):
        count = instructions(function)
        row(name, seconds(function), target, count)
        with options(race=False):
            row("  without race checks", seconds(function), "", count)


if __name__ == "__main__":
    main()
