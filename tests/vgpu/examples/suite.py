"""Every example with inputs, results from the device and what NumPy says they should be.

Each function yields a Check for each result; EXAMPLES has them by name.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from . import matmul, nano_gpt, nano_gpt_reference, numba_features, reductions, tensor_core


class Check(NamedTuple):
    """A result and its reference; tolerance is relative to the largest reference value."""

    got: np.ndarray
    expected: np.ndarray
    tolerance: float = 0.0

    def error(self) -> float:
        """The largest difference over the largest reference value; infinite if not comparable."""
        if self.got.shape != self.expected.shape:
            return math.inf
        if np.array_equal(self.got, self.expected):
            return 0.0
        expected = self.expected.astype(np.float64)
        difference = np.abs(self.got.astype(np.float64) - expected).max()
        return math.inf if np.isnan(difference) else float(difference / np.abs(expected).max())


EXAMPLES: dict[str, Callable[[], Iterator[Check]]] = {}
# Threads of these wait for each other or retry: how often depends on the order they run in.
CONTENDED = {"float_extremes", "compare_and_swap", "spin_lock"}


def example(function: Callable[[], Iterator[Check]]):
    """Register an example under its name."""
    EXAMPLES[function.__name__] = function
    return function


def random(seed=0):
    return np.random.default_rng(seed)


def normal(*shape, seed=0):
    return random(seed).standard_normal(shape).astype(np.float32)


def double(x):
    return x.astype(np.float64)


@example
def tiled_matmul():
    for m, k, n in ((37, 50, 41), (16, 32, 48), (1, 1, 1)):
        a, b = normal(m, k), normal(k, n, seed=1)
        yield Check(matmul.matmul(a, b), double(a) @ double(b), 1e-6)


@example
def transposed_matmul():
    a, b = normal(33, 20), normal(45, 33, seed=1)
    yield Check(matmul.matmul_transposed(a, b), double(a).T @ double(b).T, 1e-6)


@example
def tensor_core_matmul():
    for m, k, n in ((64, 32, 64), (128, 96, 64)):
        a, b = (tensor_core.to_bf16(normal(*s, seed=s[0])) for s in ((m, k), (k, n)))
        exact = double(tensor_core.from_bf16(a)) @ double(tensor_core.from_bf16(b))
        yield Check(tensor_core.matmul_bf16(a, b), exact, 1e-5)


@example
def warp_layernorm():
    x, gain, bias = normal(11, 70), normal(70, seed=1), normal(70, seed=2)
    centred = double(x) - double(x).mean(axis=1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5)
    yield Check(reductions.layernorm(x, gain, bias), centred / deviation * gain + bias, 1e-6)


@example
def shared_sum():
    # Whole numbers: their sum is exact in any order of the atomic additions.
    x = random().integers(-99, 99, 1000).astype(np.float32)
    yield Check(reductions.total(x), x.sum(keepdims=True))


@example
def warp_scan():
    x = normal(256)
    expected = double(x).reshape(-1, 32).cumsum(axis=1).ravel()
    yield Check(reductions.scan(x), expected, 1e-6)


@example
def block_softmax():
    for width in (300, 7):
        x = 4 * normal(5, width)
        e = np.exp(double(x) - x.max(axis=1, keepdims=True))
        yield Check(reductions.softmax(x), e / e.sum(axis=1, keepdims=True), 1e-6)


@example
def float_extremes():
    x = normal(300)
    yield Check(reductions.largest_and_smallest(x), np.array([x.max(), x.min()]))


@example
def compare_and_swap():
    x = 2 * random().integers(-99, 99, 200, np.int32) + 1
    yield Check(reductions.product(x), np.multiply.reduce(x, keepdims=True, dtype=np.int32))


@example
def shared_histogram():
    x = random().integers(0, 64, 1000, np.int32)
    yield Check(reductions.count(x), np.bincount(x, minlength=64))


@example
def block_votes():
    x = random().integers(-2, 3, (4, 96), np.int32)
    x[1], x[2] = 1, -1
    positive = x > 0
    expected = [positive.sum(axis=1), positive.all(axis=1), positive.any(axis=1)]
    yield Check(reductions.vote(x.ravel()), np.stack(expected, axis=1))


@example
def local_arrays():
    x = normal(150)
    padded = np.pad(x, 2, "edge")
    expected = np.median(np.lib.stride_tricks.sliding_window_view(padded, 5), axis=1)
    yield Check(numba_features.elementwise(numba_features.running_median, [x], 150, np.float32),
                expected)


@example
def divergence():
    def length(value):
        steps = 0
        while value != 1:
            value = value // 2 if value % 2 == 0 else 3 * value + 1
            if value > 10000:
                return -2
            steps += 1
        return steps

    x = random().integers(-5, 800, 150, np.int32)
    expected = np.array([-1 if value < 1 else length(value) for value in x.tolist()])
    yield Check(numba_features.elementwise(numba_features.collatz_lengths, [x], 150, np.int32),
                expected)


@example
def warp_operations():
    x = random().integers(0, 9, 64, np.int32)
    x[32:] = 3
    got = numba_features.elementwise(numba_features.warp_operations, [x], (64, 11), np.int32)
    expected = np.empty((64, 11), np.int32)
    lanes = np.arange(32)

    def mask(bits):
        return np.array((bits << lanes).sum()).astype(np.uint32).view(np.int32)

    for first in (0, 32):
        v, rows = x[first:first + 32], expected[first:first + 32]
        rows[:, 0], rows[:, 1], rows[:, 2] = mask(v > 4), (v >= 0).all(), (v > 8).any()
        rows[:, 3] = [mask(v == value) for value in v]
        rows[:, 4] = (v == v[0]).all()
        rows[:, 5] = v[np.where(lanes < 3, lanes, lanes - 3)]
        rows[:, 6] = v[np.where(lanes + 5 > 31, lanes, lanes + 5)]
        rows[:, 7], rows[:, 8] = v[lanes ^ 9], v[lanes * 7 & 31]
        rows[:, 9] = v[np.where(lanes < 16, 15 - lanes, lanes ^ 1)]
        rows[:, 10] = [value.bit_count() + 32 - value.bit_length() for value in v.tolist()]
    yield Check(got, expected)


@example
def wide_arithmetic():
    x = random().integers(-(2**62), 2**62, 100)
    y = random(1).integers(1, 10**6, 100) * random(2).choice([-1, 1], 100)
    integers, floats = numba_features.wide(x, y)
    state = x.astype(np.uint64)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashed = (state ^ (state >> np.uint64(31))).astype(np.int64)
    yield Check(integers, np.stack([hashed, x // y, x % y], axis=1))
    yield Check(floats, np.stack([double(x) / y, np.sqrt(np.abs(double(x))) + 1 / 3], axis=1),
                1e-15)


@example
def half_precision():
    x, y = (normal(100, seed=seed).astype(np.float16) for seed in (0, 1))
    got = numba_features.elementwise(numba_features.half_precision, [x, y], (100, 2), np.float16)
    expected = np.stack([double(x) * double(y) + double(x), np.maximum(x, y)], axis=1)
    yield Check(got, expected, 1e-3)


def elementary_functions(kernel):
    """Results of an `elementary` kernel and the same functions in float64."""
    x = random().uniform(0.1, 9, 200).astype(np.float32)
    got = numba_features.elementwise(kernel, [x], (200, 11), np.float32)
    d = double(x)
    columns = [np.exp(-d), np.log(d), np.sin(d), np.cos(d), np.tanh(d), np.sqrt(d), 1 / d, d**1.5,
               np.array([math.erf(value) for value in d]), np.floor(d), np.abs(2 - d)]
    return got, np.stack(columns, axis=1)


@example
def math_functions():
    got, expected = elementary_functions(numba_features.elementary_exact)
    for column in range(got.shape[1]):
        yield Check(got[:, column], expected[:, column], 3e-7)


@example
def fast_math_functions():
    got, expected = elementary_functions(numba_features.elementary_fast)
    for column in range(got.shape[1]):
        # tanh.approx has a relative error of 2^-11.
        yield Check(got[:, column], expected[:, column], 6e-4 if column == 4 else 3e-6)


@example
def constant_array():
    x = normal(100)
    got = numba_features.elementwise(numba_features.filtered, [x], 100, np.float32)
    yield Check(got, np.convolve(double(x), numba_features.TAPS[::-1], "same"), 1e-6)


@example
def ragged_volume():
    v = normal(*numba_features.VOLUME_SHAPE)
    expected = np.full(v.shape, -1.0)
    inner = -6 * double(v)[1:-1, 1:-1, 1:-1]
    for axis in range(3):
        for shift in (-1, 1):
            inner += np.roll(double(v), shift, axis)[1:-1, 1:-1, 1:-1]
    expected[1:-1, 1:-1, 1:-1] = inner
    yield Check(numba_features.laplacian_of(v), expected, 1e-6)


@example
def large_dynamic_shared():
    x = normal(2, 16384)  # 64 KB a row
    yield Check(numba_features.reverse_rows(x), x[:, ::-1])


@example
def structured_array():
    particles = np.zeros(40, numba_features.PARTICLE)
    particles["charge"], particles["mass"] = np.arange(40), 1 + np.arange(40)
    got = numba_features.move(particles, 2.0)
    expected = np.zeros((40, 3))
    expected[np.arange(40), np.arange(40) % 3] = 2 / (1 + np.arange(40))
    yield Check(got["position"], expected, 1e-7)
    yield Check(got["charge"], particles["charge"] + 1)


@example
def spin_lock():
    yield Check(numba_features.count_under_lock(6), np.array([15]))


@example
def debug_exceptions():
    x, y = np.arange(40, dtype=np.int32), np.full(40, 3, np.int32)

    def quotients():
        return numba_features.elementwise(numba_features.checked_quotients, [x, y], 40, np.int32)

    yield Check(quotients(), x // 3)
    y[7] = 0
    try:
        quotients()
        raised = False
    except ZeroDivisionError:
        raised = True
    yield Check(np.array(raised), np.array(True))


@example
def nano_gpt_step():
    config = nano_gpt.Config(layers=1, width=32, heads=2, context=8, batch=2, vocabulary=20)
    parameters = nano_gpt.initial_parameters(config)
    tokens, targets = random().integers(0, config.vocabulary, (2, config.rows), np.int32)
    model = nano_gpt.NanoGPT(config, parameters)
    loss = model.step(tokens, targets)
    expected, gradients = nano_gpt_reference.loss_and_gradients(
        config, parameters, tokens, targets)
    yield Check(np.array(loss), np.array(expected), 1e-5)
    yield Check(model.gradients.copy_to_host(), gradients, 1e-5)
