"""The examples on devices of other compute capabilities, whose PTX looks different."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import vgpu
from vgpu.examples import suite

PROGRAM = """
import vgpu
vgpu.install(cc={cc})
from vgpu.examples import suite
for name in {names}:
    for check in suite.EXAMPLES[name]():
        assert check.error() <= check.tolerance, (name, check.error())
"""
ALL = list(suite.EXAMPLES)
# One compiler writes the PTX for 8.0 and 9.0, a newer one that for 10.0 and 12.0.
EXAMPLES = {
    (8, 0): [name for name in ALL if name != "nano_gpt_step"],
    (10, 0): ["tiled_matmul", "tensor_core_matmul", "warp_operations", "math_functions"],
    (12, 0): ALL,
}


@pytest.mark.parametrize("cc", EXAMPLES)
def test_examples_on(cc):
    program = PROGRAM.format(cc=cc, names=EXAMPLES[cc])
    environment = dict(os.environ, PYTHONPATH=str(Path(vgpu.__file__).parent.parent))
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], env=environment,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
