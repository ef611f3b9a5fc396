"""Where the elements of mma fragments are, as the PTX ISA's formulas say, and exact products."""

from __future__ import annotations

from fractions import Fraction

import reference_float as real
from reference_float import FORMATS


def positions(matrix: str, depth: int, kind: str, lane: int) -> list[tuple[int, int]]:
    """(row, column) of each element that a lane holds of matrix "a" (16 x depth), "b" (depth x 8)
    or "c" (16 x 8), in the order of its registers."""
    group, quad = lane >> 2, lane & 3
    if matrix == "c":
        return [(group + 8 * (i >= 2), 2 * quad + i % 2) for i in range(4)]
    if kind == "tf32":
        steps = range(depth // 4)
        if matrix == "a":
            return [(group + 8 * half, quad + 4 * step) for step in steps for half in range(2)]
        return [(quad + 4 * step, group) for step in steps]
    steps = range(depth // 8)
    if matrix == "a":
        return [(group + 8 * half, 2 * quad + i + 8 * step)
                for step in steps for half in range(2) for i in range(2)]
    return [(2 * quad + i + 8 * step, group) for step in steps for i in range(2)]


def fragments(matrix: str, depth: int, kind: str, elements: list[list[int]]) -> list[list[int]]:
    """For each lane, the 32-bit registers that hold its elements (bit patterns)."""
    lanes = []
    for lane in range(32):
        bits = [elements[row][column] for row, column in positions(matrix, depth, kind, lane)]
        if kind in ("f16", "bf16"):
            bits = [bits[i] | bits[i + 1] << 16 for i in range(0, len(bits), 2)]
        lanes.append(bits)
    return lanes


def product(a: list, b: list, c: list, kinds: tuple[str, str]) -> list[list[Fraction]]:
    """The exact a b + c of matrices of bit patterns; kinds: of a and b, and of c."""
    def values(matrix, kind):
        shift = 13 if kind == "tf32" else 0
        return [[Fraction(FORMATS[kind].decode(bits >> shift)) for bits in row] for row in matrix]
    left, right, addend = values(a, kinds[0]), values(b, kinds[0]), values(c, kinds[1])
    return [[sum((x * y for x, y in zip(row, column, strict=True)), start)
             for column, start in zip(zip(*right, strict=True), starts, strict=True)]
            for row, starts in zip(left, addend, strict=True)]


def bits_of(value: Fraction, kind: str) -> int:
    """Bit pattern in a register of a number that the format has."""
    form = FORMATS[kind]
    bits = form.encode(value if value else 0.0)
    assert real.is_finite(form.decode(bits))
    return bits << (13 if kind == "tf32" else 0)
