"""Validation: fixed windows, token-weighted means, the score that a source's entropy bounds."""

import math

import numpy as np
import pytest
from helpers import dataset, tiny_config

from andrea_numba import model
from andrea_numba.evaluate import bits_per_byte
from andrea_numba.trainer import Trainer
from kernels.registry import op_table


def trainer(tmp_path, **changes):
    config = tiny_config(**changes)
    return Trainer(config, op_table("cpu"), dataset(config, tmp_path))


def test_twice_the_same_number(tmp_path):
    evaluator = trainer(tmp_path).evaluator()
    assert evaluator.score() == evaluator.score()


def test_batch_size_does_not_matter(tmp_path):
    scores = [trainer(tmp_path, batch_size=b).evaluator().score() for b in (1, 3, 8)]
    assert len({s.tokens for s in scores}) == 1
    for score in scores[1:]:
        assert score.loss == pytest.approx(scores[0].loss, abs=1e-6)


def test_every_target_counts_once(tmp_path):
    """Also those of a last window shorter than the context."""
    run = trainer(tmp_path)
    tokens = np.asarray(run.dataset.val)
    assert (len(tokens) - 1) % 16  # so that there is a short window
    score = run.evaluator().score()
    assert score.tokens == len(tokens) - 1
    nats = 0.0
    for start in range(0, len(tokens) - 1, 16):
        ids = tokens[start:start + 16][:len(tokens) - 1 - start].astype(np.int32)
        targets = tokens[start + 1:start + 17].astype(np.int32)
        a = run.buffers.views(1, len(ids))
        model.losses(run.ops, run.p, a, ids[None], targets, run.config.model.vocab_size)
        nats += float(a.losses.sum(dtype=np.float64))
    assert score.nats == pytest.approx(nats, rel=1e-6)


def test_limited_score_covers_the_first_windows(tmp_path):
    evaluator = trainer(tmp_path).evaluator()
    assert evaluator.score(max_tokens=40).tokens == 48
    assert evaluator.score(max_tokens=10**9) == evaluator.score()


def test_score_with_context_leaves_out_the_first_half(tmp_path):
    run = trainer(tmp_path)
    n = len(run.dataset.val)
    score = run.evaluator().score_with_context()
    windows = (n - 1 - 16) // 8 + 1
    assert score.tokens == 8 * windows
    assert score.loss == pytest.approx(math.log(257), abs=0.1)  # a fresh model


def test_bits_per_byte():
    # 10 tokens of ln 2 nats each over 5 bytes are 2 bits per byte.
    assert bits_per_byte(math.log(2), 10, 5) == pytest.approx(2.0)
