"""Negative controls, as in test_controls, for what only cases in bfloat16 have: on the GPU."""

import numpy as np
import pytest
from test_controls import ORACLE, on_the_device

from kernels.common.spec import cases_of
from kernels.common.verify import is_in_bf16, verify
from kernels.registry import load_spec

pytest.importorskip("numba_cuda")


def layernorm_leaves_dx_bf16(dx, dx_bf16, dgamma, dbeta, dy, x, mean, rstd, gamma, residual):
    ORACLE["layernorm"].backward(dx, None, dgamma, dbeta, dy, x, mean, rstd, gamma, residual)


def layernorm_rounds_before_the_residual(dx, dx_bf16, dgamma, dbeta, dy, x, mean, rstd, gamma,
                                         residual):
    through_norm = np.empty_like(dx)
    ORACLE["layernorm"].backward(through_norm, dx_bf16, dgamma, dbeta, dy, x, mean, rstd, gamma,
                                 None)
    dx[:] = through_norm if residual is None else residual + through_norm


def cross_entropy_rounds_to_7_bits(losses, dlogits, logits, targets, vocab_size, scale):
    """By cutting the low bits off, which bfloat16 does not: twice the error."""
    ORACLE["cross_entropy"].backward(losses, dlogits, logits, targets, vocab_size, scale)
    bits = dlogits.view(np.uint32)
    bits &= np.uint32(0xFFFE0000)


def adamw_leaves_weights_bf16(weights, weights_bf16, *others):
    ORACLE["adamw"].update(weights, None, *others)


def adamw_rounds_the_weights_of_before(weights, weights_bf16, *others):
    before = weights.copy()
    ORACLE["adamw"].update(weights, weights_bf16, *others)
    weights_bf16[:] = before


CONTROLS = [
    ("layernorm", "backward", layernorm_leaves_dx_bf16, "dx_bf16: "),
    ("layernorm", "backward", layernorm_rounds_before_the_residual, "dx_bf16: error"),
    ("cross_entropy", "backward", cross_entropy_rounds_to_7_bits, "dlogits: error"),
    ("adamw", "update", adamw_leaves_weights_bf16, "weights_bf16: error"),
    ("adamw", "update", adamw_rounds_the_weights_of_before, "weights_bf16: error"),
]


@pytest.mark.parametrize(
    ("op", "name", "wrong", "fault"), CONTROLS, ids=[c[2].__name__ for c in CONTROLS]
)
def test_the_comparison_refuses_in_bfloat16(op, name, wrong, fault):
    """And takes the oracle itself, handled in the same way."""
    cases = [case for case in cases_of(load_spec(op), name, "gpu") if is_in_bf16(case)]
    faults, of_the_oracle = (
        [found for case in cases
         for found in verify(op, name, case, on_the_device(implementation), "gpu")]
        for implementation in (wrong, getattr(ORACLE[op], name)))
    assert any(fault in found for found in faults), faults
    assert of_the_oracle == []
