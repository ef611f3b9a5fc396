"""Arithmetic of generated code where NumPy's differs from the PTX ISA. Stateless but for the
setting of `set_approximation`.

Every function takes arrays or NumPy scalars and returns a scalar when all its operands are scalars.
Generated code runs under `np.errstate(all="ignore")`.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from .lanes import Value, is_scalar
from .numerics_approximate import *  # noqa: F403
from .numerics_double import fma_double, two_sum
from .numerics_integer import *  # noqa: F403
from .numerics_integer import UNSIGNED, where

u2, u4, u8 = np.uint16, np.uint32, np.uint64
f2, f4, f8 = np.float16, np.float32, np.float64

TINY = {np.dtype(kind): np.finfo(kind).smallest_normal for kind in (f2, f4, f8)}

# Below the 24 bits that float32 keeps of a float64 significand, 29 remain.
DROPPED_BITS, MIDPOINT = u8(0x1FFFFFFF), u8(0x10000000)


# Subnormal numbers and the class of a number

def flush(value: Value) -> Value:
    """Replace subnormal numbers by zeros of the same sign (.ftz)."""
    small = np.abs(value) < TINY[value.dtype]
    if not small.any():
        return value
    return where(small, np.copysign(value.dtype.type(0), value), value)


def is_normal(value: Value) -> Value:
    """Neither zero, subnormal, infinite nor NaN."""
    magnitude = np.abs(value)
    return (magnitude >= TINY[value.dtype]) & (magnitude < np.inf)


def is_subnormal(value: Value) -> Value:
    """Not zero, but smaller than the smallest normal number."""
    magnitude = np.abs(value)
    return (magnitude > 0) & (magnitude < TINY[value.dtype])


def saturate_unit(value: Value) -> Value:
    """Clamp to [+0, 1]; NaN becomes +0 (.sat)."""
    zero, one = value.dtype.type(0), value.dtype.type(1)
    return where(value > zero, np.fmin(value, one), zero)


# Minimum and maximum

def minimum(a: Value, b: Value) -> Value:
    """The smaller number; a NaN only if both are, and -0 is less than +0."""
    result = np.fmin(a, b)
    zero = (a == 0) & (b == 0)
    return where(zero, _bitwise(np.bitwise_or, a, b), result) if zero.any() else result


def maximum(a: Value, b: Value) -> Value:
    """The larger number; a NaN only if both are, and -0 is less than +0."""
    result = np.fmax(a, b)
    zero = (a == 0) & (b == 0)
    return where(zero, _bitwise(np.bitwise_and, a, b), result) if zero.any() else result


def minimum_nan(a: Value, b: Value) -> Value:
    """As `minimum`, but a NaN if one operand is."""
    return where(np.isnan(a) | np.isnan(b), a.dtype.type(np.nan), minimum(a, b))


def maximum_nan(a: Value, b: Value) -> Value:
    """As `maximum`, but a NaN if one operand is."""
    return where(np.isnan(a) | np.isnan(b), a.dtype.type(np.nan), maximum(a, b))


def _bitwise(function, a, b):
    word = UNSIGNED[a.dtype.itemsize]
    return function(a.view(word), b.view(word)).view(a.dtype)


# Fused multiply-add

def fma(a: Value, b: Value, c: Value) -> Value:
    """a * b + c of float32 or float64, rounded once.

    The product of two float32 is exact in float64, so only the sum and the last conversion round.
    Rounding twice is wrong only if the sum lies on the midpoint of two float32, or is subnormal,
    which the processor reports as underflow; such sums are rounded to odd first.
    """
    if a.dtype == f8:
        return fma_double(a, b, c)
    total = a.astype(f8)
    total *= b
    total += c
    midpoint = (total.view(u8) & DROPPED_BITS) == MIDPOINT
    if midpoint.any():
        total = _corrected(total, midpoint, a, b, c)
    try:
        with np.errstate(under="raise"):
            return total.astype(f4)
    except FloatingPointError:
        return _corrected(total, np.abs(total) < TINY[a.dtype], a, b, c).astype(f4)


def _corrected(total, doubtful, a, b, c):
    """The sums a * b + c of float32, those of the doubtful lanes rounded to odd."""
    if is_scalar(total):
        return round_to_odd(a.astype(f8) * b, c)
    lanes = np.flatnonzero(doubtful)
    a, b, c = (x if is_scalar(x) else x[lanes] for x in (a, b, c))
    total[lanes] = round_to_odd(a.astype(f8) * b, c)
    return total


def round_to_odd(product: Value, addend: Value) -> Value:
    """product + addend as float64, where an inexact sum gets an odd last bit.

    Rounding that to fewer than 52 bits is then the same as rounding the exact sum.
    """
    total, error = two_sum(product, addend.astype(f8))
    bits = total.view(u8)
    inexact_even = ((error > 0) | (error < 0)) & (bits & u8(1) == 0)
    away = (error > 0) == (total > 0)
    neighbour = where(away, bits + u8(1), bits - u8(1))
    return where(inexact_even, neighbour, bits).view(f8)


# Directed rounding ("rz", "rm", "rp")

def directed(nearest: Value, residual: Value, mode: str) -> Value:
    """Correct a neighbour of the exact result, given the sign of exact - nearest."""
    if mode == "rm":
        return where(residual < 0, np.nextafter(nearest, nearest.dtype.type(-np.inf)), nearest)
    if mode == "rp":
        return where(residual > 0, np.nextafter(nearest, nearest.dtype.type(np.inf)), nearest)
    beyond = where(nearest > 0, residual < 0, residual > 0)
    return where(beyond, np.nextafter(nearest, nearest.dtype.type(0)), nearest)


def directed_narrow(value: Value, dtype: type, mode: str) -> Value:
    """Convert to a narrower floating-point type."""
    nearest = value.astype(dtype)
    return directed(nearest, value.astype(f8) - nearest.astype(f8), mode)


def integer_to_float(value: Value, dtype: type, mode: str) -> Value:
    """Convert an integer to floating point."""
    return _directed_exactly(value.astype(dtype), lambda x: x, (value,), mode)


def directed_add(a: Value, b: Value, mode: str) -> Value:
    """a + b."""
    return directed_fma(a, a.dtype.type(1), b, mode)


def directed_sub(a: Value, b: Value, mode: str) -> Value:
    """a - b."""
    return directed_fma(a, a.dtype.type(1), -b, mode)


def directed_mul(a: Value, b: Value, mode: str) -> Value:
    """a * b."""
    if a.dtype == f8:
        return _directed_exactly(a * b, lambda x, y: x * y, (a, b), mode)
    product = a.astype(f8) * b
    return directed_narrow(product, f4, mode)


def directed_fma(a: Value, b: Value, c: Value, mode: str) -> Value:
    """a * b + c; an exact zero of unlike signs is negative when rounding down."""
    if a.dtype == f8:
        nearest = fma_double(a, b, c)
        residual = _residuals(nearest, lambda x, y, z: x * y + z, (a, b, c))
        result = directed(nearest, residual, mode)
        zero = (nearest == 0) & (residual == 0)
    else:
        total = round_to_odd(a.astype(f8) * b, c)
        result = directed_narrow(total, f4, mode)
        zero = total == 0
    if mode != "rm":
        return result
    negative = np.signbit(a) ^ np.signbit(b) | np.signbit(c)
    return where(zero & negative, result.dtype.type(-0.0), result)


def directed_div(a: Value, b: Value, mode: str) -> Value:
    """a / b."""
    quotient = a / b
    if a.dtype == f8:
        return _directed_exactly(quotient, lambda x, y: x / y, (a, b), mode)
    residual = a.astype(f8) - quotient.astype(f8) * b
    return directed(quotient, where(b < 0, -residual, residual), mode)


def directed_rcp(a: Value, mode: str) -> Value:
    """1 / a."""
    return directed_div(a.dtype.type(1), a, mode)


def directed_sqrt(a: Value, mode: str) -> Value:
    """Square root."""
    root = np.sqrt(a)
    if a.dtype == f8:
        residual = _residuals(root, lambda x, r: x - r * r, (a, root), against=0)
    else:
        residual = a.astype(f8) - root.astype(f8) * root
    return directed(root, residual, mode)


def _directed_exactly(nearest, function, operands: tuple, mode: str):
    return directed(nearest, _residuals(nearest, function, operands), mode)


def _residuals(nearest, function, operands: tuple, against=None):
    """Sign of function(operands) - nearest, in rational numbers; 0 if an operand is not finite."""
    values = np.broadcast_arrays(nearest if against is None else against, nearest, *operands)
    signs = np.zeros(values[0].shape, np.int8)
    finite = np.logical_and.reduce([np.isfinite(value) for value in values[2:]])
    for index in np.argwhere(finite):
        index = tuple(index)
        target, result, *exact = (value[index].item() for value in values)
        try:
            value = function(*map(Fraction, exact))
        except ZeroDivisionError:
            continue
        difference = -result if np.isinf(result) else value - Fraction(target)
        signs[index] = (difference > 0) - (difference < 0)
    return signs if signs.ndim else signs[()]


# Conversions

def float_to_integer(value: Value, dtype: type) -> Value:
    """Convert integral floating-point numbers; saturates, and NaN becomes 0."""
    if value.dtype == f2:
        value = value.astype(f4)
    limits = np.iinfo(dtype)
    inside = (value >= float(limits.min)) & (value < float(limits.max + 1))
    if inside.all():
        return value.astype(dtype)
    result = where(inside, value, value.dtype.type(0)).astype(dtype)
    result = where(value >= float(limits.max + 1), dtype(limits.max), result)
    return where(value < float(limits.min), dtype(limits.min), result)


def widen_bf16(value: Value) -> Value:
    """bf16 (uint16) to float32."""
    return (value.astype(u4) << u4(16)).view(f4)


def narrow_bf16(value: Value, truncate: bool = False) -> Value:
    """float32 to bf16 (uint16), to nearest even or toward zero; NaN becomes 0x7FFF."""
    bits = value.view(u4)
    if not truncate:
        bits = bits + (u4(0x7FFF) + (bits >> u4(16) & u4(1)))
    narrow = (bits >> u4(16)).astype(u2)
    invalid = np.isnan(value)
    return where(invalid, u2(0x7FFF), narrow) if invalid.any() else narrow


def relu_bf16(value: Value) -> Value:
    """bf16 (uint16) with negative numbers replaced by zero."""
    return where(value & u2(0x8000) != 0, u2(0), value)


def relu_f16(value: Value) -> Value:
    """float16 bits (uint16) with negative numbers replaced by zero, NaN by 0x7FFF."""
    result = where(value & u2(0x8000) != 0, u2(0), value)
    return where(np.isnan(value.view(f2)), u2(0x7FFF), result)


def round_tf32(value: Value) -> Value:
    """float32 to tf32 (the upper 19 bits of a uint32): to nearest, ties away from zero."""
    rounded = value.view(u4) + u4(0x1000) & u4(0xFFFFE000)
    return where(np.isnan(value), u4(0x7FFFFFFF), rounded)


# Half precision

def fma_half(a: Value, b: Value, c: Value) -> Value:
    """a * b + c of float16, rounded once: float64 has bits enough for an exact product and sum."""
    return (a.astype(f8) * b.astype(f8) + c.astype(f8)).astype(f2)


def fma_bf16(a: Value, b: Value, c: Value) -> Value:
    """a * b + c of bf16 (uint16), rounded once."""
    total = round_to_odd(widen_bf16(a).astype(f8) * widen_bf16(b), widen_bf16(c))
    nearest = total.astype(f4)
    bits = nearest.view(u4)
    too_large = np.abs(nearest.astype(f8)) > np.abs(total)
    truncated = where(too_large, bits - u4(1), bits)
    odd = truncated | (nearest.astype(f8) != total).astype(u4)
    return narrow_bf16(where(np.isnan(nearest), bits, odd).view(f4))
