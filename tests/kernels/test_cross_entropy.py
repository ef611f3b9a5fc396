"""What is special about the cross-entropy: padding, ignored rows, and logits of any size."""

import math

import numpy as np
import pytest
from helpers import guarded_scratch
from tables import tables

from kernels.common.spec import cases_of
from kernels.common.verify import verify
from kernels.cross_entropy import cpu
from kernels.registry import load_spec

TABLES = tables("cross_entropy")


@pytest.fixture(params=TABLES)
def cross_entropy(request):
    return TABLES[request.param]


def losses_and_gradients(op, logits, targets, vocab_size=None, scale=1.0):
    """Both functions, which must agree about the losses."""
    logits = np.array(logits, np.float32)
    targets = np.array(targets, np.int32)
    vocab_size = vocab_size or logits.shape[1]
    forward_losses, losses = np.full((2, len(targets)), np.nan, np.float32)
    dlogits = np.full_like(logits, np.nan)
    op.forward(forward_losses, logits, targets, vocab_size)
    op.backward(losses, dlogits, logits, targets, vocab_size, scale)
    np.testing.assert_allclose(losses, forward_losses, rtol=1e-6)
    return losses, dlogits


@pytest.mark.parametrize("size", [1e3, -1e3, 0.0, 1e30, -1e30])
def test_three_equal_logits_are_a_third_each(cross_entropy, size):
    losses, dlogits = losses_and_gradients(cross_entropy, [[size] * 3], [1])
    np.testing.assert_allclose(dlogits, [[1 / 3, -2 / 3, 1 / 3]], atol=1e-6)
    np.testing.assert_allclose(losses, math.log(3), atol=1e-6)


def test_two_equal_logits_of_1e8(cross_entropy):
    """0.0 would mean that the maximum went into a sum with the logarithm before the difference."""
    losses, _ = losses_and_gradients(cross_entropy, [[1e8, 1e8]], [0])
    assert losses[0] == pytest.approx(0.693147, abs=1e-5)


def test_a_hopeless_target_has_a_large_finite_loss(cross_entropy):
    losses, dlogits = losses_and_gradients(cross_entropy, [[5000.0, -5000.0]], [1])
    assert losses[0] == pytest.approx(10000)
    np.testing.assert_allclose(dlogits, [[1, -1]], atol=1e-6)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e38, -1e38])
def test_padding_never_reaches_loss_or_gradient(cross_entropy, garbage):
    rng = np.random.default_rng(0)
    logits = np.full((9, 128), garbage, np.float32)
    logits[:, :65] = rng.standard_normal((9, 65))
    targets = rng.integers(65, size=9)
    losses, dlogits = losses_and_gradients(cross_entropy, logits, targets, 65)
    alone, alone_dlogits = losses_and_gradients(cross_entropy, logits[:, :65], targets)
    np.testing.assert_allclose(losses, alone, rtol=1e-6)
    np.testing.assert_allclose(dlogits[:, :65], alone_dlogits, rtol=1e-5, atol=1e-7)
    assert (dlogits[:, 65:] == 0).all()


def test_gradients_of_a_row_sum_to_zero(cross_entropy):
    logits = 3 * np.random.default_rng(1).standard_normal((5, 8449))
    _, dlogits = losses_and_gradients(cross_entropy, logits, [0, 1, 8448, 100, 7])
    np.testing.assert_allclose(dlogits.sum(axis=1), 0, atol=1e-5)


def test_an_ignored_row_is_exactly_zero(cross_entropy):
    logits = np.random.default_rng(2).standard_normal((3, 33))
    losses, dlogits = losses_and_gradients(cross_entropy, logits, [5, -1, 32])
    assert losses[1] == 0 and (dlogits[1] == 0).all()
    assert (losses[[0, 2]] > 0).all() and (dlogits[[0, 2]] != 0).all()


@pytest.mark.parametrize("column", [0, 7, 31, 32])
def test_nan_in_a_used_logit_gives_a_nan_loss(cross_entropy, column):
    logits = np.random.default_rng(3).standard_normal((3, 33))
    logits[1, column] = np.nan
    losses, dlogits = losses_and_gradients(cross_entropy, logits, [5, 6, 7])
    assert np.isnan(losses[1]) and np.isnan(dlogits[1]).any()
    assert np.isfinite(losses[[0, 2]]).all() and np.isfinite(dlogits[[0, 2]]).all()


def test_infinite_logit_gives_a_loss_that_is_not_finite(cross_entropy):
    with np.errstate(invalid="ignore"):
        losses, _ = losses_and_gradients(cross_entropy, [[0.0, np.inf, 1.0]], [0])
    assert not np.isfinite(losses[0])


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_scratch_is_not_read_or_written_beyond_its_end(name, monkeypatch):
    with guarded_scratch(monkeypatch, cpu):
        for case in cases_of(load_spec("cross_entropy"), name, "cpu"):
            assert verify("cross_entropy", name, case, getattr(cpu, name)) == []
