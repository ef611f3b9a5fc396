"""What memory and arithmetic can give at this moment, and how near to that each op of a step is.

Memory of a virtual machine may be twice as fast in one minute as in the next, so a stream is timed
in the same second as what is compared with it.
"""

from __future__ import annotations

import functools
import inspect
import statistics
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
from numba import get_num_threads, prange

from kernels.common.cache import njit
from kernels.common.checks import bind
from kernels.common.cpu_features import RUNG, TILES, VECTORS
from kernels.common.cpu_math import FAST, FAST_SUM, F
from kernels.common.spec import is_bf16, parse
from kernels.registry import load_spec

from .process import Call, timed

WORDS = 1 << 25  # of the stream's array: four times the last cache of large processors
BLOCK = 1 << 14
REPEATS = 5
TERMS = 200_000  # of the loop that shows the peak of products, about 10 ms


@njit(parallel=True, fastmath=FAST_SUM)
def _read(x, sums):
    for block in prange(sums.size):
        part = x[block * BLOCK:(block + 1) * BLOCK]
        total = F(0.0)
        for i in range(part.size):
            total += part[i]
        sums[block] = total


@njit(parallel=True, fastmath=FAST)
def _update(x, sums):
    for block in prange(sums.size):
        part = x[block * BLOCK:(block + 1) * BLOCK]
        for i in range(part.size):
            part[i] = part[i] * F(0.5) + F(1.0)


LOOPS = {"read": (_read, 1), "update": (_update, 2)}  # and how often each byte moves


@functools.cache
def _arrays() -> tuple[np.ndarray, np.ndarray]:
    return np.ones(WORDS, np.float32), np.empty(WORDS // BLOCK, np.float32)


def stream(kind: str) -> float:
    """Bytes a second of reading, or of updating in place, an array that fits into no cache."""
    loop, passes = LOOPS[kind]
    seconds = [timed(lambda: loop(*_arrays())) for _ in range(REPEATS)]
    return passes * 4 * WORDS / statistics.median(seconds[1:])


def product_peak(precision: str) -> float:
    """Operations a second: products of registers alone; without vectors a product of BLAS."""
    if not VECTORS:
        a = np.ones((1024, 1024), np.float32)
        return 2 * 1024**3 / min(timed(lambda: a @ a) for _ in range(REPEATS))
    threads = get_num_threads()
    if TILES and precision == "bf16":
        seconds = min(timed(lambda: _tile_products(threads, TERMS)) for _ in range(REPEATS))
        return threads * TERMS * 4 * 2 * 16 * 16 * 32 / seconds
    dtype, flops = (np.int32, 64) if precision == "bf16" else (np.float32, 32)
    sums = np.zeros((threads, 16), np.float32)
    seconds = min(timed(lambda: _multiply_adds(sums, np.zeros(16, dtype), TERMS))
                  for _ in range(REPEATS))
    return threads * TERMS * CHAINS * flops / seconds


if VECTORS:
    from kernels.common.simd import broadcast, load, multiply_add, registers, store

    CHAINS = 12 if RUNG != "avx2" else 6  # sums that do not wait for each other

    @njit(parallel=True)
    def _multiply_adds(sums, factors, terms):
        for thread in prange(sums.shape[0]):
            factor = load(factors, 0)
            acc = registers(CHAINS)
            for i in range(CHAINS):
                acc[i] = broadcast(F(i))
            for _ in range(terms):
                for i in range(CHAINS):
                    acc[i] = multiply_add(acc[i], factor, factor)
            total = acc[0]
            for i in range(1, CHAINS):
                total = total + acc[i]
            store(sums[thread], 0, total)


if TILES:
    from kernels.common import amx

    @njit(parallel=True)
    def _tile_products(threads, terms):
        for _ in prange(threads):
            amx.configure()
            amx.zero(4)
            amx.zero(5)
            for _ in range(terms):  # four sums that do not wait for each other
                amx.multiply_add(0, 4, 5)
                amx.multiply_add(1, 4, 5)
                amx.multiply_add(2, 4, 5)
                amx.multiply_add(3, 4, 5)
            amx.release()


class Recorder:
    """A table of ops that notes each call: function, what it cost at least, and its seconds."""

    def __init__(self, ops: SimpleNamespace, rates: dict[str, float]):
        self.calls: list[tuple[str, dict[str, float], float]] = []
        self._rates = rates
        self.ops = SimpleNamespace(**{
            op: SimpleNamespace(**{name: self._noted(op, name, getattr(module, name))
                                   for name in load_spec(op).FUNCTIONS})
            for op, module in vars(ops).items()})

    def _noted(self, op: str, name: str, function: Call) -> Call:
        parameters = tuple(inspect.signature(function).parameters)

        def call(*values):
            seconds = timed(lambda: function(*values))
            limits = self._limits(op, name, dict(zip(parameters, values, strict=True)))
            self.calls.append((f"{op}.{name}", limits, seconds))

        return call

    def _limits(self, op: str, name: str, arguments: dict[str, Any]) -> dict[str, float]:
        """Seconds by what limits them: operations and bytes as the op's spec counts them."""
        function = load_spec(op).FUNCTIONS[name]
        case = {"V": arguments.get("vocab_size")}
        for key, shape in function.arrays.items():
            if arguments[key] is not None:
                bind(parse(shape, arguments), arguments[key].shape, case)
                if is_bf16(arguments[key]):
                    case["precision"] = "bf16"
        return {"arithmetic": function.flops(case) / self._rates["arithmetic"],
                "memory": function.traffic(case, arguments) / self._rates["memory"]}


def rates(precision: str) -> dict[str, float]:
    """Operations and bytes a second, at most."""
    return {"arithmetic": product_peak(precision), "memory": stream("update")}


def profile(recorder: Recorder, step: Call, steps: int) -> list[dict[str, Any]]:
    """Of each function of the ops: seconds a step, the least it could take, and what limits it.

    The least is the longer of operations by the peak of products and bytes by the stream; what lies
    in the cache already may beat that.
    """
    step()
    recorder.calls.clear()
    total = sum(timed(step) for _ in range(steps)) / steps
    seconds, least, limits = Counter(), Counter(), {}
    for name, by_limit, spent in recorder.calls:
        limits[name] = max(by_limit, key=by_limit.get)
        least[name] += by_limit[limits[name]] / steps
        seconds[name] += spent / steps
    rows = [{"op": name, "seconds": spent, "least": least[name], "limit": limits[name]}
            for name, spent in seconds.most_common()]
    rest = total - sum(seconds.values())
    return [*rows, {"op": "all else", "seconds": rest, "least": 0.0, "limit": ""}]
