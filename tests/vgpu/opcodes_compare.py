"""Comparison and selection opcodes: setp, set, selp, slct, testp."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .opcodes_registry import DTYPES, form, last_type, read, template
from .ptx import Pair

if TYPE_CHECKING:
    from .lower import Code
    from .ptx import Instruction

# Ordered floating-point comparisons are false for NaN, unordered ones true.
COMPARISONS = {
    **{name: f"({{a}} {sign} {{b}})" for names, sign in (
        ("eq", "=="), ("lt lo", "<"), ("le ls", "<="), ("gt hi", ">"), ("ge hs", ">="),
        ("ne neu", "!=")) for name in names.split()},
    **{name: f"~({{a}} {sign} {{b}})" for name, sign in (
        ("ltu", ">="), ("leu", ">"), ("gtu", "<="), ("geu", "<"))},
    "equ": "~(({a} < {b}) | ({a} > {b}))",
    "num": "(({a} == {a}) & ({b} == {b}))",
    "nan": "(({a} != {a}) | ({b} != {b}))",
}
ORDERED_NOT_EQUAL = "(({a} < {b}) | ({a} > {b}))"
COMBINERS = {"and": "&", "or": "|", "xor": "^"}

SIGNED = "{eq,ne,lt,le,gt,ge}"
UNSIGNED = "{eq,ne,lt,le,gt,ge,lo,ls,hi,hs}"
FLOATING = "{eq,ne,lt,le,gt,ge,equ,neu,ltu,leu,gtu,geu,num,nan}"


def compare(code: Code, opcode: str, left: object, right: object) -> str:
    """The comparison that a setp or set opcode names, as a boolean expression."""
    _, name, *options, type_name = opcode.split(".")
    values = {}
    for letter, source in (("a", left), ("b", right)):
        value = read(code, source, type_name)
        if type_name == "bf16":
            value = f"N.widen_bf16({value})"
        if "ftz" in options:
            value = f"N.flush({value})"
        if not value.isidentifier():
            variable = code.temporary()
            code.line(f"{variable} = {value}")
            value = variable
        values[letter] = value
    if name == "ne" and type_name in ("f16", "bf16", "f32", "f64"):
        return ORDERED_NOT_EQUAL.format(**values)
    return COMPARISONS[name].format(**values)


@form(f"setp.{SIGNED}.{{s16,s32,s64}}", f"setp.{UNSIGNED}.{{u16,u32,u64}}",
      "setp.{eq,ne}.{b16,b32,b64}", f"setp.{FLOATING}.{{f16,bf16,f32,f64}}",
      f"setp.{FLOATING}.ftz.{{f16,f32}}",
      f"setp.{SIGNED}.{{and,or,xor}}.{{s16,s32,s64,u16,u32,u64}}",
      "setp.{eq,ne}.{and,or,xor}.{b16,b32,b64}",
      f"setp.{FLOATING}.{{and,or,xor}}.{{f32,f64}}", f"setp.{FLOATING}.{{and,or,xor}}.ftz.f32")
def set_predicate(code: Code, instruction: Instruction) -> None:
    """p = (a ? b) op c, and of a pair p|q also q = !(a ? b) op c; op and c are optional."""
    destination, left, right, *third = instruction.operands
    result = compare(code, instruction.opcode, left, right)
    combine = ""
    if third:
        combine = f" {COMBINERS[instruction.opcode.split('.')[2]]} {code.value(third[0], 'pred')}"
    if isinstance(destination, Pair):
        name = code.temporary()
        code.line(f"{name} = {result}")
        code.store(destination.first, name + combine, "pred")
        code.store(destination.second, f"~{name}{combine}", "pred")
    else:
        code.store(destination, result + combine, "pred")


@form(f"set.{SIGNED}.{{u32,s32,f32}}.{{s32,u32,s64,u64,f32,f64}}",
      f"set.{SIGNED}.ftz.{{u32,s32,f32}}.f32")
def set_value(code: Code, instruction: Instruction) -> None:
    """All ones (of integer results) or 1.0 where the comparison holds, else zero."""
    destination, left, right = instruction.operands
    result = f"({compare(code, instruction.opcode, left, right)})"
    type_name = instruction.opcode.split(".")[-2]
    sign = "" if type_name == "f32" else "-"
    code.store(destination, f"{sign}{result}.astype({DTYPES[type_name]})", type_name)


template("where({c}, {a}, {b})", "selp.{u16,s16,u32,s32,u64,s64,b16,b32,b64,f32,f64}",
         reads=("", "", "pred"))


@form("slct.{u16,s16,u32,s32,u64,s64,b16,b32,b64,f32,f64}.{s32,f32}",
      "slct.ftz.{u16,s16,u32,s32,u64,s64,b16,b32,b64,f32,f64}.f32")
def select_by_sign(code: Code, instruction: Instruction) -> None:
    """a where c >= 0 (of a float c: also -0, but not NaN), else b."""
    *_, type_name, sign_type = instruction.opcode.split(".")
    destination, a, b, c = instruction.operands
    sign = code.value(c, sign_type)
    if ".ftz." in instruction.opcode:
        sign = f"N.flush({sign})"
    code.store(destination, f"where({sign} >= 0, {code.value(a, type_name)}, "
               f"{code.value(b, type_name)})", type_name)


@form("testp.{finite,infinite,number,notanumber,normal,subnormal}.{f32,f64}")
def test_property(code: Code, instruction: Instruction) -> None:
    """Class of a floating-point number."""
    destination, source = instruction.operands
    name = instruction.opcode.split(".")[1]
    expression = {
        "finite": "np.isfinite({})", "infinite": "np.isinf({})", "number": "~np.isnan({})",
        "notanumber": "np.isnan({})", "normal": "N.is_normal({})",
        "subnormal": "N.is_subnormal({})",
    }[name].format(code.value(source, last_type(instruction.opcode)))
    code.store(destination, expression, "pred")
