"""A strict parser for the PTX that NVVM emits: anything it does not know is an error."""

import re
from itertools import chain

from .report import PtxError
from .syntax import (
    TYPE_BYTES,
    Address,
    Function,
    Guard,
    Immediate,
    Instruction,
    Label,
    Module,
    Negated,
    Pair,
    Register,
    Sink,
    Special,
    Symbol,
    Variable,
    Vector,
)

__all__ = [
    "TYPE_BYTES",
    "Address",
    "Function",
    "Guard",
    "Immediate",
    "Instruction",
    "Label",
    "Module",
    "Negated",
    "Pair",
    "Register",
    "Sink",
    "Special",
    "Symbol",
    "Variable",
    "Vector",
    "parse",
]


def parse(text: str) -> Module:
    """Parse a PTX module; a PtxError names the line of whatever is unknown."""
    return _Parser(text).module_body()


_NAME = r"[\w$%]+"
_LINKAGE = r"(?P<linkage>(?:\.(?:visible|extern|weak|common)\s+)*)"
_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"[^"\n]*"', re.DOTALL)
_FILE = re.compile(r'^[ \t]*\.file\s+(\d+)\s+"([^"\n]*)"', re.MULTILINE)
_SPACE = re.compile(r"\s*")
_STATEMENT = re.compile(
    rf"""\s*(?:
      (?P<label>{_NAME})\s*:(?!:)
    | (?:@(?P<negated>!?)(?P<guard>{_NAME})\s+)?
      (?P<opcode>[a-z]\w*(?:\.[\w:]+)*)(?![\w.:])\s*(?P<operands>[^;]*);
    | \.loc\s+(?P<file>\d+)\s+(?P<source_line>\d+)\s+\d+[^\n]*
    | \.reg\s+\.(?P<register_type>\w+)\s+(?P<registers>[^;]*);
    | (?P<brace>[{{}}])
    | \.pragma\s+"[^"]*"\s*;
    )""",
    re.VERBOSE,
)
_VARIABLE = re.compile(
    rf"""\s*{_LINKAGE}\.(?P<space>global|const|shared|local|param)\s+
    (?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+
    (?P<name>{_NAME})\s*(?P<dimensions>(?:\[\s*\d*\s*\])*)\s*
    (?:=\s*(?P<initializer>[^;]*?)\s*)?;""",
    re.VERBOSE,
)
_PARAMETER = re.compile(
    rf"""\s*\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+
    (?:\.ptr\s+(?:\.(?:global|shared|const|local)\s+)?(?:\.align\s+\d+\s+)?)?
    (?P<name>{_NAME})\s*(?P<dimensions>(?:\[\s*\d*\s*\])*)\s*""",
    re.VERBOSE,
)
_FUNCTION = re.compile(
    rf"""\s*{_LINKAGE}\.(?P<kind>entry|func)\s*(?:\((?P<returns>[^)]*)\)\s*)?
    (?P<name>{_NAME})\s*(?:\((?P<parameters>[^)]*)\))?""",
    re.VERBOSE,
)
_FUNCTION_DIRECTIVE = re.compile(
    r"""\s*(?:\.(?P<name>maxntid|reqntid|minnctapersm|maxnctapersm|maxnreg)\s+
    (?P<values>\d+(?:\s*,\s*\d+)*)
    | (?P<noreturn>\.noreturn) | \.pragma\s+"[^"]*"\s*; | (?P<end>[{;]))""",
    re.VERBOSE,
)
_MODULE_DIRECTIVE = re.compile(
    r"""\s*(?:\.version\s+(?P<version>\d+\.\d+) | \.target\s+(?P<target>\w+)(?:\s*,\s*debug)?
    | \.address_size\s+64\b | \.file\s[^\n]* | \.section\s+\.debug_\w+\s*\{[^}]*\}
    | \.pragma\s+"[^"]*"\s*;)""",
    re.VERBOSE,
)
_ADDRESS = re.compile(
    rf"\[\s*(?P<base>(?!-?\d){_NAME})?\s*\+?\s*(?P<offset>-?\s*(?:0[xX][0-9a-fA-F]+|\d+))?\s*\]"
)
_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0|[1-9]\d*)U?")
_FLOAT = re.compile(r"0(?:[fF](?P<f32>[0-9a-fA-F]{8})|[dD](?P<f64>[0-9a-fA-F]{16}))")
_REGISTER_NAME = re.compile(rf"\s*(?P<name>{_NAME})(?:<(?P<count>\d+)>)?\s*")
_OUTER_COMMA = re.compile(r",(?![^{}()\[\]]*[)}\]])")
_SPECIAL = re.compile(r"%[a-z]\w*(?:\.[a-z]\w*)?")
_WORD = re.compile(_NAME)


class _Scope:
    """The names of one `{ }`; inside a function body they get a suffix that makes them unique."""

    def __init__(self, parent: "_Scope | None", suffix: str, start: int):
        self.parent = parent
        self.suffix = suffix
        self.start = start  # index in the body
        self.names: dict[str, Register | Symbol] = {}
        self.labels: set[str] = set()
        self.operands: dict[str, object] = {}

    def find(self, name: str) -> Register | Symbol | None:
        scope = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.parent
        return None


class _Parser:
    def __init__(self, text: str):
        self.module = Module(lines=text.split("\n"))
        self.module.files = {int(number): name for number, name in _FILE.findall(text)}
        self.text = _COMMENT.sub(_without_comment, text)
        self.position = 0
        self.counted = 0
        self.line = 1

    def error(self, detail: str) -> PtxError:
        text = self.module.lines[self.line - 1]
        return PtxError(f"PTX line {self.line}: {detail}", ptx_line=self.line, ptx_text=text)

    def accept(self, pattern: re.Pattern) -> re.Match | None:
        """Match at the current position and go past it; `line` becomes that of the match."""
        found = pattern.match(self.text, self.position)
        if found:
            start = self.skip_space()
            self.position = found.end()
            self.line += self.text.count("\n", self.counted, start)
            self.counted = start
        return found

    def skip_space(self) -> int:
        return _SPACE.match(self.text, self.position).end()

    def unknown(self) -> PtxError:
        start = self.skip_space()
        self.line += self.text.count("\n", self.counted, start)
        return self.error(f"unknown syntax: {self.text[start:].split(chr(10), 1)[0].strip()!r}")

    def module_body(self) -> Module:
        module = self.module
        while self.skip_space() < len(self.text):
            if found := self.accept(_MODULE_DIRECTIVE):
                module.version = found["version"] or module.version
                module.target = found["target"] or module.target
            elif found := self.accept(_VARIABLE):
                variable = self.variable(found)
                if variable.space in ("local", "param"):
                    raise self.error(f".{variable.space} variable outside a function")
                known = module.variables.get(variable.name)
                if known is None or known.extern:
                    module.variables[variable.name] = variable
                elif not variable.extern and not _may_repeat(found):
                    raise self.error(f"variable {variable.name} is defined twice")
            elif found := self.accept(_FUNCTION):
                self.function(found)
            else:
                raise self.unknown()
        if not module.version or not module.target:
            raise PtxError("PTX line 1: no .version or .target directive", ptx_line=1)
        return module

    def variable(self, found: re.Match, space: str | None = None) -> Variable:
        type, name = found["type"], found["name"]
        if type not in TYPE_BYTES or type == "pred":
            raise self.error(f"variable {name} of type .{type}")
        size = TYPE_BYTES[type]
        align = int(found["align"] or size)
        for dimension in re.findall(r"\[\s*(\d*)", found["dimensions"]):
            size *= int(dimension or 0)
        groups = found.groupdict()
        initializer = groups.get("initializer")
        return Variable(
            name, space or found["space"], type, align, size,
            None if initializer is None else self.initializer(initializer, type, size),
            ".extern" in groups.get("linkage", ""),
        )

    def initializer(self, text: str, type: str, size: int) -> bytes:
        width = TYPE_BYTES[type]
        mask = (1 << 8 * width) - 1
        items = [item.strip() for item in text.strip("{}").split(",") if item.strip()]
        values = [self.immediate(item) for item in items]
        if None in values:
            raise self.error(f"initializer {items[values.index(None)]!r} is not a number")
        data = b"".join((value.value & mask).to_bytes(width, "little") for value in values)
        if len(data) > size:
            raise self.error("initializer is longer than its variable")
        return data.ljust(size, b"\0")

    def parameters(self, text: str | None) -> list[Variable]:
        variables = []
        for part in (text or "").split(",") if (text or "").strip() else ():
            found = _PARAMETER.fullmatch(part)
            if not found:
                raise self.error(f"unknown parameter {part.strip()!r}")
            variables.append(self.variable(found, "param"))
        return variables

    def function(self, header: re.Match) -> None:
        function = Function(
            header["name"], header["kind"] == "entry", self.parameters(header["parameters"]),
            self.parameters(header["returns"]), self.line,
        )
        while not (found := self.accept(_FUNCTION_DIRECTIVE)) or not found["end"]:
            if not found:
                raise self.unknown()
            if found["name"]:
                function.directives[found["name"]] = tuple(map(int, found["values"].split(",")))
            elif found["noreturn"]:
                function.directives["noreturn"] = ()
        known = self.module.functions.setdefault(function.name, function)
        if found["end"] == "{":
            if not known.defined:
                self.module.functions[function.name] = function
            elif not _may_repeat(header):
                raise self.error(f"function {function.name} is defined twice")
            function.defined = True
            self.body(function)

    def body(self, function: Function) -> None:
        outer = scope = _Scope(None, "", 0)
        for variable in chain(function.parameters, function.returns):
            scope.names[variable.name] = Symbol(variable.name)
        body, scopes, source = function.body, 0, None
        while True:
            found = self.accept(_STATEMENT)
            if not found:
                if not (found := self.accept(_VARIABLE)):
                    raise self.unknown()
                self.declare_variable(function, scope, self.variable(found))
            elif opcode := found["opcode"]:
                operands, guard = found["operands"], found["guard"]
                if guard:
                    register = self.operand(scope, guard)
                    if not isinstance(register, Register):
                        raise self.error(f"guard {guard} is not a register")
                    guard = Guard(register.name, bool(found["negated"]))
                if operands:
                    operands = tuple(
                        self.operand(scope, part.strip()) for part in _OUTER_COMMA.split(operands)
                    )
                body.append(Instruction(opcode, operands or (), guard or None, self.line, source))
            elif found["source_line"]:
                # Line 0 marks code of no line: the line before is the best guess.
                number, file = int(found["source_line"]), self.module.files.get(int(found["file"]))
                if number and file:
                    source = (file, number)
            elif label := found["label"]:
                if label in scope.labels:
                    raise self.error(f"label {label} is defined twice")
                scope.labels.add(label)
                body.append(Label(label + scope.suffix, self.line))
            elif found["registers"]:
                self.declare_registers(function, scope, found)
            elif found["brace"] == "{":
                scopes += 1
                scope = _Scope(scope, f"@{scopes}", len(body))
            elif found["brace"] == "}":
                if scope is outer:
                    return
                _rename_targets(body, scope)
                scope = scope.parent

    def declare_variable(self, function: Function, scope: _Scope, variable: Variable) -> None:
        if variable.space in ("global", "const"):
            raise self.error(f".{variable.space} variable {variable.name} inside a function")
        if variable.name in scope.names:
            raise self.error(f"{variable.name} is declared twice")
        unique = variable.name + scope.suffix
        scope.names[variable.name] = Symbol(unique)
        scope.operands.clear()
        variable.name = unique
        function.variables.append(variable)

    def declare_registers(self, function: Function, scope: _Scope, found: re.Match) -> None:
        type = found["register_type"]
        if TYPE_BYTES.get(type, 1) == 1 and type != "pred":
            raise self.error(f"register of type .{type}")
        scope.operands.clear()
        for part in found["registers"].split(","):
            item = _REGISTER_NAME.fullmatch(part)
            if not item:
                raise self.error(f"unknown register declaration {part.strip()!r}")
            base, count = item["name"], item["count"]
            for name in [base] if count is None else [f"{base}{i}" for i in range(int(count))]:
                if name in scope.names:
                    raise self.error(f"{name} is declared twice")
                scope.names[name] = Register(name + scope.suffix)
                function.registers[name + scope.suffix] = type

    def operand(self, scope: _Scope, text: str):
        found = scope.operands.get(text)
        if found is None:
            found = scope.operands[text] = self.parse_operand(scope, text)
        return found

    def parse_operand(self, scope: _Scope, text: str):
        if known := scope.find(text):
            return known
        if (immediate := self.immediate(text)) is not None:
            return immediate
        if text == "_":
            return Sink()
        if address := _ADDRESS.fullmatch(text):
            base = address["base"] and self.operand(scope, address["base"])
            return Address(base, int((address["offset"] or "0").replace(" ", ""), 0))
        if text[:1] + text[-1:] in ("{}", "()"):
            inside = text[1:-1].strip()
            items = inside.split(",") if inside else ()
            return Vector(tuple(self.operand(scope, item.strip()) for item in items))
        if text.startswith("!"):
            return Negated(self.operand(scope, text[1:].strip()))
        if text.count("|") == 1:
            first, second = text.split("|")
            return Pair(self.operand(scope, first.strip()), self.operand(scope, second.strip()))
        if _SPECIAL.fullmatch(text):
            return Special(text)
        if _WORD.fullmatch(text) and text[0] not in "%0123456789":
            return Symbol(text)
        raise self.error(f"unknown operand {text!r}")

    def immediate(self, text: str) -> Immediate | None:
        if _INTEGER.fullmatch(text):
            return Immediate(int(text.rstrip("U"), 0), "int")
        if found := _FLOAT.fullmatch(text):
            return Immediate(int(found[found.lastgroup], 16), found.lastgroup)
        return Immediate(32, "int") if text == "WARP_SZ" else None


def _without_comment(found: re.Match) -> str:
    text = found[0]
    return text if text[0] == '"' else " " + "\n" * text.count("\n")


def _may_repeat(found: re.Match) -> bool:
    """Whether linking keeps one of several definitions."""
    return ".weak" in found["linkage"] or ".common" in found["linkage"]


def _rename_targets(body: list, scope: _Scope) -> None:
    """Give branches inside a scope the unique names of the scope's labels."""
    for i in range(scope.start, len(body)):
        item = body[i]
        if isinstance(item, Instruction) and item.opcode.startswith("bra"):
            (target,) = item.operands
            if target.name in scope.labels:
                item.operands = (Symbol(target.name + scope.suffix),)
