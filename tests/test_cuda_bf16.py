"""Training in bfloat16 on tensor cores, and steps that are recorded once and replayed."""

import os
import subprocess
import sys

import numpy as np
import pytest
import vgpu
import vgpu.presence
from helpers import ROOT, TEXT, dataset, events, tiny_config

from andrea_numba import checkpoint, device
from andrea_numba.generate import generate_text
from andrea_numba.memory import HOST
from andrea_numba.sampler import Sampling
from andrea_numba.trainer import Trainer
from kernels.common.spec import BFLOAT16
from kernels.registry import op_table

pytest.importorskip("numba_cuda")

pytestmark = pytest.mark.xdist_group("cuda_training")
SIZE = dict(d_model=16, n_head=2, n_layer=2, context=16, batch_size=2, steps=20)
CLOSE = 0.02  # nats, by which a loss may differ from that in float32
ON_GPU = ["-m"] if vgpu.presence.real_gpu() else ["-m", "tests.vgpu", "--no-race", "-m"]


@pytest.fixture(scope="module", autouse=True)
def without_race_checks():
    """The kernels have them in their own tests."""
    if not vgpu.installed():
        yield
        return
    with vgpu.options(race=False):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bf16")


@pytest.fixture(scope="module")
def run(folder):
    """run(place, steps, …): a trainer after some steps, and their figures."""
    def run(place, steps, resumed=None, graph=True, **changes):
        config = resumed.config if resumed else tiny_config(**{**SIZE, **changes})
        chosen = (device.choose("cuda", place, graph) if place != "cpu"
                  else device.Device("cpu", op_table("cpu"), HOST, ""))
        with chosen.memory.queue():
            trainer = Trainer(config, chosen.ops, dataset(config, folder), resumed, chosen.memory)
            return trainer, [trainer.step() for _ in range(steps)]
    return run


@pytest.fixture(scope="module")
def straight(run):
    return run("bf16", 6)


def bits(trainer):
    return [trainer.memory.get(array).tobytes()
            for array in (trainer.weights, trainer.optimizer.m, trainer.optimizer.v)]


def test_losses_follow_float32(run, straight):
    for ours, theirs in zip(straight[1], run("cpu", 6)[1], strict=True):
        assert abs(ours.loss - theirs.loss) <= CLOSE, ours
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=0.05)


def test_the_operands_are_the_rounded_weights(straight):
    trainer = straight[0]
    weights, operands = map(trainer.memory.get, (trainer.weights, trainer.operands))
    assert operands.tobytes() == weights.astype(BFLOAT16).tobytes()


def test_graphs_change_no_bit(run, straight):
    eager, figures = run("bf16", 6, graph=False)
    replayed, again = straight
    assert figures == again and bits(eager) == bits(replayed)


@pytest.mark.parametrize("place", ["fp32", "bf16"])
def test_a_resumed_run_is_the_same_run(run, folder, place):
    whole, figures = run(place, 5)
    half, first = run(place, 3)
    with half.memory.queue():
        saved = half.save(folder / place, "x")
    resumed, rest = run(place, 2, checkpoint.load(saved))
    assert first + rest == figures
    assert bits(resumed) == bits(whole)


def test_accumulated_batches_are_replayed_too(run):
    whole, (one, *_) = run("bf16", 3, batch_size=4)
    parts, (other, *_) = run("bf16", 3, batch_size=2, grad_accum=2)
    assert other.loss == pytest.approx(one.loss, abs=1e-3)
    assert whole.step_count == parts.step_count == 3


@pytest.mark.parametrize("graph", [True, False])
def test_a_replayed_token_is_the_one_of_a_fresh_window(straight, graph):
    """Each step of the decoder reads its position from memory: one recording serves them all."""
    trainer = straight[0]
    trainer.memory._graph = graph
    ids = np.array([1, 2, 3, 4, 5, 6, 7], np.int32)
    with trainer.memory.queue():
        decoder = trainer.decoder()
        decoder.prefill(ids[:2])
        stepped = [decoder.step(token) for token in ids[2:]]
        for length, logits in zip(range(3, 8), stepped, strict=True):
            np.testing.assert_allclose(logits, decoder.prefill(ids[:length]), atol=0.05)
        texts = [generate_text(decoder, trainer.dataset.tokenizer, "The ", 20,
                               Sampling(temperature=0), np.random.default_rng(0)).tokens
                 for _ in range(2)]
    assert texts[0] == texts[1] and len(texts[0]) == 20


@pytest.mark.parametrize(("blocks", "steps"), [(2, 20), (12, 3)])
def test_the_program_follows_float32(tmp_path, blocks, steps):
    (tmp_path / "t.txt").write_text(TEXT)
    losses = {}
    programs = [("bf16", ON_GPU, ["--device", "cuda"]), ("fp32", ["-m"], ["--device", "cpu"])]
    if blocks == 12:
        programs.append(("eager", ON_GPU, ["--device", "cuda", "--no-graph"]))
    for name, start, options in programs:
        result = subprocess.run(
            [sys.executable, *start, "andrea_numba.cli_train", "t.txt", "--out", name, *options,
             "--n-layer", str(blocks), "--steps", str(steps), "--d-model", "16", "--n-head", "2",
             "--context", "16", "--batch-size", "2", "--warmup", "2", "--log-every", "1",
             "--eval-every", "0", "--sample-every", "0", "--threads", "1"],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
            text=True, timeout=600)
        assert result.returncode == 0, result.stderr
        assert ("products in bf16" in result.stderr) == (name != "fp32")
        losses[name] = [event["loss"] for event in events(tmp_path / name, "run.loss")]
    assert losses.get("eager", losses["bf16"]) == losses["bf16"] and len(losses["bf16"]) == steps
    assert np.abs(np.subtract(losses["bf16"], losses["fp32"])).max() <= CLOSE
