"""Arithmetic of f16, bf16 and their packed pairs (f16x2, bf16x2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .opcodes_registry import form

if TYPE_CHECKING:
    from .lower import Code
    from .ptx import Instruction

# Float16 operations that NumPy rounds correctly through float32, as float32 is wide enough.
HALF = {
    "add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "fma": "N.fma_half({}, {}, {})",
    "min": "N.minimum({}, {})", "max": "N.maximum({}, {})",
    "min.NaN": "N.minimum_nan({}, {})", "max.NaN": "N.maximum_nan({}, {})",
}
BFLOAT = {
    "add": "N.fma_bf16({}, u2(0x3F80), {})", "sub": "N.fma_bf16({1}, u2(0xBF80), {0})",
    "mul": "N.fma_bf16({}, {}, u2(0x8000))", "fma": "N.fma_bf16({}, {}, {})",
}


@form("{add,sub,mul}{,.rn}{,.ftz}{,.sat}.{f16,f16x2}", "fma.rn{,.ftz}{,.sat,.relu}.{f16,f16x2}",
      "{min,max}{,.ftz}{,.NaN}.{f16,f16x2}", "{neg,abs}{,.ftz}.{f16,f16x2}",
      "{ex2,tanh}.approx.{f16,f16x2}",
      "{add,sub,mul}{,.rn}.{bf16,bf16x2}", "fma.rn{,.relu}.{bf16,bf16x2}",
      "{min,max}{,.NaN}.{bf16,bf16x2}", "{neg,abs}.{bf16,bf16x2}",
      "ex2.approx.ftz.{bf16,bf16x2}", "tanh.approx.{bf16,bf16x2}")
def half_arithmetic(code: Code, instruction: Instruction) -> None:
    """One 16-bit operation, or the same on both halves of a register."""
    base, *options, type_name = instruction.opcode.split(".")
    destination, *sources = instruction.operands
    scalar = type_name.removesuffix("x2")
    if scalar == type_name:
        values = [code.value(source, "b16") for source in sources]
        code.store(destination, one_half(base, options, scalar, values), "b16")
        return
    words = [code.temporary() for _ in sources]
    for word, source in zip(words, sources, strict=True):
        code.line(f"{word} = {code.value(source, 'b32')}")
    upper = one_half(base, options, scalar, [f"({word} >> u4(16)).astype(u2)" for word in words])
    lower = one_half(base, options, scalar, [f"{word}.astype(u2)" for word in words])
    code.store(destination, f"N.join_halves({upper}, {lower})", "b32")


def one_half(base: str, options: list[str], type_name: str, values: list[str]) -> str:
    """Expression of uint16 for an operation on uint16 expressions."""
    flush = "ftz" in options
    if base in ("neg", "abs") and not flush:
        return f"{values[0]} {'^ u2(0x8000)' if base == 'neg' else '& u2(0x7FFF)'}"
    name = f"{base}.NaN" if "NaN" in options else base
    if type_name == "bf16":
        return bfloat(base, name, options, values)
    values = [f"N.flush({value}.view(f2))" if flush else f"{value}.view(f2)" for value in values]
    if base in ("ex2", "tanh"):
        result = f"N.{base}_half({values[0]}.astype(f4), {'9.9' if base == 'ex2' else '10.987'})"
        return f"{result}.astype(f2).view(u2)"
    if base in ("neg", "abs"):
        result = f"-{values[0]}" if base == "neg" else f"np.abs({values[0]})"
    else:
        result = HALF[name].format(*values)
    result = f"({result})"
    if flush:
        result = f"N.flush({result})"
    if "sat" in options:
        result = f"N.saturate_unit({result})"
    result = f"{result}.view(u2)"
    return f"N.relu_f16({result})" if "relu" in options else result


def bfloat(base: str, name: str, options: list[str], values: list[str]) -> str:
    """The same for bf16."""
    if base in BFLOAT:
        result = BFLOAT[base].format(*values)
        return f"N.relu_bf16({result})" if "relu" in options else result
    wide = [f"N.widen_bf16({value})" for value in values]
    if base == "ex2":
        return f"N.narrow_bf16(N.flush(N.ex2_half(N.flush({wide[0]}), 7)))"
    if base == "tanh":
        return f"N.narrow_bf16(N.tanh_half({wide[0]}, 8))"
    return f"N.narrow_bf16({HALF[name].format(*wide)})"
