"""What a reference says of an opcode form, and the types of its operands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from reference_float import FORMATS
from reference_integer import width_of


@dataclass(frozen=True)
class Within:
    """A result that may be off: a number and how far from it."""

    exact: Fraction
    bound: Fraction


@dataclass(frozen=True)
class Reference:
    """sources, results: types ("count" is a u32 that tests choose small); compute: bits of the
    sources -> tuple of the bits, or Within, of the results."""

    sources: tuple[str, ...]
    results: tuple[str, ...]
    compute: Callable[..., tuple]


def width(kind: str) -> int:
    """Bits of any type."""
    if kind == "pred":
        return 1
    if kind == "count":
        return 32
    if kind.endswith("x2"):
        return 32
    return FORMATS[kind].width if kind in FORMATS else width_of(kind)


def packed(scalar: Reference, kind: str) -> Reference:
    """The same on both halves."""
    def compute(*bits: int) -> tuple:
        (upper,) = scalar.compute(*(value >> 16 for value in bits))
        (lower,) = scalar.compute(*(value & 0xFFFF for value in bits))
        if isinstance(upper, Within) or isinstance(lower, Within):
            return ((upper, lower),)
        return (upper << 16 | lower,)
    return Reference((kind,) * len(scalar.sources), (kind,), compute)
