"""Training with bfloat16 operands on a processor that multiplies them."""

import numpy as np
import pytest
from helpers import dataset, events, tiny_config

from andrea_numba import checkpoint, device
from andrea_numba.trainer import Trainer
from kernels.common.cpu_features import BF16
from kernels.common.spec import BFLOAT16

if not BF16:
    pytest.skip("no products of bfloat16 here", allow_module_level=True)

SIZE = dict(d_model=48, n_head=3, n_layer=2, context=33, batch_size=3, steps=20)  # odd tiles
CLOSE = 0.02  # nats, by which a loss may differ from that in float32


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """run(precision, steps): a trainer after some steps, and their figures."""
    folder = tmp_path_factory.mktemp("bf16")

    def run(precision, steps, resumed=None):
        config = resumed.config if resumed else tiny_config(**SIZE)
        chosen = device.choose("cpu", precision)
        trainer = Trainer(config, chosen.ops, dataset(config, folder), resumed, chosen.memory)
        return trainer, [trainer.step() for _ in range(steps)]
    return run


def test_losses_follow_float32(run):
    trainer, figures = run("bf16", 20)
    for ours, theirs in zip(figures, run("fp32", 20)[1], strict=True):
        assert abs(ours.loss - theirs.loss) <= CLOSE, ours
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=0.05)
    assert figures[-1].loss < figures[0].loss - 0.5
    assert trainer.operands.tobytes() == trainer.weights.astype(BFLOAT16).tobytes()


def test_a_resumed_run_is_the_same_run(run, tmp_path):
    whole, figures = run("bf16", 5)
    half, first = run("bf16", 3)
    resumed, rest = run("bf16", 2, checkpoint.load(half.save(tmp_path, "x")))
    assert first + rest == figures
    for ours, theirs in ((resumed.weights, whole.weights),
                         (resumed.optimizer.m, whole.optimizer.m)):
        assert ours.tobytes() == theirs.tobytes()


def test_a_token_at_a_time_gives_the_logits_of_a_whole_window(run):
    decoder = run("bf16", 3)[0].decoder()
    ids = np.array([1, 2, 3, 4, 5, 6, 7], np.int32)
    decoder.prefill(ids[:2])
    stepped = [decoder.step(token) for token in ids[2:]]
    for length, logits in zip(range(3, 8), stepped, strict=True):
        np.testing.assert_allclose(logits, decoder.prefill(ids[:length]), atol=0.05)


def test_the_program_says_that_it_trains_in_bf16(train, text):
    result = train("t.txt", "--precision", "bf16", "--steps", 2, "--log-every", 1, "--out", "r")
    assert result.returncode == 0, result.stderr
    assert "products in bf16" in result.stderr
    assert all(np.isfinite(event["loss"]) for event in events(text / "r", "run.loss"))
