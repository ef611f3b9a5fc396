"""Loads, stores, address conversion, atomics and asynchronous copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .memory import GLOBAL_BASE, LOCAL_WINDOW, SHARED_WINDOW, WINDOW_SHIFT
from .opcodes_registry import DTYPES, form, last_type, modifiers
from .ptx import Immediate, Vector

if TYPE_CHECKING:
    from .lower import Code
    from .ptx import Instruction

WINDOWS = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}
SPACES = ("global", "shared", "local", "const", "param")

# What compilers emit has every type; what only inline assembly has, the common ones.
NARROW = "{b8,u8,s8,b16,u16,s16,b32,u32,s32,f32}"
WIDE = "{b64,u64,s64,f64}"
TYPED = (f".{NARROW}", f".{WIDE}", f".v2.{NARROW}", f".v2.{WIDE}", f".v4.{NARROW}")
COMMON = ("{,.v2,.v4}.{b32,u32,f32}", "{,.v2}.{b64,u64}")
WORDS = ".{b32,u32,b64,u64}"
READABLE = "{,.global,.local,.shared,.shared::cta,.const}"
WRITABLE = "{,.global,.local,.shared,.shared::cta}"
COHERENT = "{,.global,.shared}"
SCOPES = "{cta,gpu,sys}"
PREFETCH = "{,.L2::64B,.L2::128B,.L2::256B}"
HINTS = "{.L1::no_allocate,.L1::evict_first,.L1::evict_last,.L2::128B,.L1::no_allocate.L2::128B}"


def space_of(opcode: str) -> str:
    """The state space that an opcode names, "generic" if none."""
    parts = [part.partition("::")[0] for part in modifiers(opcode)]
    return next((part for part in parts if part in SPACES), "generic")


def items(operand: object) -> tuple:
    """The scalar operands of a vector, or the operand itself."""
    return operand.items if isinstance(operand, Vector) else (operand,)


@form(*(f"ld.param{types}" for types in TYPED))
def load_parameter(code: Code, instruction: Instruction) -> None:
    """Kernel parameters are uniform: NumPy scalars."""
    destination, address = instruction.operands
    type_name = last_type(instruction.opcode)
    offset, dtype = code.parameter_offset(address), DTYPES[type_name]
    for position, item in enumerate(items(destination)):
        place = offset + position * int(dtype[1:])
        code.store(item, f"S.parameter({place}, {dtype})", type_name)


@form(*(f"ld{READABLE}{types}" for types in TYPED),
      *(f"ld.global.nc{types}" for types in TYPED),
      *(f"ld.global{{.ca,.cg,.cs,.lu,.cv}}{types}" for types in COMMON),
      *(f"ld.global.nc{HINTS}{types}" for types in COMMON),
      f"ld.volatile{{,.global,.shared}}.{NARROW}",
      f"ld.volatile{{,.global,.shared}}.{WIDE}",
      f"ld.{{relaxed,acquire}}.{SCOPES}{COHERENT}{WORDS}")
def load(code: Code, instruction: Instruction) -> None:
    """One value or a vector from memory."""
    destination, address = instruction.operands
    type_name = last_type(instruction.opcode)
    space = space_of(instruction.opcode)
    if "nc" in modifiers(instruction.opcode):
        space = "global_nc"
    elif space == "const":
        space = "global"  # where the loader puts constant variables
    targets = items(destination)
    names = [code.temporary() for _ in targets]
    code.line(f"{', '.join(names)}, = S.load_{space}({code.address(address)}, "
              f"{DTYPES[type_name]}, {len(targets)}, lanes, {code.site})")
    for target, name in zip(targets, names, strict=True):
        code.store(target, name, type_name)


@form(*(f"st{WRITABLE}{types}" for types in TYPED),
      *(f"st.global{{.wb,.cg,.cs,.wt}}{types}" for types in COMMON),
      f"st.volatile{{,.global,.shared}}.{NARROW}",
      f"st.volatile{{,.global,.shared}}.{WIDE}",
      f"st.{{relaxed,release}}.{SCOPES}{COHERENT}{WORDS}")
def store(code: Code, instruction: Instruction) -> None:
    """One value or a vector to memory."""
    address, source = instruction.operands
    type_name = last_type(instruction.opcode)
    values = "".join(f"{code.value(item, type_name)}, " for item in items(source))
    code.line(f"S.store_{space_of(instruction.opcode)}({code.address(address)}, ({values}), "
              f"{DTYPES[type_name]}, lanes, {code.site})")


@form("cvta{,.to}.{global,local,const,shared,shared::cta}.u64")
def convert_address(code: Code, instruction: Instruction) -> None:
    """Between a state space and the generic address space; only windows have an offset."""
    destination, source = instruction.operands
    value = code.value(source, "u64")
    window = WINDOWS.get(space_of(instruction.opcode))
    if window:
        sign = "-" if ".to." in instruction.opcode else "+"
        value = f"{value} {sign} {code.value(Immediate(window, 'int'), 'u64')}"
    code.store(destination, value, "u64")


@form("isspacep.{global,local,shared,shared::cta}")
def is_in_space(code: Code, instruction: Instruction) -> None:
    """Whether a generic address lies in a state space's window."""
    destination, source = instruction.operands
    window = WINDOWS.get(space_of(instruction.opcode), GLOBAL_BASE) >> WINDOW_SHIFT
    address = code.value(source, "b64")
    code.store(destination, f"({address} >> u8({WINDOW_SHIFT})) == u8({window})", "pred")


REDUCTIONS = ("add.{u32,s32,u64,f32,f64}", "{min,max}.{u32,s32,u64,s64}", "{inc,dec}.u32",
              "{and,or,xor}.{b32,b64}")
SWAPS = ("exch.{b32,b64}", "cas.{b16,b32,b64}")
ORDERS = "{.relaxed.cta,.relaxed.gpu,.relaxed.sys}"
STRONGER = "{.acquire.gpu,.release.gpu,.acq_rel.cta,.acq_rel.gpu,.acq_rel.sys}"
ORDERED = ("add.{u32,u64,f32}", "exch.{b32,b64}", "cas.{b32,b64}")


@form(*(f"atom{COHERENT}.{operation}" for operation in (*REDUCTIONS, *SWAPS)),
      *(f"atom{ORDERS}{COHERENT}.{operation}" for operation in (*REDUCTIONS, *SWAPS)),
      *(f"atom{STRONGER}{COHERENT}.{operation}" for operation in ORDERED),
      *(f"red{COHERENT}.{operation}" for operation in REDUCTIONS),
      *(f"red{{.relaxed.gpu,.relaxed.sys}}{COHERENT}.{operation}" for operation in REDUCTIONS))
def atomic(code: Code, instruction: Instruction) -> None:
    """Read-modify-write of memory; red drops the old value."""
    base, *_, operation, type_name = instruction.opcode.split(".")
    operands = list(instruction.operands)
    destination = operands.pop(0) if base == "atom" else None
    address, *sources = operands
    values = "".join(f"{code.value(source, type_name)}, " for source in sources)
    call = (f"S.atomic({space_of(instruction.opcode)!r}, {operation!r}, {code.address(address)}, "
            f"{DTYPES[type_name]}, ({values}), lanes, {code.site})")
    if destination is None:
        code.line(call)
    else:
        code.store(destination, call, type_name)


@form(f"cp.async.{{ca,cg}}.{{shared,shared::cta}}.global{PREFETCH}")
def copy_async(code: Code, instruction: Instruction) -> None:
    """Copy of 4, 8 or 16 bytes whose result is there after a wait; the rest is zero-filled."""
    destination, source, size, *source_size = instruction.operands
    filled = code.value(source_size[0], "u32") if source_size else "None"
    code.line(f"S.cp_async({code.address(destination)}, {code.address(source)}, {size.value}, "
              f"{filled}, lanes, {code.site})")


@form("cp.async.commit_group")
def copy_commit(code: Code, instruction: Instruction) -> None:
    """Close the thread's group of asynchronous copies."""
    code.line("S.cp_async_commit(lanes)")


@form("cp.async.wait_group", "cp.async.wait_all")
def copy_wait(code: Code, instruction: Instruction) -> None:
    """Wait until at most n groups are pending, or for all copies."""
    pending = instruction.operands[0].value if instruction.operands else None
    code.line(f"S.cp_async_wait({pending}, lanes, {code.site})")
