"""andrea-train again and interrupted: resume, signals, divergence."""

import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from helpers import (
    ROOT,
    TEXT,
    TINY,
    dataset,
    events,
    final_weights,
    refused,
    tiny_config,
)

from andrea_numba import checkpoint
from andrea_numba.corpora import Corpus
from andrea_numba.data import Document, write_token_file
from andrea_numba.run import Run
from andrea_numba.trainer import Diverged, Trainer
from kernels.registry import op_table


def test_resume_refuses_other_settings_by_name(train, text):
    train("t.txt", "--steps", 2, "--out", "r")
    refused(train("t.txt", "--resume", "--out", "r", "--steps", 4, "--lr", "0.1"), "--lr 0.1")
    refused(train("t.txt", "--resume", "--out", "r", "--n-layer", 9, "--steps", 4, tiny=False),
            "--n-layer 9")


def test_resume_refuses_other_text(train, text):
    train("t.txt", "--steps", 2, "--out", "r", "--tokenizer", "char")
    before = final_weights(text / "r")
    (text / "t.txt").write_text(TEXT + "é" + TEXT)
    refused(train("t.txt", "--resume", "--out", "r", "--steps", 4), "é")
    (text / "t.txt").write_text(TEXT + TEXT)
    refused(train("t.txt", "--resume", "--out", "r", "--steps", 4), "not the one")
    assert final_weights(text / "r") == before


def test_resume_of_a_finished_run_says_so(train, text):
    train("t.txt", "--steps", 2, "--out", "r")
    files = {p: p.read_bytes() for p in (text / "r").rglob("*") if p.is_file()}
    result = train("--resume", "--out", "r", tiny=False)
    assert result.returncode == 0
    assert "complete: 2 steps" in result.stderr
    assert files == {p: p.read_bytes() for p in (text / "r").rglob("*") if p.is_file()}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_resume_gives_the_same_run(train, text, number):
    settings = ["t.txt", "--steps", 2000, "--log-every", 1]
    assert train(*settings, "--out", "whole").returncode == 0
    command = [sys.executable, str(ROOT / "bin" / "andrea-train"), *map(str, settings + TINY),
               "--out", "broken"]
    process = subprocess.Popen(command, cwd=text, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if line.startswith("step 5/"):
            process.send_signal(number)
            break
    rest = process.stderr.read()
    assert process.wait(60) == 128 + number
    assert "andrea-train --resume --out broken" in rest
    stopped = checkpoint.load(checkpoint.find(str(text / "broken"))).step
    assert 5 <= stopped < 2000
    resumed = train("--resume", "--out", "broken", "--threads", 1, tiny=False)
    assert resumed.returncode == 0, resumed.stderr
    assert final_weights(text / "broken") == final_weights(text / "whole")
    losses = [(r["step"], r["loss"]) for r in events(text / "broken", "run.loss")]
    assert losses == [(r["step"], r["loss"]) for r in events(text / "whole", "run.loss")]


def test_divergence_stops_with_its_own_code(train, text):
    result = train("t.txt", "--lr", 1e6, "--min-lr", 0, "--steps", 50, "--clip", 0, "--warmup", 0,
                   "--save-every", 1, "--out", "r")
    assert result.returncode == 3, result.stderr
    assert re.search(r"diverged at step \d+: ", result.stderr)
    assert "Warning" not in result.stderr
    found = list((text / "r").glob("checkpoints/*"))
    assert all(np.isfinite(checkpoint.load(c).weights).all() for c in found)


def test_weights_that_are_not_finite_are_never_saved(tmp_path):
    config = tiny_config()
    data = dataset(config, tmp_path)
    trainer = Trainer(config, op_table("cpu"), data)
    run = Run(trainer, Corpus("t", data), tmp_path / "r")
    for array in (trainer.weights, trainer.optimizer.m, trainer.optimizer.v):
        array[3] = np.nan
        with pytest.raises(Diverged, match="is not finite"):
            run.save()
        array[3] = 0.0
    assert not (tmp_path / "r").exists()


def test_resume_refuses_other_tokens_of_the_same_text(train, text):
    train("t.txt", "--steps", 2, "--out", "r")
    write_token_file(text / "t.tokens", [Document.from_text("t", TEXT)], "char")
    refused(train("t.tokens", "--resume", "--out", "r", "--steps", 4), "tokenised in another way")


@pytest.mark.parametrize("arguments", [["--preset", "nano"], ["--config", "c.toml"]])
def test_resume_takes_no_preset_or_file(train, text, arguments):
    (text / "c.toml").write_text("[run]\nsteps = 9\n")
    train("t.txt", "--steps", 2, "--out", "r")
    refused(train("--resume", "--out", "r", *arguments, tiny=False), arguments[0], "--resume")


def test_validation_text_may_not_be_training_text(train, text):
    (text / "folder").mkdir()
    (text / "folder" / "a.txt").write_text(TEXT)
    (text / "folder" / "b.txt").write_text(TEXT[:300])
    refused(train("folder", "--val-data", "folder/b.txt", "--steps", 1), "b.txt", "validation")


def test_lines_appear_while_it_runs(text):
    command = [sys.executable, str(ROOT / "bin" / "andrea-train"), "t.txt", *map(str, TINY),
               "--steps", "100000", "--log-every", "1", "--out", "r"]
    process = subprocess.Popen(command, cwd=text, stderr=subprocess.PIPE, text=True)
    try:
        assert any(line.startswith("step 3/") for line in process.stderr)
        assert process.poll() is None
    finally:
        process.kill()
        process.stderr.close()
        process.wait()
