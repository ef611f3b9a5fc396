"""Checks of global memory within one launch: races, and stores to what is loaded as read-only."""

from __future__ import annotations

import numpy as np

from .lanes import Lanes
from .memory import GLOBAL_BASE
from .races import THREAD, TIME_SHIFT, Moment, Races, granule_of
from .report import VirtualGPUError

CTA_SHIFT = 27
LAUNCH_SHIFT = 47
CTA = (1 << LAUNCH_SHIFT) - (1 << CTA_SHIFT)  # the bits of a tag that tell the CTA
SEVERAL_CTAS = CTA
LAST_CTA = (1 << LAUNCH_SHIFT - CTA_SHIFT) - 2
LAST_LAUNCH = (1 << 64 - LAUNCH_SHIFT) - 1


def watchers_of(chunk, arena, options) -> list:
    """What has to watch a chunk's accesses to global memory."""
    watchers: list = []
    if options.global_race:
        watchers.append(GlobalRaces(chunk, arena))
    if chunk.kernel.uses_nc_loads:
        watchers.append(ReadOnlyLoads(chunk, arena))
    return watchers


class GlobalRaces(Races):
    """Races between all threads of a launch; a tag also has the launch and the CTA."""

    kind = "global race"
    dtype = np.uint64
    last_time = (1 << CTA_SHIFT - TIME_SHIFT) - 1

    def __init__(self, chunk, arena):
        granule = granule_of(chunk.kernel.forms, "global")
        names = ("writes", "reads", "atomics")
        super().__init__(
            chunk, granule, tuple(arena.tags(name, granule, np.uint64) for name in names))
        if chunk.launch.ctas > LAST_CTA or arena.launches > LAST_LAUNCH:
            raise VirtualGPUError("not supported", "a check for global races of so many CTAs")
        self.start = np.uint64(arena.launches << LAUNCH_SHIFT)  # older tags: earlier launches
        cta = np.arange(chunk.first_cta, chunk.first_cta + chunk.ctas, dtype=np.uint64)
        self.thread_tag = self.thread_tag | self.start | np.repeat(
            cta << np.uint64(CTA_SHIFT), chunk.threads)

    def ordered(self, tag: np.ndarray, moment: Moment) -> np.ndarray:
        in_cta = np.uint64((1 << CTA_SHIFT) - 1)
        same_cta = (tag ^ moment.mine) & np.uint64(CTA) == 0
        inner = Moment(moment.mine & in_cta, moment.floor, moment.warp_floor)
        return (tag < self.start) | same_cta & super().ordered(tag & in_cta, inner)

    def both(self, tag: np.ndarray, mine: np.ndarray) -> np.ndarray:
        same_cta = (tag ^ mine) & np.uint64(CTA) == 0
        several = mine | np.uint64(SEVERAL_CTAS | THREAD)
        return np.where(same_cta, super().both(tag, mine), several)

    def who(self, tag: int, lane: int) -> str:
        cta = (tag & CTA) >> CTA_SHIFT
        if cta == SEVERAL_CTAS >> CTA_SHIFT:
            return "threads of several blocks"
        block = self.chunk.launch.block_index(cta)
        return f"{super().who(tag, lane)} of block {block}"

    def where(self, granule: int) -> str:
        arena = self.chunk.launch.arena
        return arena.describe(GLOBAL_BASE + granule * self.granule, self.granule)


class ReadOnlyLoads:
    """ld.global.nc may see stale data where the same launch stores."""

    def __init__(self, chunk, arena):
        self.chunk = chunk
        self.granule = granule_of(chunk.kernel.forms, "global")
        self.launch = arena.launches
        self.written, self.loaded = (
            arena.tags(name, self.granule, np.uint32) for name in ("written", "loaded"))

    def granules(self, offset, width: int) -> list:
        first = np.atleast_1d(offset) // self.granule
        return [first + k for k in range(width // self.granule)]

    def read(self, offset, width: int, lanes: Lanes, site: int, read_only: bool = False) -> None:
        if read_only:
            self.check(self.written, self.loaded, offset, width, lanes, site,
                       "loads as read-only what this launch stores")

    def write(self, offset, width: int, lanes: Lanes, site: int) -> None:
        self.check(self.loaded, self.written, offset, width, lanes, site,
                   "stores what this launch loads as read-only")

    atomic = write

    def barrier(self, lanes: Lanes) -> None:
        """Barriers do not matter."""

    warp_barrier = barrier

    def check(self, forbidden, marked, offset, width: int, lanes: Lanes, site: int,
              what: str) -> None:
        for granule in self.granules(offset, width):
            bad = forbidden.take(granule) == self.launch
            if bad.any():
                position = int(np.argmax(bad))
                address = GLOBAL_BASE + int(np.atleast_1d(offset)[position])
                where = self.chunk.launch.arena.describe(address, width)
                self.chunk.fail("read-only load of written memory", f"{what}: {where}", position,
                                lanes, site)
            marked[granule] = self.launch
