"""Floating-point formats and IEEE arithmetic in rational numbers, one value at a time.

A number is a non-zero Fraction or one of the floats 0.0, -0.0, inf, -inf and nan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

Number = Fraction | float
INFINITY, NAN = math.inf, math.nan


@dataclass(frozen=True)
class Format:
    """A binary format: bits in all, and bits of the significand with the hidden one."""

    width: int
    precision: int

    @property
    def fraction_bits(self) -> int:
        return self.precision - 1

    @property
    def infinity(self) -> int:
        exponent_bits = self.width - self.precision
        return ((1 << exponent_bits) - 1) << self.fraction_bits

    @property
    def smallest_exponent(self) -> int:
        """Exponent of the last place of the subnormal numbers."""
        bias = (1 << (self.width - self.precision - 1)) - 1
        return 1 - bias - self.fraction_bits

    @property
    def smallest_normal(self) -> Fraction:
        return power(self.smallest_exponent + self.fraction_bits)

    def decode(self, bits: int) -> Number:
        negative, magnitude = bits >> (self.width - 1), bits & ((1 << (self.width - 1)) - 1)
        if magnitude > self.infinity:
            return NAN
        if magnitude == self.infinity:
            return -INFINITY if negative else INFINITY
        exponent, fraction = magnitude >> self.fraction_bits, magnitude % (1 << self.fraction_bits)
        if exponent:
            fraction += 1 << self.fraction_bits
        value = fraction * power(self.smallest_exponent + max(exponent - 1, 0))
        return (-value if negative else value) if value else (-0.0 if negative else 0.0)

    def encode(self, value: Number, mode: str = "rn") -> int:
        """Bits of the number rounded by `mode`: rn, rna (ties away), rz, rm or rp."""
        sign = 1 << (self.width - 1) if is_negative(value) else 0
        if is_nan(value):
            return self.infinity + (1 << (self.fraction_bits - 1))
        if value == 0:
            return sign
        if is_infinite(value):
            return sign | self.infinity
        magnitude = abs(value)
        unit = self.unit(magnitude)
        whole = round_integer(magnitude / unit, mode, bool(sign))
        place = exponent_of(unit) - self.smallest_exponent
        bits = (place << self.fraction_bits) + whole
        if bits >= self.infinity:
            toward_zero = mode == "rz" or mode == ("rp" if sign else "rm")
            bits = self.infinity - 1 if toward_zero else self.infinity
        return sign | bits

    def round(self, value: Number, mode: str = "rn") -> Number:
        return self.decode(self.encode(value, mode))

    def unit(self, value: Fraction) -> Fraction:
        """One unit in the last place of a number."""
        place = exponent_of(abs(value)) - self.fraction_bits
        return power(max(place, self.smallest_exponent))

    def flush(self, value: Number) -> Number:
        """Subnormal numbers become zeros of the same sign."""
        if is_finite(value) and value != 0 and abs(value) < self.smallest_normal:
            return -0.0 if value < 0 else 0.0
        return value


FORMATS = {"f16": Format(16, 11), "bf16": Format(16, 8), "f32": Format(32, 24),
           "f64": Format(64, 53), "tf32": Format(19, 11)}


def operand(bits: int, kind: str, flush: bool) -> Number:
    value = FORMATS[kind].decode(bits)
    return FORMATS[kind].flush(value) if flush else value


def power(exponent: int) -> Fraction:
    return Fraction(2) ** exponent


def exponent_of(value: Fraction) -> int:
    """Largest e with 2**e <= value."""
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if power(guess) <= value else guess - 1


def is_nan(value: Number) -> bool:
    return isinstance(value, float) and math.isnan(value)


def is_infinite(value: Number) -> bool:
    return isinstance(value, float) and math.isinf(value)


def is_finite(value: Number) -> bool:
    return not (isinstance(value, float) and not math.isfinite(value))


def is_negative(value: Number) -> bool:
    return math.copysign(1, value) < 0 if isinstance(value, float) else value < 0


def round_integer(value: Fraction, mode: str, negative: bool) -> int:
    """Round a magnitude to an integer, as a number of that sign would be."""
    whole = math.floor(value)
    rest = value - whole
    half = Fraction(1, 2)
    up = {
        "rn": rest > half or (rest == half and whole % 2 == 1),
        "rna": rest >= half,
        "rz": False,
        "rm": negative and rest > 0,
        "rp": not negative and rest > 0,
    }[mode]
    return whole + up


def round_integral(value: Number, mode: str) -> Number:
    """Round to an integral number; the sign of a zero result is that of the operand."""
    if not is_finite(value) or value == 0:
        return value
    negative = value < 0
    whole = round_integer(abs(value), mode, negative)
    return signed(Fraction(whole), negative)


def signed(magnitude: Fraction, negative: bool) -> Number:
    if magnitude == 0:
        return -0.0 if negative else 0.0
    return -magnitude if negative else magnitude


def negate(value: Number) -> Number:
    return -value


def add(x: Number, y: Number, mode: str = "rn") -> Number:
    """Exact sum; a zero sum of unlike signs is +0, and -0 when rounding down."""
    if is_nan(x) or is_nan(y):
        return NAN
    if is_infinite(x) or is_infinite(y):
        if is_infinite(x) and is_infinite(y) and x != y:
            return NAN
        return x if is_infinite(x) else y
    total = Fraction(x) + Fraction(y)
    if total != 0:
        return total
    if is_negative(x) and is_negative(y):
        return -0.0
    unlike = is_negative(x) or is_negative(y)
    return -0.0 if unlike and mode == "rm" else 0.0


def multiply(x: Number, y: Number) -> Number:
    """Exact product."""
    if is_nan(x) or is_nan(y):
        return NAN
    negative = is_negative(x) != is_negative(y)
    if is_infinite(x) or is_infinite(y):
        if x == 0 or y == 0:
            return NAN
        return -INFINITY if negative else INFINITY
    return signed(abs(Fraction(x) * Fraction(y)), negative)


def divide(x: Number, y: Number) -> Number:
    """Exact quotient."""
    if is_nan(x) or is_nan(y):
        return NAN
    negative = is_negative(x) != is_negative(y)
    if is_infinite(x) or y == 0:
        if is_infinite(y) or x == 0:
            return NAN
        return -INFINITY if negative else INFINITY
    if is_infinite(y):
        return -0.0 if negative else 0.0
    return signed(abs(Fraction(x) / Fraction(y)), negative)


def square_root(x: Number) -> Number:
    """A square root that rounds like the exact one to at most 64 bits."""
    if is_nan(x) or x == 0:
        return x
    if is_negative(x):
        return NAN
    if is_infinite(x):
        return x
    shift = 2 * (70 - exponent_of(x) // 2)
    scaled = x * power(shift)
    root = math.isqrt(math.floor(scaled))
    inexact = root * root != scaled
    # A last bit below every format's precision stands for the part that is cut off.
    return (2 * root + inexact) * power(-shift // 2 - 1)


def minimum(x: Number, y: Number) -> Number:
    """The smaller one that is not NaN; -0 is less than +0."""
    if is_nan(x) or is_nan(y):
        return y if is_nan(x) else x
    if x == y == 0:
        return x if is_negative(x) else y
    return x if x < y else y


def maximum(x: Number, y: Number) -> Number:
    """The larger one that is not NaN; +0 is greater than -0."""
    return -minimum(-x, -y)


def saturate(x: Number) -> Number:
    """Clamp to [+0, 1]; NaN becomes +0."""
    if is_nan(x) or is_negative(x) or x == 0:
        return 0.0
    return x if is_finite(x) and x < 1 else Fraction(1)
