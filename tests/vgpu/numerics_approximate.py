"""The .approx instructions: nominal results, or results as wrong as the PTX ISA allows.

Nominal results are those of float64 arithmetic, rounded once. Under "hostile" every result is
moved by (almost) the documented error bound, up or down by the last bit of the nominal result, but
never past the bound; the special values of the documentation's tables stay.
"""

from __future__ import annotations

import numpy as np

from .lanes import Value
from .numerics_integer import where

u2, u4, u8 = np.uint16, np.uint32, np.uint64
f2, f4, f8 = np.float16, np.float32, np.float64

_hostile = False


def set_approximation(name: str) -> None:
    """Choose "nominal" or "hostile" results; ValueError for another name."""
    global _hostile
    if name not in ("nominal", "hostile"):
        raise ValueError(f"unknown approximation {name!r}")
    _hostile = name == "hostile"


def _settle(exact, error, special=None):
    """float32 result for a float64 value; `error()` is its bound, `special` marks exact lanes."""
    nominal = exact.astype(f4)
    if not _hostile:
        return nominal
    bound = error()
    up = nominal.view(u4) & u4(1) == 0
    shifted = (exact + where(up, bound, -bound)).astype(f4)
    beyond = np.abs(shifted.astype(f8) - exact) > bound
    shifted = where(beyond, np.nextafter(shifted, nominal), shifted)
    kept = ~np.isfinite(nominal) | (exact == 0 if special is None else special)
    return where(kept, nominal, shifted)


def _ulps(exact, count: int):
    return count * np.spacing(np.abs(exact.astype(f4))).astype(f8)


def _relative(exact, bits: float):
    return np.abs(exact) * 2.0**-bits


def rcp_approx(a: Value) -> Value:
    """1 / a within 1 ulp."""
    exact = f8(1) / a
    return _settle(exact, lambda: _ulps(exact, 1))


def sqrt_approx(a: Value) -> Value:
    """Square root within 2**-23, relative."""
    exact = np.sqrt(a.astype(f8))
    return _settle(exact, lambda: _relative(exact, 23))


def rsqrt_approx(a: Value) -> Value:
    """1 / square root within 2**-22.9, relative."""
    exact = f8(1) / np.sqrt(a.astype(f8))
    return _settle(exact, lambda: _relative(exact, 22.9))


def ex2_approx(a: Value) -> Value:
    """2**a within 2 ulp."""
    exact = np.exp2(a.astype(f8))
    return _settle(exact, lambda: _ulps(exact, 2), (a == 0) | (exact == 0))


def lg2_approx(a: Value) -> Value:
    """log2(a) within 2**-22, absolute for a in (0.5, 2) and else relative."""
    exact = np.log2(a.astype(f8))
    near_one = (a > 0.5) & (a < 2)
    return _settle(exact, lambda: where(near_one, f8(2.0**-22), _relative(exact, 22)), np.False_)


def sin_approx(a: Value) -> Value:
    """Sine within 2**-20.5 in [-2 pi, 2 pi], else 2**-14.7, absolute."""
    exact = np.sin(a.astype(f8))
    return _within_one(_settle(exact, lambda: _angle_error(a)))


def cos_approx(a: Value) -> Value:
    """Cosine within 2**-20.5 in [-2 pi, 2 pi], else 2**-14.7, absolute."""
    exact = np.cos(a.astype(f8))
    return _within_one(_settle(exact, lambda: _angle_error(a), a == 0))


def _angle_error(a):
    return where(np.abs(a) <= 2 * np.pi, f8(2.0**-20.5), f8(2.0**-14.7))


def tanh_approx(a: Value) -> Value:
    """Hyperbolic tangent within 2**-11, relative; subnormal numbers pass through."""
    exact = np.tanh(a.astype(f8))
    subnormal = np.abs(a) < np.finfo(f4).smallest_normal
    return _within_one(_settle(exact, lambda: _relative(exact, 11), subnormal | np.isinf(a)))


def _within_one(value):
    return np.maximum(np.minimum(value, f4(1)), f4(-1))


def div_full(a: Value, b: Value) -> Value:
    """a / b within 2 ulp."""
    exact = a.astype(f8) / b
    return _settle(exact, lambda: _ulps(exact, 2))


def div_approx(a: Value, b: Value) -> Value:
    """a / b within 2 ulp, but of |b| > 2**126 zero, or NaN if a is infinite."""
    far = np.abs(b) > f4(2.0**126)
    return where(far, a * np.copysign(f4(0), b), div_full(a, b))


# float64: only the upper word of operand and result counts, and no bound is documented.

def rcp_approx_ftz_f64(a: Value) -> Value:
    """rcp.approx.ftz.f64."""
    return _upper_word(f8(1) / _upper_word(a))


def rsqrt_approx_ftz_f64(a: Value) -> Value:
    """rsqrt.approx.ftz.f64."""
    return _upper_word(f8(1) / np.sqrt(_upper_word(a)))


def rsqrt_approx_f64(a: Value) -> Value:
    """rsqrt.approx.f64."""
    return f8(1) / np.sqrt(a)


def _upper_word(value):
    """The upper word of a float64; subnormal numbers become zeros, NaN the canonical one."""
    upper = (value.view(u8) & u8(0xFFFFFFFF00000000)).view(f8)
    upper = where(np.abs(upper) < np.finfo(f8).smallest_normal, np.copysign(f8(0), upper), upper)
    return where(np.isnan(value), u8(0x7FFFFFFF00000000).view(f8), upper)


# Half precision: float32 values, whose error is bounded in terms of the narrower format.

def ex2_half(a: Value, bits: float) -> Value:
    """2**a of float32 values, relative error 2**-bits before narrowing."""
    exact = np.exp2(a.astype(f8))
    return _settle(exact, lambda: _relative(exact, bits), a == 0)


def tanh_half(a: Value, bits: float) -> Value:
    """tanh(a) of float32 values, absolute error 2**-bits before narrowing."""
    exact = np.tanh(a.astype(f8))
    return _within_one(_settle(exact, lambda: f8(2.0**-bits)))
