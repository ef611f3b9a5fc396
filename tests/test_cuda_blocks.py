"""Deep models through the real program on CUDA: the CPU's losses, in few launches per block."""

import os
import subprocess
import sys

import numpy as np
import pytest
import vgpu
import vgpu.presence
from helpers import ROOT, TEXT, events, tiny_config

from andrea_numba import device, model
from andrea_numba.buffers import Buffers
from andrea_numba.parameters import ParameterTable

pytest.importorskip("numba_cuda")

MOST_LAUNCHES = 30  # of one block, forward and backward
UNITS = 4  # in the last place of float32, by which losses may differ
ON_GPU = ["-m"] if vgpu.presence.real_gpu() else ["-m", "tests.vgpu", "--no-race", "-m"]


@pytest.mark.parametrize(("blocks", "steps"), [(2, 20), (12, 3)])
def test_losses_are_the_cpus(tmp_path, blocks, steps):
    """To a few units in the last place of float32: both devices round, in another order."""
    (tmp_path / "t.txt").write_text(TEXT)
    losses = {}
    for place, start in (("cuda", ON_GPU), ("cpu", ["-m"])):
        result = subprocess.run(
            [sys.executable, *start, "andrea_numba.cli_train", "t.txt", "--device", place,
             "--n-layer", str(blocks), "--steps", str(steps), "--out", place, "--d-model", "16",
             "--n-head", "2", "--context", "16", "--batch-size", "2", "--warmup", "2",
             "--log-every", "1", "--eval-every", "0", "--sample-every", "0", "--threads", "1"],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
            text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        losses[place] = [event["loss"] for event in events(tmp_path / place, "run.loss")]
    assert len(losses["cpu"]) == steps
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=UNITS * 2.0**-23)


@pytest.mark.skipif(vgpu.presence.real_gpu(), reason="the virtual GPU counts launches")
def test_launches_per_block():
    assert launches_of(2) - launches_of(1) <= MOST_LAUNCHES


def launches_of(blocks):
    """Launches of forward and backward of a model with that many blocks."""
    cuda = device.choose("cuda")
    config = tiny_config(n_layer=blocks, d_model=8, context=8, vocab_size=40).model
    table = ParameterTable(config)
    p, g = (table.views(cuda.memory.zeros(table.size)) for _ in range(2))
    a = Buffers(config, 1, 8, training=True, memory=cuda.memory).views(1, 8)
    ids, targets = cuda.memory.transfers(8).upload(np.zeros((1, 8), np.int32),
                                                   np.zeros(8, np.int32))
    before = len(vgpu.launches())
    with cuda.memory.queue():
        model.forward_backward(cuda.ops, p, g, a, ids, targets, config.vocab_size, 1.0)
    cuda.memory.wait()
    return len(vgpu.launches()) - before
