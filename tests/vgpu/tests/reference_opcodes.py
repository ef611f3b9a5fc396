"""What each arithmetic, logic, comparison, selection and conversion form must compute.

`reference(form)` is written from the PTX ISA with Python integers and fractions, without NumPy and
without the virtual GPU's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import reference_float as real
import reference_integer as integer
from reference_approximate import approximate
from reference_float import FORMATS, Number, operand
from reference_types import Reference, packed, width

INTEGERS = {f"{kind}{width}" for kind in "usb" for width in (8, 16, 32, 64)}
COMPARISONS = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "lo": lambda a, b: a < b, "ls": lambda a, b: a <= b,
    "hi": lambda a, b: a > b, "hs": lambda a, b: a >= b,
}
COMBINERS = {"and": lambda a, b: a and b, "or": lambda a, b: a or b, "xor": lambda a, b: a != b}
MODES = ("rn", "rz", "rm", "rp")


def reference(form: str, immediate: int | None = None) -> Reference:
    """The reference of a form; KeyError for one that has none. `immediate`: the table of lop3."""
    base, *options = form.split(".")
    if base in ("setp", "set", "selp", "slct", "testp"):
        return {"setp": set_predicate, "set": set_value, "selp": select, "slct": select_by_sign,
                "testp": test_property}[base](options)
    if base in ("mov", "cvt"):
        return {"mov": move, "cvt": convert}[base](options)
    if "approx" in options or "full" in options:
        return approximate(base, options)
    if base in BITWISE:
        return BITWISE[base](base, options, immediate)
    if options[-1] in INTEGERS:
        return integer_arithmetic(base, options)
    return real_arithmetic(base, options)


# Integers

def integer_function(sources: tuple, result: str, compute: Callable) -> Reference:
    """Reference of a function of numbers, whose result is wrapped to its type."""
    mask = (1 << integer.width_of(result)) - 1
    types = ["u32" if source == "count" else source for source in sources]

    def of_bits(*bits: int) -> tuple:
        values = (integer.number(value, kind) for value, kind in zip(bits, types, strict=True))
        return (compute(*values) & mask,)
    return Reference(sources, (result,), of_bits)


def integer_arithmetic(base: str, options: list[str]) -> Reference:
    kind = options[-1]
    compute = integer.arithmetic(base, options, kind)
    count = 1 if base in ("abs", "neg") else 3 if base in ("mad", "sad") else 2
    if "wide" in options:
        wide = f"{kind[0]}{2 * integer.width_of(kind)}"
        return integer_function((kind, kind, wide)[:count], wide, compute)
    return integer_function((kind,) * count, kind, compute)


def bitwise(base: str, options: list[str], immediate: int | None) -> Reference:
    kind = options[-1]
    count = 2 if base in ("and", "or", "xor") else 1
    if kind == "pred":
        compute = integer.logic(base, 1)
        return Reference(("pred",) * count, ("pred",), lambda *bits: (compute(*bits) & 1,))
    result = "u32" if base in ("popc", "clz") else kind
    return integer_function((kind,) * count, result, integer.logic(base, integer.width_of(kind)))


BITWISE = {
    **dict.fromkeys(("and", "or", "xor", "not", "cnot", "popc", "clz", "brev"), bitwise),
    **dict.fromkeys(("shl", "shr"), lambda base, options, _: integer_function(
        (options[0], "count"), options[0], integer.shift(base, options[0]))),
    "shf": lambda _, options, __: integer_function(
        ("b32", "b32", "count"), "b32", integer.funnel(options[0], options[1])),
    "bfind": lambda _, options, __: integer_function(
        (options[-1],), "u32", integer.find_bit(options[-1], "shiftamt" in options)),
    "bfe": lambda _, options, __: integer_function(
        (options[0], "count", "count"), options[0], integer.extract_field(options[0])),
    "bfi": lambda _, options, __: integer_function(
        (options[0], options[0], "count", "count"), options[0],
        integer.insert_field(integer.width_of(options[0]))),
    "prmt": lambda _, options, __: integer_function(
        ("b32",) * 3, "b32", integer.permute(options[1] if len(options) > 1 else None)),
    "lop3": lambda _, __, table: integer_function(("b32",) * 3, "b32", integer.any_logic(table)),
    "dp4a": lambda _, options, __: integer_function(
        ("b32",) * 3, "b32", integer.dot_bytes(*options)),
}


# Comparison and selection

def compare(name: str, kind: str, flush: bool) -> Callable[[int, int], bool]:
    """The comparison of two bit patterns."""
    if kind in INTEGERS:
        test = COMPARISONS[name]
        return lambda a, b: test(integer.number(a, kind), integer.number(b, kind))

    def test_numbers(a: int, b: int) -> bool:
        x, y = (operand(value, kind, flush) for value in (a, b))
        unordered = real.is_nan(x) or real.is_nan(y)
        if name in ("num", "nan"):
            return unordered == (name == "nan")
        if unordered:
            return name not in COMPARISONS
        return COMPARISONS[name if name in COMPARISONS else name[:-1]](x, y)
    return test_numbers


def set_predicate(options: list[str]) -> Reference:
    kind = options[-1]
    test = compare(options[0], kind, "ftz" in options)
    combine = COMBINERS.get(options[1])
    if kind in ("f16", "bf16"):  # has no second destination
        return Reference((kind, kind), ("pred",), lambda a, b: (int(test(a, b)),))
    if combine is None:
        def compute(a: int, b: int) -> tuple:
            return (int(test(a, b)), int(not test(a, b)))
        return Reference((kind, kind), ("pred", "pred"), compute)

    def combined(a: int, b: int, c: int) -> tuple:
        return (int(combine(test(a, b), bool(c))), int(combine(not test(a, b), bool(c))))
    return Reference((kind, kind, "pred"), ("pred", "pred"), combined)


def set_value(options: list[str]) -> Reference:
    result, kind = options[-2:]
    test = compare(options[0], kind, "ftz" in options)
    true = FORMATS["f32"].encode(Fraction(1)) if result == "f32" else integer.NONE
    return Reference((kind, kind), (result,), lambda a, b: (true if test(a, b) else 0,))


def select(options: list[str]) -> Reference:
    kind = options[0]
    return Reference((kind, kind, "pred"), (f"b{width(kind)}",), lambda a, b, c: (a if c else b,))


def select_by_sign(options: list[str]) -> Reference:
    kind, sign = options[-2:]

    def compute(a: int, b: int, c: int) -> tuple:
        value = integer.number(c, sign) if sign == "s32" else operand(c, sign, "ftz" in options)
        return (a if not real.is_nan(value) and value >= 0 else b,)
    return Reference((kind, kind, sign), (f"b{width(kind)}",), compute)


def test_property(options: list[str]) -> Reference:
    name, kind = options
    smallest = FORMATS[kind].smallest_normal

    def compute(bits: int) -> tuple:
        value = FORMATS[kind].decode(bits)
        finite, nan = real.is_finite(value), real.is_nan(value)
        return (int({
            "finite": finite, "infinite": real.is_infinite(value), "number": not nan,
            "notanumber": nan, "normal": finite and value != 0 and abs(value) >= smallest,
            "subnormal": finite and value != 0 and abs(value) < smallest,
        }[name]),)
    return Reference((kind,), ("pred",), compute)


# Conversion

def move(options: list[str]) -> Reference:
    kind = "pred" if options == ["pred"] else f"b{width(options[0])}"
    return Reference((kind,), (kind,), lambda bits: (bits,))


def convert(options: list[str]) -> Reference:
    target, source = options[-2:]
    flags = set(options[:-2])
    mode = next((option for option in options if option in ("rn", "rna", "rz", "rm", "rp")), "rn")
    whole = next((option[:-1] for option in options if option in ("rni", "rzi", "rmi", "rpi")), "")
    if target in INTEGERS and source in INTEGERS:
        return integer_function((source,), target, lambda a: integer.clamp(a, target)
                                if "sat" in flags else a)
    if target in ("bf16x2", "f16x2"):
        half = convert([*options[:-2], target[:-2], source]).compute
        return Reference((source, source), (target,),
                         lambda a, b: (half(a)[0] << 16 | half(b)[0],))

    def compute(bits: int) -> tuple:
        if source in INTEGERS:
            value = integer.number(bits, source)
            return (FORMATS[target].encode(Fraction(value) if value else 0.0, mode),)
        value = operand(bits, source, "ftz" in flags and source == "f32")
        if target in INTEGERS:
            return (to_integer(value, target, whole),)
        if whole:
            value = real.round_integral(value, whole)
        value = FORMATS[target].round(value, mode)
        if "ftz" in flags and target == "f32":
            value = FORMATS[target].flush(value)
        if "sat" in flags:
            value = real.saturate(value)
        if "relu" in flags and not real.is_nan(value):
            value = real.maximum(value, 0.0)
        return (FORMATS[target].encode(value) << (13 if target == "tf32" else 0),)
    return Reference((source,), ("f32" if target == "tf32" else target,), compute)


def to_integer(value: Number, kind: str, mode: str) -> int:
    """Bits of a number rounded to an integer type: saturates, NaN gives 0."""
    lower, upper = integer.limits(kind)
    if real.is_nan(value):
        result = 0
    elif real.is_infinite(value):
        result = upper if value > 0 else lower
    else:
        result = integer.clamp(int(real.round_integral(value, mode)), kind)
    return result & ((1 << integer.width_of(kind)) - 1)


# Floating-point arithmetic

def real_function(base: str, options: list[str], mode: str) -> Callable[..., Number]:
    """The exact result of an opcode for numbers."""
    if base in ("min", "max"):
        choose = real.minimum if base == "min" else real.maximum
        if "NaN" not in options:
            return choose
        return lambda x, y: real.NAN if real.is_nan(x) or real.is_nan(y) else choose(x, y)
    return {
        "add": lambda x, y: real.add(x, y, mode),
        "sub": lambda x, y: real.add(x, -y, mode),
        "mul": real.multiply,
        "fma": lambda x, y, z: real.add(real.multiply(x, y), z, mode),
        "mad": lambda x, y, z: real.add(real.multiply(x, y), z, mode),
        "div": real.divide,
        "rcp": lambda x: real.divide(Fraction(1), x),
        "sqrt": real.square_root,
        "neg": lambda x: -x,
        "abs": abs,
        "copysign": lambda x, y: -abs(y) if real.is_negative(x) else abs(y),
    }[base]


def real_arithmetic(base: str, options: list[str]) -> Reference:
    kind = options[-1]
    if kind.endswith("x2"):
        return packed(real_arithmetic(base, [*options[:-1], kind[:-2]]), kind)
    mode = next((option for option in options if option in MODES), "rn")
    function = real_function(base, options, mode)
    flush = "ftz" in options

    def compute(*bits: int) -> tuple:
        value = function(*(operand(value, kind, flush) for value in bits))
        value = FORMATS[kind].round(value, mode)
        if flush:
            value = FORMATS[kind].flush(value)
        if "sat" in options:
            value = real.saturate(value)
        if "relu" in options and not real.is_nan(value):
            value = real.maximum(value, 0.0)
        return (FORMATS[kind].encode(value),)
    count = {"neg": 1, "abs": 1, "sqrt": 1, "rcp": 1, "fma": 3, "mad": 3}.get(base, 2)
    return Reference((kind,) * count, (kind,), compute)
