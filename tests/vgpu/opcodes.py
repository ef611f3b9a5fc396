"""The opcodes of the virtual GPU: the complete table, and the look-up of an instruction's form."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from . import (  # noqa: F401  (imported for the forms they register)
    opcodes_compare,
    opcodes_control,
    opcodes_convert,
    opcodes_float,
    opcodes_half,
    opcodes_integer,
    opcodes_memory,
    opcodes_warp,
)
from .opcodes_registry import FORMS, KINDS, MASKS, SPECIALS, Emitter
from .report import UnknownOpcode

if TYPE_CHECKING:
    from .ptx import Instruction

__all__ = ["FORMS", "KINDS", "MASKS", "SPECIALS", "emitter_of"]


def emitter_of(instruction: Instruction) -> Emitter:
    """The emitter of an instruction; raises UnknownOpcode with the nearest known form."""
    try:
        return FORMS[instruction.opcode]
    except KeyError:
        nearest = difflib.get_close_matches(instruction.opcode, FORMS, n=1, cutoff=0)
        raise UnknownOpcode(
            f"opcode {instruction.opcode} (nearest known form: {nearest[0]})",
            ptx_line=instruction.line, ptx_text=instruction.opcode, source=instruction.source,
        ) from None
