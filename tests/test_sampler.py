"""The sampler: exact distributions, limits, extremes and refusals."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from andrea_numba.errors import UserError
from andrea_numba.sampler import Sampling, sample, sample_rng

NOTHING_SEEN = np.zeros(0, np.int32)
DRAWS = 20_000


class Fixed:
    """A generator whose every uniform number is `u`; counts how many were taken."""

    def __init__(self, u: float):
        self.u, self.taken = u, 0

    def random(self) -> float:
        self.taken += 1
        return self.u


def draw_many(logits, sampling, draws=DRAWS, seen=NOTHING_SEEN, seed=5) -> np.ndarray:
    """How often each id came, float64 [V]."""
    rng = sample_rng(seed, 0)
    logits = np.asarray(logits, np.float32)
    ids = [sample(logits, seen, sampling, rng) for _ in range(draws)]
    return np.bincount(ids, minlength=len(logits)) / draws


def agrees(frequencies, expected, draws=DRAWS) -> bool:
    """Every frequency within 5 standard deviations of its probability; 0 must be 0."""
    expected = np.asarray(expected)
    return bool(np.all(abs(frequencies - expected)
                       <= 5 * np.sqrt(expected * (1 - expected) / draws)))


PROBABILITIES = np.array([0.125, 0.5, 0.0625, 0.25, 0.0625])
LOGITS = np.log(PROBABILITIES).astype(np.float32)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_gives_the_exact_distribution(temperature):
    expected = PROBABILITIES ** (1 / temperature)
    expected /= expected.sum()
    frequencies = draw_many(LOGITS, Sampling(temperature))
    assert agrees(frequencies, expected)
    # The check itself can tell a wrong temperature.
    wrong = PROBABILITIES ** (1.2 / temperature)
    assert not agrees(frequencies, wrong / wrong.sum())


@pytest.mark.parametrize(("sampling", "kept"), [
    (Sampling(top_k=1), [1]),
    (Sampling(top_k=2), [1, 3]),
    (Sampling(top_k=4), [1, 3, 0, 2]),  # of the equal ids 2 and 4 the first
    (Sampling(top_p=0.4), [1]),
    (Sampling(top_p=0.5), [1]),  # exactly reached
    (Sampling(top_p=0.51), [1, 3]),
    (Sampling(top_p=0.75), [1, 3]),
    (Sampling(top_p=0.9), [1, 3, 0, 2]),
    (Sampling(top_p=1e-300), [1]),  # at least one
    (Sampling(top_k=3, top_p=0.85), [1, 3]),  # top-p of what top-k left: 6/7 reach 0.85
])
def test_limits_keep_exactly_the_likeliest(sampling, kept):
    expected = np.zeros(5)
    expected[kept] = PROBABILITIES[kept] / PROBABILITIES[kept].sum()
    assert agrees(draw_many(LOGITS, sampling, 4000), expected, 4000)


def test_top_p_is_not_moved_by_rounding():
    # 55 of 100 equal tokens reach 0.55, although 0.55 * 100 is 55.00000000000001 in float64.
    assert 0.55 * 100 > 55
    logits, last = np.zeros(100), np.nextafter(1, 0)
    assert sample(logits, NOTHING_SEEN, Sampling(top_p=0.55), Fixed(last)) == 54
    assert sample(logits, NOTHING_SEEN, Sampling(top_p=0.5501), Fixed(last)) == 55


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=12),
       st.floats(0.01, 0.999), st.floats(0, 1, exclude_max=True))
def test_top_p_set_is_the_smallest(logits, p, u):
    logits = np.array(logits, np.float32)
    chosen = sample(logits, NOTHING_SEEN, Sampling(top_p=p), Fixed(u))
    weights = np.exp(logits.astype(np.float64))
    # Without the tokens ranked before it the set must not have reached p.
    ahead = [i for i in range(len(logits)) if (-logits[i], i) < (-logits[chosen], chosen)]
    assert math.fsum(weights[ahead]) / math.fsum(weights) < p


@pytest.mark.parametrize(("u", "expected"), [
    (0.0, 1), (0.49, 1), (0.5, 2), (0.74, 2), (0.75, 4), (np.nextafter(1, 0), 4), (1.0, 4)])
def test_inverse_distribution_function(u, expected):
    # Ids 0, 3 and 5 are impossible, and must not come even at the very ends.
    logits = np.log(np.array([1e-320, 0.5, 0.25, 1e-320, 0.25, 1e-320]))
    logits[[0, 3, 5]] = -np.inf
    assert sample(logits, NOTHING_SEEN, Sampling(), Fixed(u)) == expected


def test_one_uniform_number_per_token():
    rng = Fixed(0.5)
    sample(LOGITS, NOTHING_SEEN, Sampling(0.7, 3, 0.9, 1.3), rng)
    assert rng.taken == 1


def test_greedy_takes_the_first_maximum_and_no_random_number():
    rng = Fixed(0.5)
    logits = np.array([1, 7, 3, 7], np.float32)
    assert sample(logits, NOTHING_SEEN, Sampling(temperature=0), rng) == 1
    assert rng.taken == 0


def test_limits_that_remove_nothing_change_nothing():
    plain, wide = sample_rng(3, 0), sample_rng(3, 0)
    source = np.random.default_rng(0)
    for _ in range(500):
        logits = source.normal(size=65).astype(np.float32)
        assert (sample(logits, NOTHING_SEEN, Sampling(), plain)
                == sample(logits, NOTHING_SEEN, Sampling(top_k=10_000), wide))


def test_repetition_penalty():
    # Seen twice counts once: 2 -> 1, -2 -> -4; what was not seen stays.
    logits, seen = np.array([2, -2, 1, 0], np.float32), np.array([1, 0, 1], np.int32)
    expected = np.exp([1.0, -4.0, 1.0, 0.0])
    frequencies = draw_many(logits, Sampling(repetition_penalty=2), seen=seen)
    assert agrees(frequencies, expected / expected.sum())
    assert sample(logits, seen, Sampling(0, repetition_penalty=2.1), Fixed(0)) == 2
    divided = np.exp([1.0, -1.0, 1.0, 0.0])  # negative control: dividing a negative score
    assert not agrees(frequencies, divided / divided.sum())


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e30, 1e308])
def test_extreme_temperatures_neither_warn_nor_fail(temperature):
    logits = np.array([-3e38, 3e38, 0, -np.inf], np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen = sample(logits, NOTHING_SEEN, Sampling(temperature), Fixed(0.5))
    assert chosen == 1


@pytest.mark.parametrize("u", [0.25, 0.75])
def test_large_scores_keep_their_distribution(u):
    # exp(1000) is infinite in float64: only differences of scores may meet exp.
    assert sample(np.full(2, 1000, np.float32), NOTHING_SEEN, Sampling(), Fixed(u)) == (u > 0.5)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scores_that_are_not_finite_are_refused(temperature, bad):
    logits = np.array([0, bad, 1], np.float32)
    with pytest.raises(UserError, match="model is broken"):
        sample(logits, NOTHING_SEEN, Sampling(temperature), Fixed(0.5))
    with pytest.raises(UserError, match="model is broken"):
        sample(np.full(3, -np.inf, np.float32), NOTHING_SEEN, Sampling(temperature), Fixed(0.5))


def test_logits_are_not_changed():
    logits = LOGITS.copy()
    sample(logits, np.array([1]), Sampling(0.5, 2, 0.5, 3.0), Fixed(0.5))
    np.testing.assert_array_equal(logits, LOGITS)


def test_padding_cut_off_by_the_caller_is_never_sampled():
    logits = np.random.default_rng(1).normal(size=128).astype(np.float32)
    cut = draw_many(logits[:65], Sampling(100.0), 10_000)
    assert np.all(cut > 0) and len(cut) == 65
    # Without the cut padded ids would come: the test can see the difference.
    assert draw_many(logits, Sampling(100.0), 1000)[65:].sum() > 0.4


def test_streams_depend_on_seed_and_index_alone():
    first = sample_rng(7, 0).random(4)
    np.testing.assert_array_equal(first, sample_rng(7, 0).random(4))
    others = [sample_rng(7, 1).random(4), sample_rng(8, 0).random(4), sample_rng(0, 7).random(4)]
    assert not any(np.isin(first, other).any() for other in others)
