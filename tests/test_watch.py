"""Spikes of the loss, samples that repeat themselves, and what is stored of them."""

import dataclasses
import json
import math

import numpy as np
import pytest
from helpers import events
from in_process import open_run

from andrea_numba import watch
from andrea_numba.watch import Repetition, Spikes, diversity, least_diversity, restored


def falling(steps, noise=0.1, seed=0):
    """Losses of a healthy run: 5.5 falling to 1.5, with noise, now and then a heavy tail."""
    rng = np.random.default_rng(seed)
    curve = 1.5 + 4 * np.exp(-np.arange(steps) / 300)
    return (curve + noise * rng.standard_t(8, steps)).tolist()


def spikes(losses):
    watched = Spikes()
    return [i for i, loss in enumerate(losses) if watched.add(loss) is not None]


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_run_has_no_spikes(seed):
    assert spikes(falling(3000, seed=seed)) == []


def test_a_constant_loss_has_no_spikes():
    assert spikes([0.001 * (i % 7) for i in range(500)]) == []


def test_a_spike_is_told_once_with_its_figures():
    losses = falling(1000)
    losses[600:605] = [4.0] * 5
    losses[900] = 5.0
    assert spikes(losses) == [600, 900]
    watched = Spikes()
    told = [watched.add(loss) for loss in losses[:601]][-1]
    window = losses[500:600]
    assert told == pytest.approx((np.mean(window), (4.0 - np.mean(window)) / np.std(window)))


def test_nothing_is_told_before_there_is_a_window():
    assert spikes([1.0] * 49 + [9.0]) == []
    assert spikes([1.0] * 50 + [9.0]) == [50]


def test_a_loss_that_stays_high_is_told_once():
    assert spikes([2.0] * 200 + [4.0] * 500) == [200]


def test_diversity():
    assert diversity([]) == diversity([1, 2, 3]) == 1.0
    assert diversity(list(range(100))) == 1.0
    assert diversity([7] * 103) == 0.01
    assert diversity(list(b"the ") * 25) == 4 / 97


def test_text_that_repeats_itself_is_the_measure():
    text = np.array(list(b"one two three. " * 100 + bytes(range(200)) * 2))
    assert least_diversity(text, 300) == 15 / 297
    assert least_diversity(text[:2], 300) == 1.0


def collapses(values, reference=0.8, steps=100):
    watched = Repetition()
    return [i for i, value in enumerate(values, 1) if watched.add(value, reference, i / steps)]


def test_a_collapse_is_told_once_and_again_after_a_recovery():
    assert collapses([0.8] * 5 + [0.05] * 5) == [7]
    assert collapses([0.8, 0.1, 0.1, 0.7, 0.1, 0.1, 0.1]) == [3, 6]


def test_no_collapse():
    assert collapses([0.41] * 50) == []
    assert collapses([0.8, 0.1] * 20) == []  # one unlucky sample is none
    assert collapses([0.05] * 9 + [0.7] * 50) == []  # a young model
    assert collapses([0.05] * 20, reference=0.09) == []  # as repetitive as the text


def test_a_model_that_never_wrote_anything_else():
    assert collapses([0.05] * 30) == [11]


@pytest.mark.parametrize("watched", [
    Spikes(falling(120), True), Repetition(True, 1), watch.Skips(2, 7), watch.Best(3, 1.5, 99)])
def test_state_survives_json(watched):
    stored = json.loads(json.dumps(dataclasses.asdict(watched)))
    assert restored(type(watched), stored) == watched


@pytest.mark.parametrize("stored", [
    None, [], {}, {"losses": [], "high": 0}, {"losses": 1.0, "high": True},
    {"losses": [1.0, None], "high": True}, {"losses": [math.inf], "high": True},
    {"losses": [], "high": True, "more": 1}])
def test_damaged_state_is_refused(stored):
    with pytest.raises(ValueError, match="Spikes"):
        restored(Spikes, stored)


def test_a_run_warns_of_both(tmp_path, capsys):
    run = open_run(tmp_path, steps=64, sample_every=8, sample_tokens=24)
    decoder = run.trainer.decoder()
    run.trainer.decoder = lambda: OneToken(decoder) if run.trainer.step_count > 30 else decoder
    record = run.trainer._record

    def jump(result):
        record(dataclasses.replace(result, loss=50.0) if result.step == 60 else result)

    run.trainer._record = jump
    assert run.train() == 0
    warnings = [x for x in capsys.readouterr().err.splitlines() if x.startswith("warning")]
    assert len(warnings) == 2
    assert warnings[0].startswith("warning: samples repeat themselves: 5 % of the 4-token "
                                  "sequences at step 40 are distinct, ")
    assert warnings[1].startswith("warning: the loss jumped at step 60: 50.0000, ")
    samples = events(tmp_path, "run.sample")
    assert samples[0]["diversity"] > 0.9 and samples[-1]["diversity"] == 1 / 21


class OneToken:
    """A decoder whose model has collapsed."""

    def __init__(self, decoder):
        self.context = decoder.context

    def prefill(self, ids):
        return np.where(np.arange(257) == 101, np.float32(50), np.float32(0))

    def step(self, token):
        return self.prefill(None)
