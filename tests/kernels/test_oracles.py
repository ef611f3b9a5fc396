"""Every gradient of every oracle against central differences in float64."""

import numpy as np
import pytest

from kernels.common.spec import cases_of, label
from kernels.common.verify import build_arguments
from kernels.registry import OPS, load_op, load_spec

STEP = 1e-6  # truncation STEP^2 * third derivative, rounding 1e-16 * value / STEP
DIRECTIONS = 3
BOUND = 1e-6


def has_gradient(op, gradient, case):
    inputs = load_spec(op).make_inputs(np.random.default_rng(0), case)
    return gradient not in inputs or inputs[gradient] is not None


GRADIENTS = [
    pytest.param(op, gradient, case, id=f"{op} {gradient} {label(case)}")
    for op in OPS
    for gradient in load_spec(op).GRADIENTS
    for case in cases_of(load_spec(op), "backward")
    if has_gradient(op, gradient, case)
]


def slopes(op, gradient, case):
    """(gradient, [(slope by the gradient, slope by differences) along random directions])."""
    spec, oracle = load_spec(op), load_op(op, "oracle")
    argument = spec.GRADIENTS[gradient]
    backward = build_arguments(op, "backward", case)
    inputs = build_arguments(op, "forward", case) | backward
    before = backward[gradient].copy()
    oracle.backward(**backward)
    added = gradient in spec.FUNCTIONS["backward"].added_to
    computed = backward[gradient] - before if added else backward[gradient]

    def objective(value):
        forward = build_arguments(op, "forward", case) | {argument: value}
        oracle.forward(**forward)
        return spec.objective(forward, inputs | {argument: value})

    rng = np.random.default_rng(1)
    pairs = []
    for direction in rng.standard_normal((DIRECTIONS, *computed.shape)):
        ahead = objective(inputs[argument] + STEP * direction)
        behind = objective(inputs[argument] - STEP * direction)
        pairs.append((np.sum(computed * direction), (ahead - behind) / (2 * STEP)))
    return computed, pairs


@pytest.mark.parametrize(("op", "gradient", "case"), GRADIENTS)
def test_gradient_is_the_slope_of_the_objective(op, gradient, case):
    computed, pairs = slopes(op, gradient, case)
    for by_gradient, by_difference in pairs:
        assert abs(by_gradient - by_difference) < BOUND * (np.linalg.norm(computed) + 1)


def test_the_bound_would_notice_one_wrong_element():
    computed, _ = slopes("matmul", "dw", {"M": 21, "N": 90, "K": 30})
    assert np.abs(computed).mean() > 1000 * BOUND * (np.linalg.norm(computed) + 1)


@pytest.mark.parametrize("op", OPS)
def test_every_gradient_that_backward_computes_is_listed(op):
    spec = load_spec(op)
    if "backward" in spec.FUNCTIONS:
        outputs = spec.FUNCTIONS["backward"].outputs.keys() - spec.FUNCTIONS["forward"].outputs
        assert outputs == spec.GRADIENTS.keys()
