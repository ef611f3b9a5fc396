"""Operands for the opcode tests, and the comparison of results."""

from __future__ import annotations

import random
from fractions import Fraction

import reference_float as real
from reference_float import FORMATS
from reference_types import Within, width

COUNTS = (0, 1, 7, 8, 15, 16, 17, 24, 31, 32, 33, 63, 64, 65, 255, 256, 257, 0x10001, 0xFFFFFFFF)


def edges(kind: str) -> list[int]:
    """The bit patterns of a type where mistakes are likely."""
    if kind == "pred":
        return [0, 1]
    if kind == "count":
        return list(COUNTS)
    if kind.endswith("x2"):
        halves = edges(kind[:-2])
        return [upper << 16 | lower for upper, lower in zip(halves, reversed(halves), strict=True)]
    if kind in FORMATS:
        return float_edges(kind)
    bits = width(kind)
    ones, top = (1 << bits) - 1, 1 << bits - 1
    return [0, 1, 2, 3, 7, 10, 16, ones, ones - 1, top, top - 1, top + 1, top >> 1, 0x55 % ones,
            1 << bits // 2, (1 << bits // 2) - 1, 127, 128, 255 & ones]


def float_edges(kind: str) -> list[int]:
    form = FORMATS[kind]
    one = form.encode(Fraction(1))
    magnitudes = [0, 1, 2, (1 << form.fraction_bits) - 1, 1 << form.fraction_bits,
                  (1 << form.fraction_bits) + 1, one, one + 1, one - 1, form.infinity - 1,
                  form.infinity]
    # integers and halves around the limits of the integer types
    for value in (0.5, 1.5, 2.5, 3.0, 127.5, 128, 255.5, 256, 32767.5, 65535.5, 2**31 - 1, 2**31,
                  2**32, 2**63, 2**64, 0.25, 100.75, 2.0**126, 1.0000001):
        magnitudes.append(form.encode(Fraction(value)))
    nan = form.infinity + 1 + (1 << form.fraction_bits - 1)
    sign = 1 << form.width - 1
    return [nan, *magnitudes, *(sign | bits for bits in magnitudes)]


def randoms(kind: str, generator: random.Random, count: int) -> list[int]:
    """Random bits, and for floats also numbers of moderate size."""
    if kind == "count":
        return [generator.randrange(70) for _ in range(count)]
    bits = [generator.getrandbits(width(kind)) for _ in range(count)]
    if kind in FORMATS and kind != "tf32":
        form = FORMATS[kind]
        for place in range(0, count, 2):
            bits[place] = form.encode(Fraction(generator.uniform(-8, 8)))
    return bits


def operands(kinds: tuple[str, ...], count: int) -> list[list[int]]:
    """`count` values for each of the types: edges first, then edges and random ones in a mix."""
    generator = random.Random("".join(kinds))
    columns = []
    for kind in kinds:
        column = edges(kind)
        if len(kinds) > 1:
            generator.shuffle(column)
        pool = column + randoms(kind, generator, 3 * len(column))
        column = (column + [generator.choice(pool) for _ in range(count)])[:count]
        columns.append(column)
    for place in range(count // 2, count, 9):  # equal and nearly equal operands
        same = [column for column, kind in zip(columns, kinds, strict=True) if kind == kinds[0]]
        for distance, column in enumerate(same):
            column[place] = max(same[0][place] - (distance if place % 2 else 0), 0)
    return columns


def agrees(expected: object, actual: int, kind: str) -> bool:
    """Whether a result is the expected one; any NaN is as good as another."""
    if kind.endswith("x2"):
        halves = expected if isinstance(expected, tuple) else (expected >> 16, expected & 0xFFFF)
        return all(agrees(half, value, kind[:-2])
                   for half, value in zip(halves, (actual >> 16, actual & 0xFFFF), strict=True))
    if kind not in FORMATS:
        return expected == actual
    form = FORMATS[kind]
    value = form.decode(actual)
    if isinstance(expected, Within):
        if not real.is_finite(value):
            return False
        # the bounds of the narrow formats are taken to be those before rounding
        value = Fraction(value)
        rounding = 0
        if kind not in ("f32", "f64"):
            rounding = form.unit(max(abs(value), abs(expected.exact))) / 2
        return abs(value - expected.exact) <= expected.bound + rounding
    return real.is_nan(value) if real.is_nan(form.decode(expected)) else expected == actual
