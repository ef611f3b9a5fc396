"""What is special about AdamW: values worked out by hand, and ten steps in a row."""

import ml_dtypes
import numpy as np
import pytest
from tables import tables

TABLES = tables("adamw")


@pytest.fixture(params=TABLES)
def adamw(request):
    return TABLES[request.param]


def step(adamw, state, grads, number, *, norm=1.0, n_decay=0, lr=0.1, weight_decay=0.0, clip=0.0,
         weights_bf16=None):
    """Step `number` (from 1) on state = (weights, m, v), betas 0.9 and 0.95."""
    weights, m, v = state
    norm = np.array([norm], np.float32)
    rates = np.array([lr, 1 - 0.9**number, 1 - 0.95**number], np.float32)
    adamw.update(weights, weights_bf16, m, v, grads, norm, rates, n_decay, 0.9, 0.95, 1e-8,
                 weight_decay, clip)


def fresh(weights, dtype=np.float32):
    weights = np.array(weights, dtype)
    return weights, np.zeros_like(weights), np.zeros_like(weights)


def test_the_first_step_has_the_size_of_the_rate(adamw):
    """0.955279 would mean that the bias correction is missing."""
    state = fresh([1.0])
    step(adamw, state, np.array([0.5], np.float32), 1)
    assert state[0][0] == pytest.approx(0.9, abs=1e-6)
    assert state[1][0] == pytest.approx(0.05) and state[2][0] == pytest.approx(0.0125)


def test_decay_alone(adamw):
    """Gradients zero, rate 0.1, decay 0.1: matrices times 0.99, the rest as it was."""
    state = fresh([1.0, -2.0, 3.0, 4.0, 5.0])
    step(adamw, state, np.zeros(5, np.float32), 1, n_decay=3, weight_decay=0.1)
    np.testing.assert_allclose(state[0][:3], [0.99, -1.98, 2.97], rtol=1e-6)
    assert state[0][3:].tolist() == [4.0, 5.0]
    assert not state[1].any() and not state[2].any()


@pytest.mark.parametrize(("clip", "scale"), [(1.0, 0.2), (5.0, 1.0), (6.0, 1.0), (0.0, 1.0)])
def test_gradients_are_clipped_to_the_norm(adamw, clip, scale):
    """Gradients [3, 4] clipped to norm 1 are [0.6, 0.8]; clip 0 means no clipping."""
    state = fresh([0.0, 0.0])
    step(adamw, state, np.array([3.0, 4.0], np.float32), 1, norm=5.0, clip=clip)
    np.testing.assert_allclose(state[1], 0.1 * scale * np.array([3, 4]), rtol=1e-5)
    np.testing.assert_allclose(state[2], 0.05 * scale**2 * np.array([9, 16]), rtol=1e-5)


@pytest.mark.parametrize("norm", [np.nan, np.inf])
def test_nothing_changes_when_the_norm_is_not_finite(adamw, norm):
    state = fresh([1.0, 2.0])
    step(adamw, state, np.array([3.0, np.nan], np.float32), 1, norm=norm, n_decay=1, clip=1.0,
         weight_decay=0.1)
    assert state[0].tolist() == [1.0, 2.0] and not state[1].any() and not state[2].any()


def test_a_norm_of_zero_is_no_division_by_zero(adamw):
    state = fresh([1.0])
    step(adamw, state, np.zeros(1, np.float32), 1, norm=0.0, clip=1.0)
    assert state[0].tolist() == [1.0]


def test_padding_stays_zero(adamw):
    state = fresh(np.zeros(100))
    for number in range(1, 4):
        step(adamw, state, np.zeros(100, np.float32), number, n_decay=50, weight_decay=0.1)
    assert not np.any(state)


def test_a_nan_gradient_touches_its_own_element_only(adamw):
    """Possible only where the caller's norm does not cover all gradients."""
    state, grads = fresh(np.ones(70)), np.ones(70, np.float32)
    grads[33] = np.nan
    step(adamw, state, grads, 1)
    for array in state:
        assert np.isnan(array[33]) and np.isfinite(np.delete(array, 33)).all()


@pytest.mark.parametrize("backend", sorted(TABLES.keys() - {"oracle"}))
def test_ten_steps_stay_with_the_oracle(backend):
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(3001)
    exact, single = fresh(weights, np.float64), fresh(weights)
    exact[0][:] = single[0]
    for number in range(1, 11):
        grads = (rng.standard_normal(3001) * 10.0 ** rng.integers(-6, 2, 3001)).astype(np.float32)
        options = {"n_decay": 1777, "lr": 1e-3, "weight_decay": 0.1, "norm": 2.0,
                   "clip": 1.0}
        step(TABLES["oracle"], exact, grads.astype(np.float64), number, **options)
        step(TABLES[backend], single, grads, number, **options)
    np.testing.assert_allclose(single[0], exact[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", sorted(TABLES.keys() - {"cpu"}))
@pytest.mark.parametrize("size", [1, 255, 256])
def test_the_copy_in_bfloat16_is_the_weights_rounded(backend, size):
    rng = np.random.default_rng(1)
    state, alone = fresh(rng.standard_normal(size)), fresh(np.zeros(size))
    alone[0][:] = state[0]
    copy = np.zeros(size, ml_dtypes.bfloat16)
    for number in range(1, 4):
        grads = rng.standard_normal(size).astype(np.float32)
        step(TABLES[backend], state, grads, number, weights_bf16=copy)
        step(TABLES[backend], alone, grads, number)
        assert copy.tobytes() == state[0].astype(ml_dtypes.bfloat16).tobytes()
        assert state[0].tobytes() == alone[0].tobytes()


@pytest.mark.parametrize("backend", sorted(TABLES.keys() - {"cpu"}))
def test_an_update_that_is_left_out_leaves_the_copy(backend):
    state, copy = fresh(np.ones(64)), np.full(64, 2, ml_dtypes.bfloat16)
    step(TABLES[backend], state, np.ones(64, np.float32), 1, norm=np.nan, weights_bf16=copy)
    assert (copy == 2).all()
