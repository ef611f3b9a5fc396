"""mma, ldmatrix and cp.async, and what counting reports."""

import numpy as np
import pytest
from vgpu import tensor
from vgpu_kernels import Machine, failure


class Warps:
    """Stands in for a chunk of whole warps."""

    def __init__(self, warps: int):
        self.lane_count = 32 * warps

    def active_count(self, lanes) -> int:
        return self.lane_count


def bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def packed(elements: np.ndarray) -> np.ndarray:
    """Pairs of 16-bit elements as uint32, the first in the low half."""
    return np.ascontiguousarray(elements).view(np.uint32)[..., 0]


LANE = np.arange(32)
GROUP, QUAD = LANE // 4, LANE % 4


def halves(matrix: np.ndarray, row, column) -> np.ndarray:
    """Registers of two neighbouring columns of (warps, rows, columns) bits."""
    pair = np.stack([matrix[:, row, column], matrix[:, row, column + 1]], axis=-1)
    return packed(pair).reshape(-1)


@pytest.mark.parametrize("depth", [8, 16])
@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_mma_of_16_bit_elements(kind, depth):
    random = np.random.default_rng(depth)
    a, b = random.standard_normal((3, 16, depth)), random.standard_normal((3, depth, 8))
    c = random.standard_normal((3, 16, 8)).astype(np.float32)
    if kind == "bf16":
        a_bits, b_bits = bf16(a), bf16(b)
        a, b = from_bf16(a_bits).astype(float), from_bf16(b_bits).astype(float)
    else:
        a_bits, b_bits = (x.astype(np.float16).view(np.uint16) for x in (a, b))
        a, b = (x.astype(np.float16).astype(float) for x in (a, b))
    left = tuple(halves(a_bits, GROUP + 8 * half, QUAD * 2 + 8 * column)
                 for column in range(depth // 8) for half in range(2))
    turned = b_bits.swapaxes(1, 2)
    right = tuple(halves(turned, GROUP, QUAD * 2 + 8 * half) for half in range(depth // 8))
    sums = tuple(c[:, GROUP + 8 * half, QUAD * 2 + column].reshape(-1)
                 for half in range(2) for column in range(2))
    result = tensor.mma(Warps(3), f"m16n8k{depth}.f32.{kind}.{kind}.f32", left, right, sums, None,
                        0)
    expected = (a @ b + c).astype(np.float32)
    for position, found in enumerate(result):
        half, column = divmod(position, 2)
        assert found.dtype == np.float32
        assert (found.reshape(3, 32) == expected[:, GROUP + 8 * half, QUAD * 2 + column]).all()


def test_mma_with_half_precision_sums():
    random = np.random.default_rng(0)
    a, b, c = (random.standard_normal(shape).astype(np.float16)
               for shape in ((2, 16, 8), (2, 8, 8), (2, 16, 8)))
    left = tuple(halves(a.view(np.uint16), GROUP + 8 * half, QUAD * 2) for half in range(2))
    right = (halves(b.view(np.uint16).swapaxes(1, 2), GROUP, QUAD * 2),)
    sums = tuple(halves(c.view(np.uint16), GROUP + 8 * half, QUAD * 2) for half in range(2))
    result = tensor.mma(Warps(2), "m16n8k8.f16.f16.f16.f16", left, right, sums, None, 0)
    expected = (a.astype(float) @ b.astype(float) + c).astype(np.float16).view(np.uint16)
    for half, found in enumerate(result):
        assert found.dtype == np.uint32
        assert (found == halves(expected, GROUP + 8 * half, QUAD * 2)).all()


@pytest.mark.parametrize("depth", [4, 8])
def test_mma_of_tf32(depth):
    random = np.random.default_rng(depth)
    a = random.standard_normal((2, 16, depth)).astype(np.float32)
    b = random.standard_normal((2, depth, 8)).astype(np.float32)
    left = tuple(a[:, GROUP + 8 * half, QUAD + 4 * column].reshape(-1).view(np.uint32)
                 for column in range(depth // 4) for half in range(2))
    right = tuple(b[:, QUAD + 4 * half, GROUP].reshape(-1).view(np.uint32)
                  for half in range(depth // 4))
    zero = np.float32(0)
    result = tensor.mma(Warps(2), f"m16n8k{depth}.f32.tf32.tf32.f32", left, right, (zero,) * 4,
                        None, 0)
    short_a, short_b = ((x.view(np.uint32) & tensor.TF32).view(np.float32).astype(float)
                        for x in (a, b))
    expected = (short_a @ short_b).astype(np.float32)
    for position, found in enumerate(result):
        half, column = divmod(position, 2)
        assert (found.reshape(2, 32) == expected[:, GROUP + 8 * half, QUAD * 2 + column]).all()


LDMATRIX = """
    .shared .align 16 .b8 tile[512];
    mov.u32 %r1, %tid.x;
    ld.param.u64 %rd1, [p0];
    mov.u32 %r2, tile;
    mul.lo.s32 %r3, %r1, 16;
    add.s32 %r3, %r2, %r3;
    mul.lo.s32 %r4, %r1, 4;
    mad.lo.s32 %r5, %r1, 4, 1;
    mad.lo.s32 %r6, %r1, 4, 2;
    mad.lo.s32 %r7, %r1, 4, 3;
    st.shared.v4.u32 [%r3], {%r4, %r5, %r6, %r7};
    BARRIER
    mov.u32 %r10, 0; mov.u32 %r11, 0; mov.u32 %r12, 0;
    mov.u32 %r13, 0;
    LOAD
    mul.wide.u32 %rd2, %r1, 16;
    add.s64 %rd2, %rd1, %rd2;
    st.global.v4.u32 [%rd2], {%r10, %r11, %r12, %r13};
    ret;
"""


def ldmatrix(load: str, barrier: str = "bar.sync 0;", **options) -> Machine:
    return Machine(LDMATRIX.replace("LOAD", load).replace("BARRIER", barrier), **options)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(count, transposed):
    names = ", ".join(f"%r{10 + k}" for k in range(count))
    trans = ".trans" if transposed else ""
    machine = ldmatrix(f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{names}}}, [%r3];")
    result = machine.empty(512)
    machine.launch(1, 32, result)
    found = machine.read(result, np.uint32, 128).reshape(32, 4)
    matrices = np.arange(128, dtype=np.uint32).view(np.uint16).reshape(4, 8, 8)
    if transposed:
        matrices = matrices.swapaxes(1, 2)
    for matrix in range(count):
        assert (found[:, matrix] == halves(matrices[matrix:matrix + 1], GROUP, QUAD * 2)).all()


LOAD = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r3"


@pytest.mark.parametrize(("load", "barrier", "kind"), [
    (LOAD + "+8];", "bar.sync 0;", "misaligned"), (LOAD + "+16];", "bar.sync 0;", "out of bounds"),
    ("sub.s32 %r3, %r3, %r2; xor.b32 %r3, %r3, 16; add.s32 %r3, %r3, %r2;" + LOAD + "];", "",
     "shared-memory race"),
    ("setp.lt.u32 %p1, %r1, 9; @%p1 " + LOAD + "];", "bar.sync 0;", "missing lanes")])
def test_ldmatrix_is_checked(load, barrier, kind):
    machine = ldmatrix(load, barrier)
    failure(kind, machine, 1, 32, machine.empty(512))


def test_ldmatrix_needs_a_whole_warp():
    machine = ldmatrix(LOAD + "];")
    failure("missing lanes", machine, 1, 24, machine.empty(512))


COPY = """
    .shared .align 16 .b8 tile[2048];
    mov.u32 %r1, %tid.x;
    ld.param.u64 %rd1, [p0];
    mov.u32 %r2, tile;
    mad.lo.s32 %r3, %r1, 16, %r2;
    mul.wide.u32 %rd2, %r1, 16;
    add.s64 %rd2, %rd1, %rd2;
    add.s64 %rd3, %rd2, 512;
    setp.lt.u32 %p1, %r1, 8;
    and.b32 %r20, %r1, 15;
    mov.u32 %r10, 0;
    BODY
    st.global.u32 [%rd3], %r10;
    ret;
"""
ISSUE = "cp.async.cg.shared.global [%r3], [%rd2], 16;"


def copies(body: str, **options) -> np.ndarray:
    """The first word that each of 32 threads loads into %r10; thread t's words are 4 t + k."""
    machine = Machine(COPY.replace("BODY", body), **options)
    data = machine.array(np.arange(256, dtype=np.uint32))
    machine.launch(1, 32, data)
    return machine.read(data + 512, np.uint32, 128)[::4]


@pytest.mark.parametrize("body", [
    ISSUE + "cp.async.wait_all;",
    ISSUE + "cp.async.commit_group; cp.async.wait_group 0;",
    ISSUE + "cp.async.commit_group; cp.async.commit_group; cp.async.wait_group 1;",
    "@%p1 " + ISSUE + "cp.async.commit_group; @!%p1 " + ISSUE + "cp.async.commit_group;"
    "@%p1 cp.async.wait_group 1; @!%p1 cp.async.wait_group 0;",
    "cp.async.ca.shared.global [%r3], [%rd2], 4; cp.async.ca.shared.global [%r3+8], [%rd2+8], 8;"
    "cp.async.wait_all;",
])
def test_copies_arrive(body):
    assert (copies(body + "ld.shared.u32 %r10, [%r3];") == np.arange(32) * 4).all()


def test_copies_fill_with_zeros():
    body = "cp.async.cg.shared.global [%r3], [%rd2], 16, %r20; cp.async.wait_all;"
    words = [copies(body + f"ld.shared.u32 %r10, [%r3+{4 * k}];") for k in range(4)]
    found = np.ascontiguousarray(np.stack(words, axis=1)).view(np.uint8)
    source = np.arange(128, dtype=np.uint32).view(np.uint8).reshape(32, 16)
    size = (np.arange(32) % 16)[:, None]
    assert (found == np.where(np.arange(16) < size, source, 0)).all()


def test_copies_are_done_as_late_as_possible():
    body = ISSUE + "mov.u32 %r9, 77; st.global.u32 [%rd2], %r9; cp.async.wait_all;"
    assert (copies(body + "ld.shared.u32 %r10, [%r3];") == 77).all()


@pytest.mark.parametrize(("body", "kind"), [
    (ISSUE + "ld.shared.u32 %r10, [%r3];", "missing cp.async wait"),
    (ISSUE + "cp.async.commit_group; ld.shared.u32 %r10, [%r3];", "missing cp.async wait"),
    (ISSUE + "cp.async.wait_group 0; ld.shared.u32 %r10, [%r3];", "missing cp.async wait"),
    (ISSUE + "cp.async.commit_group; cp.async.wait_group 1; bar.sync 0;"
     "ld.shared.u32 %r10, [%r3];", "missing cp.async wait"),
    (ISSUE + "st.shared.u32 [%r3], %r1;", "missing cp.async wait"),
    (ISSUE + ISSUE, "missing cp.async wait"),
    ("@%p1 " + ISSUE + "cp.async.commit_group; @!%p1 " + ISSUE + "@%p1 cp.async.wait_all;"
     "ld.shared.u32 %r10, [%r3];", "missing cp.async wait"),
    (ISSUE + "cp.async.wait_all; sub.s32 %r3, %r3, %r2; xor.b32 %r3, %r3, 16;"
     "add.s32 %r3, %r3, %r2; ld.shared.u32 %r10, [%r3];",
     "shared-memory race"),
    ("cp.async.ca.shared.global [%r2], [%rd2], 16; cp.async.wait_all;", "shared-memory race"),
    ("cp.async.ca.shared.global [%r3], [%rd2+4], 8;", "misaligned"),
    ("cp.async.ca.shared.global [%r3+4], [%rd2+8], 8;", "misaligned"),
    ("cp.async.cg.shared.global [%r3], [%rd2+1024], 16; cp.async.wait_all;", "out of bounds"),
])
def test_copies_are_checked(body, kind):
    machine = Machine(COPY.replace("BODY", body))
    failure(kind, machine, 1, 32, machine.array(np.arange(256, dtype=np.uint32)))


def test_copies_that_nobody_waits_for():
    assert (copies(ISSUE) == 0).all()


COUNT = """
    .shared .align 16 .b8 tile[8192];
    mov.u32 %r1, %tid.x;
    ld.param.u64 %rd1, [p0];
    mov.u32 %r2, tile;
    mad.lo.s32 %r3, %r1, STRIDE, %r2;
    mul.wide.u32 %rd2, %r1, STRIDE;
    add.s64 %rd1, %rd1, %rd2;
    mov.u32 %r4, 1; mov.u32 %r5, 1; mov.u32 %r6, 1; mov.u32 %r7, 1;
    st.shared.TYPE [%r3], VALUE;
    st.global.TYPE [%rd1], VALUE;
    ret;
"""
VALUES = {"u32": "%r4", "v2.u32": "{%r4, %r5}", "v4.u32": "{%r4, %r5, %r6, %r7}"}


@pytest.mark.parametrize(("kind", "stride", "wavefronts", "sectors"), [
    ("u32", 4, (2, 2), (8, 8)), ("u32", 8, (4, 2), (16, 8)), ("u32", 128, (64, 2), (64, 8)),
    ("u32", 132, (2, 2), (64, 8)), ("u32", 0, (2, 2), (2, 2)), ("v2.u32", 8, (4, 4), (16, 16)),
    ("v4.u32", 16, (8, 8), (32, 32)), ("v4.u32", 32, (16, 8), (64, 32)),
    ("v4.u32", 128, (64, 8), (64, 32))])
def test_counters(kind, stride, wavefronts, sectors):
    body = (COUNT.replace("STRIDE", str(stride)).replace("TYPE", kind)
            .replace("VALUE", VALUES[kind]))
    machine = Machine(body.replace("8192", str(64 * 132 + 16)), count=True)
    statistics = machine.launch(1, 64, machine.empty(64 * 132 + 16))
    shared, in_global = statistics.sites
    assert (shared.space, in_global.space) == ("shared", "global")
    assert (shared.used, shared.ideal) == wavefronts and shared.warps == 2
    assert (in_global.used, in_global.ideal) == sectors
    assert "st.shared" in shared.text and shared.line < in_global.line


def test_counters_add_up_over_chunks():
    body = COUNT.replace("STRIDE", "4").replace("TYPE", "u32").replace("VALUE", "%r4")
    for chunk in (1, 32768):
        machine = Machine(body, count=True, chunk=chunk)
        shared, _ = machine.launch(5, 64, machine.empty(256)).sites
        assert (shared.warps, shared.used) == (10, 10)


def test_nothing_is_counted_unless_asked_for():
    body = COUNT.replace("STRIDE", "4").replace("TYPE", "u32").replace("VALUE", "%r4")
    machine = Machine(body)
    assert machine.launch(1, 64, machine.empty(256)).sites == []
