"""Which lanes run next: divergence, reconvergence, barriers and warp-wide instructions."""

from __future__ import annotations

import numpy as np

from .deadlock import Repetition
from .lanes import Lanes, is_scalar
from .report import VirtualGPUError

FAIRNESS = 64  # every so many steps the last block runs, so that spin loops make progress


class Scheduler:
    """Runs the lanes of a chunk, which wait in `ready` by the index of their next block.

    The lowest block runs first, so that the lanes of both sides of a branch meet again after it.
    """

    def __init__(self, chunk):
        self.chunk = chunk
        self.blocks = chunk.kernel.blocks
        self.ready: dict[int, np.ndarray | None] = {}
        self.at_barrier: dict[int, np.ndarray | None] = {}
        self.at_warp: dict[int, np.ndarray | None] = {}
        # While lanes wait for others of their warp: which lanes have run something else since.
        self.went_on: np.ndarray | None = None
        self.instructions = 0
        options = chunk.launch.options
        self.schedule = options.schedule
        self.random = np.random.default_rng(options.seed)
        self.steps = 0
        self.repetition = Repetition(chunk)

    def run(self) -> int:
        """Run until every lane has exited; returns the number of executed instructions."""
        chunk = self.chunk
        ready = self.ready
        ready[0] = None
        while ready or self.release():
            self.steps += 1
            if self.steps % FAIRNESS == 0:
                self.release_barriers()
                if self.repeats():
                    self.fail_deadlock()
            index = self.choose()
            lanes = ready.pop(index)
            block = self.blocks[index]
            if block.kind == "warp":
                lanes = self.complete_warps(index, lanes)
                if lanes is not None and not lanes.size:
                    continue
            if self.went_on is not None and block.size > 1:
                self.went_on[slice(None) if lanes is None else lanes] = True
            self.instructions += block.size * chunk.active_count(lanes)
            predicate = block.run(chunk, lanes)
            match block.kind:
                case "jump" | "warp":
                    self.arrive(ready, block.target, lanes)
                case "branch":
                    self.branch(block, predicate, lanes)
                case "barrier":
                    self.arrive(self.at_barrier, index, lanes)
                case "exit":
                    self.exit(lanes)
        chunk.copies.finish()
        return self.instructions

    def choose(self) -> int:
        """The index of the block to run next."""
        ready = self.ready
        if len(ready) == 1:
            return next(iter(ready))
        if self.schedule == "random":
            return int(self.random.choice(sorted(ready)))
        fair = self.steps % FAIRNESS == 0
        return max(ready) if fair != (self.schedule == "highest") else min(ready)

    def arrive(self, queue: dict, index: int, lanes: Lanes) -> None:
        """Add lanes to those that wait for a block."""
        if index in queue:
            lanes = np.sort(np.concatenate([queue[index], lanes]), kind="stable")
            if lanes.size == self.chunk.lane_count:
                lanes = None
        queue[index] = lanes

    def branch(self, block, predicate, lanes: Lanes) -> None:
        """Send lanes to the target where the predicate holds, else to the other block."""
        if not is_scalar(predicate):
            taken = np.flatnonzero(predicate)
            if 0 < taken.size < predicate.size:
                fallen = np.flatnonzero(~predicate)
                if lanes is not None:
                    taken, fallen = lanes[taken], lanes[fallen]
                self.arrive(self.ready, block.target, taken)
                self.arrive(self.ready, block.other, fallen)
                return
            predicate = taken.size > 0
        self.arrive(self.ready, block.target if predicate else block.other, lanes)

    def exit(self, lanes: Lanes) -> None:
        chunk = self.chunk
        chunk.exited[slice(None) if lanes is None else lanes] = True
        chunk.alive -= chunk.active_count(lanes)

    # Barriers

    def release(self) -> bool:
        """When no lane can run: let waiting lanes go on. False when there are none."""
        if not self.at_barrier and not self.at_warp:
            return False
        if not self.release_barriers() and not self.release_warps():
            self.fail_stuck()
        return True

    def release_barriers(self) -> bool:
        """Release the CTAs all of whose living threads wait at one barrier."""
        released = False
        for index in list(self.at_barrier):
            lanes = self.at_barrier.pop(index)
            going, staying = self.arrived(lanes)
            if staying is not None and staying.size:
                self.at_barrier[index] = staying
            if going is None or going.size:
                self.pass_barrier(index, going)
                released = True
        return released

    def arrived(self, lanes: Lanes) -> tuple:
        """Lanes of CTAs that are complete, and the others (None for nobody)."""
        chunk = self.chunk
        if chunk.active_count(lanes) == chunk.alive:
            return lanes, None
        living = chunk.threads - chunk.exited.reshape(chunk.ctas, -1).sum(axis=1)
        cta = lanes // chunk.threads
        complete = np.bincount(cta, minlength=chunk.ctas) == living
        going = complete[cta]
        return lanes[going], lanes[~going]

    def pass_barrier(self, index: int, lanes: Lanes) -> None:
        chunk = self.chunk
        block = self.blocks[index]
        barrier = block.barrier
        if barrier["kind"] != "sync":
            result = self.reduce(barrier["kind"], barrier["predicate"](chunk, lanes), lanes)
            chunk.write_register(lanes, barrier["destination"], result)
        chunk.barrier(lanes)
        chunk.changes += 1
        self.arrive(self.ready, block.target, lanes)

    def reduce(self, kind: str, predicate, lanes: Lanes):
        """bar.red: the count, conjunction or disjunction over the living threads of a CTA."""
        chunk = self.chunk
        everybody = np.arange(chunk.lane_count) if lanes is None else lanes
        cta = everybody // chunk.threads
        holds = np.broadcast_to(predicate, everybody.shape)
        count = np.bincount(cta, weights=holds, minlength=chunk.ctas).astype(np.uint32)
        if kind == "popc":
            return count[cta]
        if kind == "or":
            return (count > 0)[cta]
        return (count == np.bincount(cta, minlength=chunk.ctas))[cta]

    # Warp-wide instructions

    def complete_warps(self, index: int, lanes: Lanes):
        """Those of the lanes whose warps have all the lanes they wait for; keep the others.

        Returns None for everybody, or the lanes that may go on (perhaps none).
        """
        if index in self.at_warp:
            self.arrive(self.at_warp, index, lanes)
            lanes = self.at_warp.pop(index)
        going = self.complete(index, lanes)
        if going is not None and not going.all():
            everybody = np.arange(self.chunk.lane_count) if lanes is None else lanes
            lanes, self.at_warp[index] = everybody[going], everybody[~going]
        if not self.at_warp:
            self.went_on = None
        elif self.went_on is None:
            self.went_on = np.zeros(self.chunk.lane_count, bool)
        return lanes

    def complete(self, index: int, lanes: Lanes):
        """Which of the lanes have all lanes that they wait for here (None: all of them)."""
        chunk, block = self.chunk, self.blocks[index]
        mask = None if block.mask is None else block.mask(chunk, lanes)
        if self.went_on is not None and (chunk.exited & self.went_on).any():
            chunk.layout.check_left(chunk, mask, chunk.exited & self.went_on, lanes, block.site)
        return chunk.layout.complete(chunk, mask, lanes, block.site)

    def release_warps(self) -> bool:
        """Let lanes go on that waited for lanes which have exited since."""
        for index, lanes in self.at_warp.items():
            going = self.complete(index, lanes)
            if going is None or going.any():
                self.ready[index] = self.at_warp.pop(index)
                return True
        return False

    # Nobody can go on

    def repeats(self) -> bool:
        """Whether the lanes that can run do the same for ever."""
        if self.schedule == "random" and len(self.ready) > 1:
            return False
        return self.repetition.seen(self.steps, [self.ready, self.at_barrier, self.at_warp])

    def fail_deadlock(self):
        chunk = self.chunk
        index, lanes = next(iter(self.ready.items()))
        site = self.site_near(index)
        running = sum(chunk.active_count(lanes) for lanes in self.ready.values())
        detail = (f"{running} threads repeat themselves and store nothing, "
                  f"{chunk.alive - running} threads wait")
        if site is None:
            raise VirtualGPUError("deadlock", detail, kernel=chunk.kernel.title)
        chunk.fail("deadlock", detail, 0, lanes, site)

    def site_near(self, index: int) -> int | None:
        """The site that ends a block or what it jumps to; before it where that is an empty loop."""
        seen = set()
        while index not in seen:
            if self.blocks[index].site is not None:
                return self.blocks[index].site
            seen.add(index)
            index = self.blocks[index].target
        return next((b.site for b in self.blocks[index::-1] if b.site is not None), None)

    def fail_stuck(self):
        """No lane can run, and nothing will release those that wait."""
        chunk = self.chunk
        for index, lanes in self.at_warp.items():
            block = self.blocks[index]
            mask = None if block.mask is None else block.mask(chunk, lanes)
            chunk.layout.fail_missing(chunk, mask, lanes, block.site)
        (index, lane), (other, other_lane) = self.two_of_one_cta()
        instruction = chunk.kernel.sites[self.blocks[other].site]
        _, thread = chunk.place(other_lane)
        text = chunk.kernel.module.lines[instruction.line - 1].strip()
        chunk.fail_lane(
            "barrier divergence",
            f"waits here while thread {thread} of the CTA waits at PTX line {instruction.line}: "
            f"{text}", lane, self.blocks[index].site)

    def two_of_one_cta(self) -> tuple:
        """Two (block, lane) that wait at different barriers of one CTA."""
        seen: dict[int, tuple[int, int]] = {}
        for index, lanes in sorted(self.at_barrier.items()):
            for cta in np.unique(lanes // self.chunk.threads):
                lane = int(lanes[np.argmax(lanes // self.chunk.threads == cta)])
                if cta in seen:
                    return seen[cta], (index, lane)
                seen[cta] = (index, lane)
        raise AssertionError("all waiting threads of a CTA are at one barrier")
