"""Integer helpers of generated code: high products, division, shifts, bit fields, bytes.

Every function takes arrays or NumPy scalars and returns a scalar when all its operands are scalars.
"""

from __future__ import annotations

import numpy as np

from .lanes import Value, is_scalar

u1, u2, u4, u8 = np.uint8, np.uint16, np.uint32, np.uint64
i1, i4 = np.int8, np.int32

NONE = u4(0xFFFFFFFF)  # what bfind gives when there is no bit to find

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def where(condition: Value, if_true: Value, if_false: Value) -> Value:
    """`np.where` that keeps scalars scalar."""
    if is_scalar(condition):
        return if_true if condition else if_false
    return np.where(condition, if_true, if_false)


def width_of(value: Value) -> int:
    """Bits of the value's type."""
    return 8 * value.dtype.itemsize


def saturate(value: Value, dtype: type) -> Value:
    """Convert an integer to `dtype`, clamped to its range."""
    source, target = np.iinfo(value.dtype), np.iinfo(dtype)
    lower = value.dtype.type(max(source.min, target.min))
    upper = value.dtype.type(min(source.max, target.max))
    return np.minimum(np.maximum(value, lower), upper).astype(dtype)


def multiply_high(a: Value, b: Value) -> Value:
    """The upper half of the double-width product, in the operands' type."""
    size = a.dtype.itemsize
    if size < 8:
        wide = (SIGNED if a.dtype.kind == "i" else UNSIGNED)[2 * size]
        return (a.astype(wide) * b.astype(wide) >> wide(8 * size)).astype(a.dtype)
    high = _multiply_high_u8(a.view(u8), b.view(u8))
    if a.dtype.kind == "u":
        return high
    # A negative operand was taken 2**64 too large, which adds the other one to the upper half.
    zero = np.int64(0)
    return high.view(np.int64) - where(a < 0, b, zero) - where(b < 0, a, zero)


def _multiply_high_u8(a, b):
    half, low = u8(32), u8(0xFFFFFFFF)
    a_low, a_high, b_low, b_high = a & low, a >> half, b & low, b >> half
    middle = a_high * b_low + (a_low * b_low >> half)
    other = a_low * b_high + (middle & low)
    return a_high * b_high + (middle >> half) + (other >> half)


def divide(a: Value, b: Value) -> Value:
    """Quotient rounded toward zero. PTX leaves x / 0 open; it gives all ones, as ptxas's code does.

    The most negative number divided by -1 wraps around to itself.
    """
    quotient = (a - np.fmod(a, b)) // b if a.dtype.kind == "i" else a // b
    return where(b == 0, _all_ones(a), quotient)


def remainder(a: Value, b: Value) -> Value:
    """Remainder with the sign of `a`; of a division by zero all ones, see `divide`."""
    return where(b == 0, _all_ones(a), np.fmod(a, b))


def _all_ones(value):
    return ~value.dtype.type(0)


def shift_left(value: Value, count: Value) -> Value:
    """`value << count` for any uint32 count: 0 from the width on.

    NumPy's own shifts define the count that equals the width.
    """
    return value << np.minimum(count, u4(width_of(value))).astype(value.dtype)


def shift_right(value: Value, count: Value) -> Value:
    """`value >> count` for any uint32 count: from the width on 0, or the sign of signed types."""
    return value >> np.minimum(count, u4(width_of(value))).astype(value.dtype)


def funnel_left(low: Value, high: Value, count: Value) -> Value:
    """The upper word of (high:low) << count, count at most 32."""
    return (_join_words(low, high) << count.astype(u8) >> u8(32)).astype(u4)


def funnel_right(low: Value, high: Value, count: Value) -> Value:
    """The lower word of (high:low) >> count, count at most 32."""
    return (_join_words(low, high) >> count.astype(u8)).astype(u4)


def _join_words(low, high):
    return high.astype(u8) << u8(32) | low


def leading_zeros(value: Value) -> Value:
    """Number of zero bits above the highest set bit (clz), as uint32."""
    if value.dtype.itemsize == 8:
        high = (value >> u8(32)).astype(u4)
        return where(high != 0, leading_zeros(high), u4(32) + leading_zeros(value.astype(u4)))
    return u4(32) - np.frexp(value.astype(np.float64))[1].astype(u4)


def leading_bit(value: Value) -> Value:
    """Position of the highest bit that differs from the sign (bfind), 0xFFFFFFFF if none."""
    if value.dtype.kind == "i":
        value = where(value < 0, ~value, value)
    unsigned = UNSIGNED[value.dtype.itemsize]
    return u4(width_of(value) - 1) - leading_zeros(value.view(unsigned))


def leading_bit_shift(value: Value) -> Value:
    """The left shift that brings that bit to the top (bfind.shiftamt), 0xFFFFFFFF if none."""
    position = leading_bit(value)
    return where(position == NONE, NONE, u4(width_of(value) - 1) - position)


def reverse_bits(value: Value) -> Value:
    """The bits in opposite order (brev)."""
    word = value.dtype.type
    for step, mask in ((1, 0x5555555555555555), (2, 0x3333333333333333), (4, 0x0F0F0F0F0F0F0F0F)):
        mask = word(mask & int(np.iinfo(word).max))
        value = (value >> word(step) & mask) | (value & mask) << word(step)
    return value.byteswap()


def extract_field(value: Value, position: Value, length: Value) -> Value:
    """`length` bits from `position` on, extended by the sign of the field (bfe)."""
    width = u4(width_of(value))
    position, length = position & u4(0xFF), length & u4(0xFF)
    above = width - np.minimum(position + length, width)
    field = shift_right(shift_left(value, above), above + position)
    return where(length == 0, value.dtype.type(0), field)


def insert_field(field: Value, value: Value, position: Value, length: Value) -> Value:
    """`value` with `length` bits from `position` on replaced by the low bits of `field` (bfi)."""
    position, length = position & u4(0xFF), length & u4(0xFF)
    mask = shift_left(~shift_left(_all_ones(value), length), position)
    return (value & ~mask) | (shift_left(field, position) & mask)


def permute(a: Value, b: Value, selector: Value) -> Value:
    """Any four bytes of the eight of (b:a), by a nibble each; bit 3 spreads the byte's sign."""
    result = u4(0)
    for place in range(4):
        nibble = selector >> u4(4 * place) & u4(0xF)
        byte = _byte_of(a, b, nibble)
        byte = where(nibble & u4(8) != 0, byte.view(i1) >> i1(7), byte.view(i1)).view(u1)
        result = result | byte.astype(u4) << u4(8 * place)
    return result


def permute_mode(a: Value, b: Value, selector: Value, mode: str) -> Value:
    """The fixed patterns of prmt, which the low two bits of the selector choose from."""
    start = selector & u4(3)
    pattern = {
        "f4e": lambda place: start + place,
        "b4e": lambda place: start - place,
        "rc8": lambda place: start,
        "ecl": lambda place: np.maximum(start, place),
        "ecr": lambda place: np.minimum(start, place),
        "rc16": lambda place: ((start & u4(1)) << u4(1)) + (place & u4(1)),
    }[mode]
    result = u4(0)
    for place in range(4):
        byte = _byte_of(a, b, pattern(u4(place)))
        result = result | byte.astype(u4) << u4(8 * place)
    return result


def _byte_of(a, b, index):
    return (_join_words(a, b) >> (index & u4(7)).astype(u8) * u8(8)).astype(u1)


def dot_bytes(a: Value, b: Value, dtype_a: type, dtype_b: type) -> Value:
    """Sum of the products of the four bytes of two words (dp4a), as uint32."""
    total = i4(0)
    for place in range(4):
        shift = u4(8 * place)
        total = total + ((a >> shift).astype(u1).view(dtype_a).astype(i4)
                         * (b >> shift).astype(u1).view(dtype_b).astype(i4))
    return total.view(u4)


def join_halves(upper: Value, lower: Value) -> Value:
    """One word from two uint16."""
    return upper.astype(u4) << u4(16) | lower
