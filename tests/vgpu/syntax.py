"""What a parsed PTX module is made of."""

from dataclasses import dataclass, field

TYPE_BYTES = {
    "pred": 1, "b8": 1, "u8": 1, "s8": 1,
    "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2,
    "b32": 4, "u32": 4, "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4,
    "b64": 8, "u64": 8, "s64": 8, "f64": 8,
}


@dataclass(frozen=True, slots=True)
class Register:
    name: str


@dataclass(frozen=True, slots=True)
class Immediate:
    """kind "int" (Python int), or "f32", "f64" with the bit pattern as value."""

    value: int
    kind: str


@dataclass(frozen=True, slots=True)
class Special:
    """A special register such as %tid.x, or a register that is not declared."""

    name: str


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable, a function or a label."""

    name: str


@dataclass(frozen=True, slots=True)
class Address:
    base: Register | Symbol | None
    offset: int


@dataclass(frozen=True, slots=True)
class Vector:
    """`{a, b}`, and the parenthesised lists of `call`."""

    items: tuple


@dataclass(frozen=True, slots=True)
class Pair:
    """`first|second`."""

    first: object
    second: object


@dataclass(frozen=True, slots=True)
class Negated:
    register: Register


@dataclass(frozen=True, slots=True)
class Sink:
    """`_`, a result that is dropped."""


@dataclass(frozen=True, slots=True)
class Guard:
    """`@register` or `@!register`."""

    register: str
    negated: bool


@dataclass(slots=True)
class Label:
    name: str
    line: int


@dataclass(slots=True)
class Instruction:
    """One instruction; `call` has the operands (returns), name, (arguments) where given."""

    opcode: str
    operands: tuple
    guard: Guard | None
    line: int
    source: tuple[str, int] | None


@dataclass(slots=True)
class Variable:
    """align and size in bytes (size 0: `extern name[]`); offset is set for kernel parameters."""

    name: str
    space: str
    type: str
    align: int
    size: int
    initializer: bytes | None = None
    extern: bool = False
    offset: int = 0


@dataclass(slots=True)
class Function:
    """body is empty and `defined` False for a forward or external declaration."""

    name: str
    entry: bool
    parameters: list[Variable]
    returns: list[Variable]
    line: int
    registers: dict[str, str] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    body: list[Instruction | Label] = field(default_factory=list)
    directives: dict[str, tuple] = field(default_factory=dict)
    defined: bool = False


@dataclass(slots=True)
class Module:
    """addresses: where the loader placed the .global and .const variables."""

    version: str = ""
    target: str = ""
    variables: dict[str, Variable] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    files: dict[int, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    addresses: dict[str, int] = field(default_factory=dict)
