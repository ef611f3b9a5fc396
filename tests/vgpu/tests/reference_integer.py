"""Integer opcodes, one value at a time: Python integers in, the bits of the result out."""

from __future__ import annotations

from collections.abc import Callable

NONE = 0xFFFFFFFF


def width_of(type_name: str) -> int:
    """Bits of an integer type."""
    return int(type_name[1:])


def signed(bits: int, width: int) -> int:
    """The number that bits stand for in two's complement."""
    bits &= (1 << width) - 1
    return bits - (1 << width) if bits >> (width - 1) else bits


def number(bits: int, type_name: str) -> int:
    """The number that bits stand for in a type."""
    width = width_of(type_name)
    return signed(bits, width) if type_name[0] == "s" else bits & ((1 << width) - 1)


def limits(type_name: str) -> tuple[int, int]:
    width = width_of(type_name)
    return (-1 << width - 1, (1 << width - 1) - 1) if type_name[0] == "s" else (0, (1 << width) - 1)


def clamp(value: int, type_name: str) -> int:
    lower, upper = limits(type_name)
    return max(lower, min(upper, value))


def quotient(a: int, b: int) -> int:
    """Toward zero; all ones for a division by zero."""
    if b == 0:
        return -1
    result = abs(a) // abs(b)
    return -result if (a < 0) != (b < 0) else result


def remainder(a: int, b: int) -> int:
    return -1 if b == 0 else a - quotient(a, b) * b


def arithmetic(base: str, options: list[str], type_name: str) -> Callable[..., int]:
    """The function of numbers that an integer arithmetic opcode computes, before wrapping."""
    width = width_of(type_name)
    if base in ("mul", "mad"):
        shift = width if "hi" in options else 0
        return lambda a, b, c=0: (a * b >> shift) + c
    if "sat" in options:
        operation = arithmetic(base, [], type_name)
        return lambda a, b: clamp(operation(a, b), type_name)
    return {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "div": quotient,
        "rem": remainder,
        "abs": abs,
        "neg": lambda a: -a,
        "min": min,
        "max": max,
        "sad": lambda a, b, c: c + abs(a - b),
    }[base]


def logic(base: str, width: int) -> Callable[..., int]:
    """Bitwise opcodes."""
    return {
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
        "not": lambda a: ~a,
        "cnot": lambda a: int(a == 0),
        "popc": lambda a: bin(a).count("1"),
        "clz": lambda a: width - a.bit_length(),
        "brev": lambda a: int(format(a, f"0{width}b")[::-1], 2),
    }[base]


def any_logic(table: int) -> Callable[[int, int, int], int]:
    """lop3: bit 4a + 2b + c of the table, for each of the 32 places."""
    def compute(a: int, b: int, c: int) -> int:
        result = 0
        for place in range(32):
            row = (a >> place & 1) * 4 + (b >> place & 1) * 2 + (c >> place & 1)
            result |= (table >> row & 1) << place
        return result
    return compute


def shift(base: str, type_name: str) -> Callable[[int, int], int]:
    width = width_of(type_name)
    if base == "shl":
        return lambda a, count: a << min(count, width)
    return lambda a, count: a >> min(count, width)


def funnel(direction: str, mode: str) -> Callable[[int, int, int], int]:
    def compute(low: int, high: int, count: int) -> int:
        count = count % 32 if mode == "wrap" else min(count, 32)
        whole = high << 32 | low
        return whole << count >> 32 if direction == "l" else whole >> count
    return compute


def find_bit(type_name: str, amount: bool) -> Callable[[int], int]:
    """bfind: the highest bit that is not a copy of the sign."""
    width = width_of(type_name)

    def compute(a: int) -> int:
        position = (~a if a < 0 else a).bit_length() - 1
        if position < 0:
            return NONE
        return width - 1 - position if amount else position
    return compute


def extract_field(type_name: str) -> Callable[[int, int, int], int]:
    """bfe, bit by bit as the PTX ISA describes it."""
    top = width_of(type_name) - 1

    def compute(a: int, position: int, length: int) -> int:
        position, length = position & 0xFF, length & 0xFF
        sign = 0
        if type_name[0] == "s" and length:
            sign = a >> min(position + length - 1, top) & 1
        result = 0
        for place in range(top + 1):
            inside = place < length and position + place <= top
            result |= (a >> position + place & 1 if inside else sign) << place
        return result
    return compute


def insert_field(width: int) -> Callable[[int, int, int, int], int]:
    """bfi, bit by bit as the PTX ISA describes it."""
    def compute(a: int, b: int, position: int, length: int) -> int:
        position, length = position & 0xFF, length & 0xFF
        for place in range(length):
            if position + place < width:
                bit = 1 << position + place
                b = b & ~bit | (bit if a >> place & 1 else 0)
        return b
    return compute


PATTERNS = {  # bytes of the result, the highest first, by the low two bits of the selector
    "f4e": ("3210", "4321", "5432", "6543"),
    "b4e": ("5670", "6701", "7012", "0123"),
    "rc8": ("0000", "1111", "2222", "3333"),
    "ecl": ("3210", "3211", "3222", "3333"),
    "ecr": ("0000", "1110", "2210", "3210"),
    "rc16": ("1010", "3232", "1010", "3232"),
}


def permute(mode: str | None) -> Callable[[int, int, int], int]:
    """prmt."""
    def compute(a: int, b: int, selector: int) -> int:
        source = (b << 32 | a).to_bytes(8, "little")
        if mode:
            return int.from_bytes(bytes(source[int(c)] for c in PATTERNS[mode][selector & 3]),
                                  "big")
        result = 0
        for place in range(4):
            nibble = selector >> 4 * place & 0xF
            byte = source[nibble & 7]
            if nibble & 8:
                byte = 0xFF if byte & 0x80 else 0
            result |= byte << 8 * place
        return result
    return compute


def dot_bytes(type_a: str, type_b: str) -> Callable[[int, int, int], int]:
    """dp4a."""
    def compute(a: int, b: int, c: int) -> int:
        return c + sum(number(a >> 8 * i, type_a[0] + "8") * number(b >> 8 * i, type_b[0] + "8")
                       for i in range(4))
    return compute
