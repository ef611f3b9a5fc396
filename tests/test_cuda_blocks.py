"""Deep models through the real program on CUDA: as close to the oracle as the CPU, and few
launches per block."""

import os
import subprocess
import sys

import numpy as np
import pytest
import vgpu
import vgpu.presence
from helpers import ROOT, TEXT, events, tiny_config

from andrea_numba import args, device, model
from andrea_numba.buffers import Buffers
from andrea_numba.config import TrainConfig
from andrea_numba.corpora import open_corpus
from andrea_numba.memory import HostMemory
from andrea_numba.parameters import ParameterTable
from andrea_numba.trainer import Trainer
from kernels.registry import op_table

pytest.importorskip("numba_cuda")

MOST_LAUNCHES = 30  # of one block, forward and backward
FACTOR = 4  # of the CPU's error that another device may be off by
ON_GPU = ["-m"] if vgpu.presence.real_gpu() else ["-m", "tests.vgpu", "--no-race", "-m"]


@pytest.mark.parametrize(("blocks", "steps"), [(2, 20), (12, 3)])
def test_losses_are_as_close_to_the_oracles_as_the_cpus(tmp_path, monkeypatch, blocks, steps):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text(TEXT)
    for place, start in (("cuda", ON_GPU), ("cpu", ["-m"])):
        result = subprocess.run(
            [sys.executable, *start, "andrea_numba.cli_train", "t.txt", "--device", place,
             "--precision", "fp32", "--n-layer", str(blocks), "--steps", str(steps), "--out", place,
             "--d-model", "16", "--n-head", "2", "--context", "16", "--batch-size", "2",
             "--warmup", "2", "--log-every", "1", "--eval-every", "0",
             "--sample-every", "0", "--threads", "1"],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
            timeout=300)
        assert result.returncode == 0, result.stderr
    cuda, cpu = (np.array([event["loss"] for event in events(tmp_path / place, "run.loss")])
                 for place in ("cuda", "cpu"))
    oracle = oracle_losses(tmp_path / "cpu")
    assert len(oracle) == steps
    # A step's error can be small by chance: the largest until then counts, or one rounding.
    rounding = 2.0**-24 * np.abs(oracle)
    allowed = FACTOR * np.maximum(np.maximum.accumulate(np.abs(cpu - oracle)), rounding)
    assert (np.abs(cuda - oracle) <= allowed).all(), (cuda - oracle, allowed)


def oracle_losses(run):
    """The losses of that run's steps when everything is computed in float64 by the oracle."""
    config = TrainConfig()
    args.apply(config, events(run, "run.start")[0]["config"], "log")
    data = open_corpus(config.data, config.model.context).dataset
    trainer = Trainer(config, op_table("oracle"), data, memory=DoubleMemory())
    return np.array([trainer.step().loss for _ in range(config.run.steps)])


class DoubleMemory(HostMemory):
    """Host memory with float64 in the place of float32."""

    def empty(self, size, dtype=np.float32):
        return super().empty(size, np.float64 if dtype == np.float32 else dtype)

    zeros = empty

    def put(self, array):
        return array.astype(np.float64)


@pytest.mark.skipif(vgpu.presence.real_gpu(), reason="the virtual GPU counts launches")
def test_launches_per_block():
    assert launches_of(2) - launches_of(1) <= MOST_LAUNCHES


def launches_of(blocks):
    """Launches of forward and backward of a model with that many blocks."""
    cuda = device.choose("cuda", "fp32")
    config = tiny_config(n_layer=blocks, d_model=8, context=8, vocab_size=40).model
    table = ParameterTable(config)
    p, g = (table.views(cuda.memory.zeros(table.size)) for _ in range(2))
    a = Buffers(config, 1, 8, training=True, memory=cuda.memory).views(1, 8)
    ids, targets = cuda.memory.transfers(8).upload(np.zeros((1, 8), np.int32),
                                                   np.zeros(8, np.int32))
    vgpu.forget_launches()
    with cuda.memory.queue():
        model.forward_backward(cuda.ops, p, g, a, ids, targets, config.vocab_size, 1.0)
    cuda.memory.wait()
    return len(vgpu.launches())
