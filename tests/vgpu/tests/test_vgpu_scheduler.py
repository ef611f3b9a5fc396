"""Divergence, barriers, waiting warps, registers; counts do not depend on the schedule."""

import numpy as np
import pytest
from vgpu_kernels import Machine, failure

SCHEDULES = ["lowest", "highest", "random"]

STORE_OWN = """
    mov.u32 %r30, %ctaid.x;
    mov.u32 %r31, %ntid.x;
    mov.u32 %r32, %tid.x;
    mad.lo.s32 %r33, %r30, %r31, %r32;
    mul.wide.u32 %rd30, %r33, 4;
    ld.param.u64 %rd31, [p0];
    add.s64 %rd31, %rd31, %rd30;
    st.global.u32 [%rd31], %r9;
    ret;
"""


def run(body: str, grid, block, count: int, **options) -> np.ndarray:
    """What each thread leaves in %r9."""
    machine = Machine(body + STORE_OWN, **options)
    result = machine.empty(4 * count)
    machine.launch(grid, block, result)
    return machine.read(result, np.uint32, count)


LOOP = """
    mov.u32 %r1, %tid.x;
    mov.u32 %r9, 0;
    and.b32 %r2, %r1, 7;
    loop:
    setp.ge.u32 %p1, %r9, %r2;
    @%p1 bra done;
    add.s32 %r9, %r9, 1;
    bra loop;
    done:
    setp.gt.u32 %p2, %r1, 50;
    @%p2 add.s32 %r9, %r9, 100;
"""


@pytest.mark.parametrize("chunk", [1, 100, 32768])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_divergent_loop(schedule, chunk):
    found = run(LOOP, 3, 60, 180, schedule=schedule, chunk=chunk)
    thread = np.arange(180) % 60
    assert (found == thread % 8 + 100 * (thread > 50)).all()


def test_instruction_counts_do_not_depend_on_schedule_and_chunk():
    counts = set()
    for schedule in SCHEDULES:
        for chunk in (1, 64, 32768):
            machine = Machine(LOOP + STORE_OWN, schedule=schedule, chunk=chunk, seed=chunk)
            counts.add(machine.launch(3, 60, machine.empty(720)).instructions)
    assert len(counts) == 1


def test_registers_that_share_an_array_stay_apart():
    found = run("""
    mov.u32 %r1, %tid.x;
    mov.u32 %r9, %r1;
    setp.lt.u32 %p1, %r1, 3;
    @%p1 bra done;
    add.s32 %r1, %r1, 50;
    setp.lt.u32 %p2, %r1, 60;
    @%p2 bra done;
    mov.u32 %r1, 7;
    done:
    add.s32 %r9, %r9, %r1;
""", 1, 12, 12)
    assert found.tolist() == [0, 2, 4, 56, 58, 60, 62, 64, 66, 68, 17, 18]


def test_uniform_registers_after_an_early_exit():
    machine = Machine("""
    mov.u32 %r1, %tid.x;
    setp.ge.u32 %p1, %r1, 5;
    @%p1 exit;
    mov.u32 %r9, 0;
    loop:
    add.s32 %r9, %r9, 2;
    setp.lt.u32 %p2, %r9, 10;
    @%p2 bra loop;
""" + STORE_OWN)
    result = machine.empty(20)
    machine.launch(1, 8, result)
    assert machine.read(result, np.uint32, 5).tolist() == [10] * 5


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_special_registers(schedule):
    machine = Machine("""
    mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z;
    mov.u32 %r4, %ntid.x; mov.u32 %r5, %ntid.y; mov.u32 %r6, %ntid.z;
    mov.u32 %r11, %ctaid.x; mov.u32 %r12, %ctaid.y; mov.u32 %r13, %ctaid.z;
    mov.u32 %r14, %nctaid.x; mov.u32 %r15, %nctaid.y;
    mad.lo.s32 %r20, %r3, %r5, %r2;
    mad.lo.s32 %r20, %r20, %r4, %r1;
    mad.lo.s32 %r21, %r13, %r15, %r12;
    mad.lo.s32 %r21, %r21, %r14, %r11;
    mul.lo.s32 %r22, %r4, %r5;
    mul.lo.s32 %r22, %r22, %r6;
    mad.lo.s32 %r23, %r21, %r22, %r20;
    ld.param.u64 %rd1, [p0];
    mul.wide.u32 %rd2, %r23, 4;
    add.s64 %rd1, %rd1, %rd2;
    st.global.u32 [%rd1], %r23;
    ret;
""", schedule=schedule, chunk=60)
    result = machine.empty(4 * 24 * 24)
    machine.launch((2, 3, 4), (4, 3, 2), result)
    assert (machine.read(result, np.uint32, 576) == np.arange(576)).all()


@pytest.mark.parametrize(("operation", "expected"), [
    ("popc.u32 %r9, 0, %p1", [3, 13]), ("and.pred %p2, 0, %p1", [0, 0]),
    ("or.pred %p2, 0, %p1", [1, 1]), ("and.pred %p2, 0, %p3", [1, 1]),
    ("or.pred %p2, 0, !%p3", [0, 0])])
def test_barrier_reductions(operation, expected):
    select = "" if "popc" in operation else "selp.u32 %r9, 1, 0, %p2;"
    found = run(f"""
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mad.lo.s32 %r3, %r2, 10, 3;
    setp.lt.u32 %p1, %r1, %r3;
    setp.lt.u32 %p3, %r1, 1000;
    bar.red.{operation};
    {select}
""", 2, 40, 80)
    assert (found == np.repeat(expected, 40)).all()


DIVERGED = """
    mov.u32 %r1, %tid.x;
    setp.lt.u32 %p1, %r1, 32;
    @%p1 bra other;
    bar.sync 0;
    bra done;
    other:
    {other}
    done:
    ret;
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_barrier_divergence(schedule):
    machine = Machine(DIVERGED.replace("{other}", "bar.sync 0;"), schedule=schedule)
    error = failure("barrier divergence", machine, 3, 64, 0)
    assert "(0, 0, 0)" in error.detail and error.thread == (32, 0, 0)


def test_exited_threads_do_not_hold_up_a_barrier():
    Machine(DIVERGED.replace("{other}", "exit;")).launch(3, 64, 0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_spinning_threads_see_what_others_store(schedule):
    machine = Machine("""
    mov.u32 %r1, %tid.x;
    ld.param.u64 %rd1, [p0];
    setp.eq.u32 %p1, %r1, 5;
    @%p1 bra signal;
    wait:
    ld.volatile.global.u32 %r2, [%rd1];
    setp.eq.u32 %p2, %r2, 0;
    @%p2 bra wait;
    ret;
    signal:
    st.global.u32 [%rd1], 1;
    ret;
""", schedule=schedule)
    machine.launch(1, 40, machine.array(np.zeros(1, np.uint32)))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_ctas_of_a_cooperative_launch_run_together(schedule):
    machine = Machine("""
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r3, %tid.x;
    ld.param.u64 %rd1, [p0];
    setp.ne.u32 %p1, %r3, 0;
    bar.sync 0;
    @%p1 bra done;
    atom.global.add.u32 %r2, [%rd1], 1;
    wait:
    ld.volatile.global.u32 %r2, [%rd1];
    setp.ne.u32 %p2, %r2, 6;
    @%p2 bra wait;
    done:
    bar.sync 0;
    ret;
""", schedule=schedule, chunk=64)
    machine.launch(6, 64, machine.array(np.zeros(1, np.uint32)), cooperative=True)


def test_trap():
    error = failure("trap", Machine("""
    mov.u32 %r1, %tid.x;
    setp.eq.u32 %p1, %r1, 9;
    @%p1 trap;
    ret;
"""), 1, 40, 0)
    assert error.thread == (9, 0, 0)


DEADLOCKS = {
    "flag": """
    wait:
    ld.volatile.global.u32 %r2, [%rd1];
    setp.eq.u32 %p2, %r2, 0;
    @%p2 bra wait;
""",
    "lock": """
    wait:
    atom.global.cas.b32 %r2, [%rd1+4], 0, 1;
    setp.ne.u32 %p2, %r2, 0;
    @%p2 bra wait;
    bar.sync 0;
    st.global.u32 [%rd1+4], 0;
""",
    "stack": """
    .local .align 4 .b8 stack[4];
    wait:
    st.local.u32 [stack], 7;
    ld.volatile.global.u32 %r2, [%rd1];
    st.local.u32 [stack], %r2;
    setp.eq.u32 %p2, %r2, 0;
    @%p2 bra wait;
""",
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", DEADLOCKS)
def test_deadlock(name, schedule):
    machine = Machine("ld.param.u64 %rd1, [p0];" + DEADLOCKS[name] + "ret;", schedule=schedule)
    data = machine.array(np.zeros(2, np.uint32))
    error = failure("deadlock", machine, 1, 40, data)
    assert ("39 threads repeat" if name == "lock" else "40 threads repeat") in error.detail


def test_a_lock_is_no_deadlock():
    machine = Machine("""
    ld.param.u64 %rd1, [p0];
    wait:
    atom.global.cas.b32 %r2, [%rd1+4], 0, 1;
    setp.ne.u32 %p2, %r2, 0;
    @%p2 bra wait;
    ld.global.u32 %r3, [%rd1];
    add.s32 %r3, %r3, 1;
    st.global.u32 [%rd1], %r3;
    atom.global.exch.b32 %r2, [%rd1+4], 0;
    ret;
""")
    data = machine.array(np.zeros(2, np.uint32))
    machine.launch(1, 128, data)
    assert machine.read(data, np.uint32, 1)[0] == 128


LATE = """
    mov.u32 %r1, %tid.x;
    setp.lt.u32 %p1, %r1, 16;
    @%p1 bra other;
    bar.warp.sync -1;
    ret;
    other:
    {other}
    ret;
"""


def test_lanes_that_only_exit_are_not_waited_for():
    Machine(LATE.format(other="")).launch(2, 64, 0)


def test_lanes_that_go_on_and_exit_are_missing():
    machine = Machine(LATE.format(other="ld.param.u64 %rd1, [p0]; st.global.u32 [%rd1], 1;"))
    error = failure("missing lanes", machine, 1, 64, machine.empty(4))
    assert "lanes 0, 1, 2" in error.detail and error.thread == (16, 0, 0)
