"""Deadlock: the threads that can run do the same for ever."""

from __future__ import annotations

import numpy as np

FIRST = 4096  # steps before the first look; most chunks are done by then


class Repetition:
    """Notices that a chunk is in a state in which it was before, and so will be again.

    The state is kept from time to time (at twice as many steps as the last time) and compared
    with those that follow. As every store that others can see counts as a change, only loops that
    wait are found.
    """

    def __init__(self, chunk):
        self.chunk = chunk
        self.at = FIRST // 2
        self.changes = -1  # no state is kept
        self.queues: list[dict] = []
        self.registers: list = []
        self.local = np.empty(0, np.uint8)

    def seen(self, steps: int, queues: list[dict]) -> bool:
        """Whether the chunk was in this state before; `queues` tell which lanes are where."""
        chunk = self.chunk
        if steps == 2 * self.at:
            self.at = steps
            self.changes = chunk.changes
            self.queues = [dict(queue) for queue in queues]
            # Register arrays that somebody else refers to are never changed in place.
            self.registers = list(chunk.registers)
            self.local = chunk.local.words[1].copy()
            return False
        return (self.changes == chunk.changes
                and all(map(_same_queue, queues, self.queues))
                and all(map(_same_bits, chunk.registers, self.registers))
                and np.array_equal(chunk.local.words[1], self.local))


def _same_queue(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(one[index], other[index]) for index in one)


def _same_bits(one, other) -> bool:
    return one is other or one.tobytes() == other.tobytes()
