"""andrea-train as a user meets it: a whole run, looking without training, refusals."""

import errno
import json
import os
import re
import subprocess
import sys
import tomllib

import pytest
from helpers import ROOT, TEXT, TINY, events, final_weights, refused, run_program
from in_process import open_run

from andrea_numba import args, checkpoint, plot
from andrea_numba.cli_train import make_parser, read_config
from andrea_numba.config import PRESETS, TrainConfig
from andrea_numba.errors import UserError

# ---- a whole run


def test_a_run_from_text_to_files(train, text):
    result = train("t.txt", "--steps", 6, "--log-every", 2, "--eval-every", 3, "--sample-every", 3,
                   "--save-every", 3)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "andrea-generate runs/t\n"
    assert "cuda" not in result.stderr.lower() and "numba" not in result.stderr.lower()
    assert "\r" not in result.stderr and "\x1b" not in result.stderr
    run = text / "runs" / "t"
    assert checkpoint.load(checkpoint.find(str(run))).step == 6
    names = {r["event"] for r in map(json.loads, (run / "log.jsonl").read_text().splitlines())}
    assert names == {"run.start", "run.loss", "run.eval", "run.sample", "run.checkpoint",
                     "run.end"}
    assert [r["step"] for r in events(run, "run.loss")] == [1, 2, 4, 6]
    assert [r["step"] for r in events(run, "run.eval")] == [3, 6]
    first = re.search(r"first loss ([\d.]+); ([\d.]+) is expected", result.stderr)
    assert abs(float(first[1]) - float(first[2])) < 0.1
    line = re.findall(r"step 6/6 100\.0%  loss [\d.]+ \(average [\d.]+\)  norm [\d.]+  "
                      r"lr [\d.e-]+  \d+ ms  [\d,]+ tok/s  ETA ", result.stderr)
    assert len(line) == 1
    generated = run_program("andrea-generate", "--max-tokens", 5, "--prompt", "The", cwd=text)
    assert generated.returncode == 0 and generated.stdout.startswith("The"), generated.stderr


def test_one_step_is_one_update(train, text):
    result = train("t.txt", "--steps", 1, "--out", "one")
    assert result.returncode == 0, result.stderr
    assert [r["step"] for r in events(text / "one", "run.loss")] == [1]
    assert checkpoint.load(checkpoint.find(str(text / "one"))).step == 1


def test_a_folder_that_cannot_be_written(train, text):
    (text / "runs").write_text("a file")
    refused(train("t.txt", "--steps", 1), "runs", "not a folder")


def test_output_to_a_full_disk_is_one_line(text):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    result = run_program("andrea-train", "--print-config", cwd=text, stdout_to="/dev/full")
    assert result.returncode == 2 and result.stderr.count("\n") == 1


def test_logged_speed_is_steps_over_time(train, text):
    train("t.txt", "--steps", 4, "--log-every", 1, "--out", "r")
    end = events(text / "r", "run.end")[0]
    seconds = sum(4 * 16 / r["tokens_per_second"] for r in events(text / "r", "run.loss"))
    assert seconds == pytest.approx(end["seconds"], rel=1e-6)


def test_auto_device_says_why_in_one_line(text):
    result = run_program("andrea-train", "t.txt", *TINY[:-2], "--steps", 1, cwd=text,
                         env={"NUMBA_CUDA_DRIVER": "/nonexistent/libcuda.so"})
    assert result.returncode == 0, result.stderr
    assert len([x for x in result.stderr.splitlines() if x.startswith("device:")]) == 1
    assert re.search(r"^device: cpu \(.+\)$", result.stderr, re.M)


def test_cuda_asked_for_in_vain(text):
    result = run_program("andrea-train", "t.txt", "--device", "cuda", cwd=text)
    refused(result, "--device cuda", "--device cpu")
    assert not (text / "runs").exists()


def test_an_existing_run_is_never_overwritten(train, text):
    assert train("t.txt", "--steps", 1, "--out", "r").returncode == 0
    before = final_weights(text / "r")
    refused(train("t.txt", "--steps", 1, "--out", "r"), "not empty", "--resume")
    assert final_weights(text / "r") == before
    for number in ("", "-2", "-3"):
        assert train("t.txt", "--steps", 1).returncode == 0
        assert (text / "runs" / f"t{number}").is_dir()


@pytest.mark.parametrize(("document", "vocab_size"), [("t.jsonl", 257), ("folder", 257)])
def test_other_kinds_of_data(train, text, document, vocab_size):
    (text / "folder").mkdir()
    (text / "folder" / "a.txt").write_text(TEXT)
    (text / "folder" / "b.md").write_text(TEXT[::-1])
    lines = [json.dumps({"text": TEXT[i:i + 90]}) for i in range(0, len(TEXT), 90)]
    (text / "t.jsonl").write_text("\n".join(lines))
    result = train(document, "--steps", 1, "--out", "r")
    assert result.returncode == 0, result.stderr
    loaded = checkpoint.load(checkpoint.find(str(text / "r")))
    assert loaded.model.vocab_size == vocab_size


def test_separate_validation_file(train, text):
    (text / "v.txt").write_text(TEXT[:100])
    result = train("t.txt", "--val-data", "v.txt", "--steps", 1, "--out", "r")
    assert result.returncode == 0, result.stderr
    assert events(text / "r", "run.eval")[-1]["tokens"] == 99


def test_a_console_that_cannot_show_the_text(train, text):
    (text / "u.txt").write_text("naïve café ☕ " * 200, encoding="utf-8")
    result = train("u.txt", "--steps", 1, "--tokenizer", "char",
                   env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"})
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("data", ["t.txt", "stories"])
def test_plot(train, text, data):
    result = train(data, "--steps", 2, "--plot", "--out", "r")
    assert result.returncode == 0, result.stderr
    assert (text / "r" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib_is_a_hint(train, text):
    hidden = text / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import sys; sys.modules['matplotlib'] = None\n")
    result = train("t.txt", "--steps", 1, "--plot", "--out", "r",
                   env={"PYTHONPATH": str(hidden)})
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("matplotlib") == 1
    assert not (text / "r" / "curves.png").exists()


def test_curves_that_cannot_be_written_are_a_warning(tmp_path, monkeypatch, capsys):
    def full(log, image):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(plot, "write_curves", full)
    assert open_run(tmp_path, steps=2, plot=True).train() == 0
    assert "warning: curves.png is not written: No space left on device\n" in (
        capsys.readouterr().err)


def test_an_older_image_survives_a_failure(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    image = tmp_path / "curves.png"
    image.write_bytes(b"older")
    (tmp_path / "log.jsonl").touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *names: os.stat(tmp_path / "missing"))
        with pytest.raises(FileNotFoundError):
            plot.write_curves(tmp_path / "log.jsonl", image)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["curves.png", "log.jsonl"]
    assert image.read_bytes() == b"older"


# ---- looking without training


def test_print_config_is_read_back(train, text):
    printed = train("t.txt", "--print-config", "--lr", "1e-3").stdout
    assert tomllib.loads(printed)["optimizer"]["lr"] == 1e-3
    (text / "c.toml").write_text(printed)
    again = train("--config", "c.toml", "--print-config", tiny=False).stdout
    assert again == printed


def test_plan_of_120m(text):
    result = run_program("andrea-train", "t.txt", "--preset", "andrea-120m", "--batch-size", 1,
                         "--context", 64, "--plan", cwd=text)
    assert result.returncode == 0, result.stderr
    count = 92_331_264 - (1024 - 64) * 768
    assert f"{count:,} unique" in result.stdout
    assert f"{count + 8449 * 768:,} when the tied table is counted once per use" in result.stdout
    for group in ("weights", "gradients", "AdamW moments", "activations", "runtime", "peak"):
        assert group in result.stdout
    assert "GFLOP" in result.stdout and "tokens/s" in result.stdout
    assert not (text / "runs").exists()


def test_help_is_complete_and_imports_nothing_heavy():
    code = ("import sys; from andrea_numba.cli_train import main\n"
            "try: main(['--help'])\nexcept SystemExit as e: assert e.code == 0\n"
            "assert not {'numpy', 'numba', 'numba_cuda'} & set(sys.modules), 'heavy'")
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for flag in re.findall(r"\S+", """
            preset config d-model n-layer n-head context vocab-size tokenizer tied bias norm-affine
            batch-size grad-accum steps lr min-lr warmup schedule weight-decay beta1 beta2 clip
            seed device out resume save-every eval-every sample-every log-every val-fraction
            threads plot plan print-config overfit-one-batch"""):
        assert f"--{flag}" in result.stdout, flag


# ---- refusals


@pytest.mark.parametrize(("arguments", "words"), [
    (["--bach", "8"], ["--bach", "--batch-size"]),
    (["--batch", "8"], ["--batch"]),  # no abbreviations
    (["--batch-size", "3.5"], ["--batch-size", "3.5"]),
    (["--batch-size", "0"], ["--batch-size 0", "at least 1"]),
    (["--steps", "0"], ["--steps 0", "at least 1"]),
    (["--lr", "nan"], ["--lr", "finite"]),
    (["--lr", "1e-4", "--min-lr", "1e-3"], ["--min-lr 0.001", "--lr 0.0001"]),
    (["--d-model", "30", "--n-head", "4"], ["30", "4", "1, 2, 3, 5, 6, 10, 15, 30"]),
    (["--tokenizer", "words"], ["--tokenizer", "byte", "char"]),
    (["--preset", "huge"], ["--preset", "nano"]),
    (["--config", "nosuch.toml"], ["nosuch.toml"]),
    (["--context", "1000000"], ["--context 1000000", "1000001"]),
    (["--vocab-size", "100"], ["--vocab-size 100", "257"]),
    (["--val-fraction", "1"], ["--val-fraction 1.0", "at most"]),
    (["--batch-size", "100000000"], ["needs", "free", "--batch-size"]),
    (["--resume", "--out", "nosuch"], ["nosuch", "does not exist"]),
    (["--out", "t.txt"], ["t.txt", "not a folder"]),
    (["--n-layer", "100000000"], ["--n-layer", "at most"]),
    (["--steps", "9" * 400], ["--steps", "at most"]),
    (["--config", ""], ["--config"]),
    ([""], ["name of a file"]),
    (["--beta1", "1"], ["--beta1 1.0", "below 1.0"]),
    (["--version=3"], ["--version"]),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_refused_options(text, arguments, words):
    result = run_program("andrea-train", "t.txt", *arguments, cwd=text)
    refused(result, *words)
    assert not (text / "runs").exists()


def test_a_rate_in_scientific_notation_is_accepted():
    assert read_config(["--lr", "1e-3"])[0].optimizer.lr == 1e-3


@pytest.mark.parametrize(("content", "arguments", "words"), [
    (b"", [], ["e.txt", "empty"]),
    (b"caf\xe9 au lait", [], ["e.txt", "offset 3", "0xE9", "--encoding"]),
    (b"x" * 40, ["--context", 64], ["40", "65"]),
    (b"x" * 200, ["--context", 150], ["training", "validation"]),
    (None, [], ["e.txt", "no such file"]),
], ids=range(5))
def test_refused_data(text, content, arguments, words):
    if content is not None:
        (text / "e.txt").write_bytes(content)
    result = run_program("andrea-train", "e.txt", *arguments, cwd=text)
    if "validation" in words:
        words = ["--context 150", "part has"]
    refused(result, *words)
    assert not (text / "runs").exists()


@pytest.mark.parametrize(("toml", "words"), [
    ("[model]\nd_modle = 3", ["d_modle", "d_model"]),
    ("[modell]\nd_model = 3", ["modell", "model"]),
    ("[model]\nd_model = 'wide'", ["d_model", "int"]),
    ("[model\n", ["not a TOML file"]),
    ("steps = 3", ["steps", "[run]"]),
    ("[data]\ndata = 'l.txt'", ["data.data", "['l.txt']"]),
    ("model = 5", ["model", "section"]),
    ("x = " + "[" * 5000, ["not a TOML file"]),
    ("[optimizer]\nlr = 1" + "0" * 400, ["optimizer.lr", "float"]),
])
def test_refused_config_files(tmp_path, toml, words):
    (tmp_path / "c.toml").write_text(toml)
    with pytest.raises(UserError) as caught:
        read_config(["--config", str(tmp_path / "c.toml")])
    assert all(word in str(caught.value) for word in words)


def test_flags_win_over_file_over_preset(tmp_path):
    (tmp_path / "c.toml").write_text("[model]\nn_layer = 3\n[run]\nsteps = 7\n")
    config, _ = read_config(["--preset", "andrea-12m", "--config", str(tmp_path / "c.toml"),
                             "--steps", "9", "--no-bias"])
    assert (config.model.d_model, config.model.n_layer, config.run.steps) == (384, 3, 9)
    assert config.model.bias is False


def test_data_may_stand_before_and_after_flags():
    assert read_config(["a.txt", "--steps", "1", "b.txt"])[0].data.data == ["a.txt", "b.txt"]


def test_every_preset_is_valid():
    for name, values in PRESETS.items():
        config = TrainConfig()
        args.apply(config, values, name)
        assert read_config(["--preset", name])[0] == config


def test_every_option_has_help():
    assert all(action.help for action in make_parser()._actions)
