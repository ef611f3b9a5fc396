"""Every op, every case, every backend against the float64 oracle.

All knowledge about the ops is in their specs: a new op is tested by being in the registry.
"""

import importlib.util

import pytest
import vgpu

from kernels.common.spec import cases_of, label
from kernels.common.verify import ALIGNED_GUARD_WORDS, GUARD_WORDS, verify
from kernels.registry import OPS, implementations, load_op, load_spec

ORACLE_CALLS, CPU_CALLS, GPU_CALLS = (
    [
        pytest.param(op, name, case, id=f"{op}.{name} {label(case)}")
        for op in OPS
        for name in load_spec(op).FUNCTIONS
        for case in cases_of(load_spec(op), name, backend)
    ]
    for backend in ("oracle", "cpu", "gpu")
)

# The virtual GPU needs a second for some hundred million instructions; larger cases are for the
# CPU and for real GPUs.
VIRTUAL_FLOPS = 30_000_000


@pytest.mark.parametrize(("op", "name", "case"), CPU_CALLS)
def test_cpu_matches_the_oracle(op, name, case):
    assert verify(op, name, case, getattr(load_op(op, "cpu"), name)) == []


@pytest.mark.parametrize(("op", "name", "case"), ORACLE_CALLS)
def test_the_oracle_in_float32_passes_its_own_comparison(op, name, case):
    assert verify(op, name, case, getattr(load_op(op, "oracle"), name)) == []


@pytest.mark.skipif(not importlib.util.find_spec("numba_cuda"), reason="numba-cuda not installed")
@pytest.mark.parametrize("guard_words", [GUARD_WORDS, ALIGNED_GUARD_WORDS])
@pytest.mark.parametrize(("op", "name", "case"), GPU_CALLS)
def test_gpu_matches_the_oracle(op, name, case, guard_words):
    """With checks for races, and approximations that are off by all that their makers allow."""
    implementation = getattr(load_op(op, "gpu"), name)
    if not vgpu.installed():
        assert verify(op, name, case, implementation, "gpu", guard_words) == []
        return
    if load_spec(op).FUNCTIONS[name].flops(case) > VIRTUAL_FLOPS:
        pytest.skip(f"more than {VIRTUAL_FLOPS // 10**6} MFLOP")
    with vgpu.options(global_race=True, approx="hostile"):
        assert verify(op, name, case, implementation, "gpu", guard_words) == []


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_both_implementations(op):
    assert implementations(op) == ("cpu", "gpu")
