"""The short form of `python -m tests.fuzz_inputs`."""

import pytest
from fuzz_inputs import TARGETS, fuzz


@pytest.mark.parametrize("name", TARGETS)
def test_random_inputs_are_right_or_refused_in_one_line(name):
    cost = TARGETS[name][2]
    right, refused = fuzz(name, max(10, 150 // cost))
    assert right and right + refused >= 10
