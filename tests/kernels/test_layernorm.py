"""What is special about layer normalization: rows without variance, and NaN stays in its row."""

import numpy as np
import pytest
from tables import tables

TABLES = tables("layernorm")


@pytest.fixture(params=TABLES)
def layernorm(request):
    return TABLES[request.param]


def forward(layernorm, x, gamma=None, beta=None):
    x = np.array(x, np.float32)
    y, (mean, rstd) = np.full_like(x, np.nan), np.full((2, len(x)), np.nan, np.float32)
    layernorm.forward(y, mean, rstd, x, gamma, beta, 1e-5)
    return y, mean, rstd


def test_rows_have_mean_0_and_variance_1(layernorm):
    y, _, _ = forward(layernorm, 7 + 3 * np.random.default_rng(0).standard_normal((33, 255)))
    np.testing.assert_allclose(y.mean(axis=1), 0, atol=1e-6)
    np.testing.assert_allclose(y.var(axis=1), 1, atol=1e-5)


def test_a_constant_row_becomes_beta(layernorm):
    gamma, beta = np.full(31, 2, np.float32), np.arange(31, dtype=np.float32)
    y, mean, rstd = forward(layernorm, np.full((3, 31), 4.0), gamma, beta)
    np.testing.assert_allclose(y, np.broadcast_to(beta, y.shape), atol=1e-4)
    np.testing.assert_allclose(mean, 4.0)
    np.testing.assert_allclose(rstd, 1e-5**-0.5, rtol=1e-5)


@pytest.mark.parametrize("d", [1, 2])
def test_the_gradient_cancels_where_the_output_cannot_move(layernorm, d):
    """One or two features always normalize to the same values: dx is 0 but for rounding."""
    rng = np.random.default_rng(1)
    x, dy = rng.standard_normal((2, 9, d)).astype(np.float32)
    _, mean, rstd = forward(layernorm, x)
    dx = np.full_like(x, np.nan)
    layernorm.backward(dx, None, None, None, dy, x, mean, rstd, None, None)
    terms = rstd[:, None] * np.abs(dy).max(axis=1, keepdims=True)
    inherent = 1e-5 * rstd[:, None] ** 2  # how far eps keeps |xhat| from 1
    assert (np.abs(dx) <= terms * (8 * np.finfo(np.float32).eps + (d > 1) * inherent)).all()


def test_nan_stays_in_its_row(layernorm):
    x = np.random.default_rng(2).standard_normal((5, 33))
    x[3, 17] = np.nan
    y, mean, rstd = forward(layernorm, x)
    for array in (y, mean[:, None], rstd[:, None]):
        assert np.isnan(array[3]).all() and np.isfinite(np.delete(array, 3, axis=0)).all()


@pytest.mark.parametrize("d", [1, 33, 1028])
def test_the_residual_gradient_passes_the_norm_unchanged(layernorm, d):
    """Where no gradient comes through the norm, dx is the residual's, bit for bit."""
    rng = np.random.default_rng(3)
    x, residual = rng.standard_normal((2, 9, d)).astype(np.float32)
    _, mean, rstd = forward(layernorm, x)
    dx = np.full_like(x, np.nan)
    layernorm.backward(dx, None, None, None, np.zeros_like(x), x, mean, rstd, None, residual)
    assert np.array_equal(dx, residual)
    layernorm.backward(dx, None, None, None, np.zeros_like(x), x, mean, rstd, None, dx)
    assert np.array_equal(dx, residual)
