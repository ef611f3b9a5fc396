"""State spaces: checked loads and stores of many lanes at once, for global and local memory.

An access has an address for each active lane, or one NumPy scalar for all of them. The check is
one more gather, of the shadow bytes at the same width.
"""

from __future__ import annotations

import numpy as np

from . import atomics
from .counters import global_cost
from .lanes import Lanes, is_scalar
from .memory import (
    GLOBAL_BASE,
    LIVE,
    LIVE_WORD,
    POISON,
    READY,
    READY_WORD,
    Arena,
    typed_views,
)

SHIFT = {1: 0, 2: 1, 4: 2, 8: 3}


def words_of(offset, width: int):
    """The size and the indexes of the words, of at most 8 bytes, that an access consists of."""
    unit = min(width, 8)
    index = offset >> SHIFT[unit]
    return unit, [index] if width == unit else [index + k for k in range(width // unit)]


class Space:
    """Bytes with a shadow byte each, and what a chunk of threads does to them."""

    seen_by_others = True  # a store may be what another thread waits for

    def __init__(self, chunk, data: np.ndarray, shadow: np.ndarray):
        self.chunk = chunk
        self.watchers: list = []  # of races and of read-only loads; they are told each access
        self.words = typed_views(data)
        self.shadow_words = typed_views(shadow)

    def locate(self, address, width: int, lanes: Lanes, site: int):
        """Byte offsets into the data, within bounds and aligned: an int64 array or an int."""
        raise NotImplementedError

    def fail(self, offset, width: int, position: int, lanes: Lanes, site: int):
        """Raise the error that explains why the access at `offset` is bad."""
        raise NotImplementedError

    def load(self, address, dtype, count: int, lanes: Lanes, site: int,
             read_only: bool = False) -> tuple:
        """`count` values of `dtype` from each address, as a tuple of arrays or scalars."""
        width = np.dtype(dtype).itemsize * count
        offset = self.locate(address, width, lanes, site)
        self.check_ready(offset, width, lanes, site)
        for watcher in self.watchers:
            watcher.read(offset, width, lanes, site, read_only)
        return self.fetch(offset, dtype, count)

    def store(self, address, values: tuple, dtype, lanes: Lanes, site: int) -> None:
        """Store values of `dtype` next to each other; of equal addresses the last lane wins."""
        width = np.dtype(dtype).itemsize * len(values)
        offset = self.locate(address, width, lanes, site)
        self.make_ready(offset, width, lanes, site)
        self.put(offset, values, dtype)
        for watcher in self.watchers:
            overwritten = watcher.write(offset, width, lanes, site)
            if overwritten is not None:
                self.compare(watcher, offset, values, dtype, overwritten, lanes, site)

    def atomic(self, operation: str, address, dtype, operands: tuple, lanes: Lanes, site: int):
        """Atomic read-modify-write in ascending order of lanes; returns the old values."""
        width = np.dtype(dtype).itemsize
        offset = self.locate(address, width, lanes, site)
        self.check_ready(offset, width, lanes, site)
        for watcher in self.watchers:
            watcher.atomic(offset, width, lanes, site)
        return self.update(operation, offset, dtype, operands, lanes)

    def update(self, operation: str, offset, dtype, operands: tuple, lanes: Lanes) -> np.ndarray:
        """The read-modify-write of `atomic` at byte offsets, without any check."""
        width = np.dtype(dtype).itemsize
        index = np.broadcast_to(offset >> SHIFT[width], self.chunk.active_count(lanes))
        view = self.words[width].view(dtype)
        old = atomics.apply(operation, view, index, operands)
        if (view.take(index) != old).any():
            self.chunk.changes += 1
        return old

    def fetch(self, offset, dtype, count: int) -> tuple:
        """`count` values from each offset, without any check."""
        width = np.dtype(dtype).itemsize
        view = self.words[width].view(dtype)
        index = offset >> SHIFT[width]
        if is_scalar(index):
            return tuple(view[index:index + count])
        if count == 1:
            return (view.take(index),)
        return tuple(view.take(index + k) for k in range(count))

    def put(self, offset, values: tuple, dtype) -> None:
        """Store values at each offset, without any check."""
        self.chunk.changes += self.seen_by_others
        width = np.dtype(dtype).itemsize
        view = self.words[width].view(dtype)
        index = offset >> SHIFT[width]
        for k, value in enumerate(values):
            if is_scalar(index) and not is_scalar(value):
                value = value[-1]
            view[index + k] = value

    def check_ready(self, offset, width: int, lanes: Lanes, site: int) -> None:
        """Every byte must be live and initialised."""
        unit, indexes = words_of(offset, width)
        for index in indexes:
            shadow = self.shadow_words[unit]
            found = shadow[index] if is_scalar(index) else shadow.take(index)
            # Shadow bytes are at most READY, so one smaller byte makes the whole word smaller.
            if found.min() != READY_WORD[unit]:
                position = int(np.argmax(found != READY_WORD[unit]))
                self.fail(offset, width, position, lanes, site)

    def make_ready(self, offset, width: int, lanes: Lanes, site: int) -> None:
        """Every byte must be live; afterwards all of them are initialised."""
        unit, indexes = words_of(offset, width)
        shadow = self.shadow_words[unit]
        for index in indexes:
            found = shadow[index] if is_scalar(index) else shadow.take(index)
            if found.min() == READY_WORD[unit]:
                continue
            dead = (found & LIVE_WORD[unit]) != LIVE_WORD[unit]
            if dead.any():
                self.fail(offset, width, int(np.argmax(dead)), lanes, site)
            shadow[index] = READY_WORD[unit]

    def compare(self, races, offset, values: tuple, dtype, overwritten, lanes: Lanes,
                site: int) -> None:
        """Lanes that stored to one place in one instruction must have stored the same bits."""
        size = np.dtype(dtype).itemsize
        bits = self.words[size].dtype
        place = np.broadcast_to(offset, self.chunk.active_count(lanes))[overwritten]
        for found, value in zip(self.fetch(place, bits, len(values)), values, strict=True):
            mine = np.broadcast_to(value, self.chunk.active_count(lanes))[overwritten]
            differs = found != mine.view(bits)
            if differs.any():
                position = int(overwritten[np.argmax(differs)])
                races.fail_same_instruction(offset, position, lanes, site)

    def shadow_at(self, offset, width: int, position: int) -> np.ndarray:
        """The shadow bytes of one lane's access."""
        start = int(offset if is_scalar(offset) else offset[position])
        return self.shadow_words[1][start:start + width]


class GlobalSpace(Space):
    """The arena."""

    def __init__(self, chunk, arena: Arena):
        super().__init__(chunk, arena.data, arena.shadow)
        self.arena = arena
        self.counters = chunk.launch.counters

    def locate(self, address, width: int, lanes: Lanes, site: int):
        if self.counters is not None:
            cost = global_cost(self.chunk.layout, address, width, lanes)
            self.counters.add("global", site, cost)
        offset = address - np.uint64(GLOBAL_BASE)
        limit = self.arena.nbytes - width
        if is_scalar(offset):
            offset = int(offset)
            if offset > limit:
                self._fail_bounds(address, width, lanes, site)
            if offset & (width - 1):
                self.chunk.fail_misaligned(address, width, lanes, site)
            return offset
        if offset.max() > limit:
            self._fail_bounds(address, width, lanes, site)
        if int(np.bitwise_or.reduce(offset)) & (width - 1):
            self.chunk.fail_misaligned(address, width, lanes, site)
        return offset.view(np.int64)

    def _fail_bounds(self, address, width: int, lanes: Lanes, site: int):
        offset = np.atleast_1d(address - np.uint64(GLOBAL_BASE))
        position = int(np.argmax(offset > self.arena.nbytes - width))
        where = self.arena.describe(np.atleast_1d(address)[position], width)
        self.chunk.fail("out of bounds", where, position, lanes, site)

    def fail(self, offset, width: int, position: int, lanes: Lanes, site: int):
        address = GLOBAL_BASE + int(offset if is_scalar(offset) else offset[position])
        if (self.shadow_at(offset, width, position) & LIVE).all():
            kind = "uninitialised read"
        else:
            kind = self.arena.misuse(address)
        self.chunk.fail(kind, self.arena.describe(address, width), position, lanes, site)


class LocalSpace(Space):
    """A private slice of bytes for each thread.

    Unoptimised code copies whole structures, padding included, so bytes of a compiler's stack
    count as initialised from the start; numba fills its local arrays with zeros anyway.
    """

    seen_by_others = False

    def __init__(self, chunk, nbytes: int):
        self.nbytes = nbytes
        self.slice = -(-nbytes // 16) * 16
        data = np.full(chunk.lane_count * self.slice, POISON, np.uint8)
        shadow = READY if chunk.kernel.compiler_stack else LIVE
        super().__init__(chunk, data, np.full(data.size, shadow, np.uint8))
        self.base = np.arange(chunk.lane_count, dtype=np.int64) * self.slice

    def locate(self, address, width: int, lanes: Lanes, site: int):
        within = np.atleast_1d(address)
        if int(np.bitwise_or.reduce(within)) & (width - 1):
            self.chunk.fail_misaligned(address, width, lanes, site)
        if int(within.max()) > self.nbytes - width:
            position = int(np.argmax(within > max(self.nbytes - width, 0)))
            self.chunk.fail(
                "out of bounds", f"{width} bytes at offset {int(within[position])} of the "
                f"{self.nbytes} bytes of local memory", position, lanes, site)
        base = self.base if lanes is None else self.base[lanes]
        return base + (int(address) if is_scalar(address) else address.astype(np.int64))

    def fail(self, offset, width: int, position: int, lanes: Lanes, site: int):
        within = int(offset[position]) % self.slice
        detail = f"{width} bytes at offset {within} of local memory"
        self.chunk.fail("uninitialised read", detail, position, lanes, site)
