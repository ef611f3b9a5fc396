"""Signals and streams that vanish: what is asked for is done, and nothing is lost."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time

import pytest
from helpers import ROOT, TINY, events
from in_process import logged, open_run, resume, state, stop_at

from andrea_numba import checkpoint, model
from andrea_numba import run as run_module
from andrea_numba.program import StopRequest, raising_on_signals

LONG = ["--steps", 10**6, "--log-every", 1, "--eval-every", 0, "--sample-every", 0, "--out", "r"]


@pytest.fixture
def start(text):
    """Start `andrea-train` on a tiny model; killed after the test if it still runs."""
    started = []

    def begin(*arguments, program=(str(ROOT / "bin" / "andrea-train"),), **options):
        process = subprocess.Popen(
            [sys.executable, *program, "t.txt", *map(str, (*TINY, *arguments))], cwd=text,
            text=True, **{"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, **options})
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
        if process.stderr:
            process.stderr.close()


def read_until(process, beginning):
    for line in process.stderr:
        if line.startswith(beginning):
            return
    pytest.fail(f"no line begins with {beginning}")


def steps_saved(run):
    return checkpoint.load(checkpoint.find(str(run))).step


def test_a_hangup_saves(start, text):
    process = start(*LONG)
    read_until(process, "step 3/")
    process.send_signal(signal.SIGHUP)
    assert "--resume --out r" in process.stderr.read()
    assert process.wait(60) == 129
    assert steps_saved(text / "r") >= 3


def test_nohup_and_a_save_on_demand(start, text):
    """An ignored hangup stays ignored; SIGUSR1 writes a checkpoint, and training goes on."""
    process = start(*LONG, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    read_until(process, "device:")
    process.send_signal(signal.SIGUSR1)  # nothing to save yet
    read_until(process, "step 3/")
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGUSR1)
    for line in process.stderr:
        if line.startswith("step") and events(text / "r", "run.checkpoint"):
            break
    saved = events(text / "r", "run.checkpoint")[0]["step"]
    read_until(process, f"step {saved + 5}/")
    assert steps_saved(text / "r") == saved
    process.send_signal(signal.SIGTERM)
    process.stderr.read()
    assert process.wait(60) == 143
    assert steps_saved(text / "r") > saved


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_during_start_up_nothing_is_left(start, text, number):
    process = start(*LONG)
    read_until(process, "device:")
    process.send_signal(number)
    process.stderr.read()
    assert process.wait(60) == 128 + number
    assert not (text / "r").exists()


def test_a_second_signal_ends_at_once(start, text):
    """Here the first one leads into a save that takes an hour."""
    slow = ("import sys, time; sys.path.insert(0, sys.argv.pop(1))\n"
            "from andrea_numba import program, checkpoint_files\n"
            "checkpoint_files.flush = lambda folder: time.sleep(3600)\n"
            "sys.exit(program.train())")
    process = start(*LONG, program=("-c", slow, str(ROOT)))
    read_until(process, "step 3/")
    process.send_signal(signal.SIGTERM)
    read_until(process, "finishing the step")
    time.sleep(0.2)  # not the same request
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert not list((text / "r").glob("checkpoints/step-*"))
    [json.loads(line) for line in (text / "r" / "log.jsonl").read_text().splitlines()]


def test_one_request_may_arrive_twice():
    """`timeout` signals its child, and then the group that the child is in."""
    stop = StopRequest()
    with stop.listening():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert stop.signal == signal.SIGTERM
    with pytest.raises(SystemExit) as left, raising_on_signals():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
    assert left.value.code == 143


# ---- in the middle of a long look at the model


SETTINGS = dict(steps=12, log_every=1, eval_every=4, sample_every=4, keep=3)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    run = open_run(folder, **SETTINGS)
    assert run.train() == 0
    return state(run), logged(folder)


def signal_in(monkeypatch, owner, name, step, run):
    """Let a signal arrive when `owner.name` is called after `step`."""
    original = getattr(owner, name)

    def call(*arguments, **named):
        if run.trainer.step_count == step:
            signal.raise_signal(signal.SIGTERM)
        return original(*arguments, **named)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("step", [8, 12])
@pytest.mark.parametrize(("owner", "name", "event"), [
    (model, "losses", "run.eval"), (run_module, "generate_text", "run.sample")])
def test_a_validation_or_sample_is_cut_short_and_made_up_for(tmp_path, monkeypatch, straight,
                                                             owner, name, event, step):
    run = open_run(tmp_path, **SETTINGS)
    with monkeypatch.context() as patch:
        signal_in(patch, owner, name, step, run)
        assert run.train() == 143
    assert step not in [e["step"] for e in events(tmp_path, event)]
    assert steps_saved(tmp_path) == step
    assert not run_module.finished(tmp_path, step)
    again = resume(tmp_path)
    assert again.train() == 0
    assert logged(tmp_path) == straight[1]
    assert state(again) == straight[0]
    assert run_module.finished(tmp_path, 12)


def test_before_the_first_step(tmp_path):
    run = open_run(tmp_path, **SETTINGS)
    run._stop.signal = signal.SIGINT
    assert run.train() == 130
    assert steps_saved(tmp_path) == 0
    assert resume(tmp_path).train() == 0


def test_a_signal_at_the_last_step(tmp_path, straight):
    run = open_run(tmp_path, **SETTINGS)
    stop_at(run, 12)
    assert run.train() == 143
    again = resume(tmp_path)
    assert again.train() == 0
    assert logged(tmp_path) == straight[1] and state(again) == straight[0]


def test_a_long_validation_says_how_far_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_module, "PROGRESS_SECONDS", 0)
    assert open_run(tmp_path, steps=1, val_fraction=0.5).train() == 0
    said = [x for x in capsys.readouterr().err.splitlines() if x.startswith("validation: ")]
    assert len(said) > 3 and " tokens, ETA " in said[0]


# ---- streams


def test_streams_that_are_closed_full_or_gone(start, text):
    """The log is whole: nothing meant for stderr is written into another file of that number."""
    command = " ".join(map(str, (sys.executable, ROOT / "bin" / "andrea-train", "t.txt", *TINY,
                                 "--steps", 30, "--log-every", 1, "--out")))
    for name, redirected in (("closed", "<&- >&- 2>&-"), ("full", ">/dev/null 2>/dev/full"),
                             ("gone", "2>&1 | head -1; exit ${PIPESTATUS[0]}")):
        result = subprocess.run(["bash", "-c", f"{command} {name} {redirected}"], cwd=text,
                                timeout=300, stdout=subprocess.DEVNULL)
        assert result.returncode == 0, name
        assert [r["step"] for r in events(text / name, "run.loss")] == list(range(1, 31))
        assert steps_saved(text / name) == 30


def test_a_terminal_that_cannot_show_a_character(text, start):
    (text / "t.txt").write_text("naïve café ☕ " * 200, encoding="utf-8")
    ours, theirs = pty.openpty()
    shown = []

    def show():
        with contextlib.suppress(OSError):
            while piece := os.read(ours, 4096):
                shown.append(piece)

    reader = threading.Thread(target=show)
    reader.start()
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    process = start("--tokenizer", "char", "--steps", 20, "--sample-every", 5, "--out", "r",
                    stderr=theirs, env=environment)
    os.close(theirs)
    assert process.wait(120) == 0
    reader.join(60)
    os.close(ours)
    output = b"".join(shown)
    assert b"--- sample at step 20" in output and output.isascii() and b"Traceback" not in output


def test_a_terminal_that_is_closed_meanwhile(text, start):
    ours, theirs = pty.openpty()
    process = start(*LONG, stderr=theirs, start_new_session=True,
                    preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    os.close(theirs)
    while b"step 3/" not in os.read(ours, 4096):
        pass
    os.close(ours)
    seen = len(events(text / "r", "run.loss"))
    while len(events(text / "r", "run.loss")) < seen + 20:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
