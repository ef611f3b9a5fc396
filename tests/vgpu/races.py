"""Races: accesses of different threads to the same bytes that no barrier orders.

Each granule of memory has a tag of the last threads that wrote it, that read it, and that changed
it atomically: time << 11 | warp << 6 | lane. Time grows at each barrier. A tag is in conflict with
a thread when it is of another thread and not older than the last barrier of the thread's CTA (for
a tag of the same warp: than the last bar.warp.sync).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from .lanes import Lanes, is_scalar
from .memory import FIRST_SHARED
from .report import VirtualGPUError

TIME_SHIFT = 11
WARP_SHIFT = 6
THREAD = (1 << TIME_SHIFT) - 1  # the bits of a tag that tell the thread
LANE = (1 << WARP_SHIFT) - 1
WARP = THREAD - LANE
SEVERAL_LANES = 32  # as the lane: several lanes of the warp
SEVERAL_WARPS = THREAD  # as the thread: threads of several warps
HISTORY = 128  # accesses remembered for reports, and reads logged before they become tags

ACCESSES = {"ld", "st", "atom", "red"}
STRONG = {"volatile", "relaxed", "acquire", "release"}  # are no races among themselves
SPACES = {"global", "shared", "local", "param", "const"}
NARROW = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2}


def granule_of(forms: set[str], space: str) -> int:
    """The narrowest access (1, 2 or 4 bytes) that a kernel may make in a state space."""
    narrowest = 4
    for form in forms:
        base, *parts = (part.partition("::")[0] for part in form.split("."))
        spaces = SPACES.intersection(parts)
        if base in ACCESSES and (not spaces or space in spaces):
            narrowest = min(narrowest, NARROW.get(parts[-1], 4))
    return narrowest


@dataclass
class Moment:
    """When an access happens, for each executing lane."""

    mine: np.ndarray  # the tag that the lane leaves
    floor: np.ndarray | np.generic  # older tags are from before the CTA's last barrier
    warp_floor: np.ndarray | np.generic  # older tags of the own warp are from before its barrier


class Races:
    """Tags of one memory, and what the threads of a chunk do to them."""

    kind: str  # of the error
    dtype: type  # of tags
    last_time: int

    def __init__(self, chunk, granule: int, tables: tuple):
        self.chunk = chunk
        self.granule = granule
        self.writes, self.reads, self.atomics = tables
        thread = np.arange(chunk.threads).astype(self.dtype)
        self.thread_tag = np.tile(thread // 32 << WARP_SHIFT | thread % 32, chunk.ctas)
        self.time = 1
        self.floor = self.warp_floor = self.dtype(1 << TIME_SHIFT)
        self.warp_barriers = False
        self.any_reads = self.any_writes = self.any_atomics = True
        self.history: deque[tuple] = deque(maxlen=HISTORY)
        self._strong: dict[int, bool] = {}
        self._distinct: dict[int, np.ndarray] = {}  # offsets that no two lanes of a site share

    # Time

    def barrier(self, lanes: Lanes) -> None:
        """The threads `lanes`, all that live of some CTAs, have passed a barrier."""
        start = self.tick()
        if self.chunk.active_count(lanes) == self.chunk.alive:
            self.floor = self.warp_floor = start
        else:
            self.floor = self.raised(self.floor, lanes, start)
            self.warp_floor = self.raised(self.warp_floor, lanes, start)

    def warp_barrier(self, lanes: Lanes) -> None:
        """These lanes have passed a bar.warp.sync."""
        self.warp_barriers = True
        start = self.tick()
        self.warp_floor = start if lanes is None else self.raised(self.warp_floor, lanes, start)

    def tick(self) -> np.generic:
        if self.time == self.last_time:
            raise VirtualGPUError(
                "not supported", f"a check for races over more than {self.last_time} barriers")
        self.time += 1
        return self.dtype(self.time << TIME_SHIFT)

    def raised(self, floor, lanes: np.ndarray, start: np.generic) -> np.ndarray:
        floor = np.broadcast_to(floor, self.chunk.lane_count).copy()
        floor[lanes] = start
        return floor

    def now(self) -> tuple:
        return self.time, self.floor, self.warp_floor

    def moment(self, lanes: Lanes, time: int, floor, warp_floor) -> Moment:
        mine = self.thread_tag if lanes is None else self.thread_tag[lanes]
        if lanes is not None:
            floor, warp_floor = (value if is_scalar(value) else value[lanes]
                                 for value in (floor, warp_floor))
        return Moment(mine | self.dtype(time << TIME_SHIFT), floor, warp_floor)

    # Accesses

    def granules(self, offset, width: int) -> list:
        first = offset // self.granule if self.granule > 1 else offset
        return [first + k for k in range(width // self.granule)]

    def spread(self, offset, lanes: Lanes) -> np.ndarray:
        return np.full(self.chunk.active_count(lanes), offset) if is_scalar(offset) else offset

    def strong(self, site: int) -> bool:
        """Whether an instruction is volatile or has a memory order, and so may meet others."""
        if site not in self._strong:
            opcode = self.chunk.kernel.sites[site].opcode
            self._strong[site] = not STRONG.isdisjoint(opcode.split("."))
        return self._strong[site]

    def strong_read(self, offset, width: int, lanes: Lanes, site: int) -> None:
        """It must not meet plain writes; it is not remembered."""
        moment = self.moment(lanes, *self.now())
        for granule in self.granules(self.spread(offset, lanes), width):
            self.check(granule, moment, lanes, site, "read", reads=False, atomics=False)

    def read(self, offset, width: int, lanes: Lanes, site: int, read_only: bool = False) -> None:
        """Lanes read `width` bytes at byte offsets (int64 array, or an int for all lanes)."""
        if self.strong(site):
            self.strong_read(offset, width, lanes, site)
            return
        moment = self.moment(lanes, *self.now())
        offset = self.spread(offset, lanes)
        for granule in self.granules(offset, width):
            self.check(granule, moment, lanes, site, "read", reads=False)
            self.add(self.reads, granule, moment)
        self.history.append((offset, width, lanes, site, "read"))

    def write(self, offset, width: int, lanes: Lanes, site: int):
        """Lanes write. Returns the positions of lanes that another lane overwrote at once."""
        if self.strong(site):
            self.atomic(offset, width, lanes, site)
            return None
        moment = self.moment(lanes, *self.now())
        offset = self.spread(offset, lanes)
        distinct = self._distinct.get(site) is offset
        overwritten = []
        for granule in self.granules(offset, width):
            self.check(granule, moment, lanes, site, "write")
            self.writes[granule] = moment.mine
            if not distinct:
                lost = self.writes.take(granule) != moment.mine
                if lost.any():
                    overwritten.append(np.flatnonzero(lost))
        self.any_writes = True
        self.history.append((offset, width, lanes, site, "wrote"))
        if overwritten:
            return np.unique(np.concatenate(overwritten))
        self._distinct[site] = offset
        return None

    def atomic(self, offset, width: int, lanes: Lanes, site: int) -> None:
        """Lanes change memory atomically; that is a race with plain accesses only."""
        moment = self.moment(lanes, *self.now())
        offset = self.spread(offset, lanes)
        for granule in self.granules(offset, width):
            self.check(granule, moment, lanes, site, "change", atomics=False)
            self.add(self.atomics, granule, moment)
        self.any_atomics = True
        self.history.append((offset, width, lanes, site, "changed"))

    # Tags

    def ordered(self, tag: np.ndarray, moment: Moment) -> np.ndarray:
        """Whether what left the tag happened before, for each lane."""
        other = tag ^ moment.mine
        before = (tag < moment.floor) | (other & self.dtype(THREAD) == 0)
        if self.warp_barriers:
            own_warp = ((other & self.dtype(WARP) == 0)
                        & (tag & self.dtype(THREAD) != SEVERAL_WARPS))
            before |= own_warp & (tag < moment.warp_floor)
        return before

    def both(self, tag: np.ndarray, mine: np.ndarray) -> np.ndarray:
        """A tag for two different threads, or groups of them."""
        thread = self.dtype(THREAD)
        own_warp = (((tag ^ mine) & self.dtype(WARP) == 0) & (tag & thread != SEVERAL_WARPS)
                    & (mine & thread != SEVERAL_WARPS))
        lanes_of_warp = mine & ~self.dtype(LANE) | self.dtype(SEVERAL_LANES)
        return np.where(own_warp, lanes_of_warp, mine | thread)

    def check(self, granule, moment: Moment, lanes: Lanes, site: int, verb: str, reads: bool = True,
              atomics: bool = True) -> None:
        """Report an earlier access that nothing orders before this one."""
        if reads and self.any_reads:
            self.check_table(self.reads, granule, moment, lanes, site, verb, "read")
        if self.any_writes:
            self.check_table(self.writes, granule, moment, lanes, site, verb, "wrote")
        if atomics and self.any_atomics:
            self.check_table(self.atomics, granule, moment, lanes, site, verb, "changed")

    def check_table(self, tags, granule, moment: Moment, lanes: Lanes, site: int, verb: str,
                    done: str) -> None:
        tag = tags.take(granule)
        ordered = self.ordered(tag, moment)
        if not ordered.all():
            position = int(np.argmin(ordered))
            lane = position if lanes is None else int(lanes[position])
            self.fail(int(granule[position]), int(tag[position]), lane, site, verb, done)

    def add(self, tags, granule, moment: Moment) -> None:
        """Add the executing lanes to those that accessed the granules."""
        tag = tags.take(granule)
        ordered = self.ordered(tag, moment)
        mine = moment.mine if ordered.all() else np.where(
            ordered, moment.mine, self.both(tag, moment.mine))
        tags[granule] = mine
        left = tags.take(granule)
        lost = left != mine
        if lost.any():
            merged = self.both(left[lost], mine[lost])
            granule = granule[lost]
            tags[granule] = merged
            # The widest group of threads has the largest tag, and it must be the one that stays.
            wider = tags.take(granule) < merged
            while wider.any():
                granule, merged = granule[wider], merged[wider]
                tags[granule] = merged
                wider = tags.take(granule) < merged

    # Reports

    def fail(self, granule: int, tag: int, lane: int, site: int, verb: str, done: str) -> None:
        chunk = self.chunk
        chunk.fail_lane(
            self.kind, f"{verb}s {self.where(granule)}, which {self.who(tag, lane)} {done} "
            f"without a barrier between{self.earlier(granule, lane, done)}", lane, site)

    def who(self, tag: int, lane: int) -> str:
        """The threads that left a tag, in the CTA of `lane`."""
        warp, in_warp = (tag & WARP) >> WARP_SHIFT, tag & LANE
        if tag & THREAD == SEVERAL_WARPS:
            return "several threads"
        if in_warp == SEVERAL_LANES:
            return f"several threads of warp {warp}"
        return f"thread {self.chunk.launch.thread_index(warp * 32 + in_warp)}"

    def fail_same_instruction(self, offset, position: int, lanes: Lanes, site: int) -> None:
        """Two lanes have written different values to one place."""
        offset = self.spread(offset, lanes)
        last = int(np.flatnonzero(offset == offset[position])[-1])
        block, thread = self.chunk.place(last if lanes is None else int(lanes[last]))
        self.chunk.fail(
            self.kind, f"writes {self.where(int(offset[position]) // self.granule)}, where thread "
            f"{thread} of block {block} writes too in the same instruction", position,
            lanes, site)

    def where(self, granule: int) -> str:
        raise NotImplementedError

    def earlier(self, granule: int, lane: int, done: str) -> str:
        """The place of the other access, as far as it is remembered."""
        for offset, width, lanes, site, verb in reversed(self.history):
            first = offset // self.granule
            hits = (first <= granule) & (granule < first + width // self.granule)
            own = np.arange(self.chunk.lane_count) if lanes is None else lanes
            if verb == done and (hits & (own != lane)).any():
                instruction = self.chunk.kernel.sites[site]
                text = self.chunk.kernel.module.lines[instruction.line - 1].strip()
                return f" (PTX line {instruction.line}: {text})"
        return ""


class SharedRaces(Races):
    """Races in the shared memory of the CTAs of a chunk.

    Reads are only noted in a log. Their tags are needed when a write follows before the next
    barrier, and in most kernels none does.
    """

    kind = "shared-memory race"
    dtype = np.uint32
    last_time = (1 << 32 - TIME_SHIFT) - 1

    def __init__(self, chunk, nbytes: int, granule: int):
        count = -(-nbytes // granule)
        super().__init__(chunk, granule, tuple(np.zeros(count, np.uint32) for _ in range(3)))
        self.log: list[tuple] = []
        self.logged: set[int] = set()  # the identities of the offsets in the log
        self.forget()

    def forget(self) -> None:
        """Nothing that happened so far can be in conflict with what follows."""
        self.any_reads = self.any_writes = self.any_atomics = False
        self.log.clear()
        self.logged.clear()
        self.history.clear()

    def barrier(self, lanes: Lanes) -> None:
        super().barrier(lanes)
        self.logged.clear()
        if self.chunk.active_count(lanes) == self.chunk.alive:
            self.forget()

    def warp_barrier(self, lanes: Lanes) -> None:
        super().warp_barrier(lanes)
        self.logged.clear()

    def read(self, offset, width: int, lanes: Lanes, site: int, read_only: bool = False) -> None:
        if self.strong(site):
            self.strong_read(offset, width, lanes, site)
            return
        if self.any_writes or self.any_atomics:
            moment = self.moment(lanes, *self.now())
            for granule in self.granules(self.spread(offset, lanes), width):
                self.check(granule, moment, lanes, site, "read", reads=False)
        if is_scalar(offset) or id(offset) not in self.logged:
            self.log.append((offset, width, lanes, site, self.now()))
            self.logged.add(id(offset))
            if len(self.log) == HISTORY:
                self.flush()

    def write(self, offset, width: int, lanes: Lanes, site: int):
        self.flush()
        return super().write(offset, width, lanes, site)

    def atomic(self, offset, width: int, lanes: Lanes, site: int) -> None:
        self.flush()
        super().atomic(offset, width, lanes, site)

    def flush(self) -> None:
        """Put the logged reads into the tags."""
        for offset, width, lanes, site, now in self.log:
            moment = self.moment(lanes, *now)
            offset = self.spread(offset, lanes)
            for granule in self.granules(offset, width):
                self.add(self.reads, granule, moment)
            self.history.append((offset, width, lanes, site, "read"))
            self.any_reads = True
        self.log.clear()
        self.logged.clear()

    def where(self, granule: int) -> str:
        offset = granule * self.granule % self.chunk.shared.slice
        return f"shared offset {FIRST_SHARED + offset}"
