"""Every load, store and atomic form against plain Python on bytes."""

import random
import re
import struct
from fractions import Fraction

import numpy as np
import pytest
import reference_float as real
import vgpu
from reference_float import FORMATS
from reference_integer import number, width_of
from reference_kernels import HEADER
from reference_types import width
from vgpu.opcodes import FORMS

LANES = 8
CODES = {"b8": "B", "u8": "B", "s8": "b", "b16": "H", "u16": "H", "s16": "h", "b32": "I",
         "u32": "I", "s32": "i", "f32": "I", "b64": "Q", "u64": "Q", "s64": "q", "f64": "Q"}
REGISTERS = {"f32": "f", "f64": "d"}
DECLARATIONS = (".reg .b16 %h<8>; .reg .b32 %r<8>; .reg .b64 %x<8>, %slot, %out, %in, %offset, %a;"
                ".reg .f32 %f<8>; .reg .f64 %d<8>; .reg .b32 %lane, %s; .reg .pred %p;")
# The slot of each lane in every space, whose address is %slot; outputs are 8 words a lane.
BUFFERS = ".shared .align 16 .b8 shared_slots[{bytes}]; .local .align 16 .b8 local_slots[16];"
SLOTS = {
    "global": "mov.b64 %slot, %in;",
    "generic": "cvta.global.u64 %slot, %in;",
    "shared": "mov.u64 %slot, shared_slots; shl.b64 %offset, %offset, 4; "
              "add.u64 %slot, %slot, %offset;",
    "local": "mov.u64 %slot, local_slots;",
    "const": "mov.u64 %slot, constants; shl.b64 %offset, %offset, 4; "
             "add.u64 %slot, %slot, %offset;",
}


def space_of(form):
    return next((space for space in ("global", "shared", "local", "const", "param")
                 if f".{space}" in form), "generic")


def parts_of(form):
    """Number of elements and type of an access."""
    count = next((int(count) for count in re.findall(r"\.v([24])\.", form)), 1)
    return count, form.rsplit(".", 1)[-1]


def registers(count, kind, prefix=""):
    """Registers for the elements: bytes are in 32-bit ones."""
    letter = REGISTERS.get(kind) or {8: "r", 16: "h", 32: "r", 64: "x"}[width(kind)]
    return [f"%{letter}{i}" for i in range(count)]


def braces(names):
    return names[0] if len(names) == 1 else "{" + ", ".join(names) + "}"


def kernel(name, forms, statements, extra=""):
    """A kernel in which `statements(form)` are run with %slot and %out set up for each form."""
    lines = [f".visible .entry {name}(.param .u64 in, .param .u64 out{extra}) {{", DECLARATIONS,
             BUFFERS.format(bytes=16 * LANES), "mov.u32 %lane, %tid.x;",
             "ld.param.u64 %out, [out]; cvt.u64.u32 %offset, %lane; shl.b64 %x7, %offset, 6;",
             "add.u64 %out, %out, %x7;"]
    for place, form in enumerate(forms):
        lines += ["ld.param.u64 %in, [in]; cvt.u64.u32 %offset, %lane; shl.b64 %x7, %offset, 4;",
                  f"add.u64 %in, %in, %x7; add.u64 %in, %in, {16 * LANES * place};",
                  *statements(form), f"add.u64 %out, %out, {64 * LANES};"]
    return "\n".join([*lines, "ret; }\n"])


def load_statements(form):
    count, kind = parts_of(form)
    names = registers(count, kind)
    space = space_of(form)
    lines = [SLOTS[space]] if space != "param" else []
    if space in ("shared", "local"):
        lines += ["ld.global.v2.b64 {%x0, %x1}, [%in];",
                  f"st.{space}.v2.b64 [%slot], {{%x0, %x1}};"]
    address = "[block]" if space == "param" else "[%slot]"
    lines.append(f"{form} {braces(names)}, {address};")
    bits = max(width(kind), 32) if width(kind) == 8 else width(kind)
    return lines + [f"st.global.{'f' if kind in REGISTERS else 'b'}{bits} [%out+{8 * i}], {name};"
                    for i, name in enumerate(names)]


def store_statements(form):
    count, kind = parts_of(form)
    names = registers(count, kind)
    space = space_of(form)
    bits = width(kind)
    load = f"ld.global.{'f' if kind in REGISTERS else 'b'}{bits}"
    copy = "global" if space == "generic" else space
    zeros = f"mov.b64 %x6, 0; st.{copy}.v2.b64 [%slot], {{%x6, %x6}};"
    return [SLOTS[space], "" if copy == "global" else zeros,
            *(f"{load} {name}, [%in+{bits // 8 * i}];" for i, name in enumerate(names)),
            f"{form} [%slot], {braces(names)};",
            f"ld.{copy}.v2.b64 {{%x4, %x5}}, [%slot];", "st.global.v2.b64 [%out], {%x4, %x5};"]


LOADS = [form for form in FORMS if form.startswith("ld.")]
STORES = [form for form in FORMS if form.startswith("st.")]


def batches(forms, size=60):
    return [forms[start:start + size] for start in range(0, len(forms), size)]


def name_of(forms):
    return forms[0]


def random_bytes(forms):
    return random.Random(forms[0]).randbytes(16 * LANES * len(forms))


@pytest.mark.parametrize("forms", batches(LOADS), ids=name_of)
def test_loads(forms):
    data, outputs = random_bytes(forms), np.zeros((len(forms), LANES, 8), np.uint64)
    constants, block = data[:16 * LANES], data[:16]
    initial = ", ".join(map(str, constants))
    text = (HEADER + f".const .align 16 .b8 constants[{16 * LANES}] = {{{initial}}};\n"
            + kernel("loads", forms, load_statements, ", .param .align 16 .b8 block[16]"))
    vgpu.run_ptx(text, "loads", 1, LANES,
                 [np.frombuffer(data, np.uint8).copy(), outputs, np.void(block)])
    wrong = []
    for place, form in enumerate(forms):
        count, kind = parts_of(form)
        source = {"const": constants, "param": block * LANES}.get(
            space_of(form), data[16 * LANES * place:])
        mask = (1 << max(width(kind), 32 if width(kind) == 8 else 0)) - 1
        for lane in range(LANES):
            values = struct.unpack_from("<" + CODES[kind] * count, source, 16 * lane)
            found = outputs[place, lane, :count].tolist()
            if [value & mask for value in values] != found:
                wrong.append((form, lane, values, found))
    assert not wrong


@pytest.mark.parametrize("forms", batches(STORES), ids=name_of)
def test_stores(forms):
    data, outputs = random_bytes(forms), np.zeros((len(forms), LANES, 8), np.uint64)
    vgpu.run_ptx(HEADER + kernel("stores", forms, store_statements), "stores", 1, LANES,
                 [np.frombuffer(data, np.uint8).copy(), outputs])
    wrong = []
    for place, form in enumerate(forms):
        count, kind = parts_of(form)
        size = count * width(kind) // 8
        for lane in range(LANES):
            start = 16 * (LANES * place + lane)
            rest = data[start + size:start + 16] if space_of(form) in ("global", "generic") \
                else bytes(16 - size)
            if data[start:start + size] + rest != outputs[place, lane, :2].tobytes():
                wrong.append((form, lane))
    assert not wrong


def updated(operation, kind, old, *values):
    """The bits that an atomic leaves in memory."""
    if kind in FORMATS:
        numbers = (FORMATS[kind].decode(bits) for bits in (old, *values))
        return FORMATS[kind].encode(real.add(*numbers))
    bits = [number(value, kind) for value in (old, *values)]
    a, b = bits[:2]
    result = {
        "add": lambda: a + b, "min": lambda: min(a, b), "max": lambda: max(a, b),
        "inc": lambda: 0 if a >= b else a + 1, "dec": lambda: b if a == 0 or a > b else a - 1,
        "and": lambda: a & b, "or": lambda: a | b, "xor": lambda: a ^ b, "exch": lambda: b,
        "cas": lambda: bits[2] if a == b else a,
    }[operation]()
    return result & ((1 << width_of(kind)) - 1)


ATOMICS = [form for form in FORMS if form.startswith(("atom.", "red."))]


def atomic_statements(form):
    """All lanes update the first lane's slot, which is in global or in shared memory."""
    *_, operation, kind = form.split(".")
    space = space_of(form)
    names = registers(3 if operation == "cas" else 2, kind)
    bits, letter = width(kind), "f" if kind in REGISTERS else "b"
    address = {"global": "mov.b64 %slot, %a;", "generic": "cvta.global.u64 %slot, %a;",
               "shared": "mov.u64 %slot, shared_slots;"}[space]
    lines = ["shl.b64 %x7, %offset, 4; sub.u64 %a, %in, %x7;", address]
    lines += [f"ld.global.{letter}{bits} {name}, [%out+{8 * place}];"
              for place, name in enumerate(names[1:])]
    if space == "shared":
        lines += ["ld.global.b64 %x6, [%a]; bar.sync 0; setp.eq.u32 %p, %lane, 0;",
                  "@%p st.shared.b64 [%slot], %x6; bar.sync 0;"]
    arguments = ", ".join(names[1:])
    if form.startswith("atom"):
        lines += [f"{form} {names[0]}, [%slot], {arguments};",
                  f"st.global.{letter}{bits} [%out+16], {names[0]};"]
    else:
        lines.append(f"{form} [%slot], {arguments};")
    if space == "shared":
        lines += ["bar.sync 0; ld.shared.b64 %x6, [%slot]; st.global.b64 [%a], %x6;"]
    return lines


def atomic_values(form, generator):
    """Initial value, and for each lane two operands, such that every branch is taken."""
    kind = form.rsplit(".", 1)[-1]
    if kind in FORMATS:
        return [FORMATS[kind].encode(Fraction(generator.uniform(-4, 4)))
                for _ in range(2 * LANES + 1)]
    small = generator.random() < 0.5 or ".cas." in form
    bits = 2 if small else width_of(kind)
    return [generator.getrandbits(bits) for _ in range(2 * LANES + 1)]


@pytest.mark.parametrize("forms", batches(ATOMICS), ids=name_of)
def test_atomics(forms):
    generator = random.Random(forms[0])
    cells = np.zeros((len(forms), LANES, 2), np.uint64)
    lanes = np.zeros((len(forms), LANES, 8), np.uint64)
    chosen = [atomic_values(form, generator) for form in forms]
    for place, (initial, *values) in enumerate(chosen):
        cells[place, 0, 0] = initial
        lanes[place, :, :2] = np.array(values, np.uint64).reshape(LANES, 2)
    vgpu.run_ptx(HEADER + kernel("atomics", forms, atomic_statements), "atomics", 1, LANES,
                 [cells, lanes])
    wrong = []
    for place, (form, (state, *values)) in enumerate(zip(forms, chosen, strict=True)):
        *_, operation, kind = form.split(".")
        for lane in range(LANES):
            if form.startswith("atom") and int(lanes[place, lane, 2]) != state:
                wrong.append((form, lane, state, hex(lanes[place, lane, 2])))
            count = 2 if operation == "cas" else 1
            state = updated(operation, kind, state, *values[2 * lane:2 * lane + count])
        if int(cells[place, 0, 0]) != state:
            wrong.append((form, hex(state), hex(cells[place, 0, 0])))
    assert not wrong


TESTED = {*LOADS, *STORES, *ATOMICS}
