"""mov and cvt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .opcodes_registry import DTYPES, WIDTHS, expand, form, last_type, read, write
from .ptx import Immediate, Sink, Vector

if TYPE_CHECKING:
    from .lower import Code
    from .ptx import Instruction

INTEGERS = "{u8,s8,u16,s16,u32,s32,u64,s64}"
ROUND = {"rni": "np.rint", "rzi": "np.trunc", "rmi": "np.floor", "rpi": "np.ceil"}


@form("mov.{pred,b16,u16,s16,b32,u32,s32,f32,b64,u64,s64,f64}")
def move(code: Code, instruction: Instruction) -> None:
    """Copy, or pack and unpack a vector of equally wide parts."""
    destination, source = instruction.operands
    type_name = last_type(instruction.opcode)
    if isinstance(destination, Vector):
        unpack(code, destination.items, source, type_name)
    elif isinstance(source, Vector):
        pack(code, destination, source.items, type_name)
    else:
        write(code, destination, read(code, source, type_name), type_name)


def unpack(code: Code, parts: tuple, source: object, type_name: str) -> None:
    """Split a value, lowest part first."""
    width = WIDTHS[type_name] // len(parts)
    whole = code.temporary()
    code.line(f"{whole} = {code.value(source, type_name)}")
    for position, part in enumerate(parts):
        if not isinstance(part, Sink):
            amount = code.value(Immediate(position * width, "int"), type_name)
            shifted = f"({whole} >> {amount})" if position else whole
            code.store(part, f"{shifted}.astype({DTYPES[f'b{width}']})", f"b{width}")


def pack(code: Code, destination: object, parts: tuple, type_name: str) -> None:
    """Join parts to a value, lowest part first."""
    width = WIDTHS[type_name] // len(parts)
    dtype = DTYPES[type_name]
    terms = [f"{code.value(part, f'b{width}')}.astype({dtype})" for part in parts]
    amounts = [code.value(Immediate(position * width, "int"), type_name)
               for position in range(len(parts))]
    shifted = [f"({term} << {amount})" if position else term
               for position, (term, amount) in enumerate(zip(terms, amounts, strict=True))]
    code.store(destination, " | ".join(shifted), type_name)


def loses(target: str, source: str) -> bool:
    """Whether an integer type lacks numbers of another one; only then .sat is allowed."""
    grows = WIDTHS[target] > WIDTHS[source]
    return target != source and not (grows and (target[0] == "s" or source[0] == "u"))


@form(f"cvt.{INTEGERS}.{INTEGERS}",
      *(f"cvt.sat.{target}.{source}" for target in expand(INTEGERS) for source in expand(INTEGERS)
        if loses(target, source)))
def convert_integer(code: Code, instruction: Instruction) -> None:
    """Between integers: extension, truncation, or with .sat clamping."""
    *options, target, source_type = instruction.opcode.split(".")
    destination, source = instruction.operands
    value = code.value(source, source_type)
    if "sat" in options:
        expression = f"N.saturate({value}, {DTYPES[target]})"
    else:
        expression = f"{value}.astype({DTYPES[target]})"
    code.store(destination, expression, target)


@form(f"cvt.{{rn,rz,rm,rp}}.{{f16,f32,f64}}.{INTEGERS}")
def convert_to_float(code: Code, instruction: Instruction) -> None:
    """Integer to floating point."""
    _, mode, target, source_type = instruction.opcode.split(".")
    destination, source = instruction.operands
    value = code.value(source, source_type)
    if mode == "rn":
        expression = f"{value}.astype({DTYPES[target]})"
    else:
        expression = f"N.integer_to_float({value}, {DTYPES[target]}, {mode!r})"
    write(code, destination, expression, target)


@form(f"cvt.{{rni,rzi,rmi,rpi}}{{,.ftz}}.{INTEGERS}.f32",
      f"cvt.{{rni,rzi,rmi,rpi}}.{INTEGERS}.{{f16,f64}}")
def convert_to_integer(code: Code, instruction: Instruction) -> None:
    """Floating point to integer: out of range saturates, NaN gives zero."""
    _, mode, *_, target, source_type = instruction.opcode.split(".")
    destination, source = instruction.operands
    value = read(code, source, source_type)
    if ".ftz." in instruction.opcode:
        value = f"N.flush({value})"
    code.store(destination, f"N.float_to_integer({ROUND[mode]}({value}), {DTYPES[target]})", target)


@form("cvt{,.rni,.rzi,.rmi,.rpi}{,.ftz}{,.sat}.f32.f32",
      "cvt{,.rni,.rzi,.rmi,.rpi}{,.sat}.{f64.f64,f16.f16}")
def convert_to_integral(code: Code, instruction: Instruction) -> None:
    """Round to an integral value of the same type."""
    _, *options, type_name, _ = instruction.opcode.split(".")
    destination, source = instruction.operands
    expression = read(code, source, type_name)
    if "ftz" in options:
        expression = f"N.flush({expression})"
    for mode, function in ROUND.items():
        if mode in options:
            expression = f"{function}({expression})"
    if "sat" in options:
        expression = f"N.saturate_unit({expression})"
    write(code, destination, expression, type_name)


@form("cvt{,.ftz}{,.sat}.{f64.f32,f32.f16}", "cvt{,.sat}.f64.f16", "cvt{,.ftz}.f32.bf16")
def widen(code: Code, instruction: Instruction) -> None:
    """To a wider floating-point type: exact; .ftz is about f32 only."""
    _, *options, target, source_type = instruction.opcode.split(".")
    destination, source = instruction.operands
    expression = read(code, source, source_type)
    if source_type == "f32" and "ftz" in options:
        expression = f"N.flush({expression})"
    if source_type == "bf16":
        expression = f"N.widen_bf16({expression})"
    else:
        expression = f"{expression}.astype({DTYPES[target]})"
    if target == "f32" and "ftz" in options:
        expression = f"N.flush({expression})"
    if "sat" in options:
        expression = f"N.saturate_unit({expression})"
    code.store(destination, expression, target)


@form("cvt.{rn,rz,rm,rp}{,.ftz}{,.sat}.f32.f64", "cvt.{rn,rz,rm,rp}{,.ftz}{,.sat}.f16.f32",
      "cvt.{rn,rz,rm,rp}{,.sat}.f16.f64",
      "cvt.{rn,rz}{,.relu}.bf16.f32", "cvt.rna.tf32.f32")
def narrow(code: Code, instruction: Instruction) -> None:
    """To a narrower floating-point type."""
    _, mode, *options, target, source_type = instruction.opcode.split(".")
    destination, source = instruction.operands
    value = read(code, source, source_type)
    if source_type == "f32" and "ftz" in options:
        value = f"N.flush({value})"
    if target == "tf32":
        code.store(destination, f"N.round_tf32({value})", "b32")
        return
    if target == "bf16":
        expression = f"N.narrow_bf16({value}{', truncate=True' if mode == 'rz' else ''})"
    elif mode == "rn":
        expression = f"{value}.astype({DTYPES[target]})"
    else:
        expression = f"N.directed_narrow({value}, {DTYPES[target]}, {mode!r})"
    if target == "f32" and "ftz" in options:
        expression = f"N.flush({expression})"
    if "sat" in options:
        expression = f"N.saturate_unit({expression})"
    if "relu" in options:
        expression = f"N.relu_bf16({expression})"
    write(code, destination, expression, target)


@form("cvt.{rn,rz}{,.relu}.{bf16x2,f16x2}.f32")
def narrow_pair(code: Code, instruction: Instruction) -> None:
    """Two f32 to one register of two halves; the first operand becomes the upper one."""
    _, mode, *options, target, _ = instruction.opcode.split(".")
    destination, upper, lower = instruction.operands
    halves = []
    for source in (upper, lower):
        value = code.value(source, "f32")
        if target == "bf16x2":
            half = f"N.narrow_bf16({value}{', truncate=True' if mode == 'rz' else ''})"
        elif mode == "rn":
            half = f"{value}.astype(f2).view(u2)"
        else:
            half = f"N.directed_narrow({value}, f2, 'rz').view(u2)"
        if "relu" in options:
            half = f"N.relu_{target[:-2]}({half})"
        halves.append(half)
    code.store(destination, f"N.join_halves({halves[0]}, {halves[1]})", "b32")
