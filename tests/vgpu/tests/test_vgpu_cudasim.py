"""numba-cuda's own simulator agrees with the virtual GPU, for the examples that it can run.

It interprets the Python source thread by thread and never sees PTX: the two share no code below
the kernels themselves.
"""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import vgpu
from vgpu.examples import matmul, suite

pytestmark = pytest.mark.skipif(not vgpu.installed(), reason="compares the virtual GPU")
# What the simulator lacks: shuffles and votes, intrinsics, views, exceptions of the device; and
# what takes it too long.
LACKING = {"transposed_matmul", "tensor_core_matmul", "warp_layernorm", "warp_scan",
           "block_softmax",
           "warp_operations", "debug_exceptions", "nano_gpt_step"}
SLOW = {"tiled_matmul", "shared_sum", "large_dynamic_shared"}
PROGRAM = """
import pickle, sys
import numpy as np
from examples import matmul, suite
a, b = np.load(sys.argv[1]).values()
results = {{"matmul": [matmul.matmul(a, b)]}}
for name in {names}:
    results[name] = [np.array(check.got) for check in suite.EXAMPLES[name]()]
with open(sys.argv[2], "wb") as file:
    pickle.dump(results, file)
"""


def test_simulator_agrees(tmp_path):
    names = sorted(suite.EXAMPLES.keys() - LACKING - SLOW)
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(shape).astype(np.float32) for shape in ((17, 18), (18, 5)))
    np.savez(tmp_path / "inputs.npz", a, b)
    # The examples alone, without the package around them: that one patches the real numba-cuda.
    environment = dict(os.environ, NUMBA_ENABLE_CUDASIM="1",
                       PYTHONPATH=str(Path(vgpu.__file__).parent))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM.format(names=names),
         tmp_path / "inputs.npz", tmp_path / "results"],
        env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    simulated = pickle.loads((tmp_path / "results").read_bytes())
    (product,) = simulated.pop("matmul")
    assert suite.Check(matmul.matmul(a, b), product, 1e-6).error() <= 1e-6
    assert sorted(simulated) == names
    for name in names:
        checks = list(suite.EXAMPLES[name]())
        assert len(checks) == len(simulated[name])
        for check, other in zip(checks, simulated[name], strict=True):
            assert suite.Check(check.got, other).error() <= 2 * check.tolerance, name
