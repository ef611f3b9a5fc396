"""The number of threads must not change a bit: every sum has a fixed order."""

import numba
import pytest

from kernels.common.spec import cases_of
from kernels.common.verify import as_stored, build_arguments
from kernels.registry import OPS, load_op, load_spec

# NumPy's BLAS chooses its own blocking by its own thread count, which Numba's setting leaves alone.
CALLS = [(op, name) for op in OPS for name in load_spec(op).FUNCTIONS]


def outputs_with(threads, op, name, case):
    function = load_spec(op).FUNCTIONS[name]
    arguments = as_stored(function, case, build_arguments(op, name, case))
    default = numba.get_num_threads()
    numba.set_num_threads(threads)
    try:
        getattr(load_op(op, "cpu"), name)(*arguments.values())
    finally:
        numba.set_num_threads(default)
    return {n: arguments[n].tobytes() for n in function.outputs if arguments[n] is not None}


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one processor: one thread only")
@pytest.mark.parametrize(("op", "name"), CALLS)
def test_one_thread_and_two_give_the_same_bits(op, name):
    for case in cases_of(load_spec(op), name, "cpu"):
        assert outputs_with(1, op, name, case) == outputs_with(2, op, name, case), case
