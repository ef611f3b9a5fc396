"""What is special about the linear layer: NaN, and one row at a time as in generation."""

import itertools

import numpy as np
import pytest
from helpers import guarded_scratch

from kernels import gelu, matmul
from kernels.common.cpu_features import BF16, VECTORS
from kernels.common.spec import BFLOAT16
from kernels.matmul import cpu_blas, cpu_product, cpu_stored
from kernels.registry import op_table

CPU = op_table("cpu").matmul


def product(x, w, transpose_w=False):
    columns = w.shape[0] if transpose_w else w.shape[1]
    y = np.full((len(x), columns), np.nan, np.float32)
    CPU.forward(y, None, x, w, None, None, transpose_w)
    return y


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_nan_in_x_stays_in_its_row(rows, transpose_w):
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((rows, 31)), rng.standard_normal((31, 65))
    x[-1, 7] = np.nan
    w = np.ascontiguousarray(w.T if transpose_w else w, np.float32)
    y = product(x.astype(np.float32), w, transpose_w)
    assert np.isnan(y[-1]).all() and np.isfinite(y[:-1]).all()


def test_nan_in_w_is_not_hidden_by_a_zero_in_x():
    x, w = np.zeros((1, 31), np.float32), np.ones((31, 65), np.float32)
    w[30, 64] = np.nan
    for rows in (1, 3):
        y = product(np.repeat(x, rows, axis=0), w)
        assert np.isnan(y[:, 64]).all() and (y[:, :64] == 0).all()


@pytest.mark.parametrize("transpose_w", [False, True])
def test_weight_gradients_of_every_small_shape(transpose_w):
    """No shape may fall between whole vectors and tiles."""
    for K, N in itertools.product((1, 2, 7, 15, 16, 17), repeat=2):
        x, dy = np.ones((3, K), np.float32), np.ones((3, N), np.float32)
        w = np.ones((N, K) if transpose_w else (K, N), np.float32)
        dw, dbias = np.ones_like(w), np.ones(N, np.float32)
        CPU.backward(None, dw, dbias, dy, x, w, None, transpose_w)
        assert (dw == 4).all() and (dbias == 4).all(), (K, N)


def test_products_across_blocks_of_rows_columns_and_terms():
    """More rows, columns and terms than a task packs at once, each with a rest at the end."""
    rng = np.random.default_rng(1)
    for M, K, N in ((261, 259, 37), (39, 1035, 291), (1030, 5, 35), (39, 291, 1035)):
        x, w, dy = (rng.integers(-3, 4, shape).astype(np.float32)
                    for shape in ((M, K), (K, N), (M, N)))
        assert np.array_equal(product(x, w), x @ w)  # integers: exact in any order
        dx, dw = np.full((M, K), np.nan, np.float32), np.ones((K, N), np.float32)
        CPU.backward(dx, dw, None, dy, x, w, None, False)
        assert np.array_equal(dx, dy @ w.T) and np.array_equal(dw, 1 + x.T @ dy), (M, K, N)


@pytest.fixture(params=["vectors", "BLAS"])
def way(request, monkeypatch):
    """Either way of making products; that of other processors with small scratch memory."""
    if request.param == "BLAS":
        monkeypatch.setattr(CPU, "products", cpu_blas)
        monkeypatch.setattr(cpu_blas, "SCRATCH_ELEMENTS", 100)
    elif not VECTORS:
        pytest.skip("this processor has no vectors that kernels use")


@pytest.mark.parametrize("transpose_w", [False, True])
def test_both_ways_agree_with_the_oracle(transpose_w, way):
    rng = np.random.default_rng(2)
    M, K, N = 7, 33, 45
    x, w, dy = (rng.integers(-3, 4, shape).astype(np.float32)
                for shape in ((M, K), (K, N), (M, N)))
    bias = rng.integers(-3, 4, N).astype(np.float32)
    stored = np.ascontiguousarray(w.T) if transpose_w else w
    y, pre_gelu = np.full((2, M, N), np.nan, np.float32)
    CPU.forward(y, None, x, stored, bias, None, transpose_w)
    assert np.array_equal(y, x @ w + bias)
    CPU.forward(y, pre_gelu, x, stored, bias, None, transpose_w)
    assert np.array_equal(pre_gelu, x @ w + bias) and np.isfinite(y).all()
    dx, dw = np.full((M, K), np.nan, np.float32), np.ones_like(stored)
    CPU.backward(dx, dw, None, dy, x, stored, None, transpose_w)
    expected = 1 + x.T @ dy
    assert np.array_equal(dx, dy @ w.T)
    assert np.array_equal(dw, expected.T if transpose_w else expected)


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("M", [1, 7])
def test_residual_and_gelu_of_either_way(M, transpose_w, way):
    """What follows a product does not depend on how it was computed."""
    rng = np.random.default_rng(3)
    K, N = 33, 45
    x, w, dy, residual = (rng.integers(-3, 4, shape).astype(np.float32)
                          for shape in ((M, K), (K, N), (M, N), (M, N)))
    bias = rng.integers(-3, 4, N).astype(np.float32)
    stored = np.ascontiguousarray(w.T) if transpose_w else w
    y = np.full((M, N), np.nan, np.float32)
    CPU.forward(y, None, x, stored, bias, residual, transpose_w)
    assert np.array_equal(y, x @ w + bias + residual)
    CPU.forward(y, None, x, stored, None, residual, transpose_w)
    assert np.array_equal(y, x @ w + residual)
    pre_gelu = rng.standard_normal((M, K)).astype(np.float32)
    dx, expected = np.full((2, M, K), np.nan, np.float32)
    CPU.backward(dx, np.zeros_like(stored), None, dy, x, stored, pre_gelu, transpose_w)
    gelu.backward(expected, dy @ w.T, pre_gelu)
    assert np.array_equal(dx, expected)


dtypes = pytest.mark.parametrize("dtype", [np.float32, pytest.param(
    BFLOAT16, marks=pytest.mark.skipif(not BF16, reason="no products of bfloat16 here"))])


@pytest.mark.skipif(not VECTORS, reason="no vectors that kernels use")
@dtypes
def test_scratch_is_not_read_or_written_beyond_its_end(dtype, monkeypatch):
    """Integers, so that results are exact."""
    rng = np.random.default_rng(4)
    with guarded_scratch(monkeypatch, cpu_product):
        for M, K, N in ((2, 1, 1), (13, 47, 33), (25, 1037, 17), (97, 33, 130), (31, 2100, 50)):
            x, w, dy = (rng.integers(-3, 4, shape).astype(np.float32)
                        for shape in ((M, K), (K, N), (M, N)))
            stored = [a.astype(dtype) for a in (x, w, dy)]
            for transpose_w in (False, True):
                weights = np.ascontiguousarray(stored[1].T) if transpose_w else stored[1]
                y = np.full((M, N), np.nan, np.float32)
                CPU.forward(y, None, stored[0], weights, None, np.zeros_like(y), transpose_w)
                assert np.array_equal(y, x @ w), (M, K, N)
                dx, dw = np.full((M, K), np.nan, dtype), np.ones(weights.shape, np.float32)
                CPU.backward(dx, dw, None, stored[2], stored[0], weights, None, transpose_w)
                expected = 1 + x.T @ dy
                assert np.array_equal(dw, expected.T if transpose_w else expected), (M, K, N)
                assert np.array_equal(dx, (dy @ w.T).astype(dtype)), (M, K, N)


@dtypes
def test_a_product_of_one_row_has_no_other_bits_than_among_many(dtype):
    """Of integers: what is exact must not depend on the way it was computed."""
    rng = np.random.default_rng(5)
    x, w = (rng.integers(-3, 4, shape).astype(dtype) for shape in ((3, 70), (70, 37)))
    many, one = np.full((3, 37), np.nan, dtype), np.full((1, 37), np.nan, dtype)
    CPU.forward(many, None, x, w, None, None, False)
    CPU.forward(one, None, x[:1], w, None, None, False)
    assert np.array_equal(one, many[:1])


def test_gelu_and_residual_exclude_each_other():
    x, w, y, other = (np.ones((2, 2), np.float32) for _ in range(4))
    residual = np.ones((2, 2), np.float32)
    with pytest.raises(ValueError, match="pre_gelu and residual are both given"):
        matmul.forward(y, other, x, w, None, residual, False)


@pytest.mark.parametrize("kind", cpu_stored.KINDS)
@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("M, K, N", [(1, 1, 1), (1, 47, 99), (2, 47, 1), (9, 1111, 99),
                                     (cpu_stored.FEW, 47, 35), (cpu_stored.FEW + 1, 47, 35)])
def test_stored_matrices_of_any_kind(M, K, N, transpose_w, kind):
    """Integers up to 127 are exact in bfloat16, and in int8 where each row has a 127."""
    rng = np.random.default_rng(6)
    x, residual = rng.integers(-3, 4, (M, K)), rng.integers(-3, 4, (M, N))
    w, bias = rng.integers(-127, 128, (K, N)), rng.integers(-3, 4, N)
    w[0] = 127
    x, residual, w, bias = (a.astype(np.float32) for a in (x, residual, w, bias))
    stored = cpu_stored.store(np.ascontiguousarray(w.T) if transpose_w else w, kind, transpose_w)
    y, pre_gelu, expected, expected_pre_gelu = np.full((4, M, N), np.nan, np.float32)
    CPU.forward(y, None, x, stored, bias, residual, transpose_w)
    assert np.array_equal(y, x @ w + bias + residual)
    CPU.forward(y, pre_gelu, x, stored, None, None, transpose_w)
    CPU.forward(expected, expected_pre_gelu, x, w, None, None, False)
    assert np.array_equal(pre_gelu, expected_pre_gelu)
    np.testing.assert_allclose(y, expected, rtol=1e-6)


@pytest.mark.skipif(not VECTORS, reason="x is not rounded there")
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("K", [40, 3072, 40_000])
def test_products_with_int8_round_x_to_its_bits(K, size):
    """To at most half a step; no sum of a chunk leaves int32."""
    rng = np.random.default_rng(8)
    x = (size * rng.standard_normal((5, K))).astype(np.float32)
    # With weights of 127 the largest sum there can be: it is rounded up to a power of two.
    x[1] = np.nextafter(np.float32(2.0 ** np.ceil(np.log2(size))), np.float32(0))
    w = rng.integers(-127, 128, (K, 7)).astype(np.float32)
    w[:, :2] = 127, -127
    w[0] = 127
    stored = cpu_stored.store(w, "int8", False)
    y = np.full((5, 7), np.nan, np.float32)
    CPU.forward(y, None, x, stored, None, None, False)
    half_step = np.abs(x).max(axis=1).astype(np.float64) / 2**cpu_stored.BITS
    bound = half_step[:, None] * np.abs(w).sum(axis=0)
    exact = x.astype(np.float64) @ w
    summing = 1e-6 * np.abs(x).astype(np.float64) @ np.abs(w)  # sums of chunks, and rounding y
    assert (np.abs(y - exact) <= bound + summing).all()
    assert (np.abs(y - exact) > 1e-3 * bound).any()  # a control: x is rounded


@pytest.mark.parametrize("kind", cpu_stored.KINDS)
def test_a_row_times_a_stored_matrix_has_the_bits_it_has_among_others(kind):
    rng = np.random.default_rng(7)
    x, w = (rng.standard_normal(shape, np.float32) for shape in ((9, 1111), (1111, 33)))
    stored = cpu_stored.store(w, kind, False)
    many, one = np.full((9, 33), np.nan, np.float32), np.full((1, 33), np.nan, np.float32)
    CPU.forward(many, None, x, stored, None, None, False)
    for m in range(9):
        CPU.forward(one, None, x[m:m + 1], stored, None, None, False)
        assert one.tobytes() == many[m:m + 1].tobytes()


@pytest.mark.parametrize("kind", cpu_stored.KINDS)
@pytest.mark.parametrize("place", ["x", "w"])
def test_nan_reaches_the_product_of_a_stored_matrix(place, kind):
    x, w = np.ones((1, 40), np.float32), np.zeros((40, 6), np.float32)
    (x if place == "x" else w.T)[0, 39] = np.nan
    y = np.zeros((1, 6), np.float32)
    CPU.forward(y, None, x, cpu_stored.store(w, kind, False), None, None, False)
    assert np.isnan(y[0, 0]) and np.isnan(y[0, 1:]).all() == (place == "x")


def test_scratch_of_stored_matrices_is_not_left(monkeypatch):
    with guarded_scratch(monkeypatch, cpu_stored):
        for kind, M in itertools.product(cpu_stored.KINDS, (1, 3, 8, cpu_stored.FEW + 1)):
            x, w = np.ones((M, 47), np.float32), np.ones((47, 35), np.float32)
            y = np.full((M, 35), np.nan, np.float32)
            CPU.forward(y, None, x, cpu_stored.store(w, kind, False), None, None, False)
            np.testing.assert_allclose(y, 47, rtol=1e-6)
