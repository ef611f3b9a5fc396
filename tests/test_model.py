"""The whole model: CPU against the float64 oracle, the oracle against finite differences, and the
claims about residual streams that the architecture rests on."""

import dataclasses
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import (
    ODD_MODEL,
    loss_and_gradient,
    random_batch,
    random_parameters,
    without_residuals,
)

from andrea_numba import model
from andrea_numba.buffers import Buffers
from andrea_numba.config import PRESETS, ModelConfig, OptimizerConfig
from andrea_numba.initialize import expected_first_loss, initialize
from andrea_numba.optimizer import Optimizer
from andrea_numba.parameters import ParameterTable
from kernels.registry import op_table

VARIANTS = [dict(), dict(tied=False), dict(bias=False), dict(norm_affine=False),
            dict(tied=False, bias=False, norm_affine=False)]


def problem(seed=0, batch=3, **changes):
    config = ModelConfig(**{**ODD_MODEL, **changes})
    rng = np.random.default_rng(seed)
    table = ParameterTable(config)
    return (config, table, random_parameters(table, rng), *random_batch(config, rng, batch))


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_oracle_gradient_is_the_slope_of_the_loss(changes):
    config, table, weights, ids, targets = problem(**changes)
    _, grads = loss_and_gradient("oracle", config, weights, ids, targets)
    rng = np.random.default_rng(1)
    step = 1e-5
    for name, gradient in table.unpadded(grads).items():
        # Where the gradient is largest, and one element anywhere.
        flat = np.abs(gradient).reshape(-1)
        for index in {int(flat.argmax()), int(rng.integers(flat.size))}:
            values = table.unpadded(weights)[name].reshape(-1)
            kept = values[index]
            losses = []
            for value in (kept + step, kept - step):
                values[index] = value
                losses.append(loss_and_gradient("oracle", config, weights, ids, targets)[0])
            values[index] = kept
            slope = (losses[0] - losses[1]) / (2 * step)
            assert gradient.reshape(-1)[index] == pytest.approx(slope, rel=1e-5, abs=1e-8), name


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_cpu_loss_and_every_gradient_match_the_oracle(changes):
    config, table, weights, ids, targets = problem(**changes)
    single = weights.astype(np.float32)
    exact = single.astype(np.float64)
    loss, grads = loss_and_gradient("oracle", config, exact, ids, targets)
    numpy_loss, numpy_grads = loss_and_gradient("oracle", config, single, ids, targets)
    cpu_loss, cpu_grads = loss_and_gradient("cpu", config, single, ids, targets)
    # Allowed: four times the error that the same formulas make in float32 under NumPy.
    assert abs(cpu_loss - loss) <= 4 * abs(numpy_loss - loss) + 4e-7 * loss
    for name, reference in table.unpadded(grads).items():
        error = np.linalg.norm(table.unpadded(cpu_grads)[name] - reference)
        yardstick = np.linalg.norm(table.unpadded(numpy_grads)[name] - reference)
        norm = np.linalg.norm(reference)
        assert error <= 4 * yardstick + 4e-7 * norm, name
        assert error <= 1e-4 * norm, name


def test_tied_gradient_is_the_sum_of_both_uses():
    tied, _, weights, ids, targets = problem()
    untied = dataclasses.replace(tied, tied=False)
    two = ParameterTable(untied)
    both = two.zeros(np.float64)
    one = ParameterTable(tied)
    for name, tensor in two.unpadded(both).items():
        tensor[...] = one.unpadded(weights)["wte" if name == "w_head" else name]
    _, tied_grads = loss_and_gradient("oracle", tied, weights, ids, targets)
    _, untied_grads = loss_and_gradient("oracle", untied, both, ids, targets)
    split = two.unpadded(untied_grads)
    np.testing.assert_allclose(one.unpadded(tied_grads)["wte"], split["wte"] + split["w_head"],
                               rtol=1e-12, atol=1e-14)


def test_padding_never_gets_a_gradient():
    config, table, weights, ids, targets = problem()
    _, grads = loss_and_gradient("cpu", config, weights.astype(np.float32), ids, targets)
    covered = np.zeros(table.size, bool)
    for name in table.tensors:
        table.unpadded(covered)[name][...] = True
    assert (grads[~covered] == 0).all()


def test_same_bits_twice():
    config, _, weights, ids, targets = problem()
    runs = [loss_and_gradient("cpu", config, weights.astype(np.float32), ids, targets)
            for _ in range(2)]
    assert runs[0][0] == runs[1][0]
    assert runs[0][1].tobytes() == runs[1][1].tobytes()


def test_future_tokens_do_not_matter():
    config, table, weights, ids, _ = problem()
    ops = op_table("cpu")
    p = table.views(weights.astype(np.float32))
    rows = []
    for last in (3, 44):
        ids[:, -1] = last
        a = Buffers(config, *ids.shape, training=True).views(*ids.shape)
        model.forward(ops, p, a, ids)
        rows.append(a.ln_f.reshape(*ids.shape, -1)[:, :-1].copy())
    assert rows[0].tobytes() == rows[1].tobytes()


def _wrong(module, **replaced):
    return SimpleNamespace(**{**{n: getattr(module, n) for n in dir(module)}, **replaced})


@pytest.mark.parametrize("op", ["layernorm", "attention", "embedding"])
def test_negative_controls(op):
    """A wrong backward in one op must be seen by the comparison used above."""
    config, table, weights, ids, targets = problem()
    ops = op_table("oracle")
    module = getattr(ops, op)

    def scaled(*arguments):
        module.backward(*arguments)
        arguments[0][...] *= 1.01

    broken = _wrong(ops, **{op: _wrong(module, backward=scaled)})
    _, grads = loss_and_gradient("oracle", config, weights, ids, targets)
    _, wrong = loss_and_gradient("oracle", config, weights, ids, targets, ops=broken)
    worst = max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(
        table.unpadded(wrong).values(), table.unpadded(grads).values(), strict=True))
    assert worst > 1e-3


@pytest.mark.parametrize(("vocab_size", "expected"), [(65, 4.174), (256, 5.545)])
def test_first_loss_of_small_vocabularies(vocab_size, expected):
    config = ModelConfig(d_model=64, n_head=4, n_layer=2, context=32, vocab_size=vocab_size)
    table = ParameterTable(config)
    weights = table.zeros()
    initialize(table, weights, np.random.default_rng(0))
    ids, targets = random_batch(config, np.random.default_rng(1), 8)
    loss, _ = loss_and_gradient("cpu", config, weights, ids, targets)
    assert loss == pytest.approx(expected, abs=0.1)
    assert loss == pytest.approx(expected_first_loss(config), abs=0.1)


def test_120m_starts_where_it_should():
    """First loss 9.20, and each block adds less, relative to the stream, than the one before."""
    config = ModelConfig(**PRESETS["andrea-120m"]["model"])
    table = ParameterTable(config)
    weights = table.zeros()
    initialize(table, weights, np.random.default_rng(0))
    ops, p = op_table("cpu"), table.views(weights)
    ids, targets = random_batch(config, np.random.default_rng(1), 4, length=64)
    a = Buffers(config, 4, 64, training=True).views(4, 64)
    model.losses(ops, p, a, ids, targets.reshape(-1), config.vocab_size)
    assert expected_first_loss(config) == pytest.approx(9.20, abs=0.005)
    assert a.losses.mean() == pytest.approx(expected_first_loss(config), abs=0.1)
    inputs = [a.x, *(b.x_out for b in a.blocks)]
    shares = [np.linalg.norm(after - before) / np.linalg.norm(before)
              for before, after in itertools.pairwise(inputs)]
    assert all(earlier > later for earlier, later in itertools.pairwise(shares))
    assert shares[0] == pytest.approx(2.6, abs=0.3) and shares[-1] == pytest.approx(0.31, abs=0.05)


def _block_gradient_norms(ops, steps=10):
    """Gradient norms of the first and the last of 12 blocks after some training steps."""
    config = ModelConfig(d_model=64, n_head=4, n_layer=12, context=32, vocab_size=65)
    table = ParameterTable(config)
    weights, grads = table.zeros(), table.zeros()
    initialize(table, weights, np.random.default_rng(0))
    p, g = table.views(weights), table.views(grads)
    optimizer = Optimizer(ops, table, OptimizerConfig())
    a = Buffers(config, 4, 32, training=True).views(4, 32)
    rng = np.random.default_rng(1)
    for _ in range(steps + 1):
        start = rng.integers(0, 65, (4, 1))
        text = ((start + np.arange(33)) % 65).astype(np.int32)
        ids, targets = np.ascontiguousarray(text[:, :-1]), text[:, 1:].reshape(-1).copy()
        grads.fill(0)
        model.forward_backward(ops, p, g, a, ids, targets, 65, 1 / targets.size)
        norms = [math.sqrt(sum(float((v.astype(np.float64) ** 2).sum())
                               for v in vars(g.blocks[layer]).values())) for layer in (0, -1)]
        optimizer.update(weights, None, grads, 1e-3)
    return norms


def test_residual_stream_carries_the_gradient_to_the_first_block():
    first, last = _block_gradient_norms(op_table("cpu"))
    print(f"block 1 / block 12, with residual additions: {first / last:.2g}")
    assert last / 10 < first < 10 * last


def test_without_residuals_the_gradient_is_lost():
    """Measured after 10 steps: with the additions block 1 has 6.0 times the gradient norm of block
    12, without them 2e-8 times: the gradient is lost on the way down."""
    first, last = _block_gradient_norms(without_residuals(op_table("cpu")))
    print(f"block 1 / block 12, without residual additions: {first / last:.2g}")
    assert first < 1e-6 * last
