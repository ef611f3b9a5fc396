"""Global memory: one lazily committed arena with a shadow byte for each byte."""

from __future__ import annotations

import mmap
from bisect import bisect_left, bisect_right
from collections import deque
from dataclasses import dataclass

import numpy as np

from .report import VirtualGPUError

GLOBAL_BASE = 0x7F00_0000_0000
SHARED_WINDOW = 0x7E00_0000_0000
LOCAL_WINDOW = 0x7D00_0000_0000
FIRST_SHARED = 1024  # the offset of the first byte of shared memory
WINDOW_SHIFT = 40  # an address shifted by this tells its window

POISON = 0xCB
LIVE = 1  # shadow bit: the byte belongs to an allocation
INITIALISED = 2  # shadow bit: the byte was written
READY = LIVE | INITIALISED

ALIGNMENT = 256
RED_ZONE = 512
PAGE = mmap.PAGESIZE
VIEWS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# READY (or LIVE) in each byte of a word, by the word's width.
READY_WORD = {width: int.from_bytes(bytes([READY]) * width, "little") for width in VIEWS}
LIVE_WORD = {width: int.from_bytes(bytes([LIVE]) * width, "little") for width in VIEWS}


def lazy_zeros(nbytes: int) -> tuple[mmap.mmap, np.ndarray]:
    """Zeroed bytes that take no memory until they are touched."""
    noreserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | noreserve
    mapping = mmap.mmap(-1, nbytes, flags=flags)
    return mapping, np.frombuffer(mapping, np.uint8)


def typed_views(data: np.ndarray) -> dict[int, np.ndarray]:
    """Views of `data` (uint8, a multiple of 8 bytes) as words of 1, 2, 4 and 8 bytes."""
    return {width: data.view(dtype) for width, dtype in VIEWS.items()}


@dataclass(frozen=True)
class Allocation:
    address: int
    nbytes: int
    label: str

    def __str__(self) -> str:
        label = f" {self.label!r}" if self.label else ""
        return f"allocation{label} of {self.nbytes} bytes at {self.address:#x}"


def _aligned(at_least: int) -> int:
    """The next address that is a multiple of ALIGNMENT but of no higher power of two."""
    return (-(-at_least // ALIGNMENT) | 1) * ALIGNMENT


class Arena:
    """Device memory. Fresh bytes are poisoned and count as uninitialised.

    Addresses are aligned to 256 bytes but never to 512, so that a kernel cannot lean on more
    than the driver promises, and are not reused before the arena is full.
    """

    def __init__(self, nbytes: int = 4 << 30):
        self.nbytes = nbytes // PAGE * PAGE
        data_map, self.data = lazy_zeros(self.nbytes)
        shadow_map, self.shadow = lazy_zeros(self.nbytes)
        self.words = typed_views(self.data)
        self.shadow_words = typed_views(self.shadow)
        self._live: dict[int, Allocation] = {}
        self._starts: list[int] = []  # of every allocation, live or freed, ascending
        self._known: dict[int, Allocation] = {}
        self._freed: deque[Allocation] = deque()
        self._end = GLOBAL_BASE + RED_ZONE
        self.launches = 0
        self._tags: dict[tuple, np.ndarray] = {}
        # Every mapping that grows with the memory in use, and its bytes per byte of memory.
        self._maps = [(data_map, 1.0), (shadow_map, 1.0)]

    def tags(self, name: str, granule: int, dtype: type) -> np.ndarray:
        """A zeroed table with an entry for each `granule` bytes, which lasts over launches."""
        key = name, granule
        if key not in self._tags:
            itemsize = np.dtype(dtype).itemsize
            mapping, table = lazy_zeros(self.nbytes // granule * itemsize)
            self._tags[key] = table.view(dtype)
            self._maps.append((mapping, itemsize / granule))
        return self._tags[key]

    def allocate(self, nbytes: int, label: str = "") -> int:
        """The address of `nbytes` fresh bytes; raises "bad driver call" when memory is full."""
        if nbytes <= 0:
            raise VirtualGPUError("bad driver call", f"allocation of {nbytes} bytes")
        address = self._place(nbytes)
        allocation = Allocation(address, nbytes, label)
        self._starts.insert(bisect_left(self._starts, address), address)
        self._known[address] = self._live[address] = allocation
        start = address - GLOBAL_BASE
        self.data[start:start + nbytes] = POISON
        self.shadow[start:start + nbytes] = LIVE
        return address

    def _place(self, nbytes: int) -> int:
        address = _aligned(self._end)
        end = address + nbytes + RED_ZONE
        if end <= GLOBAL_BASE + self.nbytes:
            self._end = end
            return address
        address = self._reuse(nbytes + RED_ZONE)
        if address is None:
            raise VirtualGPUError(
                "bad driver call", f"out of memory: {nbytes} bytes of an arena of {self.nbytes}")
        return address

    def _reuse(self, nbytes: int) -> int | None:
        """Where the memory was freed first that `nbytes` fit into up to the next live bytes."""
        live = [*sorted(self._live), GLOBAL_BASE + self.nbytes]
        for allocation in self._freed:
            begin = allocation.address
            end = begin + nbytes
            if end <= live[bisect_right(live, begin)]:
                self._take(begin, end)
                return begin
        return None

    def _take(self, begin: int, end: int) -> None:
        """Forget what was freed in a range; what is left of it behind the range stays freed."""
        first, last = bisect_left(self._starts, begin), bisect_left(self._starts, end)
        gone = {address: self._known.pop(address) for address in self._starts[first:last]}
        self._starts[first:last] = []
        remaining: deque[Allocation] = deque()
        for freed in self._freed:
            if freed.address in gone:
                rest = freed.address + freed.nbytes - _aligned(end)
                if rest <= 0:
                    continue
                freed = Allocation(_aligned(end), rest, freed.label)
                self._starts.insert(first, freed.address)
                self._known[freed.address] = freed
            remaining.append(freed)
        self._freed = remaining

    def free(self, address: int) -> None:
        """Free an allocation; its bytes may not be touched any more."""
        allocation = self._live.pop(address, None)
        if allocation is None:
            raise VirtualGPUError(
                "bad driver call", f"free of {address:#x}: {self.describe(address, 1)}")
        start = address - GLOBAL_BASE
        end = start + allocation.nbytes
        self.shadow[start:end] = 0
        self._freed.append(allocation)
        # Pages without live bytes go back to the system, those at both ends too.
        first, last = start // PAGE * PAGE, -(-end // PAGE) * PAGE
        if self.shadow[first:start].any():
            first += PAGE
        if self.shadow[end:last].any():
            last -= PAGE
        for mapping, ratio in self._maps:
            begin, stop = -(-first * ratio // PAGE) * PAGE, last * ratio // PAGE * PAGE
            if begin < stop:
                mapping.madvise(mmap.MADV_DONTNEED, int(begin), int(stop - begin))

    def write(self, address: int, data: np.ndarray) -> None:
        """Copy the bytes of a contiguous host array to `address`."""
        source = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        place = self._checked(address, source.size, "write")
        self.data[place] = source
        self.shadow[place] = READY

    def read(self, address: int, nbytes: int) -> np.ndarray:
        """A copy (uint8) of `nbytes` bytes; uninitialised bytes are read as they are."""
        return self.data[self._checked(address, nbytes, "read")].copy()

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        """Set `nbytes` bytes."""
        place = self._checked(address, nbytes, "fill")
        self.data[place] = byte
        self.shadow[place] = READY

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Copy on the device; uninitialised bytes stay so."""
        to = self._checked(destination, nbytes, "copy to")
        origin = self._checked(source, nbytes, "copy from")
        self.data[to] = self.data[origin].copy()
        self.shadow[to] = self.shadow[origin].copy()

    def _checked(self, address: int, nbytes: int, what: str) -> slice:
        allocation = self._nearest(int(address))
        if nbytes and (allocation is None or self._live.get(allocation.address) is not allocation
                       or address + nbytes > allocation.address + allocation.nbytes):
            kind = self.misuse(address)
            raise VirtualGPUError(kind, f"host {what} {self.describe(address, nbytes)}")
        start = int(address) - GLOBAL_BASE
        return slice(start, start + nbytes)

    def _nearest(self, address: int) -> Allocation | None:
        """The last allocation, live or freed, that starts at or before `address`."""
        position = bisect_right(self._starts, address)
        return self._known[self._starts[position - 1]] if position else None

    def find(self, address: int) -> Allocation | None:
        """The live allocation that holds the byte at `address`, or None."""
        nearest = self._nearest(int(address))
        live = nearest is not None and self._live.get(nearest.address) is nearest
        return nearest if live and address < nearest.address + nearest.nbytes else None

    def allocations(self) -> list[Allocation]:
        """The live allocations, by address."""
        return [self._live[address] for address in sorted(self._live)]

    def misuse(self, address: int) -> str:
        """What a bad access to `address` is called: out of bounds or use after free."""
        below = self._nearest(int(address))
        freed = (below is not None and below.address not in self._live
                 and address < below.address + below.nbytes)
        return "use after free" if freed else "out of bounds"

    def describe(self, address: int, nbytes: int) -> str:
        """Where `nbytes` bytes at `address` lie: relative to the nearest allocation."""
        address = int(address)
        place = f"{nbytes} bytes at {address:#x}"
        below = self._nearest(address)
        if below is not None and address < below.address + below.nbytes:
            state = "" if below.address in self._live else "freed "
            return f"{place}: byte {address - below.address} of {state}{below}"
        if not 0 <= address - GLOBAL_BASE < self.nbytes:
            return f"{place}: {'a null pointer' if address < PAGE else 'no device address'}"
        after = bisect_right(self._starts, address)
        above = self._known[self._starts[after]] if after < len(self._starts) else None
        gaps = []
        if below is not None:
            gap = address - below.address - below.nbytes
            gaps.append((gap, f"{gap} bytes after the end of {self._state(below)}{below}"))
        if above is not None:
            gap = above.address - address
            gaps.append((gap, f"{gap} bytes before {self._state(above)}{above}"))
        return f"{place}: {min(gaps)[1]}" if gaps else f"{place}: nothing was ever allocated"

    def _state(self, allocation: Allocation) -> str:
        return "" if allocation.address in self._live else "freed "
