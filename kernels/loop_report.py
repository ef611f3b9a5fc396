"""What is in the hottest loop of a compiled kernel, by the disassembler.

A loop is what lies between a branch and the earlier instruction that it goes to. The hottest one
is the innermost with the most tensor-core products (HMMA); in a kernel without them the one with
the most multiply-adds (FFMA); else the longest. Counts are those of the instructions that stand in
it: a branch inside that is taken rarely counts as much as one that is taken always.
"""

import functools
import importlib.metadata
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from .common.gpus import WAVEFRONT

PACKAGE = "nvidia-cuda-nvdisasm"
_LABEL = re.compile(r"(\.L_\w+):")
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)")
_TARGET = re.compile(r"\.L_\w+")
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}  # bytes of a lane, else 4


@dataclass(frozen=True)
class Loop:
    """Instructions of a warp in one turn, and what they move.

    wavefronts: cycles of shared memory, if no banks conflict and no lanes want the same words.
    loaded: bytes from global memory.
    """

    instructions: int = 0
    hmma: int = 0
    ldsm: int = 0
    ldgsts: int = 0
    lds: int = 0
    sts: int = 0
    mufu: int = 0
    ffma: int = 0
    bar: int = 0
    wavefronts: int = 0
    loaded: int = 0


@functools.cache
def disassembler() -> str:
    """The path of nvdisasm; empty where it is not installed."""
    try:
        files = importlib.metadata.files(PACKAGE) or ()
    except importlib.metadata.PackageNotFoundError:
        files = ()
    packaged = [str(file.locate()) for file in files if file.stem == "nvdisasm"]
    return packaged[0] if packaged else shutil.which("nvdisasm") or ""


def hottest_loop(cubin: bytes) -> Loop:
    """The counts for a cubin with one kernel; all 0 without a loop, or without nvdisasm."""
    if not disassembler():
        return Loop()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        text = subprocess.run([disassembler(), "-c", "-ndf", path], capture_output=True, text=True,
                              check=True).stdout
    return hottest_loop_of(text)


def hottest_loop_of(text: str) -> Loop:
    """The same for what nvdisasm has printed."""
    labels, instructions = {}, []
    for line in text.splitlines():
        if found := _LABEL.match(line):
            labels[found[1]] = len(instructions)
        elif found := _INSTRUCTION.match(line):
            never, opcode, operands = (found[1] or "").strip() == "@!PT", found[2], found[3]
            instructions.append(("NOP" if never else opcode, operands))
    loops = []
    for end, (opcode, operands) in enumerate(instructions):
        target = _TARGET.search(operands) if opcode.startswith("BRA") else None
        if target and labels[target[0]] < end:
            loops.append((labels[target[0]], end + 1))
    names = [opcode.split(".")[0] for opcode, _ in instructions]
    for kind in ("HMMA", "FFMA"):
        working = [(names[start:end].count(kind), start, end) for start, end in loops
                   if kind in names[start:end]]
        innermost = [(count, start, end) for count, start, end in working
                     if not any((start, end) != (a, b) and start <= a and b <= end
                                for _, a, b in working)]
        if innermost:
            _, start, end = max(innermost)
            return _counted([opcode for opcode, _ in instructions[start:end]])
    start, end = max(loops, key=lambda loop: loop[1] - loop[0], default=(0, 0))
    return _counted([opcode for opcode, _ in instructions[start:end]])


def _counted(opcodes: list[str]) -> Loop:
    count = Counter(opcode.split(".")[0] for opcode in opcodes)
    return Loop(len(opcodes), count["HMMA"], count["LDSM"], count["LDGSTS"], count["LDS"],
                count["STS"], count["MUFU"], count["FFMA"], count["BAR"],
                sum(_wavefronts(opcode) for opcode in opcodes),
                sum(_bytes(opcode) for opcode in opcodes
                    if opcode.split(".")[0] in ("LDG", "LDGSTS")))


def _bytes(opcode: str) -> int:
    """What the lanes of a warp access together."""
    return 32 * next((_WIDTHS[m] for m in opcode.split(".") if m in _WIDTHS), 4)


def _wavefronts(opcode: str) -> int:
    """Cycles of shared memory for a warp's instruction whose lanes want different words."""
    name, *modifiers = opcode.split(".")
    if name == "LDSM":
        return int(modifiers[-1])  # a matrix of 8 rows of 16 bytes at a time
    return max(1, _bytes(opcode) // WAVEFRONT) if name in ("LDS", "STS", "LDGSTS") else 0
