"""Python source of basic blocks: what the emitters of the opcodes write to."""

import re

import numpy as np

from . import numerics
from .memory import LOCAL_WINDOW, SHARED_WINDOW
from .opcodes import SPECIALS, emitter_of
from .report import VirtualGPUError
from .syntax import (
    TYPE_BYTES,
    Address,
    Immediate,
    Instruction,
    Module,
    Negated,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)

# Type -> name of the NumPy type in generated code; 16-bit floats are kept as bits.
DTYPES = {
    type: "bool" if type == "pred"
    else ("i" if type[0] == "s" else "f" if type in ("f32", "f64") else "u") + str(size)
    for type, size in TYPE_BYTES.items()
}
REGISTER_DTYPES = {
    type: name.replace("i", "u") for type, name in DTYPES.items()
}
NUMPY_TYPES = {
    "u1": np.uint8, "u2": np.uint16, "u4": np.uint32, "u8": np.uint64,
    "i1": np.int8, "i2": np.int16, "i4": np.int32, "i8": np.int64,
    "f2": np.float16, "f4": np.float32, "f8": np.float64, "bool": np.bool_,
}
_SIZES = {name: np.dtype(type).itemsize for name, type in NUMPY_TYPES.items()}
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


class BlockCode:
    """The source of one block.

    lines     statements
    values    register -> {dtype name: variable that holds the register's value in that dtype}
    reads     registers that are read before the block writes them
    writes    registers that the block writes
    result    variable of the predicate of a branch
    read_after, written_after  registers that the barrier at the block's end reads and writes
    """

    def __init__(self):
        self.lines: list[str] = []
        self.values: dict[str, dict[str, str]] = {}
        self.reads: set[str] = set()
        self.writes: set[str] = set()
        self.result: str | None = None
        self.read_after: set[str] = set()
        self.written_after: set[str] = set()


class Code:
    """What an emitter is given to write the source of one instruction.

    In the source a register's value is never changed in place: each write makes a new variable,
    and a `mov` only one more name.
    """

    def __init__(self, module: Module, registers: dict[str, str], symbols: dict[str, int],
                 parameters: dict[str, int]):
        self.module = module
        self.types = registers
        self.symbols = symbols  # address of each variable in its own state space
        self.parameters = parameters  # offset of each kernel parameter
        self.indices: dict[str, int] = {}  # of the registers, in order of appearance
        self.sites: list[Instruction] = []
        self.namespace = {
            **NUMPY_TYPES, "N": numerics, "np": np, "where": numerics.where,
            "SHARED_WINDOW": np.uint64(SHARED_WINDOW), "LOCAL_WINDOW": np.uint64(LOCAL_WINDOW),
        }
        self.block = BlockCode()
        self.instruction: Instruction | None = None
        self._constants: dict[tuple, str] = {}
        self._site_numbers: dict[int, int] = {}
        self._temporaries = 0

    # For the emitters

    @property
    def site(self) -> int:
        """Index of the instruction in the kernel's sites."""
        return self.site_of(self.instruction)

    def line(self, text: str) -> None:
        """Add one statement."""
        self.block.lines.append(text)

    def temporary(self) -> str:
        """A new variable name."""
        self._temporaries += 1
        return f"t{self._temporaries}"

    def constant(self, value: np.generic) -> str:
        """Name of a constant: a NumPy scalar that the generated module holds."""
        key = (value.dtype, value.tobytes())
        name = self._constants.get(key)
        if name is None:
            name = self._constants[key] = f"k{len(self._constants)}"
            self.namespace[name] = value
        return name

    def value(self, operand, type: str) -> str:
        """Expression of an operand with the dtype of a PTX type.

        A register that is wider than the type is truncated; a narrower one is an error.
        """
        match operand:
            case Register(name):
                return self.register(name, DTYPES[type])
            case Immediate():
                return self.constant(self.immediate(operand, type))
            case Negated(register):
                return f"(~{self.value(register, type)})"
            case Special(name):
                return self.special(name, type)
            case Symbol(name):
                if name not in self.symbols:
                    raise self.error(f"address of {name}")
                return self.constant(NUMPY_TYPES[DTYPES[type]](self.symbols[name]))
        raise self.error(f"operand {operand} as .{type}")

    def store(self, operand, expression: str, type: str) -> None:
        """Bind a destination to an expression whose dtype is that of a PTX type.

        A register that is wider than the type gets the sign- or zero-extended value.
        """
        if isinstance(operand, Sink):
            if not _IDENTIFIER.fullmatch(expression):
                self.line(expression)
            return
        if not isinstance(operand, Register):
            raise self.error(f"destination {operand}")
        name, dtype = operand.name, DTYPES[type]
        wanted = self.dtype_of(name)
        size = _SIZES[wanted]
        if _SIZES[dtype] > size or (dtype == "bool") != (wanted == "bool"):
            raise self.error(f".{type} result in register {name} of type .{self.types[name]}")
        if _SIZES[dtype] < size:
            if dtype[0] == "f":
                expression = f"({expression}).view(u{_SIZES[dtype]})"
                dtype = "u"
            dtype = f"{dtype[0]}{size}"
            expression = f"({expression}).astype({dtype})"
        if not _IDENTIFIER.fullmatch(expression):
            variable = self.temporary()
            self.line(f"{variable} = {expression}")
            expression = variable
        self.index_of(name)
        self.block.writes.add(name)
        self.block.values[name] = {dtype: expression}

    def address(self, operand: Address) -> str:
        """Expression of a uint64 address (uint32 where the base register is 32 bits wide)."""
        base, offset = operand.base, operand.offset
        if isinstance(base, Register):
            type = f"u{8 * _SIZES[self.dtype_of(base.name)]}"
            value = self.value(base, type)
            if not offset:
                return value
            return f"({value} + {self.value(Immediate(offset, 'int'), type)})"
        if isinstance(base, Symbol):
            if base.name not in self.symbols:
                raise self.error(f"address of {base.name}")
            offset += self.symbols[base.name]
        elif base is not None:
            raise self.error(f"address with base {base}")
        return self.value(Immediate(offset, "int"), "u64")

    def parameter_offset(self, operand: Address) -> int:
        """Byte offset of a kernel parameter's address in the parameter space."""
        if not isinstance(operand.base, Symbol) or operand.base.name not in self.parameters:
            raise self.error("parameter space access that is not to a named kernel parameter")
        return self.parameters[operand.base.name] + operand.offset

    # For the lowering

    def emit(self, instruction: Instruction) -> None:
        """Write the source of one instruction; errors get its place in the PTX text."""
        self.instruction = instruction
        match instruction.operands:
            # Inlining made an access to a call's parameter a move between registers.
            case Vector(), Vector() if instruction.opcode.startswith(("ld.param", "st.param")):
                self.move(*instruction.operands, instruction.opcode.rsplit(".", 1)[-1])
            case _:
                emitter_of(instruction)(self, instruction)

    def move(self, destinations: Vector, sources: Vector, type: str) -> None:
        for destination, source in zip(destinations.items, sources.items, strict=True):
            self.store(destination, self.value(source, type), type)

    def site_of(self, instruction: Instruction) -> int:
        number = self._site_numbers.setdefault(id(instruction), len(self.sites))
        if number == len(self.sites):
            self.sites.append(instruction)
        return number

    def index_of(self, name: str) -> int:
        return self.indices.setdefault(name, len(self.indices))

    def dtype_of(self, name: str) -> str:
        return REGISTER_DTYPES[self.types[name]]

    def register(self, name: str, dtype: str) -> str:
        """Variable of a register's value in a dtype."""
        values = self.block.values.get(name)
        if values is None:
            values = self.block.values[name] = {
                self.dtype_of(name): f"r{self.index_of(name)}"
            }
            self.block.reads.add(name)
        if dtype not in values:
            variable, expression = self.temporary(), self.conversion(name, values, dtype)
            self.line(f"{variable} = {expression}")
            values[dtype] = variable
        return values[dtype]

    def conversion(self, name: str, values: dict[str, str], dtype: str) -> str:
        have, variable = next(iter(values.items()))
        size = _SIZES[dtype]
        if _SIZES[have] < size or (dtype == "bool") != (have == "bool"):
            raise self.error(f"register {name} of type .{self.types[name]} used as {dtype}")
        if _SIZES[have] == size:
            return f"{variable}.view({dtype})"
        bits = self.register(name, f"u{_SIZES[have]}")
        return f"{bits}.astype(u{size})" + ("" if dtype[0] == "u" else f".view({dtype})")

    def immediate(self, operand: Immediate, type: str) -> np.generic:
        dtype = NUMPY_TYPES[DTYPES[type]]
        if type == "pred" and operand.kind == "int":
            return dtype(operand.value)
        size = TYPE_BYTES[type]
        floating = DTYPES[type][0] == "f"
        if operand.kind != type and (floating or operand.kind not in ("int", f"f{8 * size}")):
            raise self.error(f"{operand.kind} constant as .{type}")
        bits = operand.value & ((1 << 8 * size) - 1)
        return np.frombuffer(bits.to_bytes(size, "little"), dtype)[0]

    def special(self, name: str, type: str) -> str:
        known = SPECIALS.get(name)
        if known is None:
            raise self.error(f"register {name} is neither declared nor a known special register")
        if TYPE_BYTES[known] != TYPE_BYTES[type]:
            raise self.error(f"special register {name} as .{type}")
        variable = self.temporary()
        self.line(f'{variable} = S.special("{name}", lanes)')
        return variable if DTYPES[type] == DTYPES[known] else f"{variable}.view({DTYPES[type]})"

    def error(self, detail: str) -> VirtualGPUError:
        return VirtualGPUError("not supported", f"{self.instruction.opcode}: {detail}")
