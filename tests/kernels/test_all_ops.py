"""Every op, every case, every backend against the float64 oracle.

All knowledge about the ops is in their specs: a new op is tested by being in the registry.
"""

import pytest

from kernels.common.spec import cases_of, label
from kernels.common.verify import verify
from kernels.registry import OPS, implementations, load_op, load_spec

CALLS = [
    pytest.param(op, name, case, id=f"{op}.{name} {label(case)}")
    for op in OPS
    for name in load_spec(op).FUNCTIONS
    for case in cases_of(load_spec(op), name)
]


@pytest.mark.parametrize(("op", "name", "case"), CALLS)
def test_cpu_matches_the_oracle(op, name, case):
    assert verify(op, name, case, getattr(load_op(op, "cpu"), name)) == []


@pytest.mark.parametrize(("op", "name", "case"), CALLS)
def test_the_oracle_in_float32_passes_its_own_comparison(op, name, case):
    assert verify(op, name, case, getattr(load_op(op, "oracle"), name)) == []


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_a_cpu_implementation(op):
    assert "cpu" in implementations(op)
