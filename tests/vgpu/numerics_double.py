"""Exact float64 sums, products and fused multiply-add, from float64 operations."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from .lanes import Value
from .numerics_integer import where

f8, u8 = np.float64, np.uint64

# Within these magnitudes no intermediate of the error-free product overflows or loses bits.
SMALLEST_FACTOR, LARGEST_FACTOR, LARGEST_ADDEND = 2.0**-480, 2.0**480, 2.0**1000


def two_sum(a: Value, b: Value) -> tuple[Value, Value]:
    """The rounded sum and its exact error (Knuth)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def two_product(a: Value, b: Value) -> tuple[Value, Value]:
    """The rounded product and its exact error (Dekker)."""
    product = a * b
    a_high, a_low = _split(a)
    b_high, b_low = _split(b)
    error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    return product, error


def _split(value):
    """Two halves of a significand, each of which has exact products (Veltkamp)."""
    scaled = value * f8(2**27 + 1)
    high = scaled - (scaled - value)
    return high, value - high


def fma_double(a: Value, b: Value, c: Value) -> Value:
    """a * b + c of float64, rounded once (Boldo and Melquiond, "Emulation of FMA", 2008)."""
    product, product_error = two_product(a, b)
    high, low = two_sum(c, product_error)
    total, error = two_sum(product, high)
    result = total + _sum_to_odd(low, error)

    magnitude_a, magnitude_b = np.abs(a), np.abs(b)
    safe = ((magnitude_a > SMALLEST_FACTOR) & (magnitude_a < LARGEST_FACTOR)
            & (magnitude_b > SMALLEST_FACTOR) & (magnitude_b < LARGEST_FACTOR)
            & (np.abs(c) < LARGEST_ADDEND))
    if safe.all():
        return result
    finite = np.isfinite(a) & np.isfinite(b)
    plain = (a == 0) | (b == 0) | ~(finite & np.isfinite(c))
    # A finite product may overflow, which must not meet an infinite addend.
    result = np.where(plain, np.where(finite & ~np.isfinite(c), c, a * b + c), result)
    operands = np.broadcast_arrays(a, b, c)
    for index in np.argwhere(~(safe | plain)):
        index = tuple(index)
        result[index] = _fma_exact(*(float(operand[index]) for operand in operands))
    return result if result.ndim else result[()]


def _sum_to_odd(a, b):
    """a + b, where an inexact sum gets an odd last bit."""
    total, error = two_sum(a, b)
    bits = total.view(u8)
    inexact_even = (error != 0) & (bits & u8(1) == 0)
    neighbour = where((error > 0) == (total > 0), bits + u8(1), bits - u8(1))
    return where(inexact_even, neighbour, bits).view(f8)


def _fma_exact(a: float, b: float, c: float) -> float:
    """a * b + c of finite numbers in rational arithmetic."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c
    try:
        return exact.numerator / exact.denominator
    except OverflowError:
        return float("inf") if exact > 0 else float("-inf")
