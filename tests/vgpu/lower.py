"""From a parsed kernel to Python functions, one per basic block."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .blocks import BasicBlock, basic_blocks
from .emission import NUMPY_TYPES, BlockCode, Code
from .inline import Program, inline_calls
from .liveness import live_out
from .memory import FIRST_SHARED
from .opcodes import KINDS, MASKS, emitter_of
from .report import UnknownOpcode, VirtualGPUError
from .syntax import Immediate, Instruction, Module, Negated, Register, Variable

__all__ = ["Block", "Code", "Kernel", "compile_kernel"]

_BARRIER = re.compile(r"(?:bar|barrier)(?:\.cta)?\.(?:sync|red\.(?P<kind>popc|and|or))\b")


@dataclass(slots=True)
class Block:
    """One basic block as a function.

    run      (S, lanes) -> predicate of a "branch", else None
    kind     "jump", "branch" (`target` if the predicate holds, else `other`), "exit",
             "barrier" (at its end) or "warp" (run by complete warps only)
    size     number of PTX instructions
    site     index in Kernel.sites of the branch, exit, barrier or (first) warp instruction
    mask     of a warp block: (S, lanes) -> uint32 member mask; None: all 32 lanes
    barrier  of a barrier block: kind "sync", "popc", "and" or "or"; predicate (S, lanes) -> bool
             and destination (register index), both None for "sync"
    """

    index: int
    run: Callable
    kind: str
    size: int
    target: int | None = None
    other: int | None = None
    site: int | None = None
    mask: Callable | None = None
    barrier: dict | None = None


@dataclass(slots=True)
class Kernel:
    """A kernel that can be run; shared-memory sizes and offsets are in bytes.

    Static shared variables lie between FIRST_SHARED and FIRST_SHARED + static_shared, at the
    (begin, end) of shared_variables; dynamic shared memory begins at dynamic_shared_offset.
    """

    name: str
    title: str
    module: Module
    parameters: list[Variable]
    parameter_bytes: int
    static_shared: int
    dynamic_shared_offset: int
    local_bytes: int
    compiler_stack: bool  # local memory is laid out by a compiler, which copies padding too
    maxntid: tuple[int, ...] | None
    reqntid: tuple[int, ...] | None
    uses_nc_loads: bool
    forms: set[str]
    source: str = ""
    registers: list[np.dtype] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    sites: list[Instruction] = field(default_factory=list)
    shared_variables: list[tuple[int, int]] = field(default_factory=list)


def compile_kernel(module: Module, name: str) -> Kernel:
    """Lower a kernel of a module whose variables have addresses.

    Raises VirtualGPUError "not supported", or UnknownOpcode, naming the PTX line.
    """
    function = module.functions[name]
    title = readable_name(name)
    code = None
    try:
        program = inline_calls(module, function)
        blocks = basic_blocks(program, _kind_of, _mask_of)
        local, local_bytes = _local_layout(program)
        shared, places, dynamic = _shared_layout(module, program)
        static_shared = max((end for _, end in places), default=FIRST_SHARED) - FIRST_SHARED
        code = Code(module, program.registers, module.addresses | local | shared,
                    _parameter_offsets(function.parameters))
        forms = {item.opcode for item in program.body if isinstance(item, Instruction)}
        last = function.parameters[-1:]
        kernel = Kernel(
            name, title, module, function.parameters,
            sum(variable.offset + variable.size for variable in last),
            static_shared, dynamic, local_bytes,
            any(local_name.startswith("__local_depot") for local_name in local),
            function.directives.get("maxntid"), function.directives.get("reqntid"),
            any(".nc" in form for form in forms), forms, sites=code.sites,
            shared_variables=places,
        )
        _finish(kernel, code, blocks, [_emit(code, block) for block in blocks])
    except VirtualGPUError as error:
        error.kernel = title
        if error.ptx_line is None and code and code.instruction:
            error.ptx_line, error.source = code.instruction.line, code.instruction.source
        if error.ptx_line is not None:
            error.ptx_text = module.lines[error.ptx_line - 1]
        raise
    return kernel


def readable_name(name: str) -> str:
    """The Python function's own name in a name that numba mangled."""
    match = re.match(r"_ZN?", name)
    if not match:
        return name
    position, part = match.end(), ""
    while found := re.compile(r"\d+").match(name, position):
        position = found.end() + int(found[0])
        part = name[found.end():position]
    return part.replace("_3c", "<").replace("_3e", ">") or name


def _kind_of(instruction: Instruction) -> str:
    if instruction.opcode.startswith(("ld.param", "st.param")):
        return "plain"  # also of calls, which is no opcode any more
    try:
        emitter_of(instruction)
    except UnknownOpcode as error:
        error.ptx_line, error.source = instruction.line, instruction.source
        raise
    return KINDS[instruction.opcode]


def _mask_of(instruction: Instruction):
    position = MASKS[instruction.opcode]
    return None if position is None else instruction.operands[position]


def _parameter_offsets(parameters: list[Variable]) -> dict[str, int]:
    offset = 0
    for variable in parameters:
        variable.offset = -(-offset // variable.align) * variable.align
        offset = variable.offset + variable.size
    return {variable.name: variable.offset for variable in parameters}


def _local_layout(program: Program) -> tuple[dict[str, int], int]:
    symbols, end = {}, 0
    for name, variable in program.local.items():
        symbols[name] = -(-end // variable.align) * variable.align
        end = symbols[name] + variable.size
    return symbols, end


def _shared_layout(module: Module, program: Program) -> tuple[dict[str, int], list, int]:
    """(addresses, (begin, end) of the static variables, begin of the dynamic ones).

    Every variable gets an odd multiple of its alignment: code that needs more than it declares
    is found out.
    """
    shared = {name: v for name, v in module.variables.items() if v.space == "shared"}
    symbols, places, end = {}, [], FIRST_SHARED
    for name, variable in (shared | program.shared).items():
        if not variable.extern:
            symbols[name] = _odd_multiple(variable.align, end)
            end = symbols[name] + variable.size
            places.append((symbols[name], end))
    dynamic = [name for name, variable in shared.items() if variable.extern]
    start = _odd_multiple(max((shared[name].align for name in dynamic), default=16), end)
    return symbols | dict.fromkeys(dynamic, start), places, start


def _odd_multiple(align: int, at_least: int) -> int:
    return (-(-at_least // align) | 1) * align


def _emit(code: Code, block: BasicBlock) -> BlockCode:
    """The statements of one block."""
    code.block = source = BlockCode()
    for item in block.instructions:
        if item is not block.terminator or block.kind == "warp":
            code.emit(item)
    code.instruction = block.terminator
    if block.kind == "branch":
        source.result = code.value(Register(block.guard.register), "pred")
    elif block.kind == "barrier":
        destination, predicate, _ = _barrier_operands(code, block.terminator)
        source.read_after = {predicate.name} if predicate else set()
        source.written_after = {destination.name} if destination else set()
    elif block.kind == "warp" and isinstance(mask := _mask_of(block.terminator), Register):
        source.reads.add(mask.name)
    for name in source.reads | source.read_after | source.written_after:
        code.index_of(name)
    return source


def _barrier_operands(code: Code, item: Instruction) -> tuple[Register, Register, bool]:
    """(destination, predicate, whether it is negated) of a barrier; None for a plain one."""
    operands = list(item.operands)
    destination = predicate = None
    negated = False
    if _BARRIER.match(item.opcode)["kind"]:
        destination, *operands, predicate = operands
        if negated := isinstance(predicate, Negated):
            predicate = predicate.register
        if not isinstance(predicate, Register) or not isinstance(destination, Register):
            raise code.error("barrier reduction of something that is not a register")
    if operands != [Immediate(0, "int")]:
        raise code.error("barrier other than barrier 0 of the whole CTA")
    return destination, predicate, negated


def _finish(kernel: Kernel, code: Code, blocks: list[BasicBlock], codes: list[BlockCode]) -> None:
    """Add blocks and registers to a kernel: liveness, source text, compiled functions."""
    numbers = {block: i for i, block in enumerate(blocks)}
    live = live_out(
        [[numbers[following] for following in block.successors()] for block in blocks],
        [source.reads for source in codes], [source.writes for source in codes],
        [source.read_after for source in codes], [source.written_after for source in codes],
    )
    texts = []
    for i, source in enumerate(codes):
        code.block = source
        texts.append(_function(code, f"block_{i}", sorted(
            live[i] & source.writes, key=code.indices.get)))
    kernel.source = "\n".join(texts)
    exec(compile(kernel.source, f"<PTX of {kernel.title}>", "exec"), code.namespace)
    kernel.registers = [np.dtype(NUMPY_TYPES[code.dtype_of(name)]) for name in code.indices]
    for i, block in enumerate(blocks):
        code.instruction = block.terminator
        result = Block(
            i, code.namespace[f"block_{i}"], block.kind, block.size,
            numbers.get(block.target), numbers.get(block.other),
            block.terminator and code.site_of(block.terminator),
        )
        if block.kind == "warp":
            result.mask = _reader(code, _mask_of(block.terminator))
        elif block.kind == "barrier":
            destination, predicate, negated = _barrier_operands(code, block.terminator)
            result.barrier = dict(
                kind=_BARRIER.match(block.terminator.opcode)["kind"] or "sync",
                predicate=_reader(code, Negated(predicate) if negated else predicate),
                destination=destination and code.indices[destination.name],
            )
        kernel.blocks.append(result)


def _function(code: Code, name: str, outputs: list[str]) -> str:
    """Source of a block's function: registers in, statements, registers out."""
    source = code.block
    values = [code.register(output, code.dtype_of(output)) for output in outputs]
    inputs = sorted(code.indices[register] for register in source.reads)
    lines = [f"def {name}(S, lanes):"]
    if inputs or outputs:
        lines.append("    R = S.registers")
    if inputs:
        names = ", ".join(f"r{i}" for i in inputs)
        lines += [
            "    if lanes is None:",
            *(f"        r{i} = R[{i}]" for i in inputs),
            "    else:",
            f"        [{names}] = S.gather(lanes, {', '.join(map(str, inputs))})",
        ]
    lines += [f"    {line}" for line in source.lines]
    if outputs:
        pairs = [(code.indices[output], value)
                 for output, value in zip(outputs, values, strict=True)]
        lines += [
            "    if lanes is None:",
            *(f"        R[{i}] = {value}" for i, value in pairs),
            "    else:",
            *(f"        S.scatter(lanes, {i}, {value})" for i, value in pairs),
        ]
    lines.append(f"    return {source.result}\n")
    return "\n".join(lines)


def _reader(code: Code, operand) -> Callable | None:
    """Function (S, lanes) -> value of a mask or predicate, None for no operand."""
    match operand:
        case None:
            return None
        case Immediate():
            value = code.immediate(operand, "b32")
            return lambda S, lanes: value
        case Negated(register):
            read = _reader(code, register)
            return lambda S, lanes: ~read(S, lanes)
        case Register(name):
            index = code.indices[name]
            return lambda S, lanes: (
                S.registers[index] if lanes is None else S.gather(lanes, index)[0])
    raise code.error(f"member mask {operand}")
