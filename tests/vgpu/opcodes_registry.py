"""The table of PTX instruction forms: how a form is registered and how its operands are read.

A form is the full dotted opcode ("ld.global.nc.v4.f32"). Families of forms are registered from
brace patterns, so the table is an explicit enumeration: what is not in it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .lower import Code
    from .ptx import Instruction

Emitter = Callable[["Code", "Instruction"], None]

FORMS: dict[str, Emitter] = {}
"""Form -> function(code, instruction) that writes the Python source of one instruction."""

KINDS: dict[str, str] = {}
"""Form -> how it ends a basic block: "plain", "warp", "barrier", "branch" or "exit"."""

MASKS: dict[str, int | None] = {}
"""Warp form -> index of the operand that holds its member mask; None: all 32 lanes take part."""

SPECIALS: dict[str, str] = {
    **{
        f"%{name}.{axis}": "u32" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"
    },
    **dict.fromkeys(("%laneid", "%warpid", "%nwarpid", "%dynamic_smem_size"), "u32"),
    **{f"%lanemask_{relation}": "u32" for relation in ("eq", "lt", "le", "gt", "ge")},
}
"""Special register -> type."""

DTYPES: dict[str, str] = {
    "pred": "bool",
    **{f"{kind}{8 * size}": f"{letter}{size}" for size in (1, 2, 4, 8)
       for kind, letter in (("b", "u"), ("u", "u"), ("s", "i"))},
    "f16": "f2",
    "bf16": "u2",
    "f16x2": "u4",
    "bf16x2": "u4",
    "f32": "f4",
    "f64": "f8",
}
"""PTX type -> name of the NumPy type that generated code computes with."""

WIDTHS: dict[str, int] = {
    type_name: 1 if dtype == "bool" else 8 * int(dtype[1:]) for type_name, dtype in DTYPES.items()
}
"""PTX type -> bits."""


def expand(pattern: str) -> list[str]:
    """Every string of a brace pattern: "add{,.sat}.{s16,s32}" has four. Braces do not nest."""
    before, brace, rest = pattern.partition("{")
    if not brace:
        return [pattern]
    choices, _, after = rest.partition("}")
    tails = expand(after)
    return [before + choice + tail for choice in choices.split(",") for tail in tails]


def form(
    *patterns: str, kind: str = "plain", mask: int | None = None
) -> Callable[[Emitter], Emitter]:
    """Register the decorated emitter for every form of the patterns.

    `kind` is the value for `KINDS`, `mask` (of warp forms) the value for `MASKS`.
    Raises ValueError for a form that is registered twice.
    """

    def register(emitter: Emitter) -> Emitter:
        for pattern in patterns:
            for name in expand(pattern):
                if name in FORMS:
                    raise ValueError(f"{name} is registered twice")
                FORMS[name] = emitter
                KINDS[name] = kind
                if kind == "warp":
                    MASKS[name] = mask
        return emitter

    return register


def bits(type_name: str) -> str:
    """The untyped type of the same width: "s32" -> "b32"."""
    return f"b{WIDTHS[type_name]}"


def last_type(opcode: str) -> str:
    """The type an opcode ends with."""
    return opcode.rsplit(".", 1)[-1]


def read(code: Code, operand: object, type_name: str) -> str:
    """Expression of an operand with the dtype of `DTYPES[type_name]`."""
    if type_name == "f16":
        return f"{code.value(operand, 'b16')}.view(f2)"
    if type_name in ("bf16", "f16x2", "bf16x2"):
        return code.value(operand, bits(type_name))
    return code.value(operand, type_name)


def write(code: Code, operand: object, expression: str, type_name: str) -> None:
    """Bind a destination to an expression whose dtype is that of `DTYPES[type_name]`."""
    if type_name == "f16":
        code.store(operand, f"({expression}).view(u2)", "b16")
    elif type_name in ("bf16", "f16x2", "bf16x2"):
        code.store(operand, expression, bits(type_name))
    else:
        code.store(operand, expression, type_name)


def template(
    expression: str,
    *patterns: str,
    reads: Callable[[str], str] | tuple[str, ...] | str = str,
    writes: Callable[[str], str] | str = str,
) -> None:
    """Register forms whose result is one expression of their operands `{a}`, `{b}`, `{c}`, `{d}`.

    `reads` and `writes` give the PTX type of the operands and of the result: a type name, or a
    function of the type that the form ends with; `reads` may be a tuple, one entry per operand,
    where "" stands for that type. `{dtype}` in the expression is the NumPy type of that type.
    """

    def emit(code: Code, instruction: Instruction) -> None:
        type_name = last_type(instruction.opcode)
        destination, *sources = instruction.operands
        if isinstance(reads, tuple):
            types = [entry or type_name for entry in reads]
        else:
            types = [reads(type_name) if callable(reads) else reads] * len(sources)
        letters = "abcd"[:len(sources)]
        values = {
            letter: read(code, source, source_type)
            for letter, source, source_type in zip(letters, sources, types, strict=True)
        }
        result = expression.format(**values, dtype=DTYPES.get(type_name))
        write(code, destination, result, writes(type_name) if callable(writes) else writes)

    form(*patterns)(emit)


def modifiers(opcode: str) -> list[str]:
    """The dotted parts after the base opcode, with "shared::cta" kept whole."""
    return re.split(r"(?<!:)\.", opcode)[1:]
