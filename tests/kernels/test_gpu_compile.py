"""Every CUDA kernel, compiled for every architecture: accepted, in registers, in float32."""

import dataclasses
import itertools

import pytest

pytest.importorskip("numba_cuda")

from kernels import compile_report
from kernels.common import cuda as layer
from kernels.common.cuda import Floats, Kernel, cuda, float32, int32
from kernels.common.gpus import ARCHITECTURES, occupancy
from kernels.compile_report import Row, faults_of, read_table, write_table

ROW = Row("gelu.gpu._forward_4", "9.0", 256, 40, 0, 0, 0, "0.75",
          100, 64, 16, 6, 8, 4, 2, 30, 1, 80, 512, "13.5", "")


@pytest.mark.xdist_group("compile")
def test_every_kernel_on_every_architecture():
    """The committed table is that of these sources; it takes a minute when they have changed."""
    rows = compile_report.compile_all()
    assert {row.capability for row in rows} == {"8.0", "8.6", "8.9", "9.0", "10.0", "12.0"}
    assert len({row.kernel for row in rows}) * len(ARCHITECTURES) == len(rows)
    assert faults_of(rows, read_table()) == []


def test_every_reason_in_the_table_is_needed():
    assert [row for row in read_table() if row.reason and not (row.stack or row.spills)] == []


@pytest.mark.parametrize(("changed", "words"), [
    ({"stack": 8}, "8 bytes of stack"),
    ({"spills": 4}, "4 spilled"),
    ({"registers": 45}, "45 registers, 40 in gpu_resources.csv"),
    ({"shared": 49153}, "49153 bytes of shared memory"),
    ({"occupancy": "0.00"}, "too many for a single block"),
    ({"faults": "double precision"}, "double precision"),
    ({"instructions": 111}, "111 instructions, 100 in gpu_resources.csv"),
    ({"hmma": 63}, "63 hmma, 64 in"),
    ({"ldsm": 17}, "17 ldsm, 16 in"),
    ({"ldgsts": 5}, "5 ldgsts, 6 in"),
    ({"bar": 2}, "2 bar, 1 in"),
    ({"kernel": "gelu.gpu._new"}, "not in gpu_resources.csv"),
])
def test_faults(changed, words):
    assert faults_of([ROW], [ROW]) == []
    found = faults_of([dataclasses.replace(ROW, **changed)], [ROW])
    assert words in found[0] and ROW.capability in found[0]


def test_what_is_no_fault():
    assert faults_of([dataclasses.replace(ROW, registers=44)], [ROW]) == [], "10 %"
    assert faults_of([dataclasses.replace(ROW, instructions=110, sts=0)], [ROW]) == [], "10 %"
    uncounted = dataclasses.replace(ROW, **dict.fromkeys(compile_report.LOOP, 0))
    assert faults_of([uncounted], [ROW]) == faults_of([ROW], [uncounted]) == [], "no nvdisasm"
    other = dataclasses.replace(ROW, registers=99, stack=40, spills=44, nvjitlink="13.0")
    assert faults_of([other], [ROW]) == [], "another assembler"
    assert "spilled" in faults_of([other], [])[0], "it has no row"
    spilling = dataclasses.replace(ROW, stack=16, spills=16)
    assert faults_of([spilling], [dataclasses.replace(spilling, reason="measured")]) == []
    spilling = dataclasses.replace(ROW, stack=24)
    assert faults_of([spilling], [dataclasses.replace(spilling, reason="too much")]) != []


def test_another_assembler_is_named(monkeypatch, capsys):
    monkeypatch.setattr(compile_report, "compile_all", lambda: [ROW])
    monkeypatch.setattr(compile_report, "read_table",
                        lambda: [dataclasses.replace(ROW, registers=20, nvjitlink="13.0")])
    assert compile_report.main(["--check"]) == 0
    assert "nvJitLink 13.5 is not the table's 13.0" in capsys.readouterr().err


def test_rows_of_kernels_that_are_gone_are_faults():
    assert "no such kernel" in faults_of([], [ROW])[0]


def test_the_table_is_read_as_it_was_written(tmp_path):
    rows = [ROW, dataclasses.replace(ROW, reason="a, b")]
    write_table(rows, tmp_path / "table.csv")
    assert read_table(tmp_path / "table.csv") == rows
    assert read_table(tmp_path / "none.csv") == []


def in_double_precision(out: Floats, n: int32):
    out[n] = out[0] / n


def with_an_indexed_local_array(out: Floats, n: int32):
    values = cuda.local.array(64, float32)
    for i in range(n):
        values[i] = out[i]
    for i in range(n):
        out[i] = values[n - i] * values[i]


def with_a_call(n: int32):
    print(n)  # a function of the CUDA runtime


@pytest.mark.parametrize(("function", "words"), [
    (in_double_precision, "double precision"),
    (with_an_indexed_local_array, "local memory"),
    (with_a_call, "not inlined"),
])
def test_negative_controls(function, words):
    """Each of these kernels compiles and would run; the report must refuse it."""
    kernel = Kernel(function, 128, None, None)
    for capability in ((9, 0), (12, 0)):
        [code] = layer.intermediate_code(kernel, [capability])
        row = compile_report.assemble(layer, kernel, capability, code)
        assert words in row.faults
        assert faults_of([row], [row]) != []


def test_occupancy_is_what_the_virtual_gpu_says():
    limits = pytest.importorskip("vgpu.limits")
    cubin = pytest.importorskip("vgpu.cubin")
    sizes = itertools.product((32, 96, 256, 1024), (16, 40, 63, 64, 128, 255), (0, 1000, 49152))
    for (threads, registers, shared), capability in itertools.product(sizes, ARCHITECTURES):
        resources = cubin.KernelResources(registers, 0, shared, 0, 1024, 0)
        device = limits.Limits(capability)
        blocks = device.resident_blocks(resources, threads, 0)
        expected = blocks * -(-threads // 32) / (device.model.threads // 32)
        assert occupancy(capability, threads, registers, shared) == expected
