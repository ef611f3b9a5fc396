"""Launches: the grid is run in chunks of whole CTAs, all threads of a chunk at once.

`Chunk` is the object that generated code talks to. A lane is one thread of the chunk:
lane = CTA in the chunk * threads per CTA + thread. Where a method takes `lanes`, None stands for
every lane, else it is the ascending array of the lanes that execute; a value is an array with one
element for each of them, or a NumPy scalar when it is the same for all.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import numpy as np

from . import counters, tensor, tracking, warp
from .lanes import Lanes, Value, is_scalar
from .memory import GLOBAL_BASE, LOCAL_WINDOW, SHARED_WINDOW, WINDOW_SHIFT, Arena
from .report import VirtualGPUError
from .scheduler import Scheduler
from .shared import SharedSpace
from .spaces import GlobalSpace, LocalSpace

CHUNK_BYTES = 1 << 26  # of shared and local memory in a chunk, unless one CTA has more
AXES = {"x": 0, "y": 1, "z": 2}
WINDOWS = {
    SHARED_WINDOW >> WINDOW_SHIFT: ("shared", SHARED_WINDOW),
    LOCAL_WINDOW >> WINDOW_SHIFT: ("local", LOCAL_WINDOW),
    GLOBAL_BASE >> WINDOW_SHIFT: ("global", 0),
}


@dataclass
class LaunchStatistics:
    """What one launch did."""

    instructions: int = 0  # PTX instructions, counted for each thread
    sites: list[counters.SiteCount] = field(default_factory=list)  # with options.count


class Launch:
    """What the chunks of one launch have in common."""

    def __init__(self, kernel, grid, block, parameters: bytes, dynamic_shared: int, options,
                 arena: Arena):
        self.kernel = kernel
        self.grid = tuple(grid)
        self.block = tuple(block)
        self.parameters = parameters
        self.options = options
        self.arena = arena
        self.threads = int(np.prod(self.block))
        self.ctas = int(np.prod(self.grid))
        self.dynamic_shared = dynamic_shared
        self.counters = counters.Counters(kernel) if options.count else None
        thread = np.arange(self.threads, dtype=np.uint32)
        x, y, _ = self.block
        self.thread_axes = (thread % x, thread // x % y, thread // (x * y))

    def ctas_at_once(self) -> int:
        """CTAs of a chunk."""
        nbytes = (self.kernel.static_shared + self.dynamic_shared
                  + self.threads * self.kernel.local_bytes)
        fitting = CHUNK_BYTES // max(nbytes, 1)
        return max(1, min(self.options.chunk // self.threads, fitting))

    def block_index(self, cta: int) -> tuple[int, int, int]:
        x, y, _ = self.grid
        return cta % x, cta // x % y, cta // (x * y)

    def thread_index(self, thread: int) -> tuple[int, int, int]:
        return tuple(int(axis[thread]) for axis in self.thread_axes)


class Chunk:
    """CTAs `first_cta` … `first_cta + ctas - 1` of a launch, while they run."""

    def __init__(self, launch: Launch, first_cta: int, ctas: int):
        self.launch = launch
        self.kernel = launch.kernel
        self.first_cta = first_cta
        self.ctas = ctas
        self.threads = launch.threads
        self.lane_count = ctas * launch.threads
        self.registers = [poison(dtype) for dtype in self.kernel.registers]
        self.layout = warp.layout(ctas, launch.threads)
        self.exited = np.zeros(self.lane_count, bool)
        self.alive = self.lane_count
        self.changes = 0  # of memory, by stores and atomics, and of what waits at barriers
        self._specials: dict = {}
        self.shared = SharedSpace(self)
        self.local = LocalSpace(self, self.kernel.local_bytes)
        self.memory = GlobalSpace(self, launch.arena)
        self.memory.watchers = tracking.watchers_of(self, launch.arena, launch.options)
        self.watchers = [*self.shared.watchers, *self.memory.watchers]
        self.spaces = {"global": self.memory, "shared": self.shared, "local": self.local}
        self.load_global = self.memory.load
        self.store_global = self.memory.store
        self.load_shared = self.shared.load
        self.store_shared = self.shared.store
        self.load_local = self.local.load
        self.store_local = self.local.store
        self.copies = tensor.AsyncCopies(self)
        self.cp_async = self.copies.issue
        self.cp_async_commit = self.copies.commit
        self.cp_async_wait = self.copies.wait

    def run(self) -> int:
        """Run every thread to its end; returns the number of executed instructions."""
        return Scheduler(self).run()

    # Registers

    def gather(self, lanes: np.ndarray, *indices: int) -> list:
        """The registers of some lanes; uniform ones stay scalars."""
        registers = self.registers
        return [value.take(lanes) if isinstance(value, np.ndarray) else value
                for value in map(registers.__getitem__, indices)]

    def scatter(self, lanes: np.ndarray, index: int, value: Value) -> None:
        """Give some lanes of a register new values.

        Register arrays may be shared with other registers (`mov` binds the same array), so the
        old one is copied unless nobody else can see it.
        """
        registers = self.registers
        if lanes.size == self.alive and is_scalar(value):
            registers[index] = value  # the other lanes have exited
            return
        old = registers[index]
        if is_scalar(old):
            old = registers[index] = np.full(self.lane_count, old, old.dtype)
        # `old`, the list and getrefcount's own argument: three references
        elif old.base is not None or not old.flags.writeable or sys.getrefcount(old) > 3:
            old = registers[index] = old.copy()
        old[lanes] = value

    def write_register(self, lanes: Lanes, index: int, value: Value) -> None:
        """Bind a register for some lanes, or for all (lanes None)."""
        if lanes is None:
            self.registers[index] = value
        else:
            self.scatter(lanes, index, value)

    def active_count(self, lanes: Lanes) -> int:
        return self.lane_count if lanes is None else lanes.size

    def parameter(self, offset: int, dtype):
        """The value of `dtype` at a byte offset of the kernel's parameters."""
        return np.frombuffer(self.launch.parameters, dtype, 1, offset)[0]

    def special(self, name: str, lanes: Lanes):
        """A special register as uint32; raises "not supported" for an unknown one."""
        value = self._specials.get(name)
        if value is None:
            value = self._specials[name] = self._special(name)
        return value if lanes is None or is_scalar(value) else value.take(lanes)

    def _special(self, name: str):
        kind, _, axis = name.removeprefix("%").partition(".")
        launch = self.launch
        if kind == "tid":
            return self._of_thread(launch.thread_axes[AXES[axis]], launch.block[AXES[axis]])
        if kind == "ctaid":
            ctas = np.arange(self.first_cta, self.first_cta + self.ctas)
            value = np.array(launch.block_index(ctas)[AXES[axis]], np.uint32)
            same = launch.grid[AXES[axis]] == 1 or self.ctas == 1
            return value[0] if same else np.repeat(value, self.threads)
        if kind == "ntid":
            return np.uint32(launch.block[AXES[axis]])
        if kind == "nctaid":
            return np.uint32(launch.grid[AXES[axis]])
        if kind == "laneid":
            return self.layout.lane_id
        if kind.startswith("lanemask_"):
            return warp.lane_mask(kind.removeprefix("lanemask_"), self.layout.lane_id)
        if kind == "warpid":
            return self._of_thread(np.arange(self.threads, dtype=np.uint32) // 32, self.threads)
        if kind == "nwarpid":
            return np.uint32(self.layout.warps_per_cta)
        if kind == "dynamic_smem_size":
            return np.uint32(launch.dynamic_shared)
        raise VirtualGPUError("not supported", f"special register {name}", kernel=self.kernel.title)

    def _of_thread(self, value: np.ndarray, extent: int):
        return np.uint32(0) if extent == 1 else np.tile(value, self.ctas)

    # Memory that is not in one known state space

    def load_global_nc(self, address: Value, dtype, count: int, lanes: Lanes, site: int) -> tuple:
        """Load through the read-only path: nobody may store to these bytes in this launch."""
        return self.memory.load(address, dtype, count, lanes, site, read_only=True)

    def load_generic(self, address: Value, dtype, count: int, lanes: Lanes, site: int) -> tuple:
        """Load from generic addresses; each lane's address may be in another state space."""
        parts = [(part, space.load(inner, dtype, count, of_part, site))
                 for space, inner, part, of_part in self._by_space(address, lanes)]
        if len(parts) == 1:
            return parts[0][1]
        return tuple(self._joined([(part, values[k]) for part, values in parts], lanes)
                     for k in range(count))

    def store_generic(self, address: Value, values: tuple, dtype, lanes: Lanes, site: int) -> None:
        """Store to generic addresses."""
        for space, inner, part, of_part in self._by_space(address, lanes):
            chosen = tuple(value if part is None or is_scalar(value) else value[part]
                           for value in values)
            space.store(inner, chosen, dtype, of_part, site)

    def atomic(self, space: str, operation: str, address: Value, dtype, operands: tuple,
               lanes: Lanes, site: int):
        """Atomic read-modify-write; returns the old values."""
        if space != "generic":
            return self.spaces[space].atomic(operation, address, dtype, operands, lanes, site)
        parts = []
        for within, inner, part, of_part in self._by_space(address, lanes):
            chosen = tuple(value if part is None or is_scalar(value) else value[part]
                           for value in operands)
            parts.append((part, within.atomic(operation, inner, dtype, chosen, of_part, site)))
        return parts[0][1] if len(parts) == 1 else self._joined(parts, lanes)

    def _by_space(self, address: Value, lanes: Lanes) -> list:
        """(space, addresses there, positions among the active lanes, lanes) for each space."""
        window = address >> np.uint64(WINDOW_SHIFT)
        if is_scalar(window) or window.min() == window.max():
            name, base = WINDOWS.get(int(window.flat[0]), ("global", 0))
            return [(self.spaces[name], address - np.uint64(base), None, lanes)]
        parts = []
        for key in np.unique(window):
            name, base = WINDOWS.get(int(key), ("global", 0))
            part = np.flatnonzero(window == key)
            of_part = part if lanes is None else lanes[part]
            parts.append((self.spaces[name], address[part] - np.uint64(base), part, of_part))
        return parts

    def _joined(self, parts: list, lanes: Lanes) -> np.ndarray:
        whole = np.empty(self.active_count(lanes), parts[0][1].dtype)
        for part, value in parts:
            whole[part] = value
        return whole

    # Warp instructions

    def shuffle(self, mode: str, value: Value, b, c, mask: Value, lanes: Lanes, site: int) -> tuple:
        """shfl.sync: (uint32 values, whether the source lane was in range)."""
        return warp.shuffle(self, mode, value, b, c, mask, lanes)

    def vote(self, mode: str, predicate, mask: Value, lanes: Lanes, site: int):
        """vote.sync: "ballot" gives uint32, "all", "any" and "uni" give bool."""
        return warp.vote(self, mode, predicate, mask, lanes)

    def match_any(self, value: Value, mask: Value, lanes: Lanes, site: int):
        """match.any.sync: the lanes of the mask that hold the same value."""
        return warp.match_any(self, value, mask, lanes)

    def match_all(self, value: Value, mask: Value, lanes: Lanes, site: int) -> tuple:
        """match.all.sync: (the mask or 0, whether all lanes hold the same value)."""
        return warp.match_all(self, value, mask, lanes)

    def activemask(self, lanes: Lanes):
        """The lanes of each warp that execute this instruction together, as uint32."""
        return self.layout.present(lanes)

    def reduce(self, operation: str, value: Value, mask: Value, lanes: Lanes, site: int):
        """redux.sync: add, min, max, and, or, xor of integers over the lanes of the mask."""
        return warp.reduce(self, operation, value, mask, lanes)

    def warp_barrier(self, mask: Value, lanes: Lanes, site: int) -> None:
        """bar.warp.sync: orders the memory accesses of a warp's lanes."""
        for watcher in self.watchers:
            watcher.warp_barrier(lanes)

    def barrier(self, lanes: Lanes) -> None:
        """All living threads of some CTAs have arrived at a barrier."""
        for watcher in self.watchers:
            watcher.barrier(lanes)

    def mma(self, kind: str, a: tuple, b: tuple, c: tuple, lanes: Lanes, site: int) -> tuple:
        """mma.sync on fragments (uint32 registers) laid out as in the PTX ISA."""
        return tensor.mma(self, kind, a, b, c, lanes, site)

    def ldmatrix(self, count: int, transposed: bool, address: Value, lanes: Lanes,
                 site: int) -> tuple:
        """ldmatrix.sync of 1, 2 or 4 matrices of 8x8 16-bit elements."""
        return tensor.ldmatrix(self, count, transposed, address, lanes, site)

    # Everything else

    def fence(self, scope: str, lanes: Lanes) -> None:
        """Memory is sequentially consistent here, so there is nothing to wait for."""

    def nanosleep(self, duration, lanes: Lanes) -> None:
        """Lets other threads run; the scheduler does that anyway."""

    def trap(self, lanes: Lanes, site: int) -> None:
        """The kernel gave up."""
        self.fail("trap", "the kernel executed trap", 0, lanes, site)

    def fail_misaligned(self, address: Value, width: int, lanes: Lanes, site: int):
        address = np.atleast_1d(address)
        position = int(np.argmax(address % width != 0))
        detail = f"{width} bytes at {int(address[position]):#x}"
        self.fail("misaligned", detail, position, lanes, site)

    def fail(self, kind: str, detail: str, position: int, lanes: Lanes, site: int):
        """Raise an error of the `position`-th active lane at an instruction."""
        self.fail_lane(kind, detail, int(position if lanes is None else lanes[position]), site)

    def fail_lane(self, kind: str, detail: str, lane: int, site: int):
        """Raise an error of a lane at an instruction."""
        instruction = self.kernel.sites[site]
        block, thread = self.place(lane)
        raise VirtualGPUError(
            kind, detail, kernel=self.kernel.title, block=block, thread=thread,
            ptx_line=instruction.line, ptx_text=self.kernel.module.lines[instruction.line - 1],
            source=instruction.source)

    def place(self, lane: int) -> tuple[tuple, tuple]:
        """The block index and the thread index of a lane."""
        cta, thread = divmod(lane, self.threads)
        return self.launch.block_index(self.first_cta + cta), self.launch.thread_index(thread)


def poison(dtype):
    """What a register holds that was never written."""
    dtype = np.dtype(dtype)
    return np.frombuffer(b"\xcb" * 8, dtype, 1)[0] if dtype.kind != "b" else np.True_


def launch(kernel, grid: tuple, block: tuple, parameters: bytes, dynamic_shared: int, options,
           arena: Arena, cooperative: bool = False) -> LaunchStatistics:
    """Run a kernel; raises VirtualGPUError for the first mistake found.

    kernel is a lower.Kernel; grid and block are (x, y, z); parameters are the bytes of the
    .param space; dynamic_shared is in bytes. With `cooperative` all CTAs run together.
    """
    arena.launches += 1
    running = Launch(kernel, grid, block, parameters, dynamic_shared, options, arena)
    together = running.ctas if cooperative else running.ctas_at_once()
    firsts = list(range(0, running.ctas, together))
    if options.schedule == "highest":
        firsts.reverse()
    elif options.schedule == "random":
        np.random.default_rng(options.seed).shuffle(firsts)
    statistics = LaunchStatistics()
    with np.errstate(all="ignore"):
        for first in firsts:
            chunk = Chunk(running, first, min(together, running.ctas - first))
            statistics.instructions += chunk.run()
            # The spaces refer to the chunk; its large arrays need not wait for a collection.
            vars(chunk).clear()
    if running.counters is not None:
        statistics.sites = running.counters.results()
    return statistics
