"""The bench: a table on standard output, talk on standard error, and no figures for a wrong op."""

import csv

from kernels import bench
from kernels.registry import load_op


def test_a_row_for_each_function_and_a_csv_with_the_machine(capsys, tmp_path):
    file = tmp_path / "rows.csv"
    assert bench.main(["residual", "grad_norm", "--quick", "--csv", str(file)]) == 0
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


def test_a_wrong_op_is_not_timed(capsys, monkeypatch):
    def drops_the_branch(dx, dout, dbranch):
        dx[:] = dout

    monkeypatch.setattr(load_op("residual", "cpu"), "backward", drops_the_branch)
    assert bench.main(["residual", "--quick"]) == 1
    table, talk = capsys.readouterr()
    assert "residual.backward" not in table
    assert "residual.backward (cpu) is wrong for N=1 d=1: dx: error" in talk


def test_unknown_ops_are_refused(capsys):
    for argv in (["softmax"], [], ["gelu", "--all"]):
        try:
            bench.main(argv)
        except SystemExit as stop:
            assert stop.code == 2
        else:
            raise AssertionError(f"{argv} was accepted")
    assert "unknown op 'softmax': choose from embedding" in capsys.readouterr().err
