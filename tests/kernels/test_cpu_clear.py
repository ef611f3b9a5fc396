"""Large arrays set to zero by all threads: every element, and nothing beside them."""

import numpy as np
import pytest

from kernels.common.cpu_clear import LARGE, clear
from kernels.common.host_array import aligned_zeros


@pytest.mark.parametrize("start", [0, 1])  # with a cache line, and without
@pytest.mark.parametrize("size", [1, 15, 17, 8191, 8209, LARGE - 1, LARGE, LARGE + 37])
def test_every_element_is_zero_and_no_other_is_touched(size, start):
    guarded = aligned_zeros(size + 64, np.float32)
    guarded[:] = np.nan
    array = guarded[start:start + size]
    clear(array)
    assert not array.any()
    assert np.isnan(guarded[:start]).all() and np.isnan(guarded[start + size:]).all()


@pytest.mark.parametrize("dtype", [np.int32, np.uint16, np.float64])
def test_other_types(dtype):
    array = np.ones(100, dtype)
    clear(array)
    assert not array.any()
