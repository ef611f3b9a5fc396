"""Control flow, barriers, fences, addresses and carry chains; and that every form has a test."""

import random

import numpy as np
import pytest
import test_vgpu_opcodes
import test_vgpu_opcodes_memory
import test_vgpu_opcodes_warp
import vgpu
from reference_kernels import HEADER
from vgpu.opcodes import FORMS, KINDS, MASKS, emitter_of
from vgpu.opcodes_registry import expand, form
from vgpu.ptx import Instruction

DECLARATIONS = (".reg .b32 %r<20>; .reg .b64 %x<20>, %in, %out; .reg .pred %p<4>;"
                ".shared .align 8 .b8 tile[64]; .local .align 8 .b8 stack[16];")
START = ("mov.u32 %r0, %tid.x; ld.param.u64 %in, [in]; ld.param.u64 %out, [out];"
         "mul.wide.u32 %x0, %r0, 64; add.u64 %in, %in, %x0; add.u64 %out, %out, %x0;")


def run(body, lanes=64, functions="", inputs=()):
    """Run statements on a CTA, whose threads have 8 words each of input; the outputs, likewise."""
    text = (HEADER + functions + ".visible .entry k(.param .u64 in, .param .u64 out) {\n"
            + "\n".join([DECLARATIONS, START, body, "ret; }\n"]))
    words, outputs = np.zeros((2, lanes, 8), np.uint64)
    for lane, values in enumerate(inputs):
        words[lane, :len(values)] = values
    vgpu.run_ptx(text, "k", 1, lanes, [words, outputs])
    return outputs.tolist()


# Extended-precision integers: carry and borrow

CHAINS = [form for form in FORMS
          if form.split(".")[0] in ("addc", "subc", "madc") or ".cc." in form]


def numbers(count, bits, generator):
    special = [0, 1, (1 << bits) - 1, 1 << bits - 1]
    return [generator.choice([generator.choice(special), generator.getrandbits(bits)])
            for _ in range(count)]


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("sign", ["u", "s"])
@pytest.mark.parametrize("base", ["add", "sub"])
@pytest.mark.parametrize("lanes", [64, 1])
def test_carry_chain(base, sign, bits, lanes):
    """Three words: sets the carry, passes it on, takes it."""
    generator = random.Random(base + sign)
    inputs = [numbers(6, bits, generator) for _ in range(lanes)]
    letter, kind = {32: "r", 64: "x"}[bits], f"{sign}{bits}"
    load = "".join(f"ld.global.b{bits} %{letter}{i + 1}, [%in+{8 * i}];" for i in range(6))
    names = [f"%{letter}{i + 1}" for i in range(6)]
    body = (f"{base}.cc.{kind} {names[0]}, {names[0]}, {names[3]};"
            f"{base}c.cc.{kind} {names[1]}, {names[1]}, {names[4]};"
            f"{base}c.{kind} {names[2]}, {names[2]}, {names[5]};")
    store = "".join(f"st.global.b{bits} [%out+{8 * i}], {names[i]};" for i in range(3))
    outputs = run(load + body + store, lanes, inputs=inputs)
    for row, values in zip(outputs, inputs, strict=True):
        left, right = (sum(word << bits * i for i, word in enumerate(part))
                       for part in (values[:3], values[3:]))
        exact = left + right if base == "add" else left - right
        found = sum(word << bits * i for i, word in enumerate(row[:3]))
        assert found == exact % (1 << 3 * bits)


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("sign", ["u", "s"])
@pytest.mark.parametrize("base", ["mad.lo", "mad.hi", "madc.lo", "madc.hi"])
def test_multiply_with_carry(base, sign, bits):
    """The form with .cc, and its carry in the next addition; madc also without .cc."""
    generator = random.Random(base + sign)
    inputs = [numbers(5, bits, generator) for _ in range(64)]
    letter, kind = {32: "r", 64: "x"}[bits], f"{sign}{bits}"
    load = "".join(f"ld.global.b{bits} %{letter}{i + 1}, [%in+{8 * i}];" for i in range(5))
    a, b, c, d, e, result, carry, plain, zero = (f"%{letter}{i + 1}" for i in range(9))
    carry_in = base.startswith("madc")
    body = f"mov.b{bits} {zero}, 0;" + (f"add.cc.{kind} {plain}, {d}, {e};" if carry_in else "")
    body += f"{base}.cc.{kind} {result}, {a}, {b}, {c}; addc.{kind} {carry}, {zero}, {zero};"
    if carry_in:
        body += f"add.cc.{kind} {plain}, {d}, {e}; {base}.{kind} {plain}, {a}, {b}, {c};"
    store = "".join(f"st.global.b{bits} [%out+{8 * i}], {name};"
                    for i, name in enumerate((result, carry, plain)[:2 + carry_in]))
    outputs = run(load + body + store, inputs=inputs)
    modulus = 1 << bits
    for row, (x, y, z, v, w) in zip(outputs, inputs, strict=True):
        if sign == "s":
            x, y = (value - modulus if value >> bits - 1 else value for value in (x, y))
        part = x * y % modulus if "lo" in base else (x * y >> bits) % modulus
        total = part + z + (carry_in and v + w >= modulus)
        assert row[:2] == [total % modulus, total // modulus]
        if carry_in:
            assert row[2] == total % modulus


# Control flow

def test_branches_calls_and_exits():
    functions = """
.func (.param .b32 result) twice(.param .b32 value) {
    .reg .b32 %r<3>; ld.param.b32 %r1, [value]; add.u32 %r2, %r1, %r1;
    st.param.b32 [result], %r2; ret.uni; }
"""
    call = ("{{ .param .b32 arg; .param .b32 back; st.param.b32 [arg], {0};"
            "{1} (back), twice, (arg); ld.param.b32 {0}, [back]; }}")
    outputs = run(
        "mov.b32 %r1, %r0; setp.lt.u32 %p1, %r0, 40; @!%p1 bra far; " + call.format("%r1", "call")
        + "bra.uni near; far: exit; near:" + call.format("%r1", "call.uni")
        + "st.global.b32 [%out], %r1;", functions=functions)
    assert [row[0] for row in outputs] == [4 * lane if lane < 40 else 0 for lane in range(64)]


@pytest.mark.parametrize("opcode", ["trap", "brkpt"])
def test_trap_is_an_error(opcode):
    with pytest.raises(vgpu.VirtualGPUError, match="trap"):
        run(f"setp.eq.u32 %p1, %r0, 7; @%p1 {opcode};")


# Barriers

SYNCS = [form for form in FORMS if KINDS[form] == "barrier" and ".red." not in form]
REDUCTIONS = [form for form in FORMS if KINDS[form] == "barrier" and ".red." in form]


@pytest.mark.parametrize("form", SYNCS)
def test_barrier_orders_shared_memory(form):
    outputs = run("setp.eq.u32 %p1, %r0, 5; @%p1 st.shared.b32 [tile], %r0;"
                  f"{form} 0; ld.shared.b32 %r1, [tile]; st.global.b32 [%out], %r1;")
    assert [row[0] for row in outputs] == [5] * 64


@pytest.mark.parametrize("pattern", [0, 1, 2**64 - 1, 0x123456789])
@pytest.mark.parametrize("form", REDUCTIONS)
def test_barrier_reduction(form, pattern):
    popc = ".popc." in form
    target = "%r2" if popc else "%p2"
    outputs = run(f"ld.global.b32 %r1, [%in]; setp.ne.u32 %p1, %r1, 0; {form} {target}, 0, %p1;"
                  + ("" if popc else "selp.b32 %r2, 1, 0, %p2;") + "st.global.b32 [%out], %r2;",
                  inputs=[[pattern >> lane & 1] for lane in range(64)])
    votes = [pattern >> lane & 1 for lane in range(64)]
    expected = sum(votes) if popc else all(votes) if ".and." in form else any(votes)
    assert [row[0] for row in outputs] == [expected] * 64


# Opcodes without a result

SILENT = [form for form in FORMS if form.split(".")[0] in ("membar", "fence", "griddepcontrol")]
PREFETCHES = [form for form in FORMS if form.startswith("prefetch")]


def test_fences_and_hints_change_nothing():
    outputs = run(
        "mov.b32 %r1, 3;" + "".join(f"{form};" for form in SILENT)
        + "nanosleep.u32 20; nanosleep.u32 %r1; mov.u64 %x1, stack; cvta.local.u64 %x2, %x1;"
        + "".join(f"{form} [{'%x1' if '.local' in form else '%in'}];" for form in PREFETCHES)
        + "st.global.b32 [%out], %r1;")
    assert [row[0] for row in outputs] == [3] * 64


# Addresses

SPACES = {"global": "mov.b64 %x1, %in;", "shared": "mov.u64 %x1, tile;",
          "shared::cta": "mov.u64 %x1, tile;", "local": "mov.u64 %x1, stack;",
          "const": "mov.u64 %x1, constant;"}


@pytest.mark.parametrize("space", SPACES)
def test_address_conversion(space):
    """A generic address reaches the same memory, and converts back to the address it was."""
    plain = "shared" if space == "shared::cta" else space
    write = "" if space == "const" else f"st.{plain}.b32 [%x1], %r1;"
    tests = "".join(
        f"isspacep.{other} %p1, %x2; selp.b32 %r3, 1, 0, %p1;"
        f"st.global.b32 [%out+{24 + 8 * i}], %r3;"
        for i, other in enumerate(("global", "shared", "shared::cta", "local")))
    outputs = run(SPACES[space] + f"mov.b32 %r1, 77; {write} cvta.{space}.u64 %x2, %x1;"
                  f"ld.b32 %r2, [%x2]; st.global.b32 [%out], %r2; cvta.to.{space}.u64 %x3, %x2;"
                  "sub.u64 %x4, %x3, %x1; st.global.b64 [%out+8], %x4;" + tests, lanes=1,
                  functions=".const .align 4 .b32 constant = 77;\n")
    inside = {"shared::cta": "shared", "const": "global"}.get(space, space)
    assert outputs[0][:7] == [77, 0, 0, *(
        int(inside == other) for other in ("global", "shared", "shared", "local"))]


# Moving parts of registers

def test_pack_and_unpack():
    outputs = run(
        ".reg .b16 %h<8>; ld.global.b64 %x1, [%in]; mov.b64 {%r1, %r2}, %x1;"
        "mov.b64 %x2, {%r2, %r1}; mov.b32 {%h1, %h2}, %r1; mov.b32 %r3, {%h2, %h1};"
        "mov.b64 {%h1, %h2, %h3, %h4}, %x1; mov.b64 %x3, {%h4, %h3, %h2, %h1};"
        "mov.b64 {_, %r4}, %x1; st.global.b64 [%out], %x2; st.global.b32 [%out+8], %r3;"
        "st.global.b64 [%out+16], %x3; st.global.b32 [%out+24], %r4;",
        lanes=1, inputs=[[0x1122334455667788]])
    assert outputs[0][:4] == [0x5566778811223344, 0x77885566, 0x7788556633441122, 0x11223344]


# The table

CONTROL = ["bra", "bra.uni", "ret", "ret.uni", "exit", "call", "call.uni", "trap", "brkpt",
           "nanosleep.u32"]
ADDRESSES = [form for form in FORMS if form.split(".")[0] in ("cvta", "isspacep")]
TESTED = {*CHAINS, *CONTROL, *SYNCS, *REDUCTIONS, *SILENT, *PREFETCHES, *ADDRESSES}


def test_every_form_has_a_test():
    tested = TESTED.union(test_vgpu_opcodes.TESTED, ["lop3.b32"], test_vgpu_opcodes_memory.TESTED,
                          test_vgpu_opcodes_warp.TESTED)
    assert set(FORMS) == tested


def test_every_form_has_a_kind():
    assert KINDS.keys() == FORMS.keys()
    assert set(KINDS.values()) == {"plain", "warp", "barrier", "branch", "exit"}
    assert MASKS.keys() == {name for name, kind in KINDS.items() if kind == "warp"}


def test_unknown_form_names_the_nearest_one():
    instruction = Instruction("add.saturated.s32", (), None, 12, None)
    with pytest.raises(vgpu.UnknownOpcode, match=r"add\.saturated\.s32.*add\.sat\.s32") as caught:
        emitter_of(instruction)
    assert caught.value.ptx_line == 12


def test_patterns():
    assert expand("a{,.b}.{c,d}") == ["a.c", "a.d", "a.b.c", "a.b.d"]
    with pytest.raises(ValueError, match="twice"):
        form("add.s32")(lambda code, instruction: None)
