"""Instructions that exchange values between the lanes of a warp, against plain Python."""

import numpy as np
import pytest
from vgpu_kernels import Machine, failure

HEAD = """
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %laneid;
    ld.param.u64 %rd1, [p0];
    mov.u32 %r30, %ctaid.x;
    mov.u32 %r31, %ntid.x;
    mad.lo.s32 %r30, %r30, %r31, %r1;
    mul.wide.u32 %rd2, %r30, 8;
    add.s64 %rd2, %rd1, %rd2;
    mul.lo.s32 %r3, %r30, 17;
    setp.eq.u32 %p9, %r1, 100000;
    mov.u32 %r8, 0;
"""
TAIL = """
    selp.u32 %r9, 1, 0, %p9;
    st.global.v2.u32 [%rd2], {%r8, %r9};
    ret;
"""
UNDEFINED = 0xCBCBCBCB


def run(body: str, ctas: int, threads: int, **options) -> tuple[np.ndarray, np.ndarray]:
    """What each thread leaves in %r8 and %p9, by CTA and thread."""
    machine = Machine(HEAD + body + TAIL, **options)
    result = machine.array(np.zeros(2 * ctas * threads, np.uint32))
    machine.launch(ctas, threads, result)
    found = machine.read(result, np.uint32, 2 * ctas * threads).reshape(ctas, threads, 2)
    return found[..., 0], found[..., 1]


def shuffled(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """The source lane and the predicate, as in the PTX ISA."""
    segment, clamp, b = c >> 8 & 31, c & 31, b & 31
    last = lane & segment | clamp & ~segment & 31
    first = lane & segment
    source = {"up": lane - b, "down": lane + b, "bfly": lane ^ b,
              "idx": first | b & ~segment & 31}[mode]
    valid = source >= last if mode == "up" else source <= last
    return (source if valid else lane), valid


@pytest.mark.parametrize("threads", [32, 64, 40])
@pytest.mark.parametrize(("mode", "b", "c"), [
    ("up", 1, 0), ("up", 3, 0x1800), ("down", 5, 31), ("down", 2, 0x1C1F), ("bfly", 16, 31),
    ("bfly", 1, 0x101F), ("idx", 7, 31), ("idx", 3, 0x181F), ("down", 33, 31)])
def test_shuffle(mode, b, c, threads):
    values, valid = run(f"shfl.sync.{mode}.b32 %r8|%p9, %r3, {b}, {c}, -1;", 3, threads)
    for cta in range(3):
        for thread in range(threads):
            lane, in_range = shuffled(mode, thread % 32, b, c)
            source = thread // 32 * 32 + lane
            expected = (cta * threads + source) * 17 if source < threads else UNDEFINED
            assert values[cta, thread] == expected
            assert valid[cta, thread] == in_range


def test_shuffle_with_a_source_for_each_lane():
    values, _ = run("add.s32 %r4, %r2, 3; shfl.sync.idx.b32 %r8, %r3, %r4, 31, -1;", 1, 64)
    expected = [(thread // 32 * 32 + (thread + 3) % 32) * 17 for thread in range(64)]
    assert values[0].tolist() == expected


@pytest.mark.parametrize("schedule", ["lowest", "highest"])
def test_half_warps_with_their_own_masks(schedule):
    values, _ = run("""
    setp.lt.u32 %p1, %r2, 16;
    @%p1 bra low;
    shfl.sync.bfly.b32 %r8, %r3, 1, 31, 0xffff0000;
    bra done;
    low:
    shfl.sync.bfly.b32 %r8, %r3, 2, 31, 0x0000ffff;
    done:
""", 1, 64, schedule=schedule)
    expected = [(thread ^ (2 if thread % 32 < 16 else 1)) * 17 for thread in range(64)]
    assert values[0].tolist() == expected


def test_a_lane_outside_the_mask_gives_no_value():
    values, _ = run("""
    setp.ge.u32 %p1, %r2, 16;
    @%p1 bra done;
    shfl.sync.down.b32 %r8, %r3, 8, 31, 0xffff;
    done:
""", 1, 32)
    assert values[0, :8].tolist() == [17 * (lane + 8) for lane in range(8)]
    assert (values[0, 8:16] == UNDEFINED).all()


def test_votes():
    body = """
    and.b32 %r4, %r1, 3;
    setp.eq.u32 %p1, %r4, 1;
    vote.sync.ballot.b32 %r8, %p1, -1;
"""
    assert (run(body, 2, 64)[0] == 0x22222222).all()
    assert (run(body, 2, 40)[0][:, 32:] == 0x22).all()


@pytest.mark.parametrize(("mode", "expected"), [
    ("all", [1, 0, 0]), ("any", [1, 1, 0]), ("uni", [1, 0, 1])])
def test_vote_predicates(mode, expected):
    _, found = run(f"""
    setp.lt.u32 %p1, %r1, 50;
    vote.sync.{mode}.pred %p9, %p1, -1;
""", 2, 96)
    assert (found == np.repeat(expected, 32)).all()


def test_match_any_and_all():
    found, _ = run("rem.u32 %r4, %r1, 3; match.any.sync.b32 %r8, %r4, -1;", 2, 64)
    for thread in range(64):
        same = sum(1 << lane for lane in range(32)
                   if (thread // 32 * 32 + lane) % 3 == thread % 3)
        assert (found[:, thread] == same).all()
    found, same = run("shr.u32 %r4, %r1, 5; min.u32 %r5, %r1, 32;"
                      "match.all.sync.b32 %r8|%p9, %r5, -1;", 2, 96)
    assert (same == np.repeat([0, 1, 1], 32)).all()
    assert (found == np.repeat([0, 0xFFFFFFFF, 0xFFFFFFFF], 32)).all()


def test_match_of_64_bits():
    found, _ = run("cvt.u64.u32 %rd5, %r2; shl.b64 %rd5, %rd5, 40;"
                   "match.any.sync.b64 %r8, %rd5, -1;", 1, 32)
    assert found[0].tolist() == [1 << lane for lane in range(32)]


@pytest.mark.parametrize(("operation", "function"), [
    ("add.u32", np.add), ("min.s32", np.minimum), ("max.u32", np.maximum),
    ("or.b32", np.bitwise_or), ("xor.b32", np.bitwise_xor), ("and.b32", np.bitwise_and)])
def test_reductions(operation, function):
    found, _ = run(f"redux.sync.{operation} %r8, %r3, -1;", 1, 64)
    values = (np.arange(64) * 17).reshape(2, 32)
    assert (found.reshape(2, 32) == function.reduce(values, axis=1)[:, None]).all()


def test_active_mask():
    found, _ = run("setp.ge.u32 %p1, %r2, 5; @%p1 bra done; activemask.b32 %r8; done:", 1, 40)
    assert (found[0, :5] == 31).all() and (found[0, 32:37] == 31).all()
    assert (run("activemask.b32 %r8;", 1, 40)[0][0, 32:] == 255).all()


def test_lane_masks():
    for relation, compare in (("lt", np.less), ("le", np.less_equal), ("gt", np.greater),
                              ("ge", np.greater_equal), ("eq", np.equal)):
        found, _ = run(f"mov.u32 %r8, %lanemask_{relation};", 1, 40)
        for thread in range(40):
            lanes = np.flatnonzero(compare(np.arange(32), thread % 32))
            assert found[0, thread] == sum(1 << int(lane) for lane in lanes)


def test_exited_lanes_are_not_waited_for():
    values, _ = run("""
    setp.ge.u32 %p1, %r2, 16;
    @%p1 exit;
    shfl.sync.bfly.b32 %r8, %r3, 1, 31, -1;
""", 1, 64)
    assert values[0, :16].tolist() == [17 * (lane ^ 1) for lane in range(16)]


BRANCH = """
    setp.{condition} %p1, %r2, 16;
    @%p1 bra other;
    shfl.sync.bfly.b32 %r8, %r3, 1, 31, {mask};
    bra done;
    other:
    {other}
    done:
    bar.sync 0;
"""


@pytest.mark.parametrize("schedule", ["lowest", "highest", "random"])
def test_missing_lanes(schedule):
    body = BRANCH.format(condition="ge.u32", mask="-1", other="add.s32 %r8, %r8, 1;")
    error = failure("missing lanes", Machine(HEAD + body + TAIL, schedule=schedule), 1, 64, 1)
    assert "warp 0 waits" in error.detail and "lanes 16, 17" in error.detail
    assert "shfl.sync" in error.ptx_text


def test_two_shuffles_do_not_meet():
    body = BRANCH.format(condition="ge.u32", mask="-1",
                         other="shfl.sync.bfly.b32 %r8, %r3, 1, 31, -1;")
    failure("missing lanes", Machine(HEAD + body + TAIL), 1, 64, 1)


def test_a_lane_that_is_not_in_its_mask():
    body = "shfl.sync.bfly.b32 %r8, %r3, 1, 31, 0xffff;"
    error = failure("missing lanes", Machine(HEAD + body + TAIL), 1, 64, 1)
    assert "lane 16" in error.detail and error.thread == (16, 0, 0)


def test_lanes_that_give_different_masks():
    body = """
    setp.eq.u32 %p1, %r2, 3;
    selp.b32 %r4, 0xffff, 0xffffffff, %p1;
    vote.sync.any.pred %p9, %p1, %r4;
"""
    failure("missing lanes", Machine(HEAD + body + TAIL), 1, 64, 1)


def test_groups_of_lanes_with_masks_of_their_own():
    found, _ = run("""
    and.b32 %r4, %r2, 3;
    match.any.sync.b32 %r5, %r4, -1;
    setp.gt.u32 %p1, %r2, 5;
    vote.sync.ballot.b32 %r8, %p1, %r5;
""", 1, 64)
    for thread in range(64):
        lanes = [lane for lane in range(32) if lane % 4 == thread % 4 and lane > 5]
        assert found[0, thread] == sum(1 << lane for lane in lanes)
