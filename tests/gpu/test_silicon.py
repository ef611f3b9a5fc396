"""What only a real GPU can show: every other test of CUDA code runs there unchanged.

With a GPU, `pytest` runs the bench beside the rest. All of them: `pytest -n 0 tests/gpu`.
"""

import csv
import os
import subprocess
import sys

import pytest
import vgpu.presence
from helpers import ROOT, dataset, tiny_config

from andrea_numba import device
from andrea_numba.trainer import Trainer
from kernels.registry import OPS, load_spec

pytestmark = [
    pytest.mark.skipif(not vgpu.presence.real_gpu(), reason="needs a real GPU"),
    pytest.mark.xdist_group("silicon"),  # timings do not share the GPU with each other
]
SECONDS = 8 * 60


def run(*arguments, cwd=ROOT):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-m", *map(str, arguments)], cwd=cwd, env=environment,
                          capture_output=True, text=True, timeout=SECONDS)


def test_bench_checks_and_times_every_function(tmp_path):
    result = run("kernels.bench", "--all", "--quick", "--csv", tmp_path / "rows.csv")
    assert result.returncode == 0, result.stderr
    with open(tmp_path / "rows.csv", newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["backend"] == "gpu"]
    assert {row["op"] for row in rows} == {
        f"{op}.{name}" for op in OPS for name in load_spec(op).FUNCTIONS}
    for row in rows:
        assert row["gpu"] and row["driver"] and row["numba-cuda"]
        assert float(row["of limit"].rstrip("%") or 0) <= 105, row  # nothing beats the hardware


@pytest.mark.skipif(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1,
                    reason="other workers take GPU memory meanwhile: pytest -n 0 tests/gpu")
def test_device_memory_does_not_grow(tmp_path):
    """Free memory after ten and after a thousand steps differs by less than 1 MiB."""
    cuda = device.choose("cuda")
    config = tiny_config(steps=1000)
    trainer = Trainer(config, cuda.ops, dataset(config, tmp_path), memory=cuda.memory)
    free = []
    with cuda.memory.queue():
        for step in range(1, 1001):
            trainer.advance()
            if step in (10, 1000):
                trainer.wait()
                free.append(cuda.memory.free_bytes())
    assert abs(free[0] - free[1]) < 1 << 20
