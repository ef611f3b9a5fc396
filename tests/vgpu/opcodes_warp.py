"""Opcodes in which the threads of a warp work together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .opcodes_registry import form, last_type
from .ptx import Pair, Sink

if TYPE_CHECKING:
    from .lower import Code
    from .ptx import Instruction


def both(operand: object) -> tuple[object, object]:
    """The two destinations of d|p; the second is a sink when it is not written."""
    return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, Sink())


@form("shfl.sync.{up,down,bfly,idx}.b32", kind="warp", mask=4)
def shuffle(code: Code, instruction: Instruction) -> None:
    """Read a register of another lane."""
    destination, *sources = instruction.operands
    value, lane, clamp, mask = (code.value(source, "b32") for source in sources)
    result, valid = code.temporary(), code.temporary()
    mode = instruction.opcode.split(".")[2]
    code.line(f"{result}, {valid} = S.shuffle({mode!r}, {value}, {lane}, {clamp}, {mask}, lanes, "
              f"{code.site})")
    first, second = both(destination)
    code.store(first, result, "b32")
    code.store(second, valid, "pred")


@form("vote.sync.{all,any,uni}.pred", "vote.sync.ballot.b32", kind="warp", mask=2)
def vote(code: Code, instruction: Instruction) -> None:
    """Combine a predicate over the lanes of a mask."""
    destination, predicate, mask = instruction.operands
    mode = instruction.opcode.split(".")[2]
    code.store(destination, f"S.vote({mode!r}, {code.value(predicate, 'pred')}, "
               f"{code.value(mask, 'b32')}, lanes, {code.site})", last_type(instruction.opcode))


@form("match.any.sync.{b32,b64}", "match.all.sync.{b32,b64}", kind="warp", mask=2)
def match(code: Code, instruction: Instruction) -> None:
    """The lanes that hold the same value."""
    destination, source, mask = instruction.operands
    mode, type_name = instruction.opcode.split(".")[1::2]
    call = (f"S.match_{mode}({code.value(source, type_name)}, {code.value(mask, 'b32')}, lanes, "
            f"{code.site})")
    if mode == "any":
        code.store(destination, call, "b32")
        return
    result, same = code.temporary(), code.temporary()
    code.line(f"{result}, {same} = {call}")
    first, second = both(destination)
    code.store(first, result, "b32")
    code.store(second, same, "pred")


@form("activemask.b32")
def active_mask(code: Code, instruction: Instruction) -> None:
    """The lanes of the warp that execute this instruction together."""
    code.store(instruction.operands[0], "S.activemask(lanes)", "b32")


@form("redux.sync.{add,min,max}.{u32,s32}", "redux.sync.{and,or,xor}.b32", kind="warp", mask=2)
def reduce_warp(code: Code, instruction: Instruction) -> None:
    """Reduction of one integer over the lanes of a mask."""
    destination, source, mask = instruction.operands
    operation, type_name = instruction.opcode.split(".")[2:]
    code.store(destination, f"S.reduce({operation!r}, {code.value(source, type_name)}, "
               f"{code.value(mask, 'b32')}, lanes, {code.site})", type_name)


@form("bar.warp.sync", kind="warp", mask=0)
def warp_barrier(code: Code, instruction: Instruction) -> None:
    """Wait for the lanes of a mask."""
    (mask,) = instruction.operands
    code.line(f"S.warp_barrier({code.value(mask, 'b32')}, lanes, {code.site})")


@form("mma.sync.aligned.m16n8k16.row.col.f32.{bf16.bf16,f16.f16}.f32",
      "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16",
      "mma.sync.aligned.m16n8k8.row.col.f32.{bf16.bf16,f16.f16,tf32.tf32}.f32",
      "mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16",
      "mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32", kind="warp")
def matrix_multiply(code: Code, instruction: Instruction) -> None:
    """d = a b + c of matrices whose elements are spread over the registers of a warp."""
    parts = instruction.opcode.split(".")
    kind = ".".join((parts[3], *parts[6:]))
    accumulator = "f32" if parts[6] == "f32" else "b32"
    destination, a, b, c = instruction.operands
    arguments = [
        "(" + "".join(f"{code.value(item, type_name)}, " for item in vector.items) + ")"
        for vector, type_name in ((a, "b32"), (b, "b32"), (c, accumulator))]
    names = [code.temporary() for _ in destination.items]
    code.line(f"{', '.join(names)}, = S.mma({kind!r}, {', '.join(arguments)}, lanes, {code.site})")
    for item, name in zip(destination.items, names, strict=True):
        code.store(item, name, accumulator)


@form("ldmatrix.sync.aligned.m8n8.{x1,x2,x4}{,.trans}.{shared,shared::cta}.b16", kind="warp")
def load_matrix(code: Code, instruction: Instruction) -> None:
    """One, two or four 8x8 matrices of 16-bit elements from shared memory."""
    destination, address = instruction.operands
    names = [code.temporary() for _ in destination.items]
    code.line(f"{', '.join(names)}, = S.ldmatrix({len(names)}, {'.trans' in instruction.opcode}, "
              f"{code.address(address)}, lanes, {code.site})")
    for item, name in zip(destination.items, names, strict=True):
        code.store(item, name, "b32")
