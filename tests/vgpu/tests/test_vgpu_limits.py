"""The numbers behind launch limits and occupancy."""

import pytest
from vgpu import cubin, limits


@pytest.mark.parametrize(("registers", "threads"), [
    (32, 1024), (64, 1024), (72, 896), (128, 512), (168, 384), (200, 256), (255, 256)])
def test_threads_that_registers_allow(registers, threads):
    resources = cubin.KernelResources(registers, 0, 0, 0, 1024, 0)
    assert limits.Limits((9, 0)).max_threads(resources) == threads


@pytest.mark.parametrize(("target", "cc", "runs"), [
    ("sm_80", (8, 0), True), ("sm_80", (8, 6), True), ("sm_86", (8, 0), False),
    ("sm_90", (10, 0), False), ("sm_90a", (9, 0), True), ("sm_100a", (10, 0), True),
    ("sm_120", (12, 0), True), ("sm_120a", (9, 0), False)])
def test_devices_that_run_a_cubin(target, cc, runs):
    assert limits.runs_on(target, cc) == runs


def test_occupancy_by_each_resource():
    h100, ada = limits.Limits((9, 0)), limits.Limits((8, 9))
    small = cubin.KernelResources(16, 0, 0, 0, 1024, 0)
    assert h100.resident_blocks(small, 32, 0) == 32  # blocks
    assert h100.resident_blocks(small, 512, 0) == 4 and ada.resident_blocks(small, 512, 0) == 3
    assert h100.resident_blocks(small, 33, 0) == 32 and ada.resident_blocks(small, 33, 0) == 24
    shared = cubin.KernelResources(16, 0, 48 << 10, 0, 1024, 0)
    assert h100.resident_blocks(shared, 32, 0) == 4 and ada.resident_blocks(shared, 32, 0) == 2
    assert h100.resident_blocks(shared, 32, 8 << 10) == 4
    assert h100.resident_blocks(shared, 32, 9 << 10) == 3  # 58 KiB of 228
    bounded = cubin.KernelResources(16, 0, 0, 0, 64, 0)
    assert h100.resident_blocks(bounded, 96, 0) == 0
