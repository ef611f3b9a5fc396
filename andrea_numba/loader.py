"""Batches of token windows, in an order that needs no memory and no replay.

An epoch cuts the tokens into windows of `seq_len` that do not overlap, starting at an offset
drawn for that epoch, and visits them in the order of a pseudo-random permutation that is computed
index by index. So the whole state is (seed, epoch, index), whatever the size of the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from .errors import UserError

_ROUNDS = 8
_AHEAD = 256  # windows whose place is worked out together: as fast as for a few of them


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea & Flood 2014): each bit depends on all bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(index: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """Where the permutation of 0 .. n-1 chosen by `keys` sends each of `index`; both int64 [k].

    A Feistel network on pairs (left, right) in Z_a x Z_b is a permutation for any round function,
    because each round only adds to one half what the other half determines. Here a and b are
    about sqrt(n), so that the pairs are hardly more than n; a result that is not below n is sent
    through the network again until it is ("cycle walking"), which restricts the permutation to
    0 .. n-1 (Black & Rogaway 2002). `keys`: uint64 [rounds], an even number of them.
    """
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    value = np.array(index, np.uint64)
    walking = np.arange(value.size)
    while walking.size:
        right, left = np.divmod(value[walking], np.uint64(a))
        sizes = np.uint64(a), np.uint64(b)
        for round_number, key in enumerate(keys):
            size = sizes[round_number % 2]
            # The inner remainder keeps the sum from wrapping at 2^64, where it would not be one.
            left, right = right, (left + _mix(right + key) % size) % size
        value[walking] = right * np.uint64(a) + left
        walking = walking[value[walking] >= n]
    return value.astype(np.int64)


class Loader:
    """Batches (ids, targets) from N tokens, without end.

    `tokens` is a 1-D array or `Tokens`. Every start 0 .. N - seq_len - 1 is possible, so the last
    token is somewhere the last target; N = seq_len + 1 has exactly one window. An epoch's offset
    is drawn from the starts below `seq_len`. With `shuffle=False` every epoch starts at 0 and goes
    through the text in order.
    """

    def __init__(self, tokens, batch_size: int, seq_len: int, seed: int, shuffle: bool = True):
        if batch_size < 1 or seq_len < 1 or seed < 0:
            raise ValueError(f"batch_size {batch_size} and seq_len {seq_len} must be at least 1, "
                             f"seed {seed} at least 0")
        if len(tokens) < seq_len + 1:
            raise UserError(f"{len(tokens)} tokens are too few for windows of {seq_len}: at least "
                            f"{seq_len + 1} are needed (a window and its last target)")
        self.tokens = tokens
        self.batch_size = batch_size
        self.seq_len = seq_len
        self.seed = int(seed)
        self.shuffle = shuffle
        self.n_possible_windows = len(tokens) - seq_len
        self._start_epoch(0)

    def _start_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.index = 0  # windows of this epoch already given out
        self._order, self._order_start = np.empty(0, np.int64), 0
        self.offset = 0
        if self.shuffle:
            random = np.random.SeedSequence([self.seed, epoch]).generate_state(
                _ROUNDS + 1, np.uint64)
            self._keys = random[1:]
            self.offset = int(random[0]) % min(self.seq_len, self.n_possible_windows)
        self.epoch_windows = (len(self.tokens) - 1 - self.offset) // self.seq_len

    def _take(self, count: int) -> np.ndarray:
        """Start positions of the next `count` windows of this epoch; int64 [count]."""
        windows = (self._permuted(count) if self.shuffle
                   else np.arange(self.index, self.index + count))
        self.index += count
        return self.offset + windows * self.seq_len

    def _permuted(self, count: int) -> np.ndarray:
        """Where the permutation sends the next `count` windows; int64 [count]."""
        first = self.index - self._order_start
        if not 0 <= first <= self._order.size - count:
            last = min(self.index + max(count, _AHEAD), self.epoch_windows)
            self._order = permute(np.arange(self.index, last), self.epoch_windows, self._keys)
            self._order_start, first = self.index, 0
        return self._order[first:first + count]

    def next(self) -> tuple[np.ndarray, np.ndarray]:
        """(ids, targets), both int32 [batch_size, seq_len]; targets[b, t] follows ids[b, t]."""
        starts: list[np.ndarray] = []
        missing = self.batch_size
        while missing:
            if self.index == self.epoch_windows:
                self._start_epoch(self.epoch + 1)
            starts.append(self._take(min(missing, self.epoch_windows - self.index)))
            missing -= len(starts[-1])
        positions = np.concatenate(starts)[:, None] + np.arange(self.seq_len + 1)
        windows = self.tokens[positions].astype(np.int32, copy=False)
        return np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])

    def state(self) -> dict[str, Any]:
        """What `load_state` needs to go on with the next batch; JSON can hold it."""
        return {"seed": self.seed, "epoch": self.epoch, "index": self.index}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where another loader of the same tokens and `seq_len` was; no batch is replayed.

        Raises UserError for a state that no such loader can have.
        """
        values = [state.get(name) for name in ("seed", "epoch", "index")]
        if any(type(value) is not int or value < 0 for value in values):
            raise UserError(f"saved data order is damaged: {state}; expected seed, epoch and "
                            "index, integers of at least 0")
        self.seed, epoch, index = values
        self._start_epoch(epoch)
        if index > self.epoch_windows:
            raise UserError(f"saved data order is at window {index} of epoch {epoch}, which has "
                            f"only {self.epoch_windows} windows: text or sequence length differ "
                            "from those of the saved run")
        self.index = index


def validation_windows(tokens, seq_len: int) -> Iterator[tuple[int, int]]:
    """(start, length) of windows that cover every target of `tokens` once, in order.

    Ids are tokens[start : start+length], targets one further; only the last window may be shorter
    than `seq_len`.
    """
    n_targets = len(tokens) - 1
    for start in range(0, n_targets, seq_len):
        yield start, min(seq_len, n_targets - start)
