"""Shared memory: its bounds and initialisation, and races there and in global memory."""

from types import SimpleNamespace

import numpy as np
import pytest
from vgpu.races import SharedRaces, granule_of
from vgpu_kernels import Machine, failure

SHARED = """
    .shared .align 16 .b8 tile[256];
    ld.param.u64 %rd1, [p0];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, tile;
    shl.b32 %r3, %r1, 2;
    add.s32 %r4, %r2, %r3;       // own word
    xor.b32 %r5, %r3, 4;
    add.s32 %r5, %r2, %r5;       // the word of the neighbour in the pair
    xor.b32 %r6, %r3, 128;
    add.s32 %r6, %r2, %r6;       // a word of the other warp
    setp.eq.u32 %p1, %r1, 0;
    setp.eq.u32 %p2, %r1, 1;
    setp.lt.u32 %p3, %r1, 32;
    BODY
    ret;
"""


def shared(body: str, **options) -> Machine:
    return Machine(SHARED.replace("BODY", body), **options)


CLEAN = {
    "own words": "st.shared.u32 [%r4], %r1; ld.shared.u32 %r7, [%r4]; st.shared.u32 [%r4], %r7;",
    "barrier": "st.shared.u32 [%r4], %r1; bar.sync 0; ld.shared.u32 %r7, [%r6]; bar.sync 0;"
               "st.shared.u32 [%r4], %r7;",
    "warp barrier": "st.shared.u32 [%r4], %r1; bar.warp.sync -1; ld.shared.u32 %r7, [%r5];"
                    "bar.warp.sync -1; st.shared.u32 [%r4], %r7;",
    "all store one value": "st.shared.u32 [%r2], 7;",
    "many readers": "@%p1 st.shared.u32 [%r2], 7; bar.sync 0; ld.shared.u32 %r7, [%r2];"
                    "ld.shared.u32 %r7, [%r2]; bar.sync 0; @%p2 st.shared.u32 [%r2], 8;",
    "atomics": "st.shared.u32 [%r4], %r1; bar.sync 0; atom.shared.add.u32 %r7, [%r2], 1;"
               "atom.shared.max.u32 %r7, [%r2], %r1; bar.sync 0; ld.shared.u32 %r7, [%r2];",
    "volatile": "st.shared.u32 [%r4], 0; bar.sync 0; ld.volatile.shared.u32 %r7, [%r2];"
                "@%p2 st.volatile.shared.u32 [%r2], 1; ld.volatile.shared.u32 %r7, [%r2];"
                "atom.shared.add.u32 %r7, [%r2], 1;",
    "early exit": "st.shared.u32 [%r4], %r1; @%p2 exit; bar.sync 0; ld.shared.u32 %r7, [%r6];",
}
RACES = {
    "read after write": "st.shared.u32 [%r4], %r1; ld.shared.u32 %r7, [%r5];",
    "write after read": "st.shared.u32 [%r4], %r1; bar.sync 0; ld.shared.u32 %r7, [%r5];"
                        "st.shared.u32 [%r4], %r7;",
    "write after write": "@%p1 st.shared.u32 [%r2], 7; @%p2 st.shared.u32 [%r2], 7;",
    "one instruction": "st.shared.u32 [%r2], %r1;",
    "warp barrier for two warps": "st.shared.u32 [%r4], %r1; bar.warp.sync -1;"
                                  "ld.shared.u32 %r7, [%r6];",
    "several readers, one of them writes":
        "@%p1 st.shared.u32 [%r2], 7; bar.sync 0; ld.shared.u32 %r7, [%r2];"
        "@%p1 st.shared.u32 [%r2], 8;",
    "readers of a warp, one of them writes":
        "@%p1 st.shared.u32 [%r2], 7; bar.sync 0; @%p3 ld.shared.u32 %r7, [%r2];"
        "@%p1 st.shared.u32 [%r2], 8;",
    "read before an atomic": "st.shared.u32 [%r4], %r1; bar.sync 0; ld.shared.u32 %r7, [%r2];"
                             "@%p2 atom.shared.add.u32 %r7, [%r2], 1;",
    "read after an atomic": "st.shared.u32 [%r4], %r1; bar.sync 0;"
                            "@%p2 atom.shared.add.u32 %r7, [%r2], 1; ld.shared.u32 %r7, [%r2];",
    "volatile read after write": "st.shared.u32 [%r4], %r1; ld.volatile.shared.u32 %r7, [%r5];",
    "read after volatile write": "st.volatile.shared.u32 [%r4], %r1; ld.shared.u32 %r7, [%r5];",
    "part of a vector": "st.shared.u32 [%r4], %r1; bar.sync 0;"
                        "@%p1 ld.shared.v2.u32 {%r7, %r8}, [%r2+8];"
                        "@%p2 st.shared.u32 [%r2+12], 1;",
}


@pytest.mark.parametrize("chunk", [1, 32768])
@pytest.mark.parametrize("name", CLEAN)
def test_no_race(name, chunk):
    shared(CLEAN[name], chunk=chunk).launch(3, 64, 0)


@pytest.mark.parametrize("schedule", ["lowest", "highest", "random"])
@pytest.mark.parametrize("name", RACES)
def test_race(name, schedule):
    error = failure("shared-memory race", shared(RACES[name], schedule=schedule), 2, 64, 0)
    assert ".shared" in error.ptx_text


@pytest.mark.parametrize("name", RACES)
def test_races_are_not_checked_when_switched_off(name):
    shared(RACES[name], race=False).launch(2, 64, 0)


def test_the_report_names_both_sides():
    error = failure("shared-memory race", shared(RACES["read after write"]), 1, 64, 0)
    assert error.thread == (0, 0, 0) and "ld.shared" in error.ptx_text
    assert "thread (1, 0, 0) wrote" in error.detail and "st.shared.u32" in error.detail


def test_a_race_in_a_later_round_of_a_loop():
    body = """
    mov.u32 %r10, 0;
    st.shared.u32 [%r4], %r1;
    loop:
    bar.sync 0;
    ld.shared.u32 %r7, [%r6];
    {barrier}
    st.shared.u32 [%r4], %r7;
    add.s32 %r10, %r10, 1;
    setp.lt.u32 %p4, %r10, 5;
    @%p4 bra loop;
"""
    shared(body.replace("{barrier}", "bar.sync 0;")).launch(2, 64, 0)
    failure("shared-memory race", shared(body.replace("{barrier}", "")), 2, 64, 0)


def test_ctas_that_pass_different_numbers_of_barriers():
    body = """
    mov.u32 %r10, %ctaid.x;
    mov.u32 %r11, 0;
    st.shared.u32 [%r4], %r1;
    loop:
    bar.sync 0;
    ld.shared.u32 %r7, [%r6];
    bar.sync 0;
    st.shared.u32 [%r4], %r7;
    add.s32 %r11, %r11, 1;
    setp.le.u32 %p4, %r11, %r10;
    @%p4 bra loop;
    {last}
"""
    for schedule in ("lowest", "highest", "random"):
        shared(body.replace("{last}", ""), schedule=schedule).launch(5, 64, 0)
        failure("shared-memory race", shared(body.replace("{last}", "ld.shared.u32 %r7, [%r6];"),
                                             schedule=schedule), 5, 64, 0)


def test_bytes_next_to_each_other_are_no_race():
    body = "add.s32 %r7, %r2, %r1; st.shared.u8 [%r7], %r1; ld.shared.u8 %r8, [%r7];"
    shared(body.replace("%r8", "%rs1").replace("], %r1", "], %rs2")
           .replace("add.s32 %r7", "cvt.u16.u32 %rs2, %r1; add.s32 %r7")).launch(1, 64, 0)


@pytest.mark.parametrize(("forms", "granule"), [
    ({"ld.shared.f32", "st.shared.v4.u32"}, 4), ({"st.shared.u16"}, 2), ({"ld.shared::cta.b8"}, 1),
    ({"ld.global.u8"}, 4), ({"ld.u8"}, 1), ({"ldmatrix.sync.aligned.m8n8.x4.shared.b16"}, 4)])
def test_granule(forms, granule):
    assert granule_of(forms, "shared") == granule


@pytest.mark.parametrize(("body", "kind"), [
    ("ld.shared.u32 %r7, [%r4];", "uninitialised read"),
    ("st.shared.u32 [%r2+256], %r1;", "out of bounds"),
    ("ld.shared.u32 %r7, [%r2-4];", "out of bounds"),
    ("st.shared.u32 [%r4+1], %r1;", "misaligned"),
    ("st.shared.u32 [%r4], %r1; add.s32 %r4, %r4, 8; ld.shared.u32 %r7, [%r4];", "out of bounds"),
])
def test_shared_memory_is_checked(body, kind):
    error = failure(kind, shared(body), (2, 2), 64, 0)
    assert ".shared" in error.ptx_text


def test_dynamic_shared_memory_ends_where_the_launch_says():
    machine = Machine("""
    mov.u32 %r1, %tid.x;
    shl.b32 %r2, %r1, 2;
    mov.u32 %r3, dynamic;
    add.s32 %r2, %r2, %r3;
    st.shared.u32 [%r2], %r1;
    ret;
""", dynamic=True)
    machine.launch(1, 32, 0, dynamic_shared=128)
    assert failure("out of bounds", machine, 1, 33, 0, dynamic_shared=128).thread == (32, 0, 0)
    failure("out of bounds", machine, 1, 1, 0)


GLOBAL = """
    ld.param.u64 %rd1, [p0];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mad.lo.s32 %r3, %r2, 64, %r1;
    mul.wide.u32 %rd2, %r3, 4;
    add.s64 %rd2, %rd1, %rd2;    // own word
    xor.b32 %r4, %r3, 1;
    mul.wide.u32 %rd3, %r4, 4;
    add.s64 %rd3, %rd1, %rd3;    // a word of the same CTA
    xor.b32 %r4, %r3, 64;
    mul.wide.u32 %rd4, %r4, 4;
    add.s64 %rd4, %rd1, %rd4;    // a word of another CTA
    setp.eq.u32 %p1, %r3, 0;
    BODY
    ret;
"""
GLOBAL_CLEAN = {
    "own words": "st.global.u32 [%rd2], %r1; ld.global.u32 %r7, [%rd2];",
    "barrier": "st.global.u32 [%rd2], %r1; bar.sync 0; ld.global.u32 %r7, [%rd3];",
    "atomics": "atom.global.add.u32 %r7, [%rd1], 1;",
    "readers": "ld.global.u32 %r7, [%rd1]; ld.global.u32 %r7, [%rd4];",
}
GLOBAL_RACES = {
    "no barrier": "st.global.u32 [%rd2], %r1; ld.global.u32 %r7, [%rd3];",
    "another CTA": "st.global.u32 [%rd2], %r1; bar.sync 0; ld.global.u32 %r7, [%rd4];",
    "another CTA stores": "ld.global.u32 %r7, [%rd4]; bar.sync 0; st.global.u32 [%rd2], %r1;",
    "one word": "st.global.u32 [%rd1], %r3;",
    "atomic and load": "atom.global.add.u32 %r7, [%rd1], 1; bar.sync 0; ld.global.u32 %r7, [%rd1];",
    "readers, one of which stores": "ld.global.u32 %r7, [%rd1]; bar.sync 0;"
                                    "@%p1 st.global.u32 [%rd1], 1;",
}


@pytest.mark.parametrize("chunk", [1, 32768])
@pytest.mark.parametrize("name", GLOBAL_CLEAN)
def test_no_global_race(name, chunk):
    machine = Machine(GLOBAL.replace("BODY", GLOBAL_CLEAN[name]), global_race=True, chunk=chunk)
    data = machine.array(np.zeros(256, np.uint32))
    machine.launch(4, 64, data)
    machine.launch(4, 64, data)


@pytest.mark.parametrize("chunk", [1, 32768])
@pytest.mark.parametrize("name", GLOBAL_RACES)
def test_global_race(name, chunk):
    body = GLOBAL.replace("BODY", GLOBAL_RACES[name])
    machine = Machine(body, global_race=True, chunk=chunk)
    data = machine.array(np.zeros(256, np.uint32))
    error = failure("global race", machine, 4, 64, data)
    assert "block" in error.detail and ".global" in error.ptx_text
    Machine.launch(quiet := Machine(body), 4, 64, quiet.array(np.zeros(256, np.uint32)))


class Threads:
    """Stands in for a chunk of CTAs; keeps every access, and so knows every race."""

    def __init__(self, ctas: int, threads: int):
        self.ctas, self.threads = ctas, threads
        self.lane_count = self.alive = ctas * threads
        self.accesses: dict[int, list] = {}  # by word: (lane, verb, barriers, warp barriers)
        self.barriers = np.zeros(self.lane_count, int)
        self.warp_barriers = np.zeros(self.lane_count, int)

    def active_count(self, lanes) -> int:
        return self.lane_count if lanes is None else lanes.size

    def conflict(self, lane: int, verb: str, earlier: tuple) -> bool:
        other, done, barriers, warp_barriers = earlier
        if other == lane or verb == done != "write" or barriers < self.barriers[lane]:
            return False
        return other // 32 != lane // 32 or warp_barriers == self.warp_barriers[lane]

    def access(self, verb: str, words: np.ndarray, lanes: np.ndarray) -> bool:
        """Note accesses of lanes to words; whether one of them is in a race with earlier ones."""
        race = any(self.conflict(lane, verb, earlier)
                   for word, lane in zip(words.tolist(), lanes.tolist(), strict=True)
                   for earlier in self.accesses.get(word, ()))
        for word, lane in zip(words.tolist(), lanes.tolist(), strict=True):
            self.accesses.setdefault(word, []).append(
                (lane, verb, self.barriers[lane], self.warp_barriers[lane]))
        return race

    @property
    def kernel(self):
        return SimpleNamespace(sites=[SimpleNamespace(opcode="")])

    def fail_lane(self, kind, detail, lane, site):
        raise AssertionError(kind)


@pytest.mark.parametrize("seed", range(300))
def test_exactly_the_races_are_found(seed, monkeypatch):
    random = np.random.default_rng(seed)
    ctas, threads, words = 2, 64, 2
    truth = Threads(ctas, threads)
    races = SharedRaces(truth, 4 * ctas * words, 4)
    monkeypatch.setattr(races, "fail", lambda *place: truth.fail_lane("race", "", 0, 0))
    everybody = np.arange(truth.lane_count)
    for _ in range(60):
        verb = random.choice(["read"] * 3 + ["write", "atomic", "barrier", "barrier", "warp"])
        if verb == "barrier":
            chosen = everybody // threads == random.integers(ctas) if random.random() < 0.5 \
                else everybody >= 0
            truth.barriers[chosen] += 1
            races.barrier(None if chosen.all() else everybody[chosen])
        elif verb == "warp":
            chosen = np.isin(everybody // 32, random.choice(4, random.integers(1, 4)))
            truth.warp_barriers[chosen] += 1
            races.warp_barrier(everybody[chosen])
        else:
            count = 1 if verb == "write" else random.integers(1, 4)
            few = [0, 1, 32, 33, 64, 65, 96]  # threads of every warp and CTA
            lanes = np.sort(random.choice(few, count, replace=False))
            place = lanes // threads * words + random.integers(words, size=count)
            if truth.access(str(verb), place, lanes):
                with pytest.raises(AssertionError, match="race"):
                    getattr(races, verb)(place * 4, 4, lanes, 0)
                return
            getattr(races, verb)(place * 4, 4, lanes, 0)


def test_readers_of_two_warps_in_one_instruction(monkeypatch):
    truth = Threads(1, 64)
    races = SharedRaces(truth, 4, 4)
    monkeypatch.setattr(races, "fail", lambda *place: truth.fail_lane("race", "", 0, 0))
    races.read(np.zeros(3, int), 4, np.array([0, 32, 33]), 0)
    races.warp_barrier(np.arange(32, 64))
    with pytest.raises(AssertionError, match="race"):
        races.write(np.zeros(1, int), 4, np.array([33]), 0)
