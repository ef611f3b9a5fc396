"""Eight neighbours of a row at a time: 16 bytes of bf16, the unit of the kernels for bf16.

Rows whose length or address does not divide by 16 bytes are accessed element by element.
"""

from types import SimpleNamespace

from .access import unpack_eight
from .cuda import device_function, float32, uint32
from .ptx import load4, load4_words, pack_bf16, store4, store4_words

OCTET = 8
ZERO = float32(0)


@device_function
def unpack_octet(values, words):
    """values[8] = the bf16 in four words."""
    unpack_eight(values, 0, words[0], words[1], words[2], words[3])


@device_function
def _element(pointer, index, present):
    """The bits of a bf16 element, 0 where there is none."""
    return uint32(pointer[index]) if present else uint32(0)


@device_function
def pair(pointer, index, count):
    """Two neighbours in one word, of which the first `count` are there."""
    return uint32(_element(pointer, index, count > 0)
                  | _element(pointer, index + 1, count > 1) << uint32(16))


def octet_access(wide: bool) -> SimpleNamespace:
    """How 8 elements are accessed of which the first `count` are there; the rest reads as 0.

    words(pointer, at, count)                    bf16 as it is, two in each of four words
    read_bf16, read_float(values, pointer, at, count)     fill values[8]
    write_bf16, write_float(pointer, at, count, values)   write up to `count`

    wide: in accesses of 16 bytes, so that `count` is at least 8 or below 1 and addresses divide
    by 16.
    """

    @device_function
    def words(pointer, at, count):
        if wide:
            none = uint32(0)
            return load4_words(pointer, at) if count > 0 else (none, none, none, none)
        return (pair(pointer, at, count), pair(pointer, at + 2, count - 2),
                pair(pointer, at + 4, count - 4), pair(pointer, at + 6, count - 6))

    @device_function
    def read_bf16(values, pointer, at, count):
        unpack_octet(values, words(pointer, at, count))

    @device_function
    def write_bf16(pointer, at, count, values):
        w0, w1 = pack_bf16(values[0], values[1]), pack_bf16(values[2], values[3])
        w2, w3 = pack_bf16(values[4], values[5]), pack_bf16(values[6], values[7])
        if wide:
            if count > 0:
                store4_words(pointer, at, w0, w1, w2, w3)
        else:
            write_pair(pointer, at, count, w0)
            write_pair(pointer, at + 2, count - 2, w1)
            write_pair(pointer, at + 4, count - 4, w2)
            write_pair(pointer, at + 6, count - 6, w3)

    @device_function
    def write_pair(pointer, at, count, word):
        if count > 0:
            pointer[at] = word & uint32(0xFFFF)
        if count > 1:
            pointer[at + 1] = word >> uint32(16)

    @device_function
    def read_float(values, pointer, at, count):
        if wide:
            if count > 0:
                values[0], values[1], values[2], values[3] = load4(pointer, at)
                values[4], values[5], values[6], values[7] = load4(pointer, at + 4)
        else:
            for i in range(OCTET):
                values[i] = pointer[at + i] if i < count else ZERO

    @device_function
    def write_float(pointer, at, count, values):
        if wide:
            if count > 0:
                store4(pointer, at, values[0], values[1], values[2], values[3])
                store4(pointer, at + 4, values[4], values[5], values[6], values[7])
        else:
            for i in range(OCTET):
                if i < count:
                    pointer[at + i] = values[i]

    return SimpleNamespace(words=words, read_bf16=read_bf16, write_bf16=write_bf16,
                           read_float=read_float, write_float=write_float)
