"""What is special about GELU: its tails, and NaN."""

import numpy as np
import pytest
from tables import tables

TABLES = tables("gelu")


@pytest.fixture(params=TABLES)
def gelu(request):
    return TABLES[request.param]


def value_and_slope(gelu, x):
    x = np.array(x, np.float32)
    y, dx = np.full((2, *x.shape), np.nan, np.float32)
    gelu.forward(y, x)
    gelu.backward(dx, np.ones_like(x), x)
    return y, dx


def test_known_values(gelu):
    y, dx = value_and_slope(gelu, [0.0, 1.0, -1.0])
    np.testing.assert_allclose(y, [0, 0.841192, -0.158808], atol=1e-6)
    np.testing.assert_allclose(dx, [0.5, 1.082964, -0.082964], atol=1e-6)


def test_tails_are_x_and_0_with_slopes_1_and_0(gelu):
    x = np.array([10, 30, 100, 1e4], np.float32)
    y, dx = value_and_slope(gelu, np.concatenate([x, -x]))
    np.testing.assert_allclose(y, [*x, 0, 0, 0, 0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(dx, [1, 1, 1, 1, 0, 0, 0, 0], atol=1e-6)


def test_it_is_the_oracles_where_its_exponential_is_near_the_largest_float(gelu):
    x = np.linspace(-12, 12, 4801)
    y, dx = value_and_slope(gelu, x)
    exact_y, exact_dx = np.empty((2, *x.shape))
    TABLES["oracle"].forward(exact_y, x)
    TABLES["oracle"].backward(exact_dx, np.ones_like(x), x)
    # 1 + tanh and 1 - tanh^2 of float32 lose 6e-8, times factors of up to 20
    np.testing.assert_allclose(y, exact_y, rtol=1e-6, atol=2e-6)
    np.testing.assert_allclose(dx, exact_dx, rtol=1e-6, atol=2e-6)


def test_nan_stays_in_its_element(gelu):
    x = np.ones(67)
    x[40] = np.nan
    for array in value_and_slope(gelu, x):
        assert np.isnan(array[40]) and np.isfinite(np.delete(array, 40)).all()


@pytest.mark.parametrize("size", [10.01, 11.5, 1e12, 1e15, 2e19, 1e30, 3e38, np.inf])
def test_far_out_the_function_is_exactly_x_or_0_and_its_slope_1_or_0(gelu, size):
    """x^2 overflows above 1.8e19 and x^3 above 7e12; their factors there are 0."""
    y, dx = value_and_slope(gelu, [size, -size])
    assert y.tolist() == [np.float32(size), 0] and dx.tolist() == [1, 0]
