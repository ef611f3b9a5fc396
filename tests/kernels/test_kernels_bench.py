"""The bench: a table on standard output, talk on standard error, and no figures for a wrong op."""

import csv

import pytest

from kernels import bench
from kernels.common.gpus import GPUS, Gpu, ceilings, least_seconds
from kernels.registry import load_op, load_spec


def test_a_row_for_each_function_and_a_csv_with_the_machine(capsys, tmp_path):
    file = tmp_path / "rows.csv"
    ops = ["residual", "grad_norm"]
    assert bench.main([*ops, "--quick", "--backend", "cpu", "--csv", str(file)]) == 0
    table, talk = capsys.readouterr()
    assert [line.split()[0] for line in table.splitlines()] == [
        "op", "residual.forward", "residual.backward", "grad_norm.forward"
    ]
    assert "numba" in talk
    with open(file, encoding="utf-8", newline="") as rows:
        found = list(csv.DictReader(rows))
    assert len(found) == 3
    for row in found:
        assert 0 < float(row["p20_ms"]) <= float(row["median_ms"]) <= float(row["p80_ms"])
        assert row["processor"] and row["numpy"]


def test_a_csv_that_cannot_be_written_is_refused_at_once(capsys, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        bench.main(["gelu", "--csv", str(tmp_path / "none" / "rows.csv")])
    assert "rows.csv cannot be written: No such file" in capsys.readouterr().err


def test_a_wrong_op_is_not_timed(capsys, monkeypatch):
    def drops_the_branch(dx, dout, dbranch):
        dx[:] = dout

    monkeypatch.setattr(load_op("residual", "cpu"), "backward", drops_the_branch)
    assert bench.main(["residual", "--quick", "--backend", "cpu"]) == 1
    table, talk = capsys.readouterr()
    assert "residual.backward" not in table
    assert "residual.backward (cpu) is wrong for N=1 d=1: dx: error" in talk


def test_the_gpu_is_timed_by_events_and_compared_with_its_ceilings(capsys, monkeypatch, tmp_path):
    pytest.importorskip("numba_cuda")
    file = tmp_path / "rows.csv"
    monkeypatch.setattr(load_spec("gelu"), "BENCH_CASES", ({"shape": (5, 4)},))
    monkeypatch.setattr(bench, "ceilings", lambda name: Gpu(name, 1000, 50, "made up"))
    assert bench.main(["gelu", "--quick", "--backend", "gpu", "--csv", str(file)]) == 0
    with open(file, encoding="utf-8", newline="") as rows:
        found = list(csv.DictReader(rows))
    assert [row["op"] for row in found] == ["gelu.forward", "gelu.backward"]
    for row in found:
        assert row["of limit"].endswith("%") and row["gpu"] and row["cuda"] and row["nvJitLink"]


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(bench, "problem", lambda backend: "numba-cuda not installed")
    assert bench.main(["grad_norm", "--quick"]) == 0
    table, talk = capsys.readouterr()
    assert "no GPU: numba-cuda not installed" in talk and "cpu" in table and "gpu" not in table
    assert bench.main(["grad_norm", "--backend", "gpu"]) == 1


def test_other_versions_are_warned_of(monkeypatch):
    pytest.importorskip("numba_cuda")
    from kernels.common import cuda

    monkeypatch.setattr(cuda, "TESTED", cuda.compiler_versions())
    assert cuda.untested_versions() == []
    monkeypatch.setitem(cuda.TESTED, "cuda-core", "0.9")
    assert [line.endswith("is not the tested 0.9.*") for line in cuda.untested_versions()] == [True]


def test_ceilings_are_found_by_the_longest_name():
    assert ceilings("NVIDIA A100-SXM4-80GB").bandwidth == 2039
    assert ceilings("NVIDIA H200 NVL").float32 == 60
    assert ceilings("NVIDIA L40S").name == "NVIDIA L40S"
    assert ceilings("NVIDIA A10G") is None and ceilings("") is None
    assert least_seconds(Gpu("", 1000, 50, ""), 10**9, 10**9) == pytest.approx(1e-3)
    assert all(gpu.source for gpu in GPUS)


def test_unknown_ops_are_refused(capsys):
    for argv in (["softmax"], [], ["gelu", "--all"]):
        try:
            bench.main(argv)
        except SystemExit as stop:
            assert stop.code == 2
        else:
            raise AssertionError(f"{argv} was accepted")
    assert "unknown op 'softmax': choose from embedding" in capsys.readouterr().err
