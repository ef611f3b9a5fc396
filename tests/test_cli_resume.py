"""andrea-train again and interrupted: resume, signals, divergence."""

import os
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
from in_process import open_run, stop_at

from andrea_numba import checkpoint
from andrea_numba.corpora import Corpus
from andrea_numba.data import Document, write_token_file
from andrea_numba.evaluate import Evaluator, Score
from andrea_numba.lock import RunLock
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


def test_resume_keeps_threads_and_device(train, text):
    train("t.txt", "--steps", 2, "--out", "r")
    again = train("--resume", "--out", "r", "--steps", 3, tiny=False)
    assert again.returncode == 0, again.stderr
    assert again.stderr.startswith("device: cpu\n")
    assert re.search(r"^kernels ready in .* s; 1 thread \(", again.stderr, re.M)


def test_one_writer_at_a_time(train, text):
    """Neither a second new run nor a second --resume comes between; nothing of them is left."""
    train("t.txt", "--steps", 2, "--out", "r")
    (text / "new").mkdir()
    with RunLock(text / "r"), RunLock(text / "new"):
        refused(train("--resume", "--out", "r", "--steps", 4, tiny=False), "another andrea-train",
                f"process {os.getpid()}")
        result = train("t.txt", "--steps", 2, "--out", "new")
    assert result.returncode == 2 and "another andrea-train" in result.stderr
    assert [p.name for p in (text / "new").iterdir()] == [".lock"]
    assert train("--resume", "--out", "r", "--steps", 4, tiny=False).returncode == 0
    assert train("t.txt", "--steps", 2, "--out", "new").returncode == 0


def test_resume_passes_over_a_damaged_checkpoint(train, text):
    train("t.txt", "--steps", 4, "--save-every", 2, "--keep", 2, "--eval-every", 0, "--out", "r")
    newest = checkpoint.find(str(text / "r"))
    with (newest / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    again = train("--resume", "--out", "r", "--steps", 5, tiny=False)
    assert again.returncode == 0, again.stderr
    assert again.stderr.startswith("warning: a checkpoint is passed over: ")
    steps = [r["step"] for r in events(text / "r", "run.checkpoint")]
    assert steps == [2, 4, 5]


# ---- saves, in the process of the test


def test_the_best_and_the_newest_are_kept(tmp_path):
    run = open_run(tmp_path, steps=10, eval_every=2, save_every=1, keep=2)
    losses = iter([5.0, 3.0, 4.0, 3.5, 3.0])
    score = Evaluator.score
    run.trainer.evaluator = lambda progress, make=run.trainer.evaluator: Scripted(make(progress))

    class Scripted:
        def __init__(self, real):
            self.real = real

        def score(self, part):
            tokens = score(self.real, part).tokens
            return Score(tokens, tokens * next(losses))

        def rest(self, part):
            return Score()

    assert run.train() == 0
    kept = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-00000004", "step-00000009", "step-00000010"]
    assert checkpoint.load((tmp_path / "best").resolve()).step == 4
    assert checkpoint.load((tmp_path / "latest").resolve()).state["best"] == {
        "step": 4, "loss": 3.0, "tokens": 199}
    assert [r["step"] for r in events(tmp_path, "run.checkpoint") if r["best"]] == [2, 4]


def failing_saves(monkeypatch, steps):
    """No checkpoint of these steps can be written."""
    save = checkpoint.save

    def fail(run, step, *rest):
        if step in steps:
            raise checkpoint.SaveFailed("the disk is full")
        return save(run, step, *rest)

    monkeypatch.setattr(checkpoint, "save", fail)


def test_a_failed_save_is_tried_again(tmp_path, monkeypatch, capsys):
    failing_saves(monkeypatch, {4, 6})
    run = open_run(tmp_path, steps=8, save_every=2, eval_every=4)
    assert run.train() == 0
    said = capsys.readouterr().err
    assert [line for line in said.splitlines() if line.startswith("warning")] == [
        f"warning: step {step} is not saved: the disk is full" for step in (4, 6)]
    saved = checkpoint.load(checkpoint.find(str(tmp_path)))
    # The loss of step 4 may have been the lowest so far, but there is no checkpoint of it.
    assert saved.step == 8 and saved.state["best"]["step"] == 8


@pytest.mark.parametrize("stopped", [False, True])
def test_a_last_state_that_cannot_be_saved_has_its_own_code(tmp_path, monkeypatch, capsys, stopped):
    failing_saves(monkeypatch, {5, 6})
    run = open_run(tmp_path, steps=6, save_every=2)
    if stopped:
        stop_at(run, 5)
    assert run.train() == 4
    step, reason = (5, "interrupted") if stopped else (6, "finished")
    assert (f"{reason} after step {step}, which could not be saved; the newest checkpoint is of "
            "step 4") in capsys.readouterr().err
    assert checkpoint.load(checkpoint.find(str(tmp_path))).step == 4
    assert events(tmp_path, "run.end")[-1]["reason"] == "not saved"
