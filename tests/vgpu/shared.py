"""Shared memory of the CTAs of a chunk: one flat array with a slice for each CTA."""

from __future__ import annotations

import numpy as np

from .counters import shared_cost
from .lanes import Lanes, is_scalar
from .memory import FIRST_SHARED, LIVE, POISON, READY_WORD
from .races import SharedRaces, granule_of
from .spaces import Space, words_of

# Shadow bytes besides LIVE and READY; neither has the bit of LIVE.
GAP = 2  # between variables
PENDING = 0  # a cp.async will write it and has not been waited for


class Access:
    """An instruction's last addresses and what is known about them."""

    def __init__(self, address, width: int, lanes: Lanes, offset):
        self.address = address
        self.width = width
        self.lanes = lanes
        self.offset = offset
        self.ready_at = -1  # the generation of the shadow in which all bytes were ready
        self.cost: tuple[int, int, int] | None = None  # as shared_cost counts it

    def matches(self, address, width: int, lanes: Lanes) -> bool:
        if self.width != width or self.lanes is not lanes:
            return False
        if self.address is address:
            return True
        if is_scalar(address) or is_scalar(self.address):
            return is_scalar(address) and is_scalar(self.address) and address == self.address
        return bool((self.address == address).all())


class SharedSpace(Space):
    """Addresses are offsets in the shared memory of the thread's CTA.

    Instructions in loops mostly use the same addresses again, so what was found out about the
    last ones is kept: the offsets, and that all bytes are initialised.
    """

    def __init__(self, chunk):
        kernel, launch = chunk.kernel, chunk.launch
        places = list(kernel.shared_variables)
        if launch.dynamic_shared:
            begin = kernel.dynamic_shared_offset
            places.append((begin, begin + launch.dynamic_shared))
        self.end = max((end for _, end in places), default=FIRST_SHARED)
        self.slice = -(-(self.end - FIRST_SHARED) // 16) * 16
        total = chunk.ctas * self.slice
        shadow = np.full(self.slice, GAP, np.uint8)
        for begin, end in places:
            shadow[begin - FIRST_SHARED:end - FIRST_SHARED] = LIVE
        super().__init__(chunk, np.full(total, POISON, np.uint8), np.tile(shadow, chunk.ctas))
        base = np.arange(chunk.ctas, dtype=np.int64) * self.slice - FIRST_SHARED
        self.base = int(base[0]) if chunk.ctas == 1 else np.repeat(base, chunk.threads)
        self.generation = 0  # grows when bytes stop being ready
        self.accesses: dict[int, Access] = {}
        self.access: Access | None = None  # of the instruction that executes
        if launch.options.race and total:
            self.watchers = [SharedRaces(chunk, total, granule_of(kernel.forms, "shared"))]
        self.counters = launch.counters

    def locate(self, address, width: int, lanes: Lanes, site: int):
        access = self.accesses.get(site)
        if access is None or not access.matches(address, width, lanes):
            offset = self._offsets(address, width, lanes, site)
            access = self.accesses[site] = Access(address, width, lanes, offset)
        if self.counters is not None:
            if access.cost is None:
                access.cost = shared_cost(self.chunk.layout, address, width, lanes)
            self.counters.add("shared", site, access.cost)
        self.access = access
        return access.offset

    def _offsets(self, address, width: int, lanes: Lanes, site: int):
        alignment = int(address if is_scalar(address) else np.bitwise_or.reduce(address))
        if alignment & (width - 1):
            self.chunk.fail_misaligned(address, width, lanes, site)
        lowest, highest = int(address.min()), int(address.max())
        if lowest < FIRST_SHARED or highest > self.end - width:
            self._fail_bounds(address, width, lanes, site)
        base = self.base
        if lanes is not None and not is_scalar(base):
            base = base[lanes]
        return base + (int(address) if is_scalar(address) else address.astype(np.int64))

    def _fail_bounds(self, address, width: int, lanes: Lanes, site: int):
        address = np.atleast_1d(address)
        bad = (address < FIRST_SHARED) | (address > self.end - width)
        position = int(np.argmax(bad))
        offset = int(address[position])
        if offset < FIRST_SHARED:
            where = f"{FIRST_SHARED - offset} bytes before its start"
        else:
            where = f"{max(offset - self.end, 0)} bytes after its end"
        self.chunk.fail(
            "out of bounds", f"{width} bytes at shared offset {offset}: {where} "
            f"({self.end - FIRST_SHARED} bytes)", position, lanes, site)

    def fail(self, offset, width: int, position: int, lanes: Lanes, site: int):
        within = int(offset if is_scalar(offset) else offset[position]) % self.slice
        detail = f"{width} bytes at shared offset {within + FIRST_SHARED}"
        shadow = self.shadow_at(offset, width, position)
        if (shadow == GAP).any():
            self.chunk.fail("out of bounds", detail + " are not all in one variable", position,
                            lanes, site)
        if (shadow == PENDING).any():
            self.chunk.fail("missing cp.async wait", detail + " are still being copied",
                            position, lanes, site)
        self.chunk.fail("uninitialised read", detail, position, lanes, site)

    def check_ready(self, offset, width: int, lanes: Lanes, site: int) -> None:
        if self.access.ready_at != self.generation:
            super().check_ready(offset, width, lanes, site)
            self.access.ready_at = self.generation

    def make_ready(self, offset, width: int, lanes: Lanes, site: int) -> None:
        if self.access.ready_at != self.generation:
            super().make_ready(offset, width, lanes, site)
            self.access.ready_at = self.generation

    def start_copy(self, address, width: int, lanes: Lanes, site: int):
        """The bytes that a cp.async will write at some time from now on; returns offsets."""
        offset = self.locate(address, width, lanes, site)
        self.make_ready(offset, width, lanes, site)
        unit, indexes = words_of(offset, width)
        for index in indexes:
            self.shadow_words[unit][index] = PENDING
        self.generation += 1
        for races in self.watchers:
            overwritten = races.write(offset, width, lanes, site)
            if overwritten is not None:
                races.fail_same_instruction(offset, int(overwritten[0]), lanes, site)
        return offset

    def finish_copy(self, offset, values: tuple, dtype, lanes: Lanes, site: int) -> None:
        """The copied bytes arrive: `values` (tuple of arrays) at `offset`."""
        width = np.dtype(dtype).itemsize * len(values)
        unit, indexes = words_of(offset, width)
        for index in indexes:
            self.shadow_words[unit][index] = READY_WORD[unit]
        for races in self.watchers:
            races.write(offset, width, lanes, site)
        self.put(offset, values, dtype)

    def matrix_rows(self, address: np.ndarray, lanes: np.ndarray, site: int) -> np.ndarray:
        """Byte offsets of the 16-byte rows that lanes give to ldmatrix, checked like a load."""
        offset = self.locate(address, 16, lanes, site)
        self.check_ready(offset, 16, lanes, site)
        for races in self.watchers:
            races.read(offset, 16, lanes, site)
        return offset
