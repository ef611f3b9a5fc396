"""Arithmetic of f32 and f64: rounding modes, flushed subnormals, saturation, approximations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .opcodes_registry import form, template

if TYPE_CHECKING:
    from .lower import Code
    from .ptx import Instruction

NEAREST = {"add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "div": "{} / {}",
           "rcp": "{one} / {}", "sqrt": "np.sqrt({})", "fma": "N.fma({}, {}, {})"}
MODES = ("rz", "rm", "rp")


@form("{add,sub,mul}{,.rn,.rz,.rm,.rp}{,.ftz}{,.sat}.f32", "{add,sub,mul}{,.rn,.rz,.rm,.rp}.f64",
      "fma.{rn,rz,rm,rp}{,.ftz}{,.sat}.f32", "fma.{rn,rz,rm,rp}.f64",
      "mad.{rn,rz,rm,rp}{,.ftz}{,.sat}.f32", "mad.{rn,rz,rm,rp}.f64",
      "{div,rcp,sqrt}.{rn,rz,rm,rp}{,.ftz}.f32", "{div,rcp,sqrt}.{rn,rz,rm,rp}.f64")
def arithmetic(code: Code, instruction: Instruction) -> None:
    """IEEE arithmetic; the default rounding mode is to nearest even."""
    base, *options = instruction.opcode.split(".")
    type_name = options[-1]
    flush = "ftz" in options
    destination, *sources = instruction.operands
    values = [code.value(source, type_name) for source in sources]
    if flush:
        values = [f"N.flush({value})" for value in values]
    base = "fma" if base == "mad" else base
    mode = next((mode for mode in MODES if mode in options), None)
    if mode:
        expression = f"N.directed_{base}({', '.join(values)}, {mode!r})"
    else:
        one = {"f32": "f4(1)", "f64": "f8(1)"}[type_name]
        expression = NEAREST[base].format(*values, one=one)
    if flush:
        expression = f"N.flush({expression})"
    if "sat" in options:
        expression = f"N.saturate_unit({expression})"
    code.store(destination, expression, type_name)


@form("{div.approx,div.full}{,.ftz}.f32",
      "{rcp,sqrt,rsqrt,sin,cos,lg2,ex2}.approx{,.ftz}.f32", "tanh.approx.f32",
      "{rcp,rsqrt}.approx.ftz.f64", "rsqrt.approx.f64")
def approximate(code: Code, instruction: Instruction) -> None:
    """Fast approximations; numerics.py says how far off each may be."""
    base, variant, *options, type_name = instruction.opcode.split(".")
    destination, *sources = instruction.operands
    values = [code.value(source, type_name) for source in sources]
    name = f"{base}_{variant}"
    if type_name == "f64":
        name += "_ftz_f64" if options else "_f64"
    if "ftz" in options and type_name == "f32":
        values = [f"N.flush({value})" for value in values]
        expression = f"N.flush(N.{name}({', '.join(values)}))"
    else:
        expression = f"N.{name}({', '.join(values)})"
    code.store(destination, expression, type_name)


template("-{a}", "neg.{f32,f64}")
template("-N.flush({a})", "neg.ftz.f32")
template("np.abs({a})", "abs.{f32,f64}")
template("np.abs(N.flush({a}))", "abs.ftz.f32")
template("N.minimum({a}, {b})", "min.{f32,f64}")
template("N.maximum({a}, {b})", "max.{f32,f64}")
template("N.minimum(N.flush({a}), N.flush({b}))", "min.ftz.f32")
template("N.maximum(N.flush({a}), N.flush({b}))", "max.ftz.f32")
template("N.minimum_nan({a}, {b})", "min.NaN.f32")
template("N.maximum_nan({a}, {b})", "max.NaN.f32")
template("N.minimum_nan(N.flush({a}), N.flush({b}))", "min.ftz.NaN.f32")
template("N.maximum_nan(N.flush({a}), N.flush({b}))", "max.ftz.NaN.f32")
# copysign takes the sign of its first operand.
template("np.copysign({b}, {a})", "copysign.{f32,f64}")
