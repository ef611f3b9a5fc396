"""The bench: a table on standard output, talk on standard error, and no figures for a wrong op."""

import csv
import functools

import pytest

from kernels import bench, bench_readme, bench_tiles, bench_torch
from kernels.common.gpus import GPUS, Gpu, ceilings, least_seconds
from kernels.common.spec import has_bf16
from kernels.registry import OPS, load_op, load_spec


def test_a_row_for_each_function_and_a_csv_with_the_machine(capsys, tmp_path):
    file = tmp_path / "rows.csv"
    ops = ["layernorm", "grad_norm"]
    assert bench.main([*ops, "--quick", "--backend", "cpu", "--csv", str(file)]) == 0
    table, talk = capsys.readouterr()
    times = 1 + has_bf16("cpu")  # a row for each precision
    assert [line.split()[0] for line in table.splitlines()] == [
        "op", *times * ["layernorm.forward"], *times * ["layernorm.backward"], "grad_norm.forward"
    ]
    assert "numba" in talk
    with open(file, encoding="utf-8", newline="") as rows:
        found = list(csv.DictReader(rows))
    assert len(found) == 1 + 2 * times
    for row in found:
        assert 0 < float(row["p20_ms"]) <= float(row["median_ms"]) <= float(row["p80_ms"])
        assert row["processor"] and row["numpy"]


def test_a_csv_that_cannot_be_written_is_refused_at_once(capsys, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        bench.main(["gelu", "--csv", str(tmp_path / "none" / "rows.csv")])
    assert "rows.csv cannot be written: No such file" in capsys.readouterr().err


def test_a_wrong_op_is_not_timed(capsys, monkeypatch):
    def drops_the_norm(dx, dx_bf16, dgamma, dbeta, dy, x, mean, rstd, gamma, residual):
        dx[:] = residual

    monkeypatch.setattr(load_op("layernorm", "cpu"), "backward", drops_the_norm)
    assert bench.main(["layernorm", "--quick", "--backend", "cpu"]) == 1
    table, talk = capsys.readouterr()
    assert "layernorm.backward" not in table
    assert "layernorm.backward (cpu) is wrong for N=1 d=3: dx: error" in talk


def test_the_gpu_is_timed_by_events_and_compared_with_its_ceilings(capsys, monkeypatch, tmp_path):
    pytest.importorskip("numba_cuda")
    file = tmp_path / "rows.csv"
    case = {"M": 16, "N": 16, "K": 16}
    spec = load_spec("matmul")
    monkeypatch.setattr(spec, "BENCH_CASES", (case, {**case, "precision": "bf16"}))
    monkeypatch.setattr(spec, "CASES", (case,))
    monkeypatch.setattr(bench, "_time", lambda quick: (0.01, 2))
    monkeypatch.setattr(bench, "ceilings", lambda name: ceilings("NVIDIA A100-SXM4-80GB"))
    monkeypatch.setattr(bench, "SIZE", 16)
    monkeypatch.setattr(bench, "COPIED", 1 << 10)
    assert bench.main(["matmul", "--backend", "gpu", "--csv", str(file)]) == 0
    with open(file, encoding="utf-8", newline="") as rows:
        found = list(csv.DictReader(rows))
    assert [row["op"] for row in found] == ["matmul.forward"] * 2 + ["matmul.backward"] * 2
    for row in found:
        assert row["of limit"].endswith("%") and row["of ceiling"].endswith("%")
        assert float(row["model_ms"]) > 0 and float(row["bf16 TFLOP/s"]) > 0
        assert bool(row["fp32_ms"]) == ("bf16" in row["case"])
        assert row["gpu"] and row["cuda"] and row["nvJitLink"]


def test_the_tiles_are_timed_where_there_is_a_gpu(capsys, monkeypatch):
    pytest.importorskip("numba_cuda")
    monkeypatch.setattr(bench_tiles, "TOKENS", 64)
    monkeypatch.setattr(bench_tiles, "SPLITS", (1, 2))
    monkeypatch.setattr(bench_tiles, "shapes", lambda: iter([(16, 32, False)]))
    monkeypatch.setattr(bench, "rows_of_tiles", functools.partial(
        bench_tiles.rows, seconds=0.001, at_least=1))
    assert bench.main(["--tiles"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [row["form"] for row in rows] == ["y"] * 2 + ["dx"] * 2 + ["dw"] * 4
    assert all(float(row["median_ms"]) > 0 for row in rows)


def test_the_readme_gets_a_table_of_a_real_gpu_only(tmp_path, capsys):
    row = dict.fromkeys((*bench.COLUMNS, "driver", "numba-cuda", "commit", "copy GB/s",
                         "fp32 TFLOP/s", "bf16 TFLOP/s"), "1") | {"backend": "gpu"}
    readme = tmp_path / "README.md"
    readme.write_text(f"above\n{bench_readme.BEGIN}old\n{bench_readme.END}\nbelow\n")
    file = str(tmp_path / "rows.csv")
    for name in ("Virtual GPU (sm_90)", ""):
        bench.write_csv(file, (*row, "gpu"), [row | {"gpu": name}])
        with pytest.raises(ValueError, match="expected those of one NVIDIA GPU"):
            bench_readme.update(file, readme)
        assert bench.main(["--update-readme", file]) == 1
    bench.write_csv(file, (*row, "gpu"), [row | {"gpu": "NVIDIA L4", "op": "made.up"}])
    bench_readme.update(file, readme)
    text = readme.read_text()
    assert text.startswith("above\n") and text.endswith("\nbelow\n") and "old" not in text
    assert "On an NVIDIA L4" in text and "| made.up | 1 |" in text
    assert bench_readme.BEGIN in bench_readme.README.read_text(encoding="utf-8")


def test_without_torch_there_is_no_peer(monkeypatch):
    monkeypatch.setattr(bench_torch, "torch", lambda: None)
    assert bench_torch.peer("matmul", "forward", {}) is None
    assert {op for op, _ in bench_torch._PEERS} <= set(OPS)
    assert all(name in load_spec(op).FUNCTIONS for op, name in bench_torch._PEERS)


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
    made_up = Gpu("", 1000, 50, 500, "")
    assert least_seconds(made_up, 10**9, 10**9) == pytest.approx(1e-3)
    assert least_seconds(made_up, 10**12, 10**9) == pytest.approx(2e-2)
    assert least_seconds(made_up, 10**12, 10**9, in_bf16=True) == pytest.approx(2e-3)
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
