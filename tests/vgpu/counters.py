"""What the memory accesses of a kernel cost, in the units that the hardware moves.

Shared memory has 32 banks of 4 bytes; a wavefront serves each bank once, so that lanes which want
different words of one bank take several. Accesses of 8 bytes are served for half a warp at a time,
those of 16 bytes for a quarter. Global memory is moved in sectors of 32 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .lanes import Lanes, Value

BANKS = 32
SECTOR = 32
NOBODY = -(1 << 40)


@dataclass
class SiteCount:
    """The accesses of one instruction during a launch, summed over warps."""

    space: str  # "shared": used and ideal are wavefronts; "global": sectors
    line: int  # in the PTX text
    text: str
    source: tuple[str, int] | None  # file and line of the Python source
    warps: int = 0  # executions, counted for each warp
    used: int = 0
    ideal: int = 0


class Counters:
    """Counts for each instruction of a launch."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.sites: dict[tuple[int, str], SiteCount] = {}

    def results(self) -> list[SiteCount]:
        """The counts, in the order of the instructions."""
        return [self.sites[key] for key in sorted(self.sites)]

    def add(self, space: str, site: int, cost: tuple[int, int, int]) -> None:
        """Add (warps, used, ideal) to an instruction."""
        count = self.sites.get((site, space))
        if count is None:
            instruction = self.kernel.sites[site]
            text = self.kernel.module.lines[instruction.line - 1].strip()
            count = SiteCount(space, instruction.line, text, instruction.source)
            self.sites[site, space] = count
        warps, used, ideal = cost
        count.warps += warps
        count.used += used
        count.ideal += ideal


def shared_cost(layout, address: Value, width: int, lanes: Lanes) -> tuple[int, int, int]:
    """(warps, wavefronts, least wavefronts) of `width` bytes at offsets in shared memory."""
    words = max(width // 4, 1)
    rows = _by_warp(layout, address, lanes).reshape(-1, 32 // words)
    warps = np.count_nonzero((rows.reshape(-1, 32) != NOBODY).any(axis=1))
    rows = rows[(rows != NOBODY).any(axis=1)]  # those lanes are served at once
    wanted = np.where(rows == NOBODY, NOBODY, rows // 4)[:, :, None] + np.arange(words)
    wanted, first = _distinct(wanted.reshape(len(rows), -1))  # a word goes to all that want it
    row, position = np.nonzero(first)
    in_bank = np.bincount(row * BANKS + wanted[row, position] % BANKS, minlength=len(rows) * BANKS)
    return warps, int(in_bank.reshape(-1, BANKS).max(axis=1).sum()), len(rows)


def global_cost(layout, address: Value, width: int, lanes: Lanes) -> tuple[int, int, int]:
    """(warps, sectors, least sectors) of `width` bytes at addresses of global memory."""
    rows = _by_warp(layout, address, lanes)
    rows = rows[(rows != NOBODY).any(axis=1)]
    places, first = _distinct(rows)
    least = -(-np.count_nonzero(first, axis=1) * width // SECTOR)
    _, first = _distinct(np.where(places == NOBODY, NOBODY, places // SECTOR))
    return len(rows), np.count_nonzero(first), int(least.sum())


def _by_warp(layout, address: Value, lanes: Lanes) -> np.ndarray:
    """A row of 32 addresses for each warp; NOBODY where no lane executes."""
    rows = np.full(layout.warps * 32, NOBODY)
    rows[layout.of(layout.slot, lanes)] = address
    return rows.reshape(-1, 32)


def _distinct(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sorted rows, and which of their elements occur for the first time."""
    rows = np.sort(rows, axis=1)
    first = rows > NOBODY + BANKS  # vectors of words that nobody wants, too
    first[:, 1:] &= rows[:, 1:] != rows[:, :-1]
    return rows, first
