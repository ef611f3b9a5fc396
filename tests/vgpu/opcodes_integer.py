"""Integer arithmetic, logic, shifts and bit-field opcodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .opcodes_registry import DTYPES, WIDTHS, bits, form, last_type, template
from .ptx import Immediate

if TYPE_CHECKING:
    from .lower import Code
    from .ptx import Instruction

INTEGERS = "{u16,s16,u32,s32,u64,s64}"
SIGNED = "{s16,s32,s64}"

# Wrap-around arithmetic is the same for both signs, so registers are used without a view.
template("{a} + {b}", f"add.{INTEGERS}", reads=bits, writes=bits)
template("{a} - {b}", f"sub.{INTEGERS}", reads=bits, writes=bits)
template("{a} * {b}", f"mul.lo.{INTEGERS}", reads=bits, writes=bits)
template("{a} * {b} + {c}", f"mad.lo.{INTEGERS}", reads=bits, writes=bits)
template("-{a}", f"neg.{SIGNED}", reads=bits, writes=bits)
template("np.abs({a})", f"abs.{SIGNED}")
template("np.minimum({a}, {b})", f"min.{INTEGERS}")
template("np.maximum({a}, {b})", f"max.{INTEGERS}")
template("N.saturate({a}.astype(i8) + {b}, {dtype})", "add.sat.s32")
template("N.saturate({a}.astype(i8) - {b}, {dtype})", "sub.sat.s32")
template("N.multiply_high({a}, {b})", f"mul.hi.{INTEGERS}")
template("N.multiply_high({a}, {b}) + {c}", f"mad.hi.{INTEGERS}")
template("N.divide({a}, {b})", f"div.{INTEGERS}")
template("N.remainder({a}, {b})", f"rem.{INTEGERS}")
template("{c} + (np.maximum({a}, {b}) - np.minimum({a}, {b}))", f"sad.{INTEGERS}")

template("{a} & {b}", "and.{pred,b16,b32,b64}")
template("{a} | {b}", "or.{pred,b16,b32,b64}")
template("{a} ^ {b}", "xor.{pred,b16,b32,b64}")
template("~{a}", "not.{pred,b16,b32,b64}")
template("({a} == 0).astype({dtype})", "cnot.{b16,b32,b64}")

template("N.funnel_left({a}, {b}, {c} & u4(31))", "shf.l.wrap.b32")
template("N.funnel_left({a}, {b}, np.minimum({c}, u4(32)))", "shf.l.clamp.b32")
template("N.funnel_right({a}, {b}, {c} & u4(31))", "shf.r.wrap.b32")
template("N.funnel_right({a}, {b}, np.minimum({c}, u4(32)))", "shf.r.clamp.b32")

template("np.bitwise_count({a}).astype(u4)", "popc.{b32,b64}", writes="u32")
template("N.leading_zeros({a})", "clz.{b32,b64}", writes="u32")
template("N.leading_bit({a})", "bfind.{u32,s32,u64,s64}", writes="u32")
template("N.leading_bit_shift({a})", "bfind.shiftamt.{u32,s32,u64,s64}", writes="u32")
template("N.reverse_bits({a})", "brev.{b32,b64}")
template("N.extract_field({a}, {b}, {c})", "bfe.{u32,s32,u64,s64}", reads=("", "u32", "u32"))
template("N.insert_field({a}, {b}, {c}, {d})", "bfi.{b32,b64}", reads=("", "", "u32", "u32"))

template("N.permute({a}, {b}, {c})", "prmt.b32")
for _mode in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16"):
    template(f"N.permute_mode({{a}}, {{b}}, {{c}}, {_mode!r})", f"prmt.b32.{_mode}", reads="b32",
             writes="b32")
for _first in ("u32", "s32"):
    for _second in ("u32", "s32"):
        template(f"N.dot_bytes({{a}}, {{b}}, {DTYPES[_first[0] + '8']}, "
                 f"{DTYPES[_second[0] + '8']}) + {{c}}", f"dp4a.{_first}.{_second}",
                 reads="b32", writes="b32")


@form("mul.wide.{u16,s16,u32,s32}", "mad.wide.{u16,s16,u32,s32}")
def multiply_wide(code: Code, instruction: Instruction) -> None:
    """The full product, twice as wide as the operands."""
    narrow = last_type(instruction.opcode)
    wide = f"{narrow[0]}{2 * WIDTHS[narrow]}"
    destination, a, b, *addend = instruction.operands
    product = f"{code.value(a, narrow)}.astype({DTYPES[wide]}) * {code.value(b, narrow)}"
    if addend:
        product += f" + {code.value(addend[0], wide)}"
    code.store(destination, product, wide)


@form("shl.{b16,b32,b64}", "shr.{b16,b32,b64,u16,u32,u64,s16,s32,s64}")
def shift(code: Code, instruction: Instruction) -> None:
    """Shifts; counts past the width shift everything out, which NumPy leaves undefined."""
    type_name = last_type(instruction.opcode)
    left = instruction.opcode.startswith("shl")
    destination, a, count = instruction.operands
    value = code.value(a, type_name)
    if isinstance(count, Immediate) and 0 <= count.value < WIDTHS[type_name]:
        expression = f"{value} {'<<' if left else '>>'} {code.value(count, type_name)}"
    else:
        function = "N.shift_left" if left else "N.shift_right"
        expression = f"{function}({value}, {code.value(count, 'u32')})"
    code.store(destination, expression, type_name)


@form("lop3.b32")
def any_logic(code: Code, instruction: Instruction) -> None:
    """Any function of three bits, as the union of its minterms (or the complement of that)."""
    destination, *sources, table = instruction.operands
    values = [code.temporary() for _ in sources]
    for name, source in zip(values, sources, strict=True):
        code.line(f"{name} = {code.value(source, 'b32')}")
    rows = [row for row in range(8) if table.value >> row & 1]
    complement = len(rows) > 4
    if complement:
        rows = [row for row in range(8) if row not in rows]
    terms = []
    for row in rows:
        factors = [name if row >> 2 - place & 1 else f"~{name}"
                   for place, name in enumerate(values)]
        terms.append(f"({' & '.join(factors)})")
    union = " | ".join(terms) or "u4(0)"
    code.store(destination, f"~({union})" if complement else union, "b32")


@form("add.cc.{u32,s32,u64,s64}", "addc{,.cc}.{u32,s32,u64,s64}",
      "sub.cc.{u32,s32,u64,s64}", "subc{,.cc}.{u32,s32,u64,s64}",
      "{mad,madc}.{lo,hi}.cc.{u32,s32,u64,s64}", "madc.{lo,hi}.{u32,s32,u64,s64}")
def with_carry(code: Code, instruction: Instruction) -> None:
    """Extended-precision arithmetic; the condition code is a variable of the block."""
    base, *options, type_name = instruction.opcode.split(".")
    unsigned = bits(type_name)
    destination, *sources = instruction.operands
    if base.startswith("mad"):
        left, right, addend = sources
        factor = unsigned if "lo" in options else type_name
        product = f"{code.value(left, factor)}, {code.value(right, factor)}"
        first = (f"np.multiply({product})" if "lo" in options
                 else f"N.multiply_high({product}).view({DTYPES[unsigned]})")
    else:
        first, addend = code.value(sources[0], unsigned), sources[1]
    a, b, total = code.temporary(), code.temporary(), code.temporary()
    code.line(f"{a} = {first}")
    code.line(f"{b} = {code.value(addend, unsigned)}")
    subtract = base.startswith("sub")
    code.line(f"{total} = {a} {'-' if subtract else '+'} {b}")
    carries = [f"({a} < {b})" if subtract else f"({total} < {a})"]
    if base in ("addc", "subc", "madc"):
        if not any(line.startswith("carry = ") for line in code.block.lines):
            raise code.error("the condition code was not set in this basic block")
        partial, total = total, code.temporary()
        code.line(f"{total} = {partial} {'-' if subtract else '+'} carry")
        carries.append(f"({partial} < {total})" if subtract else f"({total} < {partial})")
    if "cc" in options:
        code.line(f"carry = {' | '.join(carries)}")
    code.store(destination, total, unsigned)
