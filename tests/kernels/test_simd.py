"""The vector layer of CPU kernels: each operation on this processor's vectors, against NumPy."""

import ml_dtypes
import numpy as np
import pytest
from numba import prange

from kernels.common import cpu_features, simd, simd_int
from kernels.common.cache import njit
from kernels.common.cpu_math import exp, exp2, pointer
from kernels.common.cpu_threads import take_number

if not cpu_features.VECTORS:
    pytest.skip("this processor has no vectors that kernels use", allow_module_level=True)
needs_bf16 = pytest.mark.skipif(not cpu_features.BF16, reason="no products of bfloat16 here")

F = np.float32
rng = np.random.default_rng(0)
A, B, C = rng.standard_normal((3, 16)).astype(np.float32)


def bits(array):
    """The bfloat16 nearest to each element, as uint16."""
    return array.astype(ml_dtypes.bfloat16).view(np.uint16)


def floats(words):
    return words.view(ml_dtypes.bfloat16).astype(np.float32)


def of_vectors(function):
    """A function of arrays [16] from one of vectors."""
    @njit()
    def call(out, a, b, c):
        simd.store(out, 0, function(simd.load(a, 0), simd.load(b, 0), simd.load(c, 0)))

    def run(a=A, b=B, c=C):
        out = np.full(16, np.nan, np.float32)
        call(out, a, b, c)
        return out
    return run


@njit()
def arithmetic(a, b, c):
    return (a + b) * c - F(3.0) / b + F(2.0) * a


@njit()
def largest(a, b, c):
    return simd.maximum(simd.maximum(a, b), c)


@njit()
def less(a, b, c):
    return simd.where_less(a, b, c, F(7.0))


@njit()
def fused(a, b, c):
    return simd.multiply_add(c, a, b)


@njit()
def numbers(a, b, c):
    return simd.lane_numbers() + simd.rint(a * F(9.0))


def test_arithmetic():
    assert np.array_equal(of_vectors(arithmetic)(), (A + B) * C - F(3) / B + F(2) * A)
    assert np.array_equal(of_vectors(largest)(), np.maximum(np.maximum(A, B), C))
    assert np.array_equal(of_vectors(less)(), np.where(A < B, C, F(7)))
    assert np.array_equal(of_vectors(numbers)(), np.arange(16) + np.rint(A * F(9)))


def test_multiply_add_rounds_once():
    exact = A.astype(np.float64) * B + C  # the product is exact in float64
    assert np.array_equal(of_vectors(fused)(), exact.astype(np.float32))


def test_nan_is_not_less_than_anything():
    nan = np.full(16, np.nan, np.float32)
    assert np.array_equal(of_vectors(largest)(A, nan, B), np.maximum(A * 0 + B, B))
    assert np.isnan(of_vectors(largest)(A, B, nan)).all()
    assert (of_vectors(less)(nan, B) == 7).all() and (of_vectors(less)(A, nan) == 7).all()


@njit()
def _exp(a, b, c):
    return exp(a)


@njit()
def _exp2(a, b, c):
    return exp2(a)


@pytest.mark.parametrize(("function", "reference", "low", "high"),
                         [(_exp, np.exp, -87, 88), (_exp2, np.exp2, -126, 127)])
def test_exponentials_of_vectors(function, reference, low, high):
    run = of_vectors(function)
    for x in np.linspace(low, high, 16 * 500, dtype=np.float32).reshape(-1, 16):
        exact = reference(x.astype(np.float64))
        assert (np.abs(run(x) - exact) <= 2e-7 * exact).all()
    x[:3] = np.nan, -np.inf, -1000
    y = run(x)
    assert np.isnan(y[0]) and (y[1:3] <= reference(low + 0.01)).all() and np.isfinite(y[3:]).all()


@njit()
def _reciprocal(a, b, c):
    return simd.reciprocal(a)


@njit()
def _reciprocal_of_number(x):
    return simd.reciprocal(x)


def test_reciprocals():
    run = of_vectors(_reciprocal)
    for x in np.geomspace(2.0**-126, 2.0**126, 16 * 500, dtype=np.float32).reshape(-1, 16):
        x[::2] *= -1
        exact = 1 / x.astype(np.float64)
        assert (np.abs(run(x) - exact) <= 2e-7 * np.abs(exact)).all()
    x[3] = np.nan
    assert np.isnan(run(x)[3]) and np.isfinite(np.delete(run(x), 3)).all()
    assert _reciprocal_of_number(F(3)) == F(1) / F(3)


@njit()
def _copy(target, source, at, count):
    simd.store_first(target, at, simd.load_first(source, at, count), count)


@pytest.mark.parametrize("dtype", [np.float32, np.int32, pytest.param(np.uint16, marks=needs_bf16)])
def test_parts_of_a_vector_touch_nothing_else(dtype):
    source = np.arange(40, dtype=np.float32) - 7
    source = bits(source) if dtype == np.uint16 else source.astype(dtype)
    for count in range(18):
        target = np.full(40, 99).astype(dtype)
        expected = target.copy()
        expected[5:5 + min(count, 16)] = source[5:5 + min(count, 16)]
        _copy(target, source, 5, count)
        assert np.array_equal(target, expected), count


@njit()
def _load_first(out, source, at, count):
    simd.store(out, 0, simd.load_first(source, at, count))


def test_lanes_beyond_a_part_are_zero():
    out = np.full(16, np.nan, np.float32)
    _load_first(out, np.arange(9, dtype=np.float32) + 1, 2, 7)
    assert out.tolist() == [3, 4, 5, 6, 7, 8, 9] + 9 * [0]


@njit()
def _reduce(out, a):
    out[0] = simd.sum_lanes(simd.load(a, 0))
    out[1] = simd.max_lanes(simd.load(a, 0))


def test_reductions():
    out = np.empty(2, np.float32)
    for place in range(16):
        a = np.arange(16, dtype=np.float32)
        a[place] = 1000
        _reduce(out, a)
        assert out.tolist() == [a.sum(), 1000]


@njit()
def _transpose(target, source):
    rows = simd.registers(16)
    for i in range(16):
        rows[i] = simd.load(source, 16 * i)
    simd.transpose(rows)
    for i in range(16):
        simd.store(target, 16 * i, rows[i])


def test_transpose():
    source = np.arange(256, dtype=np.float32).reshape(16, 16)
    target = np.empty_like(source)
    _transpose(target.reshape(-1), source.reshape(-1))
    assert np.array_equal(target, source.T)


@njit()
def _sums(out, a, terms):
    acc = simd.registers(2)
    for i in range(2):
        acc[i] = simd.broadcast(F(0.0))
    p = pointer(a, 3)
    for k in range(terms):
        for i in range(2):
            acc[i] = acc[i] + simd.load(p, 32 * k + 16 * i)
    for i in range(2):
        simd.store(out, 16 * i, acc[i])


def test_registers_and_pointers():
    a, out = np.arange(3 + 5 * 32, dtype=np.float32), np.empty(32, np.float32)
    _sums(out, a, 5)
    assert np.array_equal(out, a[3:].reshape(5, 32).sum(axis=0))


@njit()
def _pack(pairs, neighbours, two, zipped, a, b, words):
    simd.store(pairs, 0, simd.pack_pairs(simd.load(a, 0), simd.load(b, 0)))
    simd.store(neighbours, 0, simd.pack_neighbours(simd.load(a, 0), simd.load(b, 0)))
    simd.store(two, 0, simd.load_pairs(words, 1, 27))
    simd.store(zipped, 0, simd.load_zipped(words, 1, 11, 20, 10))


@needs_bf16
def test_pairs_of_bfloat16():
    words = bits(np.arange(40, dtype=np.float32) + 1)
    results = np.zeros((4, 16), np.int32)
    a = np.where(np.arange(16) == 3, np.nan, A).astype(np.float32)
    _pack(*results, a, B, words)
    pairs, neighbours, two, zipped = (floats(row.view(np.uint16)) for row in results)
    assert np.array_equal(pairs, floats(bits(np.stack([a, B], axis=1))).ravel(), equal_nan=True)
    assert np.array_equal(neighbours, floats(bits(np.concatenate([a, B]))), equal_nan=True)
    assert two.tolist() == [*range(2, 29)] + 5 * [0]
    assert zipped.tolist() == [x for j in range(10) for x in (2 + j, 21 + j)] + [12] + 11 * [0]


@njit()
def _dot(out, a, b, c):
    x = simd.pack_pairs(simd.load(a, 0), simd.load(b, 0))
    simd.store(out, 0, simd.multiply_add(simd.load(c, 0), x, x))


@needs_bf16
def test_products_of_pairs():
    out = np.empty(16, np.float32)
    _dot(out, A, B, C)
    a, b = floats(bits(A)).astype(np.float64), floats(bits(B)).astype(np.float64)
    assert np.allclose(out, C + a * a + b * b, rtol=3e-7, atol=0)


@njit()
def _halves(low, high, pairs):
    both = simd.load_pairs(pairs, 0, 32)
    simd.store(low, 0, simd.low_halves(both))
    simd.store(high, 0, simd.high_halves(both))


def test_halves_of_pairs():
    pairs = np.concatenate([bits(A), bits(B)])
    pairs[3:5] = bits(np.float32([np.nan, -np.inf]))
    low, high = np.empty((2, 16), np.float32)
    _halves(low, high, pairs)
    assert np.array_equal(low, floats(pairs[0::2]), equal_nan=True)
    assert np.array_equal(high, floats(pairs[1::2]), equal_nan=True)


@njit()
def _integers(out, floats, a, b, rounds):
    total = simd.broadcast(np.int32(5))
    for _ in range(rounds):
        total = simd_int.multiply_add_pairs(
            total, simd_int.load_int16_pairs(a, 1), simd_int.load_int16_pairs(b, 2))
    simd.store(out, 0, total)
    simd.store(floats, 0, simd_int.as_floats(total))


@pytest.mark.parametrize("dtype", [np.int8, np.int16])
def test_products_of_small_integers_are_exact(dtype):
    """Extreme ones among them; 511 times the largest of int8 by int16 is just within int32."""
    out, floats = np.empty(16, np.int32), np.empty(16, np.float32)
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    a = rng.integers(low, high + 1, 40).astype(dtype)
    b = rng.integers(-2**14, 2**14, 40).astype(np.int16)
    a[1:5], b[2:6] = (low, low, high, high), (-2**14, -2**14, 2**14, 2**14)
    rounds = 511 if dtype == np.int8 else 1
    _integers(out, floats, a, b, rounds)
    products = a[1:33].astype(np.int64) * b[2:34]
    assert np.array_equal(out, 5 + rounds * products.reshape(16, 2).sum(axis=1))
    assert np.array_equal(floats, out.astype(np.float32))


@njit()
def _store_int16(out, a):
    simd_int.store_int16(out, 3, simd.load(a, 0))


def test_floats_are_rounded_to_the_nearest_int16():
    out, expected = np.full((2, 30), 99, np.int16)
    a = np.float32([0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.4, 7.6, 32767, -32768, 32766.5, *range(5)])
    expected[3:19] = np.rint(a)
    _store_int16(out, a)
    assert np.array_equal(out, expected)


def test_the_ladder():
    rungs = {"+avx,+avx2,+fma,-avx512f": "avx2", "+avx2,-fma": "plain", "": "plain",
             "+avx2,+fma,+avx512f,+avx512bw,+avx512dq,+avx512vl": "avx512",
             "+avx512bf16,+avx2,+fma": "avx2",
             "+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512bf16": "avx512bf16"}
    for features, rung in rungs.items():
        assert cpu_features.rung_of(features) == rung


@pytest.mark.parametrize("permitted", [True, False])
def test_tiles_need_the_permission_of_the_system(permitted, monkeypatch):
    monkeypatch.setattr(cpu_features, "_tiles_permitted", lambda: permitted)
    features = ",".join(f"+{feature}" for feature in cpu_features.RUNGS["amx"])
    assert cpu_features.rung_of(features) == ("amx" if permitted else "avx512bf16")


@njit(parallel=True)
def _take(counts, numbers):
    for _ in prange(8):
        while True:
            number = take_number(numbers, 1)
            if number >= counts.size:
                break
            counts[number] += 1


def test_each_number_is_taken_once():
    counts, numbers = np.zeros(10_000, np.int64), np.zeros(3, np.int64)
    _take(counts, numbers)
    assert (counts == 1).all() and numbers.tolist() == [0, counts.size + 8, 0]
