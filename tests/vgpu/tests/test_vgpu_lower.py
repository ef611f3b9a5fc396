"""Lowering: inlining, basic blocks, liveness, layout, and what the generated functions compute."""

import numpy as np
import pytest
from vgpu.lower import Kernel, compile_kernel, readable_name
from vgpu.memory import FIRST_SHARED
from vgpu.ptx import parse
from vgpu.report import UnknownOpcode, VirtualGPUError

HEADER = ".version 8.7\n.target sm_90\n.address_size 64\n"
REGISTERS = (".reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<19>; .reg .b64 %rd<9>;"
             ".reg .f32 %f<9>;\n")
LANES = 4
LANE = np.arange(LANES, dtype=np.uint32)


def kernel_of(body: str, before: str = "", parameters: str = "") -> Kernel:
    text = f"{HEADER}{before}.entry k({parameters}) {{\n{REGISTERS}{body}\n}}"
    return compile_kernel(parse(text), "k")


class Lanes:
    """A stand-in for a chunk of lanes: %tid.x is the lane; `st.global` records its values."""

    def __init__(self, kernel: Kernel, parameters: bytes = b""):
        self.kernel = kernel
        self.parameters = parameters
        self.registers = [np.zeros(1, dtype)[0] for dtype in kernel.registers]
        self.stored = {}

    def gather(self, lanes, *indices):
        values = [self.registers[index] for index in indices]
        return [v[lanes] if isinstance(v, np.ndarray) else v for v in values]

    def scatter(self, lanes, index, value):
        dtype = self.kernel.registers[index]
        new = np.full(LANES, self.registers[index], dtype)
        assert np.asarray(value).dtype == dtype
        new[lanes] = value
        self.registers[index] = new

    def special(self, name, lanes):
        assert name == "%tid.x"
        return LANE if lanes is None else LANE[lanes]

    def parameter(self, offset, dtype):
        return np.frombuffer(self.parameters, dtype, 1, offset)[0]

    def store_global(self, address, values, dtype, lanes, site):
        assert isinstance(self.kernel.sites[site].opcode, str)
        for i, value in enumerate(values):
            assert np.asarray(value).dtype == dtype
            result = self.stored.setdefault(int(address) + i, np.full(LANES, 77, dtype))
            result[slice(None) if lanes is None else lanes] = value

    def shuffle(self, mode, value, b, c, mask, lanes, site):
        return value[::-1].copy(), np.True_

    def load_shared(self, address, dtype, count, lanes, site):
        return tuple(dtype(address + i) for i in range(count))

    def run(self, split: bool = False) -> dict:
        """Run all lanes, lowest block first; `split`: never as everybody at once."""
        ready = {0: LANE if split else None}
        while ready:
            index = min(ready)
            lanes = ready.pop(index)
            block = self.kernel.blocks[index]
            if block.kind == "exit":
                block.run(self, lanes)
                continue
            predicate = block.run(self, lanes)
            assert (predicate is None) == (block.kind != "branch")
            everybody = LANE if lanes is None else lanes
            taken = np.broadcast_to(True if predicate is None else predicate, everybody.shape)
            for following, part in ((block.target, everybody[taken]),
                                    (block.other, everybody[~taken])):
                if part.size:
                    both = np.union1d(ready.get(following, part), part)
                    ready[following] = None if both.size == LANES and not split else both
        return self.stored


def results(body: str, *parts: str, parameters: bytes = b"") -> list:
    """What the kernel stored to the addresses 0, 1, …, the same for whole and for split lanes."""
    kernel = kernel_of(body, *parts)
    stored = Lanes(kernel, parameters).run()
    split = Lanes(kernel, parameters).run(split=True)
    assert stored.keys() == split.keys()
    for address in stored:
        np.testing.assert_array_equal(stored[address], split[address])
    return [stored[address].tolist() for address in sorted(stored)]


def test_straight_code():
    assert results("""mov.u32 %r1, %tid.x; add.s32 %r2, %r1, -3; mov.b32 %r3, %r2;
        mov.u32 %r2, 5; st.global.s32 [0], %r3; st.global.u32 [1], %r2; ret;""") == [
        [-3, -2, -1, 0], [5] * 4]


def test_loop_diverges_and_meets_again():
    assert results("""
        mov.u32 %r1, %tid.x; mov.u32 %r2, 0; mov.u32 %r3, 0;
        again:
        add.u32 %r2, %r2, %r1; add.u32 %r3, %r3, 1;
        setp.lt.u32 %p1, %r3, %r1;
        @%p1 bra again;
        st.global.u32 [0], %r2; st.global.u32 [1], %r3;
        ret;""") == [[0, 1, 4, 9], [1, 1, 2, 3]]


def test_guarded_instructions():
    assert results("""
        mov.u32 %r1, %tid.x; mov.u32 %r2, 9; setp.gt.u32 %p1, %r1, 1;
        @%p1 mov.u32 %r2, 1;
        @%p1 add.u32 %r2, %r2, %r1;
        @!%p1 st.global.u32 [1], %r1;
        @!%p1 bra.uni end;
        add.u32 %r2, %r2, 10;
        end: st.global.u32 [0], %r2;
        setp.eq.u32 %p2, %r1, 3;
        @%p2 ret;
        st.global.u32 [2], %r1;
        """) == [[9, 9, 13, 14], [0, 1, 77, 77], [0, 1, 2, 77]]


def test_guard_that_its_own_instruction_changes():
    kernel = kernel_of("""setp.eq.u32 %p1, %r1, 0; @%p1 setp.eq.u32 %p1, %r1, 1;
        @%p1 mov.u32 %r2, 1; st.global.u32 [0], %r2; ret;""")
    assert [block.kind for block in kernel.blocks] == [
        "branch", "jump", "branch", "jump", "exit"]


def test_views_widening_and_truncation():
    assert results("""
        mov.u32 %r1, 0xFFFFFF80; cvt.s32.s8 %r2, %r1; st.global.s32 [0], %r2;
        mov.b32 %r3, 0f3F800000; st.global.f32 [1], %r3;
        mov.f32 %f1, 0f40000000; st.global.u32 [2], %f1;
        st.global.u8 [3], %r1; st.global.u16 [4], %r1;
        mov.b64 %rd1, 0d3FF0000000000000; st.global.f64 [5], %rd1;
        ret;""") == [[-128] * 4, [1.0] * 4, [0x40000000] * 4, [0x80] * 4, [0xFF80] * 4, [1.0] * 4]


def test_loads_widen_into_the_register():
    kernel = kernel_of("""ld.shared.s8 %r1, [200]; ld.shared.u8 %r2, [200];
        ld.shared.v2.b32 {%rd1, _}, [9]; bra a; a:
        st.global.u32 [0], %r1; st.global.u32 [1], %r2; st.global.u64 [2], %rd1; ret;""")
    chunk = Lanes(kernel)
    chunk.load_shared = lambda address, dtype, count, lanes, site: tuple(
        np.array([int(address) + i]).astype(dtype)[0] for i in range(count))
    assert [value[0] for value in chunk.run().values()] == [0xFFFFFFC8, 200, 9]


def test_parameters_have_natural_alignment():
    parameters = ".param .u8 a, .param .u64 b, .param .align 16 .b8 c[20], .param .u16 d"
    data = bytearray(40)
    data[8:16] = (1 << 40).to_bytes(8, "little")
    data[16:20] = (7).to_bytes(4, "little")
    data += b"\0"
    kernel = kernel_of("ret;", "", parameters)
    assert [v.offset for v in kernel.parameters] == [0, 8, 16, 36]
    assert kernel.parameter_bytes == 38
    assert results("""ld.param.u64 %rd1, [b]; ld.param.u32 %r1, [c+0];
        st.global.u64 [0], %rd1; st.global.u32 [1], %r1; ret;""", "", parameters,
                   parameters=bytes(data)) == [[1 << 40] * 4, [7] * 4]
    with pytest.raises(VirtualGPUError, match="address of b"):
        kernel_of("mov.b64 %rd1, b; ret;", "", parameters)


CALLEES = """
.func (.param .b32 retval) clamp (.param .b32 clamp_0, .param .b32 clamp_1)
{
    .reg .pred %p<2>; .reg .b32 %r<4>;
    ld.param.b32 %r1, [clamp_0]; ld.param.b32 %r2, [clamp_1];
    setp.lt.u32 %p1, %r1, %r2;
    @%p1 bra small;
    st.param.b32 [retval], %r2;
    ret;
small:
    st.param.b32 [retval], %r1;
    ret;
}
.func (.param .align 8 .b8 retval[16]) pair (.param .b64 pair_0)
{
    .reg .b32 %r<4>; .reg .b64 %rd<4>; .local .align 8 .b8 depot[24]; .shared .b32 cell;
    ld.param.b64 %rd1, [pair_0];
    cvt.u32.u64 %r1, %rd1;
    { .param .b32 param0; st.param.b32 [param0], %r1;
      .param .b32 param1; st.param.b32 [param1+0], 2;
      .param .b32 retval0;
      call.uni (retval0), clamp, (param0, param1);
      ld.param.b32 %r2, [retval0+0]; }
    cvt.u64.u32 %rd2, %r2;
    st.param.v2.b64 [retval+0], {%rd1, %rd2};
    ret;
}
.func nothing () { ret; }
"""


def test_calls_are_inlined():
    body = """
        mov.u32 %r1, %tid.x; cvt.u64.u32 %rd1, %r1;
        call nothing;
        setp.gt.u32 %p1, %r1, 0;
        mov.u64 %rd2, 50; mov.u64 %rd3, 60;
        @%p1 call.uni nothing, ();
        { .param .b64 param0; .param .align 8 .b8 retval0[16];
          st.param.b64 [param0+0], %rd1;
          call (retval0), pair, (param0);
          ld.param.b64 %rd2, [retval0+0]; ld.param.b32 %r3, [retval0+8]; }
        { .param .b64 param0; .param .align 8 .b8 retval0[16];
          st.param.b64 [param0+0], 100;
          call (retval0), pair, (param0);
          ld.param.v2.b64 {%rd4, %rd5}, [retval0]; }
        st.global.u64 [0], %rd2; st.global.u32 [1], %r3; st.global.u64 [2], %rd4;
        st.global.u64 [3], %rd5; ret;"""
    assert results(body, CALLEES) == [[0, 1, 2, 3], [0, 1, 2, 2], [100] * 4, [2] * 4]
    kernel = kernel_of(body, CALLEES)
    assert kernel.local_bytes == 48  # one depot for each copy
    assert kernel.static_shared == 4 + 4  # but one shared variable, at an odd multiple of 4
    assert "call" not in {form.split(".")[0] for form in kernel.forms}


@pytest.mark.parametrize("body, before, message", [
    ("call f;", ".func f() { call f; ret; }", "recursion of f"),
    ("call f;", ".func f(); .func g() { call f; ret; } .func f() { call g; ret; }",
     "recursion of f"),
    ("call %rd1, ();", "", "indirect call"),
    ("call vprintf;", ".extern .func vprintf ();", "call of vprintf, which has no body"),
    ("call f;", ".func f(.param .b32 a) { ret; }", "0 parameters, f has 1"),
    ("{ .param .b32 a; st.param.b32 [a], 1; .param .b32 r; call (r), f, (a); }",
     ".func (.param .b32 s) f(.param .b32 a)"
     "{ .reg .b64 %q; ld.param.b64 %q, [a]; ret; }", "8 bytes of a .param cell of 4 bytes"),
    ("frob.u32 %r1, %r2;", "", "opcode frob.u32"),
    ("bra nowhere;", "", "branch to unknown label nowhere"),
    ("mov.u32 %r1, %nosuch;", "", "register %nosuch is neither declared nor"),
    ("mov.b64 %rd1, k2;", ".func k2() { ret; }", "address of k2"),
    ("bar.sync 1;", "", "barrier other than barrier 0"),
    ("bar.sync 0, 64;", "", "barrier other than barrier 0"),
    ("add.u64 %rd1, %r1, %r2;", "", "register %r1 of type .b32 used as u8"),
    ("add.u64 %r1, %rd1, %rd2;", "", "64 result in register %r1 of type .b32"),
    ("mov.f32 %f1, 1;", "", "int constant as .f32"),
    ("ld.param.u32 %r1, [a];", "", "not to a named kernel parameter"),
])
def test_refusals(body, before, message):
    with pytest.raises(VirtualGPUError, match=message) as caught:
        kernel_of(body + "\nret;", before)
    assert caught.value.kind == "not supported" and caught.value.kernel == "k"


def test_errors_name_line_and_text():
    with pytest.raises(VirtualGPUError) as caught:
        kernel_of(".loc 1 3 1\nmov.u32 %r1,\n %nosuch;", '.file 1 "a.py"\n')
    assert caught.value.ptx_text.startswith("mov.u32 %r1,")
    assert caught.value.source == ("a.py", 3)
    with pytest.raises(UnknownOpcode, match="frob") as caught:
        kernel_of(".loc 1 3 1\nfrob;", '.file 1 "a.py"\n')
    assert (caught.value.ptx_text, caught.value.source) == ("frob;", ("a.py", 3))


def test_straight_blocks_are_joined():
    kernel = kernel_of("""
        mov.u32 %r1, 1; bra.uni a;
        c: st.global.u32 [0], %r1; ret;
        dead: mov.u32 %r1, 3; bra dead;
        b: add.u32 %r1, %r1, 1; bra c;
        a: add.u32 %r1, %r1, 1; unused: bra b;""")
    (block,) = kernel.blocks
    assert (block.kind, block.size) == ("exit", 8)


def test_blocks_are_numbered_in_program_order():
    kernel = kernel_of("""
        setp.eq.u32 %p1, %r1, 0; @%p1 bra b;
        mov.u32 %r2, 1; bra c;
        b: mov.u32 %r2, 2;
        c: st.global.u32 [0], %r2; ret;""")
    assert [(b.index, b.kind, b.target, b.other) for b in kernel.blocks] == [
        (0, "branch", 2, 1), (1, "jump", 3, None), (2, "jump", 3, None), (3, "exit", None, None)]


def test_only_live_registers_are_handed_on():
    kernel = kernel_of("""
        mov.u32 %r1, %tid.x; add.u32 %r2, %r1, 1; add.u32 %r3, %r1, 2;
        setp.eq.u32 %p1, %r2, 0; @%p1 bra end;
        st.global.u32 [0], %r3;
        end: ret;""")
    chunk = Lanes(kernel)
    untouched = list(chunk.registers)
    kernel.blocks[0].run(chunk, None)
    changed = [new for old, new in zip(untouched, chunk.registers, strict=True) if new is not old]
    assert [value.tolist() for value in changed] == [[2, 3, 4, 5]]


def test_barriers():
    kernel = kernel_of("""
        mov.u32 %r1, %tid.x; bar.sync 0; setp.eq.u32 %p1, %r1, 2;
        bar.red.popc.u32 %r2, 0, %p1; bar.red.or.pred %p2, 0, !%p1;
        selp.u32 %r3, 1, %r2, %p2; st.global.u32 [0], %r3; barrier.sync 0; ret;""")
    assert [block.kind for block in kernel.blocks] == ["barrier"] * 4 + ["exit"]
    sync, popc, disjunction, last, _ = kernel.blocks
    assert sync.barrier == dict(kind="sync", predicate=None, destination=None) == last.barrier
    assert (sync.target, sync.size, kernel.sites[sync.site].opcode) == (1, 2, "bar.sync")
    chunk = Lanes(kernel)
    sync.run(chunk, None)
    popc.run(chunk, None)
    assert popc.barrier["kind"] == "popc"
    assert popc.barrier["predicate"](chunk, None).tolist() == [False, False, True, False]
    assert popc.barrier["predicate"](chunk, LANE[2:]).tolist() == [True, False]
    assert disjunction.barrier["kind"] == "or"
    assert disjunction.barrier["predicate"](chunk, None).tolist() == [True, True, False, True]
    chunk.registers[popc.barrier["destination"]] = np.full(LANES, 4, np.uint32)
    chunk.registers[disjunction.barrier["destination"]] = LANE == 1
    last.run(chunk, None)
    assert chunk.stored[0].tolist() == [4, 1, 4, 4]


def test_warp_instructions_with_one_mask_share_a_block():
    kernel = kernel_of("""
        mov.u32 %r1, %tid.x;
        shfl.sync.bfly.b32 %r2|%p1, %r1, 1, 31, -1; add.u32 %r2, %r2, %r1;
        shfl.sync.bfly.b32 %r3, %r2, 2, 31, -1;
        shfl.sync.bfly.b32 %r4, %r3, 2, 31, %r1;
        mov.u32 %r1, 7;
        shfl.sync.bfly.b32 %r5, %r4, 2, 31, %r1;
        st.global.u32 [0], %r5; ret;""")
    assert [(block.kind, block.size) for block in kernel.blocks] == [
        ("jump", 1), ("warp", 3), ("warp", 2), ("warp", 1), ("exit", 2)]
    chunk = Lanes(kernel)
    chunk.registers = [np.zeros(LANES, dtype) for dtype in kernel.registers]
    kernel.blocks[0].run(chunk, None)
    masks = [block.mask(chunk, None) for block in kernel.blocks[1:3]]
    assert masks[0] == 0xFFFFFFFF and masks[0].dtype == np.uint32
    assert masks[1].tolist() == [0, 1, 2, 3]
    assert kernel.blocks[2].mask(chunk, LANE[1:3]).tolist() == [1, 2]
    ldmatrix = kernel_of("""ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r2];
        st.global.u32 [0], %r1; ret;""").blocks[0]
    assert ldmatrix.kind == "warp" and ldmatrix.mask is None


def test_shared_variables_get_only_the_alignment_they_declare():
    kernel = kernel_of("""
        .shared .align 16 .b8 a[10]; .shared .align 2 .b8 b[2]; .shared .align 1 .b8 c[1];
        mov.u64 %rd1, a; st.global.u64 [0], %rd1; mov.u32 %r1, b; st.global.u32 [1], %r1;
        mov.u64 %rd1, d; st.global.u64 [2], %rd1; ld.shared.u32 %r2, [c+3];
        st.global.u32 [3], %r2; ret;""", ".extern .shared .align 8 .b8 d[];")
    stored = [int(value[0]) for value in Lanes(kernel).run().values()]
    assert stored == [1040, 1050, 1064, 1053 + 3]
    assert kernel.static_shared == 1054 - FIRST_SHARED
    assert kernel.shared_variables == [(1040, 1050), (1050, 1052), (1053, 1054)]
    assert kernel.dynamic_shared_offset == 1064


def test_launch_bounds_and_read_only_loads():
    text = HEADER + ".entry k() .maxntid 64, 2, 1 .reqntid 32 {" + REGISTERS + "ret; }"
    kernel = compile_kernel(parse(text), "k")
    assert (kernel.maxntid, kernel.reqntid) == ((64, 2, 1), (32,))
    assert not kernel.uses_nc_loads
    assert kernel_of("ld.global.nc.f32 %f1, [%rd1]; ret;").uses_nc_loads


def test_module_variables_have_the_addresses_of_the_loader():
    module = parse(HEADER + ".global .b8 x[8]; .entry k() {" + REGISTERS
                   + "mov.u64 %rd1, x; st.global.u64 [0], %rd1; ret; }")
    module.addresses["x"] = 0x7F0000000100
    assert Lanes(compile_kernel(module, "k")).run()[0].tolist() == [0x7F0000000100] * 4


@pytest.mark.parametrize("mangled, name", [
    ("_ZN8__main__2mmB2v1B3abcE5ArrayIfLi2E1C7mutable7alignedE", "mm"),
    ("plain", "plain"), ("_Z3addii", "add"),
    ("_ZN5outer12_3clocals_3e6kernelB2v2Ex", "kernel"),
    ("_ZN8__main__12_3clambda_3eB2v1Ef", "<lambda>"),
])
def test_readable_name(mangled, name):
    assert readable_name(mangled) == name
