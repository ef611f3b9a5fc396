"""A run that was interrupted and resumed is the run that was not: weights, moments, log, state."""

import pytest
from helpers import TEXT
from in_process import after_step, logged, open_run, resume, state, stop_at

from andrea_numba import checkpoint
from andrea_numba.errors import UserError

# Two passes an update, eight windows: an epoch of this text is about 16 updates. Clipping and the
# warm-up are on, steps 50 and 75 are evaluated and sampled, and so is what begins an epoch.
SETTINGS = dict(steps=100, grad_accum=2, warmup=60, clip=0.5, log_every=1, eval_every=10,
                eval_tokens=64, sample_every=25, save_every=30, keep=2)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    run = open_run(folder, **SETTINGS)
    windows = run.trainer.loader.epoch_windows
    assert run.train() == 0
    return state(run), logged(folder), windows


def check(folder, run, straight):
    assert run.train() == 0
    assert state(run) == straight[0]
    assert logged(folder) == straight[1]


@pytest.mark.parametrize("step", [1, 2, 29, 30, 31, 50, 59, 60, 75, 99])
def test_one_interruption(tmp_path, straight, step):
    broken = open_run(tmp_path, **SETTINGS)
    stop_at(broken, step)
    assert broken.train() == 143
    check(tmp_path, resume(tmp_path), straight)


@pytest.mark.parametrize("after", [-1, 0, 1])
def test_at_the_end_of_an_epoch(tmp_path, straight, after):
    step = straight[2] // 8 + after
    broken = open_run(tmp_path, **SETTINGS)
    stop_at(broken, step)
    assert broken.train() == 143
    assert broken.trainer.loader.epoch == (0 if after < 1 else 1)
    check(tmp_path, resume(tmp_path), straight)


def test_many_interruptions(tmp_path, straight):
    run = open_run(tmp_path, **SETTINGS)
    for step in (7, 8, 40, 88):
        stop_at(run, step)
        assert run.train() == 143
        run = resume(tmp_path)
    check(tmp_path, run, straight)


def test_a_crash_after_a_save(tmp_path, straight):
    """What was done and logged after the newest checkpoint is done and logged again, once."""
    crashed = open_run(tmp_path, **SETTINGS)

    class PowerCut(Exception):
        pass

    def cut():
        raise PowerCut

    after_step(crashed, 58, cut)
    with pytest.raises(PowerCut):
        crashed.train()
    with (tmp_path / "log.jsonl").open("a") as log:
        log.write('{"event": "run.loss", "st')
    again = resume(tmp_path)
    assert again.trainer.step_count < 58
    check(tmp_path, again, straight)


def test_an_extended_run_goes_on(tmp_path):
    settings = {**SETTINGS, "steps": 20}
    first = open_run(tmp_path, **settings)
    assert first.train() == 0
    longer = resume(tmp_path, steps=30)
    assert longer.train() == 0
    steps = [r["step"] for r in logged(tmp_path) if r["event"] == "run.loss"]
    assert steps == list(range(1, 31))
    assert longer.trainer.seconds > first.trainer.seconds


def test_a_damaged_state_is_one_line(tmp_path):
    run = open_run(tmp_path, **{**SETTINGS, "steps": 2})
    assert run.train() == 0
    for name, value in (("best", {"step": 1}), ("average", {"decay": 1.0}),
                        ("spikes", {"losses": 3.0, "high": False}),
                        ("skips", {"in_a_row": "2", "total": 0}), ("seconds", "much"),
                        ("repetition", None)):
        resumed = checkpoint.load(checkpoint.find(str(tmp_path)))
        resumed.state[name] = value
        with pytest.raises(UserError, match="training state is damaged"):
            open_run(tmp_path, resumed)
        del resumed.state[name]
        with pytest.raises(UserError, match=name):
            open_run(tmp_path, resumed)


def test_validation_text_is_enough_for_a_part_and_a_rest():
    assert len(TEXT) * 0.1 > 2 * SETTINGS["eval_tokens"]
