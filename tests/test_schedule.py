"""Learning-rate schedules at their edges and on random settings."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andrea_numba.config import OptimizerConfig
from andrea_numba.schedule import learning_rate

SCHEDULES = ("cosine", "linear", "constant", "wsd")


def rates(steps, **settings):
    config = OptimizerConfig(**settings)
    return [learning_rate(step, steps, config) for step in range(steps)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_then_decay(schedule):
    r = rates(100, lr=1e-3, min_lr=0.0, warmup=10, schedule=schedule)
    assert r[0] == pytest.approx(1e-4)
    assert max(r) == 1e-3 == r[9]
    assert all(a <= b for a, b in itertools.pairwise(r[:10]))
    assert all(a >= b for a, b in itertools.pairwise(r[9:]))


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_last_step_is_at_the_floor(schedule):
    r = rates(1000, lr=1e-3, min_lr=1e-4, warmup=100, schedule=schedule)
    assert r[-1] == pytest.approx(1e-4, abs=1e-9)
    assert min(r[100:]) >= 1e-4 * (1 - 1e-12)


def test_cosine_half_way():
    r = rates(101, lr=1e-3, min_lr=1e-4, warmup=0, schedule="cosine")
    assert r[50] == pytest.approx(0.5 * (1e-3 + 1e-4))


def test_wsd_is_constant_then_linear():
    r = rates(101, lr=1e-3, min_lr=0.0, warmup=0, schedule="wsd")
    assert r[:80] == [1e-3] * 80
    assert r[90] == pytest.approx(0.5e-3)


@given(st.integers(1, 60), st.integers(0, 80), st.floats(0, 1), st.sampled_from(SCHEDULES))
def test_any_setting_stays_between_floor_and_peak(steps, warmup, floor, schedule):
    r = rates(steps, lr=1.0, min_lr=floor, warmup=warmup, schedule=schedule)
    assert r[0] > 0
    assert all(floor * (1 - 1e-12) <= rate <= 1.0 for rate in r[warmup:])
    assert all(0 <= rate <= 1.0 for rate in r)
    if steps > max(warmup, 1) and schedule != "constant":
        assert r[-1] == pytest.approx(floor)
