"""References of the .approx forms: the value in float64, and the bound that the PTX ISA states."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import reference_float as real
from reference_float import FORMATS, Number, operand
from reference_types import Reference, Within, packed


def ulps(count: int) -> Callable[[str, Number, float], Fraction]:
    """Units in the last place of the correctly rounded result."""
    def bound(kind: str, exact: Number, _: float) -> Fraction:
        return count * FORMATS[kind].unit(Fraction(exact))
    return bound


def relative(bits: float) -> Callable[[str, float, float], Fraction]:
    return lambda kind, exact, _: abs(Fraction(exact)) * Fraction(2.0 ** -bits)


def absolute(bits: float) -> Callable[[str, float, float], Fraction]:
    return lambda kind, exact, _: Fraction(2.0 ** -bits)


def angle(kind: str, exact: float, x: float) -> Fraction:
    return Fraction(2.0 ** (-20.5 if abs(x) <= 2 * math.pi else -14.7))


def logarithm(kind: str, exact: float, x: float) -> Fraction:
    return Fraction(2.0 ** -22) * (1 if 0.5 < x < 2 else abs(Fraction(exact)))


def safe(function: Callable[[float], float]) -> Callable[[float], float]:
    """NaN outside the domain, infinity on overflow."""
    def compute(x: float) -> float:
        try:
            return function(x)
        except ValueError:
            return math.nan
        except OverflowError:
            return math.inf
    return compute


def reciprocal_root(x: float) -> float:
    return math.copysign(math.inf, x) if x == 0 else 1 / math.sqrt(x)


APPROXIMATIONS = {
    "rcp": (lambda x: math.copysign(math.inf, x) if x == 0 else 1 / x, ulps(1)),
    "sqrt": (safe(math.sqrt), relative(23)),
    "rsqrt": (safe(reciprocal_root), relative(22.9)),
    "ex2": (safe(lambda x: 2.0**x), ulps(2)),
    "lg2": (safe(lambda x: -math.inf if x == 0 else math.log2(x)), logarithm),
    "sin": (safe(math.sin), angle),
    "cos": (safe(math.cos), angle),
    "tanh": (math.tanh, relative(11)),
}
HALF_BOUNDS = {("ex2", "f16"): relative(9.9), ("ex2", "bf16"): relative(7),
               ("tanh", "f16"): absolute(10.987), ("tanh", "bf16"): absolute(8)}


def approximate(base: str, options: list[str]) -> Reference:
    kind = options[-1]
    if kind.endswith("x2"):
        return packed(approximate(base, [*options[:-1], kind[:-2]]), kind)
    if base == "div":
        return approximate_quotient(options)
    function, bound = APPROXIMATIONS[base]
    bound = HALF_BOUNDS.get((base, kind), bound)
    if kind == "f64":
        bound = relative(19)  # not documented; the result has 20 bits of fraction
    flush = "ftz" in options

    def compute(bits: int) -> tuple:
        if kind == "f64" and flush:
            bits &= 0xFFFFFFFF00000000
        x = float(operand(bits, kind, flush))
        if base == "lg2" and x == 1:
            return (Within(Fraction(0), logarithm(kind, 0.0, x)),)
        return (settle(function(x), kind, flush, lambda exact: bound(kind, exact, x)),)
    return Reference((kind,), (kind,), compute)


def approximate_quotient(options: list[str]) -> Reference:
    flush, bound = "ftz" in options, ulps(2)

    def compute(a: int, b: int) -> tuple:
        x, y = operand(a, "f32", flush), operand(b, "f32", flush)
        exact = real.divide(x, y)
        if "approx" in options and real.is_finite(y) and abs(y) > real.power(126):
            exact = real.multiply(x, -0.0 if real.is_negative(y) else 0.0)
        return (settle(exact, "f32", flush, lambda exact: bound("f32", exact, 0.0)),)
    return Reference(("f32", "f32"), ("f32",), compute)


def settle(exact: Number, kind: str, flush: bool, bound: Callable) -> int | Within:
    """The bits of a special result, else the exact one with its bound."""
    form = FORMATS[kind]
    if not real.is_finite(exact) or exact == 0:
        return form.encode(exact)
    exact = Fraction(exact)
    if not real.is_finite(form.round(exact)):
        return form.encode(exact)
    error = bound(exact)
    if flush and abs(exact) - error < form.smallest_normal:
        error += abs(exact)  # may be flushed
    return Within(exact, error)
