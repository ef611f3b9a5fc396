"""Inlining: one flat list of instructions per kernel, in which no calls are left."""

from dataclasses import dataclass, field
from itertools import chain

from .report import VirtualGPUError
from .syntax import (
    TYPE_BYTES,
    Address,
    Function,
    Guard,
    Instruction,
    Label,
    Module,
    Negated,
    Pair,
    Register,
    Symbol,
    Variable,
    Vector,
)


@dataclass(slots=True)
class Program:
    """A kernel without calls; names of inlined copies are unique."""

    body: list[Instruction | Label] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)
    shared: dict[str, Variable] = field(default_factory=dict)
    local: dict[str, Variable] = field(default_factory=dict)


def inline_calls(module: Module, function: Function) -> Program:
    """Expand every call of a kernel, `.param` memory of the calls becoming registers.

    Raises VirtualGPUError "not supported" for recursion, indirect calls, and calls of functions
    that have no body.
    """
    inliner = _Inliner(module)
    inliner.expand(function, "", {}, ())
    return inliner.program


def registers_of(operands: tuple) -> set[str]:
    """Names of the registers that occur in operands."""
    names = set()
    for operand in operands:
        match operand:
            case Register(name):
                names.add(name)
            case Address(base, _):
                names |= registers_of((base,))
            case Vector(items):
                names |= registers_of(items)
            case Pair(first, second):
                names |= registers_of((first, second))
            case Negated(register):
                names |= registers_of((register,))
    return names


class _Inliner:
    def __init__(self, module: Module):
        self.module = module
        self.program = Program()
        self.copies = 0
        self.cells: dict[tuple[str, int], int] = {}  # (.param variable, offset) -> bytes

    def expand(self, function: Function, suffix: str, bindings: dict[str, str],
               callers: tuple[str, ...]) -> None:
        """Append a copy of a function; `bindings`: its .param variables -> those of the caller."""
        program = self.program
        symbols = dict(bindings)
        for variable in function.variables:
            unique = variable.name + suffix
            if variable.space == "shared":  # static: one for all copies
                unique = variable.name if function.entry else f"{function.name}.{variable.name}"
                program.shared[unique] = variable
            elif variable.space == "local":
                program.local[unique] = variable
            symbols[variable.name] = unique
        for name, type in function.registers.items():
            program.registers[name + suffix] = type
        parameters = set(bindings.values()) | {
            symbols[v.name] for v in function.variables if v.space == "param"
        }
        copy = _Copy(suffix, symbols)
        for item in function.body:
            if isinstance(item, Label):
                program.body.append(Label(item.name + suffix, item.line))
            elif item.opcode.startswith("call"):
                self.call(copy.instruction(item), (*callers, function.name))
            elif item.opcode.startswith("ret") and not function.entry:
                target = (Symbol("return" + suffix),)
                program.body.append(copy.instruction(item, "bra", target))
            elif item.opcode.startswith("bra") and suffix:
                target = (Symbol(item.operands[0].name + suffix),)
                program.body.append(copy.instruction(item, item.opcode, target))
            else:
                item = copy.instruction(item)
                if item.opcode.startswith(("ld.param", "st.param")):
                    item = self.parameter_access(item, parameters)
                program.body.append(item)
        if not function.entry:
            program.body.append(Label("return" + suffix, function.line))

    def call(self, call: Instruction, callers: tuple[str, ...]) -> None:
        returns, arguments = Vector(()), Vector(())
        operands = list(call.operands)
        if isinstance(operands[0], Vector):
            returns = operands.pop(0)
        name = operands.pop(0)
        if not isinstance(name, Symbol) or len(operands) > 1:
            raise self.error(call, "indirect call")
        if operands:
            (arguments,) = operands
        callee = self.module.functions.get(name.name)
        if callee is None or not callee.defined:
            raise self.error(call, f"call of {name.name}, which has no body")
        if callee.name in callers:
            raise self.error(call, f"recursion of {callee.name}")
        formal = [v.name for v in chain(callee.returns, callee.parameters)]
        actual = list(chain(returns.items, arguments.items))
        if not all(isinstance(operand, Symbol) for operand in actual):
            raise self.error(call, "call with an argument that is not a .param variable")
        if len(formal) != len(actual):
            raise self.error(call, f"{len(actual)} parameters, {callee.name} has {len(formal)}")
        self.copies += 1
        suffix = f"@call{self.copies}"
        body = self.program.body
        if call.guard:
            skip = Guard(call.guard.register, not call.guard.negated)
            target = (Symbol("return" + suffix),)
            body.append(Instruction("bra", target, skip, call.line, call.source))
        bindings = dict(zip(formal, (symbol.name for symbol in actual), strict=True))
        self.expand(callee, suffix, bindings, callers)

    def parameter_access(self, item: Instruction, parameters: set[str]) -> Instruction:
        """Turn an access to a call's .param variable into a move between registers."""
        loads = item.opcode.startswith("ld")
        address, values = reversed(item.operands) if loads else item.operands
        variable = address.base.name if isinstance(address.base, Symbol) else None
        if variable not in parameters:
            return item
        items = values.items if isinstance(values, Vector) else (values,)
        size = TYPE_BYTES[item.opcode.rsplit(".", 1)[-1]]
        cells = tuple(
            self.cell(item, variable, address.offset + i * size, size, loads)
            for i in range(len(items))
        )
        pair = (Vector(items), Vector(cells))
        item.operands = pair if loads else pair[::-1]
        return item

    def cell(self, item: Instruction, variable: str, offset: int, size: int,
             loads: bool) -> Register:
        known = self.cells.setdefault((variable, offset), size)
        if known < size or (known != size and not loads):
            raise self.error(item, f"{size} bytes of a .param cell of {known} bytes")
        name = f"{variable}+{offset}"
        self.program.registers.setdefault(name, f"b{max(16, 8 * known)}")
        return Register(name)

    def error(self, item: Instruction, detail: str) -> VirtualGPUError:
        return VirtualGPUError(
            "not supported", detail, ptx_line=item.line,
            ptx_text=self.module.lines[item.line - 1], source=item.source,
        )


class _Copy:
    """Renames the operands of one copy of a function body."""

    def __init__(self, suffix: str, symbols: dict[str, str]):
        self.suffix = suffix
        self.symbols = {old: new for old, new in symbols.items() if old != new}
        self.renamed: dict[object, object] = {}

    def instruction(self, item: Instruction, opcode: str | None = None,
                    operands: tuple | None = None) -> Instruction:
        guard = item.guard
        if guard and self.suffix:
            guard = Guard(guard.register + self.suffix, guard.negated)
        if operands is None:
            operands = item.operands
            if self.suffix:
                operands = tuple(map(self.operand, operands))
        return Instruction(opcode or item.opcode, operands, guard, item.line, item.source)

    def operand(self, operand):
        if operand not in self.renamed:
            self.renamed[operand] = self.rename(operand)
        return self.renamed[operand]

    def rename(self, operand):
        match operand:
            case Register(name):
                return Register(name + self.suffix)
            case Symbol(name):
                return Symbol(self.symbols.get(name, name))
            case Address(base, offset) if base is not None:
                return Address(self.operand(base), offset)
            case Vector(items):
                return Vector(tuple(map(self.operand, items)))
            case Pair(first, second):
                return Pair(self.operand(first), self.operand(second))
            case Negated(register):
                return Negated(self.operand(register))
        return operand
