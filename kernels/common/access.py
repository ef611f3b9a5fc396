"""One source, several kernels: 128-bit accesses where the memory allows them, single numbers
elsewhere, and memory that holds float32 or bfloat16.

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

With operands, `_make(access)` gets an `Access` and annotates their pointers `access.pointer`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .cuda import Bfloats, Floats, Kernel, device_function, uint32
from .launch import aligned
from .ptx import (
    bits_float,
    load2_words,
    load4,
    load4_words,
    pack_bf16,
    store2_words,
    store4,
    store4_words,
)
from .spec import is_bf16

LANES = 32  # threads of a warp, as a plain int: for shapes and for strides
HALF = uint32(16)  # bits of a bfloat16
HIGH = uint32(0xFFFF0000)


@dataclass(frozen=True)
class Access:
    """How a thread reads and writes `words` neighbours in memory, which are float32 in registers.

    load(values, pointer, index) fills a local array values[words] from pointer[index] on;
    store(pointer, index, values) writes it back, to bfloat16 rounded to nearest. The compiler
    keeps `values` in registers.
    """

    name: str  # ends a kernel's name
    words: int
    pointer: Any  # the annotation of pointers to such memory
    load: Callable
    store: Callable
    # unpack(values, first, a, b, c, d): values[first :] = the numbers in 16 bytes
    unpack: Callable | None = None


class ByAccess:
    """The kernels that `make(words, load, store)` makes for 4 and for 1 float32 per access."""

    def __init__(self, make: Callable[[int, Callable, Callable], Kernel]):
        self.wide, self.narrow = (make(access.words, access.load, access.store)
                                  for access in (FLOATS[4], FLOATS[1]))

    def choose(self, row: int, *arrays: Any) -> tuple[int, Kernel]:
        """Words per access and the kernel, for rows of `row` elements in each of the arrays."""
        return (4, self.wide) if _fits(4, row, arrays) else (1, self.narrow)


class ByOperand:
    """The kernels that `make(access)` makes for operands in float32 and in bfloat16.

    bf16_words: numbers of a wide access in bfloat16, 4 where a thread reads float32 beside
    them, or 8 for 128 bits.
    """

    def __init__(self, make: Callable[[Access], Kernel], bf16_words: int = 4):
        self.floats = [(access, make(access)) for access in (FLOATS[4], FLOATS[1])]
        self.bfloats = [(access, make(access)) for access in (BFLOATS[bf16_words], BFLOATS[1])]

    def choose(self, row: int, operand: Any, *arrays: Any) -> tuple[Access, Kernel]:
        """The access and the kernel, for rows of `row` elements in the operand and the arrays."""
        wide, narrow = self.bfloats if is_bf16(operand) else self.floats
        return wide if _fits(wide[0].words, row, (operand, *arrays)) else narrow


def _fits(words: int, row: int, arrays: tuple) -> bool:
    return row % words == 0 and aligned(*arrays)


@device_function
def _load_four(values, pointer, index):
    values[0], values[1], values[2], values[3] = load4(pointer, index)


@device_function
def _store_four(pointer, index, values):
    store4(pointer, index, values[0], values[1], values[2], values[3])


@device_function
def _unpack_four(values, first, a, b, c, d):
    values[first], values[first + 1] = bits_float(a), bits_float(b)
    values[first + 2], values[first + 3] = bits_float(c), bits_float(d)


@device_function
def _load_one(values, pointer, index):
    values[0] = pointer[index]


@device_function
def _store_one(pointer, index, values):
    pointer[index] = values[0]


@device_function
def low_bf16(word):
    """The bfloat16 in the lower half of a word, which is at the lower address, as float32."""
    return bits_float(uint32(uint32(word) << HALF))


@device_function
def high_bf16(word):
    """The one in the upper half."""
    return bits_float(uint32(word & HIGH))


@device_function
def _unpack_two(values, i, word):
    values[i] = low_bf16(word)
    values[i + 1] = high_bf16(word)


@device_function
def unpack_eight(values, first, a, b, c, d):
    """values[first : first + 8] = the bfloat16 in four words."""
    _unpack_two(values, first, a)
    _unpack_two(values, first + 2, b)
    _unpack_two(values, first + 4, c)
    _unpack_two(values, first + 6, d)


@device_function
def _load_eight_bf16(values, pointer, index):
    a, b, c, d = load4_words(pointer, index)
    unpack_eight(values, 0, a, b, c, d)


@device_function
def _store_eight_bf16(pointer, index, values):
    store4_words(pointer, index, pack_bf16(values[0], values[1]), pack_bf16(values[2], values[3]),
                 pack_bf16(values[4], values[5]), pack_bf16(values[6], values[7]))


@device_function
def _load_four_bf16(values, pointer, index):
    a, b = load2_words(pointer, index)
    _unpack_two(values, 0, a)
    _unpack_two(values, 2, b)


@device_function
def _store_four_bf16(pointer, index, values):
    store2_words(pointer, index, pack_bf16(values[0], values[1]), pack_bf16(values[2], values[3]))


@device_function
def _load_one_bf16(values, pointer, index):
    values[0] = low_bf16(pointer[index])


@device_function
def _store_one_bf16(pointer, index, values):
    pointer[index] = pack_bf16(values[0], values[0]) >> HALF


FLOATS = {  # by words
    4: Access("4", 4, Floats, _load_four, _store_four, _unpack_four),
    1: Access("1", 1, Floats, _load_one, _store_one),
}
BFLOATS = {
    8: Access("bf16_8", 8, Bfloats, _load_eight_bf16, _store_eight_bf16, unpack_eight),
    4: Access("bf16_4", 4, Bfloats, _load_four_bf16, _store_four_bf16),
    1: Access("bf16_1", 1, Bfloats, _load_one_bf16, _store_one_bf16),
}
