"""A cold cache is filled by two processes, of which the second ends with the first."""

import os
import subprocess
import sys

import pytest

from andrea_numba import compile_beside

LOAD = """
from numba.core import event
from andrea_numba import device, start
from andrea_numba.config import ModelConfig
names = set()
class Listener(event.Listener):
    def on_start(self, started):
        names.add(started.data["dispatcher"].py_func.__module__)
    def on_end(self, ended):
        pass
event.register("numba:compile", Listener())
start.load_kernels(device.choose("cpu", "fp32"), ModelConfig(), 1, OPTIONS)
print(*names)
"""


def run(tmp_path, options: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", LOAD.replace("OPTIONS", options)],
        capture_output=True, text=True, timeout=300,
        env={**os.environ, "ANDREA_CACHE_DIR": str(tmp_path),
             "PYTHONPATH": os.pathsep.join(sys.path)})


@pytest.mark.parametrize(("options", "module"), [
    ("training=True", "kernels.matmul.cpu"),
    ("training=False, stored='int8'", "kernels.matmul.cpu_stored")])
def test_each_process_compiles_its_kernels(options, module, tmp_path):
    cold, warm = run(tmp_path, options), run(tmp_path, options)
    assert cold.stderr.startswith("compiling kernels for this machine") and not cold.returncode
    compiled = cold.stdout.split()
    assert module in compiled
    assert not [name for name in compiled if name.startswith("kernels.attention")]
    assert (warm.stdout, warm.stderr) == ("\n", "")


def test_the_second_process_ends_with_the_first(tmp_path):
    with compile_beside.second_process("fp32", training=True, ANDREA_CACHE_DIR=str(tmp_path)) as it:
        it.stdin.close()
        assert it.wait(timeout=60) == 0
    assert not list(tmp_path.rglob("*.tmp"))
