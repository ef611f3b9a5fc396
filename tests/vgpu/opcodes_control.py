"""Control flow, barriers, fences and other opcodes without a result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .opcodes_registry import form
from .report import VirtualGPUError

if TYPE_CHECKING:
    from .lower import Code
    from .ptx import Instruction


def structural(code: Code, instruction: Instruction) -> None:
    """Stands for opcodes that the lowering handles itself, as the end of a block or a call."""
    raise VirtualGPUError("not supported", f"{instruction.opcode} in this place")


form("bra{,.uni}", kind="branch")(structural)
form("ret{,.uni}", "exit", kind="exit")(structural)
form("call{,.uni}")(structural)
form("bar.sync", "barrier.sync{,.aligned}", "bar.cta.sync", "barrier.cta.sync{,.aligned}",
     "{bar,bar.cta,barrier,barrier.cta}.red.popc.u32",
     "{bar,bar.cta,barrier,barrier.cta}.red.{and,or}.pred",
     "{barrier,barrier.cta}.red.popc.aligned.u32",
     "{barrier,barrier.cta}.red.{and,or}.aligned.pred", kind="barrier")(structural)


@form("membar.{cta,gl,sys}", "fence{,.acq_rel,.sc}.{cta,gpu,sys}")
def fence(code: Code, instruction: Instruction) -> None:
    """Memory is sequentially consistent here, so a fence only has to be known."""
    code.line(f"S.fence({instruction.opcode.rsplit('.', 1)[-1]!r}, lanes)")


@form("trap", "brkpt")
def trap(code: Code, instruction: Instruction) -> None:
    """Stop the launch with an error."""
    code.line(f"S.trap(lanes, {code.site})")


@form("nanosleep.u32")
def nanosleep(code: Code, instruction: Instruction) -> None:
    """Let other threads run; time does not exist here."""
    code.line(f"S.nanosleep({code.value(instruction.operands[0], 'u32')}, lanes)")


@form("prefetch.{global,local}.{L1,L2}", "prefetch.{L1,L2}", "prefetchu.L1",
      "prefetch.global.L2::{evict_last,evict_normal}", "griddepcontrol.{launch_dependents,wait}")
def hint(code: Code, instruction: Instruction) -> None:
    """A hint changes no value."""
