"""Scores of a model on validation text: fixed windows, token-weighted means.

The same tokens are scored in the same windows every time, and each target counts once, so the
mean does not depend on the batch size and two evaluations of the same weights are equal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from . import model
from .config import ModelConfig
from .data import validation_windows


@dataclass
class Score:
    """Sum of -log p (nats) over `tokens` scored targets."""

    tokens: int = 0
    nats: float = 0.0

    def add(self, losses: np.ndarray) -> None:
        """Count the losses [N] of some targets."""
        self.nats += float(losses.sum(dtype=np.float64))

    def __add__(self, other: Score) -> Score:
        return Score(self.tokens + other.tokens, self.nats + other.nats)

    @property
    def loss(self) -> float:
        """Mean nats per token."""
        return self.nats / self.tokens


class Evaluator:
    """Runs the model over windows of `tokens` [n] with the training buffers, a batch at a time.

    Before each batch `progress` is called with the number of tokens in it; what it raises ends
    the evaluation.
    """

    def __init__(self, config: ModelConfig, ops, p, buffers, transfers, batch_size: int, tokens,
                 progress: Callable[[int], None] = lambda tokens: None):
        self._config, self._ops, self._p, self._buffers = config, ops, p, buffers
        self._transfers, self._batch_size, self._tokens = transfers, batch_size, tokens
        self._progress = progress

    def score(self, max_tokens: int = 0) -> Score:
        """Every target once in windows that do not overlap; about `max_tokens` of them if given."""
        return self._total(self._windows(0, self._count(max_tokens)), first=0)

    def rest(self, max_tokens: int) -> Score:
        """The targets that `score(max_tokens)` leaves out."""
        return self._total(self._windows(self._count(max_tokens), None), first=0)

    def _count(self, max_tokens: int) -> int:
        """How many windows hold the first `max_tokens` targets, or all of them for 0."""
        return -(-(max_tokens or len(self._tokens)) // self._config.context)

    def _windows(self, start: int, stop: int | None) -> Iterable[tuple[int, int]]:
        windows = validation_windows(self._tokens, self._config.context)
        return itertools.islice(windows, start, stop)

    def score_with_context(self) -> Score:
        """Only targets with at least context/2 tokens before them in the window.

        Windows overlap by half, so all such targets of the text are scored once. This is the
        score to compare with the entropy of the source: it charges the model for what it does
        not know, and not for starting in the middle of a story.
        """
        length = self._config.context
        last = len(self._tokens) - 1 - length  # last start that has all its targets
        stride = max(1, length // 2)
        starts = range(0, last + 1, stride)
        return self._total(((start, length) for start in starts), first=length - stride)

    def _total(self, windows: Iterable[tuple[int, int]], first: int) -> Score:
        score = Score()
        for batch in self._batches(windows):
            length = batch[0][1]
            self._progress(length * len(batch))
            ids = np.stack([self._tokens[s:s + length] for s, _ in batch]).astype(np.int32)
            targets = np.stack([self._tokens[s + 1:s + 1 + length] for s, _ in batch])
            targets = targets.astype(np.int32)
            targets[:, :first] = -1
            score.tokens += targets.size - first * len(batch)
            ids, targets = self._transfers.upload(ids, targets)
            a = self._buffers.views(*ids.shape)
            model.losses(self._ops, self._p, a, ids, targets.reshape(-1),
                         self._config.vocab_size)
            self._transfers.download(a.losses, score.add)
        self._transfers.finish()
        return score

    def _batches(self, windows: Iterable[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        """Runs of windows of equal length, at most `batch_size` long."""
        batch: list[tuple[int, int]] = []
        for window in windows:
            if batch and (len(batch) == self._batch_size or window[1] != batch[0][1]):
                yield batch
                batch = []
            batch.append(window)
        if batch:
            yield batch


def bits_per_byte(loss: float, tokens: int, n_bytes: int) -> float:
    """Mean nats per token over a text of `tokens` tokens and `n_bytes` UTF-8 bytes, in bits; NaN
    for a text of document marks alone."""
    if not n_bytes:
        return math.nan
    return loss * tokens / n_bytes / math.log(2)
