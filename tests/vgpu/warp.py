"""Warps: which lanes belong together, and the instructions that exchange values between them.

Where there are tables by warp, each warp has 32 slots, whether the CTA fills its last warp or not:
slot = warp of the chunk * 32 + lane of the warp.
"""

from __future__ import annotations

import functools

import numpy as np

from .lanes import Lanes, Value, is_scalar

ALL = np.uint32(0xFFFFFFFF)
UNDEFINED = np.uint32(0xCBCBCBCB)  # what a lane gets from a lane that does not take part


class Layout:
    """The warps of a chunk of equal CTAs."""

    def __init__(self, ctas: int, threads: int):
        self.warps_per_cta = -(-threads // 32)
        self.warps = ctas * self.warps_per_cta
        self.full = threads % 32 == 0  # no CTA has a partial warp
        thread = np.arange(threads)
        first = np.arange(ctas)[:, None] * (self.warps_per_cta * 32)
        self.slot = (first + thread).reshape(-1)
        self.warp = self.slot >> 5
        self.lane_id = (self.slot & 31).astype(np.uint32)
        self.existing = self.bits(np.True_, None)
        self._sources: dict = {}

    def of(self, table: np.ndarray, lanes: Lanes) -> np.ndarray:
        """The entries of some lanes (None: all) in a table over the lanes."""
        return table if lanes is None else table.take(lanes)

    def padded(self, value: Value, lanes: Lanes, empty) -> np.ndarray:
        """One value for each slot; `empty` where no executing lane is."""
        if lanes is None and self.full and not is_scalar(value):
            return value
        whole = np.full(self.warps * 32, empty, value.dtype)
        whole[self.of(self.slot, lanes)] = value
        return whole

    def bits(self, predicate, lanes: Lanes) -> np.ndarray:
        """For each warp, the executing lanes whose predicate holds, as uint32."""
        return np.packbits(self.padded(predicate, lanes, False), bitorder="little").view(np.uint32)

    def present(self, lanes: Lanes):
        """For each of the lanes, the lanes of its warp that execute with it."""
        if lanes is None and self.full:
            return ALL
        return self.bits(np.True_, lanes)[self.of(self.warp, lanes)]

    def source(self, mode: str, b, c, lanes: Lanes) -> tuple:
        """The slot that shfl reads from, its lane in the warp, and whether it is in range."""
        uniform = is_scalar(b) and is_scalar(c) and lanes is None
        if uniform and (mode, int(b), int(c)) in self._sources:
            return self._sources[mode, int(b), int(c)]
        lane = self.of(self.lane_id, lanes).astype(np.int64)
        b, c = (operand.astype(np.int64) for operand in (b, c))
        segment, clamp, b = c >> 8 & 31, c & 31, b & 31
        first = lane & segment
        last = first | clamp & ~segment
        match mode:
            case "up":
                source = lane - b
            case "down":
                source = lane + b
            case "bfly":
                source = lane ^ b
            case "idx":
                source = first | b & ~segment
        in_range = source >= last if mode == "up" else source <= last
        source = np.where(in_range, source, lane)
        found = (self.of(self.warp, lanes) << 5) + source, source.astype(np.uint32), in_range
        if uniform:
            self._sources[mode, int(b), int(c)] = found
        return found

    # Member masks

    def alive(self, chunk) -> np.ndarray:
        """For each warp, the lanes that exist and have not exited."""
        if chunk.alive == chunk.lane_count:
            return self.existing
        return self.bits(~chunk.exited, None)

    def complete(self, chunk, mask: Value | None, lanes: Lanes, site: int):
        """Which executing lanes have all the lanes of their member mask here.

        mask is a uint32 scalar or array, or None where the instruction needs all 32 lanes of the
        warp. Returns None for all, else a bool array. Exited lanes are not waited for, unless all
        32 are needed.
        """
        if mask is None:
            return self._complete_full(chunk, lanes, site)
        if not is_scalar(mask) and mask.min() == mask.max():
            mask = mask[0]
        if is_scalar(mask) and mask == ALL and chunk.active_count(lanes) == chunk.alive:
            return None
        lane_id = self.of(self.lane_id, lanes)
        outside = mask >> lane_id & 1 == 0
        if outside.any():
            position = int(np.argmax(outside))
            own = int(mask if is_scalar(mask) else mask[position])
            chunk.fail("missing lanes", f"lane {lane_id[position]} executes with the member mask "
                       f"{own:#010x}, which does not contain it", position, lanes, site)
        present = self.present(lanes)
        if not is_scalar(mask):
            self._check_agreement(chunk, mask, present, lanes, site)
        return mask & self.alive(chunk)[self.of(self.warp, lanes)] & ~present == 0

    def _complete_full(self, chunk, lanes: Lanes, site: int):
        if lanes is None and self.full:
            return None
        alive = self.alive(chunk)[self.of(self.warp, lanes)]
        if (alive != ALL).any():
            position = int(np.argmax(alive != ALL))
            chunk.fail("missing lanes", f"needs all 32 lanes of the warp; missing "
                       f"{lane_list(~alive[position])}", position, lanes, site)
        return self.present(lanes) == ALL

    def _check_agreement(self, chunk, mask: Value, present, lanes: Lanes, site: int) -> None:
        """The lanes that a lane's mask names must give the same mask."""
        disagree = mask & present & ~self.equal(mask, lanes)
        if disagree.any():
            position = int(np.argmax(disagree != 0))
            chunk.fail("missing lanes", f"gives the member mask {int(mask[position]):#010x}, but "
                       f"{lane_list(disagree[position])} of it give another", position, lanes, site)

    def check_left(self, chunk, mask: Value | None, left: np.ndarray, lanes: Lanes,
                   site: int) -> None:
        """Nobody may wait for lanes that have `left`: ran past the instruction, then exited.

        A lane that had exited before is not waited for, and one that does nothing but exit
        cannot be told from it.
        """
        named = (ALL if mask is None else mask) & self.bits(left, None)[self.of(self.warp, lanes)]
        if named.any():
            position = int(np.argmax(named != 0))
            chunk.fail("missing lanes", f"waits for {lane_list(named[position])} of its warp, "
                       "which went on without coming here and exited", position, lanes, site)

    def fail_missing(self, chunk, mask: Value | None, lanes: Lanes, site: int) -> None:
        """Nobody else can come: report the first lane that waits."""
        own = int(ALL if mask is None else mask if is_scalar(mask) else mask[0])
        lane = int(lanes[0])
        warp = self.warp[lane]
        missing = own & int(self.alive(chunk)[warp]) & ~int(self.bits(np.True_, lanes)[warp])
        chunk.fail("missing lanes", f"warp {warp % self.warps_per_cta} waits with the member mask "
                   f"{own:#010x} for {lane_list(missing)}, which cannot come here", 0, lanes, site)

    def equal(self, value: np.ndarray, lanes: Lanes) -> np.ndarray:
        """For each of the lanes, the executing lanes of its warp with an equal value."""
        values = self.padded(value, lanes, 0).reshape(-1, 32)
        same = values[:, :, None] == values[:, None, :]
        bits = np.packbits(same, axis=2, bitorder="little").view(np.uint32).reshape(-1)
        return bits[self.of(self.slot, lanes)] & self.present(lanes)


@functools.lru_cache(maxsize=16)
def layout(ctas: int, threads: int) -> Layout:
    """The layout of a chunk; equal chunks share one."""
    return Layout(ctas, threads)


def lane_list(mask: int) -> str:
    """The lanes of a mask, for people."""
    lanes = [str(lane) for lane in range(32) if int(mask) >> lane & 1]
    return ("lane " if len(lanes) == 1 else "lanes ") + ", ".join(lanes)


def lane_mask(relation: str, lane_id: np.ndarray) -> np.ndarray:
    """%lanemask_{eq,lt,le,gt,ge}: the lanes of a warp in that relation to each lane."""
    equal = np.uint32(1) << lane_id
    lower = equal - np.uint32(1)
    return {"eq": equal, "lt": lower, "le": lower | equal, "gt": ~(lower | equal),
            "ge": ~lower}[relation]


def shuffle(chunk, mode: str, value: Value, b, c, mask: Value, lanes: Lanes) -> tuple:
    """shfl.sync.{up,down,bfly,idx}; reading from a lane outside the mask gives UNDEFINED."""
    layout = chunk.layout
    slot, source, in_range = layout.source(mode, b, c, lanes)
    result = layout.padded(value, lanes, UNDEFINED).take(slot)
    if not is_scalar(mask) or mask != ALL:
        result = np.where(mask >> source & 1 != 0, result, UNDEFINED)
    return result, in_range


def vote(chunk, mode: str, predicate, mask: Value, lanes: Lanes):
    """vote.sync: the lanes of the mask whose predicate holds, or what can be said of them."""
    layout = chunk.layout
    asked = mask & layout.present(lanes)
    if is_scalar(predicate):
        holds = asked if predicate else np.uint32(0)
    else:
        holds = layout.bits(predicate, lanes)[layout.of(layout.warp, lanes)] & mask
    match mode:
        case "ballot":
            return holds
        case "any":
            return holds != 0
        case "all":
            return holds == asked
        case "uni":
            return (holds == asked) | (holds == 0)


def match_any(chunk, value: Value, mask: Value, lanes: Lanes):
    """match.any.sync: the lanes of the mask that hold the same value, as uint32."""
    if is_scalar(value):
        return mask & chunk.layout.present(lanes)
    return chunk.layout.equal(value, lanes) & mask


def match_all(chunk, value: Value, mask: Value, lanes: Lanes) -> tuple:
    """match.all.sync: (the mask where all of it hold one value, else 0; whether they do)."""
    asked = mask & chunk.layout.present(lanes)
    same = match_any(chunk, value, mask, lanes) == asked
    return np.where(same, asked, np.uint32(0)) if not is_scalar(same) else (
        asked if same else np.uint32(0)), same


REDUCTIONS = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
              "or": np.bitwise_or, "xor": np.bitwise_xor}


def reduce(chunk, operation: str, value: Value, mask: Value, lanes: Lanes) -> np.ndarray:
    """redux.sync: for each lane, the reduction over the lanes of its mask."""
    layout = chunk.layout
    ufunc = REDUCTIONS[operation]
    asked = np.broadcast_to(mask & layout.present(lanes), chunk.active_count(lanes))
    result = np.empty(asked.size, value.dtype)
    value = np.broadcast_to(value, asked.size)
    warp = layout.of(layout.warp, lanes).astype(np.int64)
    order = np.argsort(warp << 32 | asked, kind="stable")  # lanes of one warp and mask together
    key = (warp << 32 | asked)[order]
    first = np.flatnonzero(np.diff(key, prepend=-1))
    totals = ufunc.reduceat(value[order], first, dtype=value.dtype)
    result[order] = np.repeat(totals, np.diff(np.append(first, order.size)))
    return result
