"""The arena, and what loads and stores report."""

import numpy as np
import pytest
from vgpu import VirtualGPUError
from vgpu.memory import ALIGNMENT, GLOBAL_BASE, POISON, RED_ZONE, Arena
from vgpu_kernels import Machine, failure


@pytest.fixture
def arena():
    return Arena(1 << 20)


def test_allocations_are_apart_and_no_better_aligned_than_promised(arena):
    addresses = [arena.allocate(nbytes) for nbytes in (1, 300, 512, 4096)]
    for address, nbytes, following in zip(addresses, (1, 300, 512), addresses[1:], strict=False):
        assert address % ALIGNMENT == 0 and address % 512 != 0
        assert following >= address + nbytes + RED_ZONE


def test_fresh_memory_is_poisoned(arena):
    address = arena.allocate(7)
    assert (arena.read(address, 7) == POISON).all()


def test_write_read_fill_copy(arena):
    first, second = arena.allocate(16), arena.allocate(16)
    arena.write(first, np.arange(4, dtype=np.float32))
    arena.fill(second, 7, 8)
    arena.copy(second + 8, first, 8)
    assert (arena.read(second, 8) == 7).all()
    assert (arena.read(second + 8, 8).view(np.float32) == [0, 1]).all()


def test_memory_is_reused_only_when_the_arena_is_full(arena):
    first = arena.allocate(400_000)
    arena.free(first)
    assert arena.allocate(400_000) != first
    assert arena.allocate(400_000) == first
    with pytest.raises(VirtualGPUError, match="out of memory"):
        arena.allocate(400_000)


def test_pages_that_small_allocations_share_go_back_with_the_last(arena):
    tags = arena.tags("any", 4, np.uint32)
    tags[:] = 1
    addresses = [arena.allocate(700) for _ in range(40)]
    first, last = addresses[0] - GLOBAL_BASE, addresses[-1] - GLOBAL_BASE
    for address in addresses[1:]:
        arena.free(address)
    assert (arena.data[first:first + 700] == POISON).all()
    arena.free(addresses[0])
    assert not arena.data[first:last].any() and not tags[first // 4 + 1024:last // 4].any()


def test_addresses_outside_device_memory(arena):
    assert arena.describe(0, 4) == "4 bytes at 0x0: a null pointer"
    assert arena.describe(1 << 40, 4).endswith("no device address")


def test_freed_neighbours_are_joined(arena):
    for size in range(4096, 900_000, 4096):
        arena.free(arena.allocate(size))
    kept = [arena.allocate(100) for _ in range(50)]
    for address in kept[::2]:
        arena.free(address)
    assert len({arena.allocate(100) for _ in range(100)} | set(kept[1::2])) == 125
    assert len(arena.allocations()) == 125


def test_reused_memory_is_fresh(arena):
    for _ in range(3):
        address = arena.allocate(900_000)
        assert (arena.read(address, 900_000) == POISON).all()
        arena.write(address, np.zeros(900_000, np.uint8))
        arena.free(address)


@pytest.mark.parametrize(("use", "kind", "words"), [
    (lambda arena, address: arena.write(address + 8, np.zeros(9, np.uint8)), "out of bounds",
     "9 bytes"),
    (lambda arena, address: arena.read(address - 1, 1), "out of bounds", "1 bytes before"),
    (lambda arena, address: arena.free(address + 1), "bad driver call", "byte 1 of"),
    (lambda arena, address: arena.read(arena_freed(arena), 4), "use after free", "freed"),
    (lambda arena, address: arena.allocate(0), "bad driver call", "0 bytes"),
])
def test_misuse_by_the_host(arena, use, kind, words):
    address = arena.allocate(16, "weights")
    with pytest.raises(VirtualGPUError, match=words) as caught:
        use(arena, address)
    assert caught.value.kind == kind


def arena_freed(arena):
    address = arena.allocate(16)
    arena.free(address)
    return address


def test_description_names_the_nearest_allocation(arena):
    address = arena.allocate(100, "weights")
    assert "4 bytes after the end of allocation 'weights'" in arena.describe(address + 104, 4)
    assert "byte 4 of allocation 'weights'" in arena.describe(address + 4, 4)
    assert "ever allocated" in Arena(1 << 16).describe(GLOBAL_BASE, 4)


COPY = """
    ld.param.u64 %rd1, [p0];
    ld.param.u64 %rd2, [p1];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd1, %rd1, %rd3;
    add.s64 %rd2, %rd2, %rd3;
    ld.global.u32 %r2, [%rd1];
    st.global.u32 [%rd2], %r2;
    ret;
"""


def test_a_kernel_copies():
    machine = Machine(COPY, parameters=("u64", "u64"))
    source, result = machine.array(np.arange(40, dtype=np.uint32)), machine.empty(160)
    machine.launch(1, 40, source, result)
    assert (machine.read(result, np.uint32, 40) == np.arange(40)).all()


@pytest.mark.parametrize(("source_bytes", "result_bytes", "thread", "line"), [
    (156, 160, 39, "ld.global"), (160, 40, 10, "st.global")])
def test_out_of_bounds(source_bytes, result_bytes, thread, line):
    machine = Machine(COPY, parameters=("u64", "u64"))
    source, result = machine.array(np.zeros(source_bytes, np.uint8)), machine.empty(result_bytes)
    error = failure("out of bounds", machine, 1, 40, source, result)
    assert error.thread == (thread, 0, 0) and error.block == (0, 0, 0)
    assert line in error.ptx_text and "0 bytes after the end" in error.detail


def test_far_addresses_are_out_of_bounds():
    machine = Machine(COPY, parameters=("u64", "u64"))
    for address in (0, 8, GLOBAL_BASE - 64, 1 << 63, GLOBAL_BASE + (1 << 33)):
        failure("out of bounds", machine, 1, 40, address, machine.empty(160))


def test_use_after_free():
    machine = Machine(COPY, parameters=("u64", "u64"))
    source, result = machine.array(np.zeros(40, np.uint32)), machine.empty(160)
    machine.arena.free(source)
    assert "freed" in failure("use after free", machine, 1, 40, source, result).detail


def test_uninitialised_global_memory():
    machine = Machine(COPY, parameters=("u64", "u64"))
    error = failure("uninitialised read", machine, 1, 40, machine.empty(160), machine.empty(160))
    assert error.thread == (0, 0, 0)


def test_misaligned():
    machine = Machine(COPY, parameters=("u64", "u64"))
    source, result = machine.array(np.zeros(41, np.uint32)), machine.empty(160)
    failure("misaligned", machine, 1, 40, source + 2, result)


VECTOR = """
    ld.param.u64 %rd1, [p0];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 16;
    add.s64 %rd1, %rd1, %rd3;
    ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%rd1];
    st.global.v2.u32 [%rd1], {%r5, %r4};
    ret;
"""


def test_vector_access():
    machine = Machine(VECTOR)
    data = machine.array(np.arange(8, dtype=np.uint32))
    machine.launch(1, 2, data)
    assert machine.read(data, np.uint32, 8).tolist() == [3, 2, 2, 3, 7, 6, 6, 7]
    failure("misaligned", machine, 1, 1, data + 8)
    failure("out of bounds", machine, 1, 3, data)


LOCAL = """
    .local .align 4 .b8 buffer[12];
    ld.param.u64 %rd1, [p0];
    mov.u32 %r1, %tid.x;
    mov.u64 %rd2, buffer;
    cvta.local.u64 %rd3, %rd2;
    st.local.u32 [%rd2+4], %r1;
    ld.u32 %r2, [%rd3+{offset}];
    mul.wide.u32 %rd4, %r1, 4;
    add.s64 %rd1, %rd1, %rd4;
    st.global.u32 [%rd1], %r2;
    ret;
"""


def test_local_memory_is_private():
    machine = Machine(LOCAL.replace("{offset}", "4"))
    result = machine.empty(160)
    machine.launch(1, 40, result)
    assert (machine.read(result, np.uint32, 40) == np.arange(40)).all()


@pytest.mark.parametrize(("offset", "kind"), [(0, "uninitialised read"), (12, "out of bounds"),
                                              (5, "misaligned")])
def test_local_memory_is_checked(offset, kind):
    machine = Machine(LOCAL.replace("{offset}", str(offset)))
    failure(kind, machine, 1, 40, machine.empty(160))


GENERIC = """
    .shared .align 4 .b8 tile[4];
    ld.param.u64 %rd1, [p0];
    mov.u32 %r1, %tid.x;
    mov.u64 %rd2, tile;
    cvta.shared.u64 %rd3, %rd2;
    setp.eq.u32 %p1, %r1, 0;
    selp.b64 %rd4, %rd3, %rd1, %p1;
    st.u32 [%rd4], %r1;
    ld.u32 %r2, [%rd4];
    atom.add.u32 %r3, [%rd4], 5;
    ld.u32 %r4, [%rd4];
    mul.wide.u32 %rd5, %r1, 12;
    add.s64 %rd1, %rd1, %rd5;
    st.global.u32 [%rd1+4], %r2;
    st.global.u32 [%rd1+8], %r3;
    st.global.u32 [%rd1+12], %r4;
    ret;
"""


def test_generic_addresses_of_two_spaces():
    machine = Machine(GENERIC)
    result = machine.empty(28)
    machine.launch(1, 2, result)
    assert machine.read(result, np.uint32, 7).tolist() == [6, 0, 0, 5, 1, 1, 6]


READ_ONLY = """
    ld.param.u64 %rd1, [p0];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mul.wide.u32 %rd2, %r2, 4;
    add.s64 %rd2, %rd1, %rd2;
    ld.global.nc.u32 %r3, [%rd1];
    st.global.u32 [%rd2+{offset}], %r3;
    ret;
"""


@pytest.mark.parametrize("chunk", [1, 1000])
@pytest.mark.parametrize("schedule", ["lowest", "highest"])
def test_read_only_loads_of_stored_memory(chunk, schedule):
    machine = Machine(READ_ONLY.replace("{offset}", "0"), chunk=chunk, schedule=schedule)
    failure("read-only load of written memory", machine, 4, 1, machine.array(np.zeros(8, np.int32)))


def test_read_only_loads_of_other_memory():
    machine = Machine(READ_ONLY.replace("{offset}", "4"))
    data = machine.array(np.zeros(8, np.int32))
    machine.launch(4, 1, data)
    machine.launch(4, 1, data + 4)  # what another launch has stored may be loaded


ATOMIC = """
    ld.param.u64 %rd1, [p0];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    and.b32 %r2, %r1, {mask};
    mul.wide.u32 %rd4, %r2, 4;
    add.s64 %rd4, %rd1, %rd4;
    {atomic};
    st.global.u32 [%rd3+64], %r3;
    ret;
"""
STEPS = {
    "add.u32 %r3, [%rd4], %r1": lambda old, tid: old + tid,
    "max.s32 %r3, [%rd4], %r1": max,
    "min.u32 %r3, [%rd4], %r1": min,
    "exch.b32 %r3, [%rd4], %r1": lambda old, tid: tid,
    "inc.u32 %r3, [%rd4], 7": lambda old, tid: 0 if old >= 7 else old + 1,
    "dec.u32 %r3, [%rd4], 7": lambda old, tid: 7 if old == 0 or old > 7 else old - 1,
    "cas.b32 %r3, [%rd4], 3, %r1": lambda old, tid: tid if old == 3 else old,
    "or.b32 %r3, [%rd4], %r1": lambda old, tid: old | tid,
}


@pytest.mark.parametrize("mask", [0, 1, 15])
@pytest.mark.parametrize("step", STEPS)
def test_atomics_apply_lane_by_lane(step, mask):
    machine = Machine(ATOMIC.replace("{atomic}", "atom.global." + step)
                      .replace("{mask}", str(mask)))
    memory = [3] * 16
    data = machine.array(np.array(memory + [0] * 40, np.uint32))
    machine.launch(1, 40, data)
    old = []
    for thread in range(40):
        old.append(memory[thread & mask])
        memory[thread & mask] = STEPS[step](memory[thread & mask], thread)
    assert machine.read(data, np.uint32, 56).tolist() == memory + old


def test_float_atomics_round_after_each_addition():
    machine = Machine("""
    ld.param.u64 %rd1, [p0];
    mov.f32 %f1, 0f3F800000;
    red.global.add.f32 [%rd1], %f1;
    ret;
""")
    data = machine.array(np.array([2.0 ** 24 - 2], np.float32))
    machine.launch(1, 64, data)
    assert machine.read(data, np.float32, 1)[0] == 2.0 ** 24
