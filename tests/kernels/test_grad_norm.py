"""What is special about the gradient norm: it must not swallow what is not finite."""

import numpy as np
import pytest
from tables import tables

TABLES = tables("grad_norm")


@pytest.fixture(params=TABLES)
def norm_of(request):
    def norm_of(grads):
        norm = np.full(1, np.nan, np.float32)
        TABLES[request.param].forward(norm, np.array(grads, np.float32))
        return norm[0]

    return norm_of


def test_three_four_five(norm_of):
    assert norm_of([3.0, 4.0]) == pytest.approx(5.0, rel=1e-6)


def test_zero_gradients_have_norm_zero(norm_of):
    assert norm_of(np.zeros(1000)) == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [1, 31, 1023, 100_003])
def test_one_bad_element_shows(norm_of, value, size):
    for place in {0, size // 2, size - 1}:
        grads = np.ones(size, np.float32)
        grads[place] = value
        assert not np.isfinite(norm_of(grads))
