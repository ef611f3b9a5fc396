"""Warp-synchronous opcodes, tensor-core opcodes and cp.async, one instruction a kernel."""

import random
from fractions import Fraction

import numpy as np
import pytest
import vgpu
from reference_float import FORMATS
from reference_integer import number
from reference_kernels import HEADER
from reference_tensor import bits_of, fragments, product
from vgpu.opcodes import FORMS

DECLARATIONS = (".reg .b32 %r<40>; .reg .b64 %x<8>, %in, %out; .reg .pred %p<4>;"
                ".shared .align 16 .b8 tile[2048];")
START = ("mov.u32 %r0, %tid.x; ld.param.u64 %in, [in]; ld.param.u64 %out, [out];"
         "mul.wide.u32 %x0, %r0, 64; add.u64 %in, %in, %x0; add.u64 %out, %out, %x0;")
HALVES = "setp.lt.u32 %p3, %r0, 16; selp.b32 %r30, 0x0000FFFF, 0xFFFF0000, %p3;"
SPLIT = [0xFFFF if lane < 16 else 0xFFFF0000 for lane in range(32)]
FULL = [0xFFFFFFFF] * 32


def run(body, inputs):
    """Run statements on one warp, whose lanes have 8 words each of input; the outputs, likewise."""
    text = (HEADER + ".visible .entry k(.param .u64 in, .param .u64 out) {\n"
            + "\n".join([DECLARATIONS, START, body, "ret; }\n"]))
    words, outputs = np.zeros((2, 32, 8), np.uint64)
    for lane, values in enumerate(inputs):
        words[lane, :len(values)] = values
    vgpu.run_ptx(text, "k", 1, 32, [words, outputs])
    return outputs.tolist()


def column(outputs, place):
    return [row[place] for row in outputs]


def members(masks, lane):
    return [other for other in range(32) if masks[lane] >> other & 1]


# shfl

def shuffled(mode, values, steps, clamp):
    """Value and predicate of each lane, by the PTX ISA's pseudo-code."""
    results = []
    for lane in range(32):
        step, limit, segment = steps[lane] & 31, clamp & 31, clamp >> 8 & 31
        last = lane & segment | limit & ~segment
        source = {"up": lane - step, "down": lane + step, "bfly": lane ^ step,
                  "idx": lane & segment | step & ~segment}[mode]
        valid = source >= last if mode == "up" else source <= last
        results.append((values[source if valid else lane], int(valid)))
    return results


@pytest.mark.parametrize("clamp", [0x1F, 0, 0x1800, 0x181F, 0x1C07, 0x100F])
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffle(mode, clamp):
    generator = random.Random(mode)
    values = [generator.getrandbits(32) for _ in range(32)]
    steps = [generator.randrange(32) for _ in range(32)]
    outputs = run("ld.global.b32 %r1, [%in]; ld.global.b32 %r2, [%in+8];"
                  f"shfl.sync.{mode}.b32 %r3|%p1, %r1, %r2, {clamp}, 0xFFFFFFFF;"
                  f"shfl.sync.{mode}.b32 %r4, %r1, 3, {clamp}, 0xFFFFFFFF;"
                  "selp.b32 %r5, 1, 0, %p1; st.global.b32 [%out], %r3;"
                  "st.global.b32 [%out+8], %r5; st.global.b32 [%out+16], %r4;",
                  zip(values, steps, strict=True))
    expected = shuffled(mode, values, steps, clamp)
    assert list(zip(column(outputs, 0), column(outputs, 1), strict=True)) == expected
    assert column(outputs, 2) == [value for value, _ in
                                  shuffled(mode, values, [3] * 32, clamp)]


# vote, match, redux, activemask

@pytest.mark.parametrize("masks", [FULL, SPLIT], ids=["full", "halves"])
@pytest.mark.parametrize("pattern", [0, 0xFFFFFFFF, 0x0000FFFF, 0x12345678])
def test_vote(pattern, masks):
    body = "mov.b32 %r30, 0xFFFFFFFF;" if masks is FULL else HALVES
    body += "ld.global.b32 %r1, [%in]; setp.ne.u32 %p1, %r1, 0;"
    for place, mode in enumerate(("all", "any", "uni")):
        body += (f"vote.sync.{mode}.pred %p2, %p1, %r30; selp.b32 %r2, 1, 0, %p2;"
                 f"st.global.b32 [%out+{8 * place}], %r2;")
    body += ("vote.sync.ballot.b32 %r3, %p1, %r30; st.global.b32 [%out+24], %r3;"
             "vote.sync.ballot.b32 %r3, !%p1, %r30; st.global.b32 [%out+32], %r3;")
    outputs = run(body, [[pattern >> lane & 1] for lane in range(32)])
    for lane, row in enumerate(outputs):
        votes = [pattern >> other & 1 for other in members(masks, lane)]
        assert row[:5] == [all(votes), any(votes), len(set(votes)) == 1,
                           pattern & masks[lane], ~pattern & masks[lane]]


@pytest.mark.parametrize("masks", [FULL, SPLIT], ids=["full", "halves"])
@pytest.mark.parametrize("different", [1, 3, 32])
@pytest.mark.parametrize("bits", [32, 64])
def test_match(bits, different, masks):
    generator = random.Random(different)
    pool = [generator.getrandbits(bits) for _ in range(different)]
    values = [generator.choice(pool) for _ in range(32)]
    register = {32: "%r1", 64: "%x1"}[bits]
    body = "mov.b32 %r30, 0xFFFFFFFF;" if masks is FULL else HALVES
    outputs = run(body + f"ld.global.b{bits} {register}, [%in];"
                  f"match.any.sync.b{bits} %r2, {register}, %r30;"
                  f"match.all.sync.b{bits} %r3|%p1, {register}, %r30; selp.b32 %r4, 1, 0, %p1;"
                  f"match.all.sync.b{bits} %r5, {register}, %r30;"
                  "st.global.b32 [%out], %r2; st.global.b32 [%out+8], %r3;"
                  "st.global.b32 [%out+16], %r4; st.global.b32 [%out+24], %r5;",
                  [[value] for value in values])
    for lane, row in enumerate(outputs):
        same = sum(1 << other for other in members(masks, lane) if values[other] == values[lane])
        agreed = same == masks[lane]
        assert row[:4] == [same, masks[lane] * agreed, agreed, masks[lane] * agreed]


REDUCTIONS = [form for form in FORMS if form.startswith("redux.")]


@pytest.mark.parametrize("masks", [FULL, SPLIT], ids=["full", "halves"])
@pytest.mark.parametrize("form", REDUCTIONS)
def test_warp_reduction(form, masks):
    generator = random.Random(form)
    values = [generator.getrandbits(32) for _ in range(32)]
    *_, operation, kind = form.split(".")
    body = "mov.b32 %r30, 0xFFFFFFFF;" if masks is FULL else HALVES
    outputs = run(body + f"ld.global.b32 %r1, [%in]; {form} %r2, %r1, %r30;"
                  "st.global.b32 [%out], %r2;", [[value] for value in values])
    for lane in range(32):
        numbers = [number(values[other], kind) for other in members(masks, lane)]
        result = numbers[0]
        for value in numbers[1:]:
            result = {"add": result + value, "min": min(result, value), "max": max(result, value),
                      "and": result & value, "or": result | value, "xor": result ^ value}[operation]
        assert outputs[lane][0] == result & 0xFFFFFFFF


def test_active_mask_of_a_divergent_warp():
    outputs = run("setp.lt.u32 %p1, %r0, 10; @%p1 bra first; activemask.b32 %r1; bra end;"
                  "first: activemask.b32 %r1; end: st.global.b32 [%out], %r1;", [])
    assert column(outputs, 0) == [0x3FF] * 10 + [0xFFFFFC00] * 22


def test_warp_barrier_orders_shared_memory():
    outputs = run("mov.u32 %r1, tile; shl.b32 %r2, %r0, 2; add.u32 %r3, %r1, %r2;"
                  "st.shared.b32 [%r3], %r0; bar.warp.sync 0xFFFFFFFF; sub.u32 %r4, 124, %r2;"
                  "add.u32 %r4, %r1, %r4; ld.shared.b32 %r5, [%r4]; st.global.b32 [%out], %r5;", [])
    assert column(outputs, 0) == list(reversed(range(32)))


# mma

MATRIX_FORMS = [form for form in FORMS if form.startswith("mma.")]


def multiply(form, chosen):
    """Run an mma on matrices of numbers from `chosen`; (exact result, result) of each element."""
    parts = form.split(".")
    depth, kind, accumulator = int(parts[3].rpartition("k")[2]), parts[7], parts[6]
    a = [[bits_of(chosen(), kind) for _ in range(depth)] for _ in range(16)]
    b = [[bits_of(chosen(), kind) for _ in range(8)] for _ in range(depth)]
    c = [[bits_of(chosen(), accumulator) for _ in range(8)] for _ in range(16)]
    parts = [fragments("a", depth, kind, a), fragments("b", depth, kind, b),
             fragments("c", depth, accumulator, c)]
    registers = [[*left, *right, *addend] for left, right, addend in zip(*parts, strict=True)]
    counts = [len(part[0]) for part in parts]
    packed = [[row[i] | (row[i + 1] << 32 if i + 1 < len(row) else 0)
               for i in range(0, len(row), 2)] for row in registers]
    body = "".join(f"ld.global.b32 %r{i + 1}, [%in+{4 * i}];" for i in range(sum(counts)))
    names, start = [], 1
    for count in counts:
        names.append("{" + ", ".join(f"%r{start + i}" for i in range(count)) + "}")
        start += count
    results = [f"%r{20 + i}" for i in range(counts[2])]
    body += f"{form} {{{', '.join(results)}}}, {', '.join(names)};"
    body += "".join(f"st.global.b32 [%out+{8 * i}], {name};" for i, name in enumerate(results))
    outputs = run(body, packed)
    exact = product(a, b, c, (kind, accumulator))
    found = [row[:counts[2]] for row in outputs]
    return exact, found, depth, accumulator


@pytest.mark.parametrize("form", MATRIX_FORMS)
def test_matrix_product_of_integers_is_exact(form):
    generator = random.Random(form)
    exact, found, depth, accumulator = multiply(form, lambda: Fraction(generator.randint(-8, 8)))
    expected = [[bits_of(value, accumulator) for value in row] for row in exact]
    assert found == fragments("c", depth, accumulator, expected)


@pytest.mark.parametrize("form", MATRIX_FORMS)
def test_matrix_product_of_fractions(form):
    generator = random.Random(form)
    exact, found, depth, accumulator = multiply(
        form, lambda: Fraction(generator.randint(-127, 127), 128))
    rounded = [[FORMATS[accumulator].encode(value or 0.0) for value in row] for row in exact]
    unit = Fraction(1, 2**20) if accumulator == "f32" else Fraction(1, 2**7)
    for want, have in zip(fragments("c", depth, accumulator, rounded), found, strict=True):
        for left, right in zip(want, have, strict=True):
            halves = (0, 16) if accumulator == "f16" else (0,)
            mask = (1 << FORMATS[accumulator].width) - 1
            for shift in halves:
                x, y = (Fraction(FORMATS[accumulator].decode(bits >> shift & mask))
                        for bits in (left, right))
                assert abs(x - y) <= unit


# ldmatrix

LOADS = [form for form in FORMS if form.startswith("ldmatrix.")]


@pytest.mark.parametrize("form", LOADS)
def test_load_matrix(form):
    count = int(form.partition(".x")[2][0])
    generator = random.Random(form)
    data = [[generator.getrandbits(16) for _ in range(8)] for _ in range(32)]
    order = generator.sample(range(32), 32)  # lane i gives the address of row order[i]
    words = [[row[i] | row[i + 1] << 16 | row[i + 2] << 32 | row[i + 3] << 48 for i in (0, 4)]
             for row in data]
    names = [f"%r{10 + i}" for i in range(count)]
    outputs = run("mov.u32 %r1, tile; shl.b32 %r2, %r0, 4; add.u32 %r2, %r1, %r2;"
                  "ld.global.v2.b64 {%x1, %x2}, [%in]; st.shared.v2.b64 [%r2], {%x1, %x2};"
                  "bar.sync 0; ld.global.b32 %r3, [%in+16]; shl.b32 %r3, %r3, 4;"
                  f"add.u32 %r3, %r1, %r3; {form} {{{', '.join(names)}}}, [%r3];"
                  + "".join(f"st.global.b32 [%out+{8 * i}], {name};"
                            for i, name in enumerate(names)),
                  [[*words[lane], order[lane]] for lane in range(32)])
    for lane, row in enumerate(outputs):
        for matrix in range(count):
            rows = [data[order[8 * matrix + i]] for i in range(8)]
            if ".trans" in form:
                rows = list(zip(*rows, strict=True))
            low, high = rows[lane // 4][2 * (lane % 4):2 * (lane % 4) + 2]
            assert row[matrix] == low | high << 16


# cp.async

COPIES = [form for form in FORMS if form.startswith("cp.async.c") and "commit" not in form]


@pytest.mark.parametrize("form", COPIES)
def test_copy_async(form):
    generator = random.Random(form)
    words = [[generator.getrandbits(64) for _ in range(2)] for _ in range(32)]
    for size in (16,) if ".cg" in form else (4, 8, 16):
        for read in (None, 0, size // 2, size):
            extra = "" if read is None else f", {read}"
            outputs = run("mov.u32 %r1, tile; shl.b32 %r2, %r0, 4; add.u32 %r2, %r1, %r2;"
                          "mov.b64 %x1, -1; st.shared.v2.b64 [%r2], {%x1, %x1};"
                          f"{form} [%r2], [%in], {size}{extra};"
                          "cp.async.commit_group; cp.async.wait_group 0;"
                          "ld.shared.v2.b64 {%x1, %x2}, [%r2];"
                          "st.global.v2.b64 [%out], {%x1, %x2};", words)
            for lane in range(32):
                source = b"".join(word.to_bytes(8, "little") for word in words[lane])
                taken = size if read is None else read
                expected = source[:taken] + bytes(size - taken) + b"\xff" * (16 - size)
                found = b"".join(word.to_bytes(8, "little") for word in outputs[lane][:2])
                assert found == expected


def test_copy_wait_all_and_groups():
    outputs = run("mov.u32 %r1, tile; shl.b32 %r2, %r0, 4; add.u32 %r2, %r1, %r2;"
                  "cp.async.ca.shared.global [%r2], [%in], 8; cp.async.commit_group;"
                  "cp.async.ca.shared.global [%r2+8], [%in+8], 8; cp.async.commit_group;"
                  "cp.async.wait_group 1; ld.shared.b64 %x1, [%r2]; cp.async.wait_all;"
                  "ld.shared.b64 %x2, [%r2+8]; st.global.v2.b64 [%out], {%x1, %x2};",
                  [[lane, 100 + lane] for lane in range(32)])
    assert [row[:2] for row in outputs] == [[lane, 100 + lane] for lane in range(32)]


TESTED = {
    *(f"shfl.sync.{mode}.b32" for mode in ("up", "down", "bfly", "idx")),
    *(f"vote.sync.{mode}.pred" for mode in ("all", "any", "uni")), "vote.sync.ballot.b32",
    *(f"match.{mode}.sync.b{bits}" for mode in ("any", "all") for bits in (32, 64)),
    "activemask.b32", "bar.warp.sync", *REDUCTIONS, *MATRIX_FORMS, *LOADS, *COPIES,
    "cp.async.commit_group", "cp.async.wait_group", "cp.async.wait_all",
}
