"""One-instruction kernels: PTX text for many forms at once, and running it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import vgpu
from reference_opcodes import reference
from reference_types import Reference, width
from reference_values import agrees, operands

LANES = 128
HEADER = ".version 8.5\n.target sm_90\n.address_size 64\n"
FLOAT_REGISTERS = {"f32": "f", "f64": "d"}


@dataclass(frozen=True)
class Case:
    """An instruction to test: a form, and immediate operands that come after the registers."""

    form: str
    immediates: tuple[int, ...] = ()

    @property
    def reference(self) -> Reference:
        if self.form.startswith("lop3"):
            return reference(self.form, self.immediates[0])
        return reference(self.form)

    @property
    def registers(self) -> tuple[str, ...]:
        """Types of the operands that are registers."""
        sources = self.reference.sources
        return sources if self.form.startswith("lop3") else sources[:len(sources)
                                                                    - len(self.immediates)]

    def expected(self, *bits: int) -> tuple:
        constants = () if self.form.startswith("lop3") else self.immediates
        return self.reference.compute(*bits, *constants)


def register_class(kind: str, number: int) -> str:
    """Prefix of the registers for a type; float types alternate between typed and untyped ones,
    bytes between registers of 16 and of 32 bits."""
    if kind == "pred":
        return "p"
    if kind in FLOAT_REGISTERS and number % 2:
        return FLOAT_REGISTERS[kind]
    bits = width(kind)
    if bits == 8:
        bits = 32 if number % 2 else 16
    return {16: "h", 32: "r", 64: "x"}[bits]


def register_width(kind: str, number: int) -> int:
    return {"p": 1, "h": 16, "r": 32, "f": 32, "x": 64, "d": 64}[register_class(kind, number)]


DECLARATIONS = "".join(
    f".reg .{kind} %s{prefix}<8>, %t{prefix}<{{count}}>;\n"
    for prefix, kind in (("p", "pred"), ("h", "b16"), ("r", "b32"), ("x", "b64"), ("f", "f32"),
                         ("d", "f64")))


def kernel_text(name: str, cases: list[Case]) -> str:
    """A kernel (inputs, outputs, first) for cases with the same operand types.

    Lane i has index first + i, reads inputs[operand, index] and writes outputs[result, index],
    both uint64 arrays of LANES columns.
    """
    kinds = cases[0].registers
    lines = [f".visible .entry {name}(",
             ".param .u64 inputs, .param .u64 outputs, .param .u64 first) {",
             DECLARATIONS.format(count=2 * len(cases)),
             ".reg .b64 %in, %out, %index; .reg .b32 %lane;",
             "ld.param.u64 %in, [inputs]; ld.param.u64 %out, [outputs];",
             "ld.param.u64 %index, [first]; mov.u32 %lane, %tid.x;",
             "cvt.u64.u32 %sx7, %lane; add.u64 %index, %index, %sx7; shl.b64 %index, %index, 3;",
             "add.u64 %in, %in, %index; add.u64 %out, %out, %index;"]
    for place, kind in enumerate(kinds):
        address = f"[%in+{8 * LANES * place}]"
        if kind == "pred":
            lines.append(f"ld.global.b32 %sr7, {address}; setp.ne.u32 %sp{place}, %sr7, 0;")
            continue
        for number in range(2):
            prefix = register_class(kind, number)
            lines.append(f"ld.global.{'f' if prefix in 'fd' else 'b'}{register_width(kind, number)}"
                         f" %s{prefix}{place}, {address};")
    row = 0
    for number, case in enumerate(cases):
        results = case.reference.results
        targets = [f"%t{register_class(kind, number)}{2 * number + place}"
                   for place, kind in enumerate(results)]
        sources = [f"%s{register_class(kind, number)}{place}" for place, kind in enumerate(kinds)]
        text = ", ".join(["|".join(targets), *sources, *map(str, case.immediates)])
        lines.append(f"{case.form} {text};")
        for target, kind in zip(targets, results, strict=True):
            address = f"[%out+{8 * LANES * row}]"
            if kind == "pred":
                lines.append(f"selp.b32 %sr7, 1, 0, {target}; st.global.b32 {address}, %sr7;")
            else:
                prefix = register_class(kind, number)
                lines.append(f"st.global.{'f' if prefix in 'fd' else 'b'}"
                             f"{register_width(kind, number)} {address}, {target};")
            row += 1
    return "\n".join([*lines, "ret; }\n"])


def by_operands(cases: list[Case], most: int = 40) -> list[list[Case]]:
    """Cases with the same operand types together, at most `most` of them."""
    groups: dict[tuple, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.registers, []).append(case)
    return [group[start:start + most] for group in groups.values()
            for start in range(0, len(group), most)]


def check(cases: list[Case], uniform: tuple[int, ...] = (0, 5, 12, 20, 70)) -> list[str]:
    """Run cases on the virtual GPU; what differs from the reference, in words.

    Every case runs with one index for each lane, and for some indexes by a single thread, whose
    operands are then NumPy scalars.
    """
    groups = by_operands(cases)
    text = HEADER + "".join(kernel_text(f"group{i}", group) for i, group in enumerate(groups))
    wrong = []
    for i, group in enumerate(groups):
        columns = operands(group[0].registers, LANES)
        inputs = np.array(columns, np.uint64)
        rows = sum(len(case.reference.results) for case in group)
        by_lane, by_thread = np.zeros((2, rows, LANES), np.uint64)
        vgpu.run_ptx(text, f"group{i}", 1, LANES, [inputs, by_lane, np.uint64(0)])
        for index in uniform:
            vgpu.run_ptx(text, f"group{i}", 1, 1, [inputs, by_thread, np.uint64(index)])
        wrong += differences(group, columns, by_lane.tolist(), range(LANES), "")
        wrong += differences(group, columns, by_thread.tolist(), uniform, " (uniform)")
    return wrong


def differences(group: list[Case], columns: list, outputs: list, indexes, note: str) -> list[str]:
    """One line for each case with a wrong result."""
    wrong, row = [], 0
    for number, case in enumerate(group):
        results = case.reference.results
        for index in indexes:
            bits = [column[index] for column in columns]
            found = [outputs[row + place][index] for place in range(len(results))]
            expected = [extended(value, kind, number) for value, kind in
                        zip(case.expected(*bits), results, strict=True)]
            if not all(map(agrees, expected, found, results)):
                wrong.append(f"{case.form}{note} {list(map(hex, bits))} {case.immediates or ''}: "
                             f"{list(map(hex, found))}, expected {expected}")
                break
        row += len(results)
    return wrong


def extended(value, kind: str, number: int):
    """The bits in a register that is wider than the type."""
    if kind in ("u8", "s8") and kind == "s8" and value >> 7:
        return value | (1 << register_width(kind, number)) - (1 << 8)
    return value
