"""One step and many: accumulation, repeatability, resume, divergence, memorising a batch."""

import dataclasses

import numpy as np
import pytest
from helpers import dataset, tiny_config

from andrea_numba import checkpoint
from andrea_numba.optimizer import Optimizer
from andrea_numba.trainer import Diverged, Trainer, generator
from kernels.registry import op_table


@pytest.fixture
def make(tmp_path):
    """Trainers on the CPU; their checkpoints and token files go below `tmp_path`."""
    def trainer(resumed=None, **changes):
        config = resumed.config if resumed else tiny_config(**changes)
        return Trainer(config, op_table("cpu"), dataset(config, tmp_path), resumed)
    return trainer


@pytest.mark.parametrize("split", [(1, 8), (2, 4), (4, 2)])
def test_accumulation_does_not_change_the_step(make, split):
    whole = make(batch_size=8, grad_accum=1)
    parts = make(batch_size=split[0], grad_accum=split[1])
    one, other = whole.step(), parts.step()
    assert other.loss == pytest.approx(one.loss, abs=1e-6)
    assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    np.testing.assert_allclose(parts.weights, whole.weights, atol=1e-6)


def test_uneven_batches_count_by_their_targets(make):
    trainer = make(batch_size=5)
    ids, targets = trainer.loader.next()
    loss = trainer.gradients([(ids, targets)])
    grads = trainer.grads.copy()
    pieces = [(ids[a:b], targets[a:b]) for a, b in ((0, 2), (2, 4), (4, 5))]
    assert trainer.gradients(pieces) == pytest.approx(loss, abs=1e-6)
    np.testing.assert_allclose(trainer.grads, grads, atol=1e-6)


def test_same_seed_same_bits(make):
    first, second = make(), make()
    assert [first.step().loss for _ in range(5)] == [second.step().loss for _ in range(5)]
    assert first.weights.tobytes() == second.weights.tobytes()
    assert make(seed=1).step().loss != make(seed=2).step().loss


def test_resume_is_the_same_run(make, tmp_path):
    """100 steps at once, and 50 + resume + 50, with accumulation, warm-up and clipping."""
    settings = dict(steps=100, grad_accum=2, warmup=60, clip=0.5)
    straight = make(**settings)
    losses = [straight.step().loss for _ in range(100)]
    broken = make(**settings)
    for _ in range(50):
        broken.step()
    resumed = make(checkpoint.load(broken.save(tmp_path / "run", "x")))
    assert resumed.step_count == 50
    assert [resumed.step().loss for _ in range(50)] == losses[50:]
    assert resumed.weights.tobytes() == straight.weights.tobytes()
    assert resumed.optimizer.v.tobytes() == straight.optimizer.v.tobytes()
    assert resumed.average == straight.average


def test_the_loss_falls_and_one_batch_is_memorised(make):
    trainer = make(overfit_one_batch=True, steps=300, lr=3e-3, d_model=32, n_head=4)
    losses = [trainer.step().loss for _ in range(300)]
    assert losses[-1] < 0.05 < losses[0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_gradient_stops_before_the_update(make, monkeypatch, bad):
    trainer = make()
    trainer.step()
    weights, m = trainer.weights.copy(), trainer.optimizer.m.copy()
    gradients = trainer.gradients

    def poisoned(batches):
        loss = gradients(batches)
        trainer.grads[123] = bad
        return loss

    monkeypatch.setattr(trainer, "gradients", poisoned)
    with pytest.raises(Diverged, match=r"step 2: loss .* gradient norm (nan|inf)"):
        trainer.step()
    assert trainer.weights.tobytes() == weights.tobytes()
    assert trainer.optimizer.m.tobytes() == m.tobytes()
    assert trainer.last.step == 1


def test_clipping_scales_to_the_norm(make):
    """Gradients [3, 4] with clip 1: logged norm 5, first moment from [0.6, 0.8]."""
    trainer = make(clip=1.0)
    optimizer = Optimizer(trainer.ops, trainer.table, trainer.config.optimizer)
    grads = trainer.table.zeros()
    grads[:2] = 3.0, 4.0
    optimizer.update(trainer.weights, None, grads, 1e-3)
    assert optimizer.norm == pytest.approx(5.0, abs=1e-6)
    np.testing.assert_allclose(optimizer.m[:2], np.float32(0.1) * np.array([0.6, 0.8]), rtol=1e-5)


def test_decay_reaches_matrices_alone(make):
    """Zero gradients, rate 0.1, decay 0.1: matrices × 0.99, vectors unchanged."""
    trainer = make(weight_decay=0.1)
    rng = np.random.default_rng(0)
    trainer.weights[:] = rng.standard_normal(trainer.table.size)
    before = {n: t.copy() for n, t in trainer.table.unpadded(trainer.weights).items()}
    trainer.optimizer.update(trainer.weights, None, trainer.grads, 0.1)
    for name, after in trainer.table.unpadded(trainer.weights).items():
        factor = np.float32(0.99) if after.ndim == 2 else np.float32(1)
        np.testing.assert_allclose(after, before[name] * factor, rtol=1e-6, err_msg=name)


def test_padding_stays_zero_through_training(make):
    trainer = make()
    for _ in range(3):
        trainer.step()
    covered = np.zeros(trainer.table.size, bool)
    for view in trainer.table.unpadded(covered).values():
        view[...] = True
    assert (trainer.weights[~covered] == 0).all()


def test_looking_does_not_change_the_run(make):
    """Evaluating and sampling between steps leaves the losses as they are."""
    quiet, looked_at = make(), make()
    for _ in range(3):
        loss = quiet.step().loss
        assert looked_at.step().loss == loss
        looked_at.evaluator().score()
        decoder = looked_at.decoder()
        decoder.prefill(np.array([1, 2, 3]))
        decoder.step(4)


def test_streams_of_different_purposes_are_independent():
    draws = {purpose: generator(0, purpose).random() for purpose in ("init", "sample")}
    assert len(set(draws.values())) == 2
    assert generator(0, "sample", 1).random() != generator(0, "sample", 2).random()
    assert generator(0, "init").random() == draws["init"]


def test_average_has_no_pull_to_zero(make):
    trainer = make()
    assert trainer.average.add(4.0) == 4.0
    assert 3.0 < trainer.average.add(3.0) < 4.0
    assert dataclasses.asdict(trainer.average).keys() == {"decay", "total", "weight"}
