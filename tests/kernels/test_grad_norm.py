"""What is special about the gradient norm: it neither swallows nor forgets what is not finite."""

import numpy as np
import pytest
from tables import tables

TABLES = tables("grad_norm")


@pytest.fixture(params=TABLES)
def norm_of(request):
    def norm_of(grads, previous=None):
        norm = np.full(1, np.nan, np.float32)
        if previous is not None:
            previous = np.array([previous], np.float32)
        TABLES[request.param].forward(norm, np.array(grads, np.float32), previous)
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


@pytest.mark.parametrize("size", [1, 1023, 100_003])
@pytest.mark.parametrize("previous", [np.nan, np.inf, -np.inf])
def test_after_a_norm_that_is_not_finite_there_is_none(norm_of, previous, size):
    assert np.isnan(norm_of(np.ones(size), previous))
    assert np.isnan(norm_of(np.zeros(size), previous))


@pytest.mark.parametrize("previous", [0.0, -1.0, 3.4e38, np.finfo(np.float32).tiny])
def test_a_finite_norm_before_changes_nothing(norm_of, previous):
    grads = np.random.default_rng(0).standard_normal(1023)
    assert norm_of(grads, previous) == norm_of(grads)


@pytest.mark.parametrize("backend", TABLES)
def test_after_a_bad_step_weights_stand_still_until_the_host_says_so(backend):
    """norm is its own `previous`, as in a training loop that runs ahead of the host."""
    update = tables("adamw")[backend].update
    weights, m, v = np.ones((3, 40), np.float32)
    norm = np.zeros(1, np.float32)

    def train(grads):
        TABLES[backend].forward(norm, np.array(grads, np.float32), norm)
        update(weights, None, m, v, grads, norm, np.array([0.1, 0.1, 0.05], np.float32), 20, 0.9,
               0.95, 1e-8, 0.1, 1.0)
        return [array.tobytes() for array in (weights, m, v)]

    good, bad = np.ones(40, np.float32), np.full(40, np.inf, np.float32)
    before = train(good)
    assert np.isfinite(norm[0])
    assert train(bad) == before and not np.isfinite(norm[0])
    assert train(good) == before and train(good) == before
    norm[0] = 0
    assert train(good) != before and np.isfinite(norm[0])
