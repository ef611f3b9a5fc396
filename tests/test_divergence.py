"""What is not finite: no update, its place by name, stopping and skipping, the good checkpoint."""

import contextlib
import re

import numpy as np
import pytest
import vgpu
from helpers import dataset, events, tiny_config
from in_process import after_step, open_run

from andrea_numba import checkpoint, device
from andrea_numba.memory import HOST
from andrea_numba.trainer import Trainer
from andrea_numba.watch import Skips
from kernels.registry import op_table


def poison(trainer, steps, value=np.nan):
    """Put `value` into an element of the gradient in these steps."""
    gradients = trainer.gradients

    def poisoned(batches):
        score = gradients(batches)
        if trainer.step_count + 1 in steps:
            trainer.grads[123] = value
        return score

    trainer.gradients = poisoned


def spoil_loss(trainer, step):
    """Make one loss infinite, and no gradient."""
    cross_entropy = trainer.ops.cross_entropy

    class Spoilt:
        forward = cross_entropy.forward

        @staticmethod
        def backward(losses, *rest):
            cross_entropy.backward(losses, *rest)
            if trainer.step_count + 1 == step:
                losses[5] = np.inf

    trainer.ops.cross_entropy = Spoilt


def arrays(trainer):
    return [a.tobytes() for a in (trainer.weights, trainer.optimizer.m, trainer.optimizer.v)]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_run_stops_and_keeps_its_checkpoint(tmp_path, capsys, value):
    run = open_run(tmp_path, save_every=2)
    poison(run.trainer, {5}, value)
    kept = []
    after_step(run, 4, lambda: kept.extend(arrays(run.trainer)))
    assert run.train() == 3
    assert arrays(run.trainer) == kept
    said = [line for line in capsys.readouterr().err.splitlines() if "diverged" in line]
    assert len(said) == 1
    assert re.match(r"diverged at step 5: loss 5\.\d+, gradient norm (nan|inf), learning rate "
                    r"[\d.e-]+; first not finite: gradient wte; the checkpoint of step 4 is "
                    r"unharmed", said[0])
    assert events(tmp_path, "run.end")[-1]["reason"] == "diverged"
    saved = checkpoint.load(checkpoint.find(str(tmp_path)))
    assert saved.step == 4 and saved.weights.tobytes() == kept[0]


def test_a_loss_alone_stops_the_update(tmp_path, capsys):
    run = open_run(tmp_path)
    spoil_loss(run.trainer, 3)
    kept = []
    after_step(run, 2, lambda: kept.extend(arrays(run.trainer)))
    assert run.train() == 3
    assert arrays(run.trainer) == kept
    assert "step 3: loss inf" in (said := capsys.readouterr().err)
    assert "first not finite: activation losses" in said and "no checkpoint was written" in said


@pytest.mark.parametrize(("tensor", "value", "found"), [
    ("blocks.1.w_1", np.nan, "weight blocks.1.w_1"),
    ("ln_f_gamma", np.inf, "weight ln_f_gamma"),
    ("blocks.0.w_1", 3e38, "activation blocks.0.fc"),
])
def test_the_first_tensor_is_named(tmp_path, capsys, tensor, value, found):
    run = open_run(tmp_path)
    view = run.trainer.table.view(run.trainer.weights, tensor)
    view[...] = value
    view.flat[::2] *= -1
    assert run.train() == 3
    assert f"first not finite: {found};" in capsys.readouterr().err


def test_logits_are_those_of_the_forward_pass(tmp_path):
    trainer = open_run(tmp_path).trainer
    trainer.step()
    found = dict(trainer._tensors())
    expected = found["activation ln_f"] @ trainer.p.head.T
    np.testing.assert_allclose(found["activation logits"], expected, atol=1e-5)


def test_skipping_goes_on_as_if_nothing_had_been(tmp_path, capsys):
    run = open_run(tmp_path, on_divergence="skip", log_every=2, steps=8)
    poison(run.trainer, {3, 4, 7})
    kept = {}
    for step in (2, 4):
        after_step(run, step, lambda: kept.update({run.trainer.step_count: arrays(run.trainer)}))
    assert run.train() == 0
    assert kept[2] == kept[4]
    said = capsys.readouterr().err
    assert re.search(r"^warning: no update at step 4: loss .*, gradient norm nan, .*; first not "
                     r"finite: gradient wte \(2 skipped in a row, 2 in all\)$", said, re.M)
    assert "(1 skipped in a row, 3 in all)" in said
    records = events(tmp_path, "run.loss")
    assert [r["step"] for r in records] == [1, 2, 3, 4, 6, 7, 8]
    assert [r["step"] for r in records if r.get("skipped")] == [3, 4, 7]
    assert all(r["grad_norm"] is None for r in records if r.get("skipped"))
    saved = checkpoint.load(checkpoint.find(str(tmp_path)))
    assert saved.step == 8 and np.isfinite(saved.weights).all()
    assert saved.state["skips"] == {"in_a_row": 0, "total": 3}


def test_skips_end_after_so_many_in_a_row(tmp_path, capsys):
    settings = dict(on_divergence="skip", max_skips=2, steps=12)
    scattered = open_run(tmp_path / "scattered", **settings)
    poison(scattered.trainer, {2, 3, 5, 6, 8, 9, 11})
    assert scattered.train() == 0
    run = open_run(tmp_path / "run", save_every=4, **settings)
    poison(run.trainer, range(6, 13))
    assert run.train() == 3
    assert "diverged at step 8" in (said := capsys.readouterr().err)
    assert "--max-skips 2 in a row" in said
    assert checkpoint.load(checkpoint.find(str(tmp_path / "run"))).step == 4


def test_a_skip_on_a_gpu_that_is_ahead(tmp_path):
    """The bad update alone is left out, though the host learns of it two updates later."""
    pytest.importorskip("numba_cuda")
    chosen = device.choose("cuda", "fp32")
    late = vgpu.options(lazy_streams=True, race=False) if vgpu.installed() else \
        contextlib.nullcontext()
    weights = []
    with late, chosen.memory.queue():
        for ops, memory in ((chosen.ops, chosen.memory), (op_table("cpu"), HOST)):
            config = tiny_config(d_model=8, n_layer=1, context=8, batch_size=2,
                                 on_divergence="skip", steps=8)
            trainer = Trainer(config, ops, dataset(config, tmp_path), memory=memory)
            bad = memory.put(np.full(8, np.nan, np.float32))
            gradients = trainer.gradients

            def spoilt(batches, trainer=trainer, bad=bad, gradients=gradients):
                score = gradients(batches)
                if trainer.step_count + 1 == 3:
                    trainer.optimizer.require_finite(bad)
                return score

            trainer.gradients = spoilt
            for _ in range(6):
                trainer.advance()
            assert trainer.wait().step == 6
            [(result, text)] = trainer.news
            assert result.step == 3 and result.skipped
            assert "not finite: nothing when it was computed again (1 skipped in a row" in text
            assert trainer.skips == Skips(0, 1)
            weights.append(memory.get(trainer.weights))
        np.testing.assert_allclose(*weights, atol=2e-5)
