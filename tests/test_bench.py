"""The bench: processes that answer, figures that have their rows, a table of what was measured."""

import csv
import importlib.util
import os

import pytest

from andrea_numba import device
from andrea_numba.bench import __main__ as bench
from andrea_numba.bench import compare, report, start, steps
from andrea_numba.bench.process import Failed, Worker

NEEDS_TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None,
                                 reason="PyTorch is not installed")
SIDES = ["andrea_numba.bench.ours",
         pytest.param("andrea_numba.bench.peer", marks=NEEDS_TORCH)]
TINY = {"d_model": 16, "n_head": 2, "n_layer": 1, "context": 16, "vocab_size": 257}
LONG = TINY | {"context": 256}
TRAIN = {"model": TINY, "batch": 2, "precision": "fp32"}
CALLS = {
    "train": TRAIN,
    "op": {"op": "attention", "name": "backward",
           "case": {"B": 1, "T": 8, "H": 2, "D": 4, "d": 8, "rows": 8}},
    "decode": {"model": LONG, "weights": "int8", "samples": 2},
    "prefill": {"model": LONG, "length": 10},
}
ROW = dict.fromkeys(compare.COLUMNS, "") | {
    "figure": "a step", "unit": "ms", "ours": "10", "threads": "2", "processor": "made up",
    "rung": "plain", "python": "3", "numpy": "2", "numba": "0", "commit": "abc", "torch": ""}


@pytest.mark.parametrize("side", SIDES)
def test_each_side_makes_the_same_calls(side):
    with Worker(side, 1) as worker:
        for name, given in CALLS.items():
            about = worker.make(name, given)
            assert about.get("tokens") == {"train": 32, "decode": 2, "prefill": 10}.get(name)
            # beyond the positions that are decoded in turn
            assert min(worker.time(130 if name == "decode" else 2)) > 0
        assert worker.ask("peak") > 0
        with pytest.raises(Failed, match="KeyError: 'fly'"):
            worker.make("fly", {})
        assert worker.time(1)  # it goes on


def test_a_worker_that_ends_is_said():
    with Worker("andrea_numba.errors", 1) as worker, pytest.raises(Failed, match="exit code 0"):
        worker.time(1)


@NEEDS_TORCH
@pytest.mark.parametrize("op, name", [("attention", "forward"), ("attention", "backward"),
                                      ("cross_entropy", "backward")])
def test_the_peer_computes_the_same(op, name):
    import numpy as np

    from kernels.bench_torch import peer_on
    from kernels.common.verify import as_stored, build_arguments
    from kernels.registry import load_op, load_spec

    case = CALLS["op"]["case"] if op == "attention" else {"N": 6, "V": 9, "Vp": 9}
    function = load_spec(op).FUNCTIONS[name]
    arguments = as_stored(function, case, build_arguments(op, name, case))
    getattr(load_op(op, "oracle"), name)(**arguments)
    theirs = peer_on("cpu", op, name, arguments)()
    if name == "forward":
        wanted, found = arguments["out"], theirs.transpose(1, 2).reshape(8, 8)
    elif op == "attention":
        wanted = arguments["dqkv"]
        found = np.concatenate([g.transpose(1, 2).reshape(8, 8) for g in theirs], axis=1)
    else:
        wanted, (found,) = arguments["dlogits"], theirs
    assert np.allclose(wanted, found, atol=1e-5)


@NEEDS_TORCH
def test_the_peer_has_the_parameters_of_ours():
    from andrea_numba.bench.peer import Gpt
    from andrea_numba.config import ModelConfig
    from andrea_numba.parameters import ParameterTable

    config = ModelConfig(**TINY)
    table = ParameterTable(config)
    padding = (config.padded_vocab_size - config.vocab_size) * config.d_model
    assert sum(p.numel() for p in Gpt(config).parameters()) == table.count + padding


def test_a_figure_has_a_row_with_its_share_of_the_stream(monkeypatch):
    monkeypatch.setattr(compare, "TURN", 0.001)
    figure = compare.Figure("a token", "decode", CALLS["decode"], stream="read", memory=True)
    with Worker("andrea_numba.bench.ours", 1) as ours:
        row, memory = compare.measure(figure, ours, {}, (2, 2))
    assert row.keys() | memory.keys() <= set(compare.COLUMNS)
    assert 0 < row["ours_p20"] <= row["ours"] <= row["ours_p80"]
    assert row["of_ceiling"] > 0 and row["note"].endswith("GB/s by read")
    assert memory["unit"] == "MiB" and memory["ours"] > 1


def test_what_cannot_be_measured_is_said(capsys):
    figure = compare.Figure("a token", "decode", {"model": LONG, "weights": "ternary"})
    with Worker("andrea_numba.bench.ours", 1) as ours:
        assert list(compare.measure(figure, ours, {}, (2, 2))) == []
    assert "a token: ValueError: there are no ternary weights" in capsys.readouterr().err


@pytest.mark.parametrize("quick", [False, True])
def test_the_figures_have_names_of_their_own(quick):
    made = [figure for group in compare.GROUPS for figure in compare.figures(group, quick)]
    assert len({figure.name for figure in made}) == len(made)
    for figure in made:
        assert figure.make in CALLS and figure.peers


def test_a_profile_adds_up():
    with Worker("andrea_numba.bench.ours", 1) as ours:
        found = ours.ask("profile", **TRAIN, steps=2)
    names = [part["op"] for part in found]
    assert names[-1] == "all else" and {"matmul.forward", "adamw.update"} <= set(names)
    assert len(names) == len(set(names))
    assert all(part["least"] > 0 and part["limit"] for part in found[:-1])


def test_a_program_is_waited_for(tmp_path):
    def waited(word: bytes) -> float:
        return start.wait(("cli_train", "--help"), 1, tmp_path, {}, lambda text: word in text,
                          "stdout")

    assert waited(b"usage") > 0
    with pytest.raises(Failed, match="cli_train ended with exit code 0"):
        waited(b"no such word")


def write(path, rows):
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ROW)
        writer.writeheader()
        writer.writerows(rows)


def test_the_readme_gets_the_table_and_the_plot(tmp_path):
    pytest.importorskip("matplotlib")
    readme, file = tmp_path / "README.md", tmp_path / "rows.csv"
    (tmp_path / "data").mkdir()
    readme.write_text(f"above\n{report.BEGIN}old\n{report.END}\nbelow\n")
    pair = {"peer": "eager", "theirs": "20", "ratio": "2.004", "theirs_p20": "19",
            "theirs_p80": "21"}
    swept = [ROW | pair | {"figure": f"sweep, {axis} {value}", "tokens_per_second": "5"}
             for axis, values in compare.SWEEP.items() for value in values]
    write(file, [ROW, ROW | pair, *swept])
    report.update(str(file), tmp_path)
    text = readme.read_text()
    assert text.startswith("above\n") and text.endswith("\nbelow\n") and "old" not in text
    assert "| a step | 10 ms |  |" in text and "| 20 ms (19 to 21), eager | 2.00 × |" in text
    assert "sweep" not in text and f"]({report.PLOT})" in text
    image = tmp_path / report.PLOT
    assert 5_000 < image.stat().st_size < 60_000
    before = image.read_bytes()
    report.update(str(file), tmp_path)
    assert image.read_bytes() == before and readme.read_text() == text
    assert report.BEGIN in (report.ROOT / "README.md").read_text(encoding="utf-8")


def test_a_file_without_figures_is_refused(tmp_path, capsys):
    file = tmp_path / "rows.csv"
    for content in ("", "figure,ratio\n", "op,median_ms\nmatmul,1\n"):
        file.write_text(content)
        assert bench.main(["--update-readme", str(file)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert bench.main(["--update-readme", str(tmp_path / "none")]) == 2


def test_presets_are_timed_alone(monkeypatch, capsys):
    for name in ("GOMP_SPINCOUNT", "OPENBLAS_THREAD_TIMEOUT"):  # which the command sets
        monkeypatch.setenv(name, os.environ.get(name, "4"))
    monkeypatch.setattr(steps, "SHAPES", {"nano": (1, 2)})
    monkeypatch.setattr(steps, "CALLS", 8)
    monkeypatch.setattr(device, "cuda_problem", lambda: "no GPU is asked")
    assert bench.main(["nano"]) == 0
    table, talk = capsys.readouterr()
    interleaved, nano = csv.DictReader(table.splitlines())
    assert interleaved["measurement"] == "interleaved" and float(nano["median_ms"]) > 0
    assert "device: " in talk


@pytest.mark.parametrize("argv", [["pico"], ["--batch-size", "-1"], ["--only", "all"]])
def test_what_cannot_be_asked_is_refused(argv, capsys):
    assert bench.main(argv) == 2
    table, talk = capsys.readouterr()
    assert table == "" and talk.startswith("bench: error: ") and talk.count("\n") == 1
