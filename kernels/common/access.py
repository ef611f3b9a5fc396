"""One source, two kernels: 128-bit accesses where the memory allows them, single words elsewhere.

    def _make(words, load, store):
        @kernel(threads=256, name=f"_double_{words}")
        def _double(out: Floats, x: Floats, n: int64):
            values = cuda.local.array(words, float32)
            i = words * cuda.grid(1)
            if i < n:
                load(values, x, i)
                for j in range(words):
                    values[j] *= float32(2.0)
                store(out, i, values)

        return _double

    _double = ByAccess(_make)
    words, double = _double.choose(n, out, x)
    double.launch(ceil_div(n, 256 * words), out, x, n)
"""

from collections.abc import Callable
from typing import Any

from .cuda import Kernel, device_function
from .launch import aligned
from .ptx import load4, store4

LANES = 32  # threads of a warp, as a plain int: for shapes and for strides


class ByAccess:
    """The kernels that `make(words, load, store)` makes for 4 and for 1 words per access.

    load(values, pointer, index) fills a local array values[words] from pointer[index] on;
    store(pointer, index, values) writes it back. The compiler keeps `values` in registers.
    """

    def __init__(self, make: Callable[[int, Callable, Callable], Kernel]):
        self.wide = make(4, _load_four, _store_four)
        self.narrow = make(1, _load_one, _store_one)

    def choose(self, row: int, *arrays: Any) -> tuple[int, Kernel]:
        """Words per access and the kernel, for rows of `row` elements in each of the arrays."""
        if row % 4 == 0 and aligned(*arrays):
            return 4, self.wide
        return 1, self.narrow


@device_function
def _load_four(values, pointer, index):
    values[0], values[1], values[2], values[3] = load4(pointer, index)


@device_function
def _store_four(pointer, index, values):
    store4(pointer, index, values[0], values[1], values[2], values[3])


@device_function
def _load_one(values, pointer, index):
    values[0] = pointer[index]


@device_function
def _store_one(pointer, index, values):
    pointer[index] = values[0]
