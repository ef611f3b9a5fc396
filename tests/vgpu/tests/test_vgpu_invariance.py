"""What must not change results or instruction counts: the order of threads, and the checks."""

import pytest
import vgpu
from vgpu.examples import suite
from vgpu.launch import launches

pytestmark = [
    pytest.mark.skipif(not vgpu.installed(), reason="a real GPU has no such switches"),
    pytest.mark.xdist_group("examples"),  # one process compiles the examples
]
SWITCHES = [
    dict(schedule="highest"),
    dict(schedule="random", seed=1),
    dict(chunk=64),
    dict(schedule="random", seed=2, chunk=64),
    dict(lazy_streams=True),
    dict(race=False, count=True),
    dict(global_race=True),
]
# They read what other blocks change, as locks and compare-and-swap loops do.
RACING = {"compare_and_swap", "spin_lock"}


def trace(example, options):
    """Kernel, launch and instruction count of every launch, and the bytes of every result."""
    launches.clear()
    with vgpu.options(**options):
        results = [check.got.tobytes() for check in example()]
    return results, [
        (record.kernel, record.grid, record.block, record.statistics.instructions)
        for record in launches
    ]


@pytest.mark.parametrize("name", suite.EXAMPLES)
def test_same_results_and_instruction_counts(name):
    results, counts = trace(suite.EXAMPLES[name], {})
    assert counts
    for options in SWITCHES:
        if options.get("global_race") and name in RACING:
            continue
        other_results, other_counts = trace(suite.EXAMPLES[name], options)
        assert other_results == results, options
        if name not in suite.CONTENDED:
            assert other_counts == counts, options


@pytest.mark.parametrize("name", sorted(RACING))
def test_global_race_reports_what_locks_do(name):
    with pytest.raises(vgpu.VirtualGPUError, match="global race"), vgpu.options(global_race=True):
        list(suite.EXAMPLES[name]())
