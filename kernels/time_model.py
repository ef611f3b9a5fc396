"""How long an op should take on a GPU that need not be there, from what its kernels consist of.

The op's launcher is called with arrays that have shapes and no memory, and each launch is noted
instead of made. A launch takes as long as the resource that it needs longest:

    tensor    products of the hottest loop (HMMA) on each partition's tensor core
    issue     instructions of that loop, one a cycle in each partition
    shared    wavefronts of shared memory, one a cycle, none of them twice
    special   exp2 and the like (MUFU);        float32   multiply-adds outside the tensor cores
    l2        bytes that the loop loads        memory    each array that the kernel was given, once

How often the loop turns follows from the multiply-adds of a block, which `WORK` knows for the
products and for attention; other kernels move memory only. Multiprocessors take blocks in turn, and
the one with most blocks decides; where blocks differ, as in causal attention, the average does, or
the largest. A block that has a multiprocessor to itself waits for its first bytes and writes its
results while nothing else runs there.

That is the time if the resources work side by side, `seconds`; if one waited for the other, it
would be the sum, `apart`. Both leave out dependent instructions, bank conflicts, what is outside
the loop, a clock below the boost clock and memory below its published rate; and, to the other
side, what L2 keeps from one kernel to the next. Nothing is fitted to a measurement or to a goal.
Constants: common/gpus.py.
"""

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from .common.device_array import DeviceArray
from .common.gpus import (
    ARCHITECTURES,
    CHIPS,
    GRAPH_GAP,
    PARTITIONS,
    PORT,
    SPECIAL,
    Chip,
    ceilings,
    resident_blocks,
)
from .common.spec import Case
from .compile_report import Row, read_table
from .registry import load_op, load_spec

MMA = 16 * 8 * 16  # multiply-adds of an HMMA
LANES = 32


@dataclass(frozen=True)
class Launch:
    """A kernel that a launcher wanted to run."""

    kernel: str
    blocks: int
    threads: int
    shared: int  # dynamic, in bytes
    arguments: Mapping[str, Any]  # by parameter; arrays without memory


@dataclass(frozen=True)
class Prediction:
    """Seconds of one launch, what decides, and the seconds of every resource."""

    kernel: str
    seconds: float
    apart: float
    bound: str
    resources: Mapping[str, float]


def predict(op: str, name: str, arguments: Mapping[str, Any], gpu: str,
            case: Case | None = None) -> list[Prediction]:
    """Each launch of `<op>.<name>` on the product that the driver calls `gpu`.

    arguments: of the call, by name; of arrays only shape and dtype matter. case: of the op's spec,
    for ops that say by it what memory they move. ValueError for a GPU that is not in CHIPS.
    """
    if gpu not in CHIPS:
        raise ValueError(f"no time model of {gpu!r}, only of {', '.join(CHIPS)}")
    function, shapes = load_spec(op).FUNCTIONS[name], _without_memory(arguments)
    outputs = {shapes[n].address for n in function.outputs if shapes[n] is not None}
    added = {shapes[n].address for n in (*function.added_to, *function.updated)
             if shapes[n] is not None}
    launches = launches_of(op, name, shapes, CHIPS[gpu])
    told = function.bytes_moved(case) / len(launches) if case and function.bytes_moved else None
    return [_predict(launch, shapes, gpu, outputs, added, told) for launch in launches]


def launches_of(op: str, name: str, arguments: Mapping[str, Any], chip: Chip) -> list[Launch]:
    """What the launcher of `<op>.<name>` launches on a GPU with `chip`; arguments as `predict`."""
    implementation = getattr(load_op(op, "gpu"), name)
    found: list[Launch] = []
    with _instead_of_a_gpu(chip, found):
        implementation(*_without_memory(arguments).values())
    return found


class _Scratch(DeviceArray):
    """An array as numba makes it."""

    @property
    def device_ctypes_pointer(self) -> SimpleNamespace:
        return SimpleNamespace(value=self.address)


@contextlib.contextmanager
def _instead_of_a_gpu(chip: Chip, found: list[Launch]) -> Iterator[None]:
    """Launches of this thread go to `found`; launchers see the chip's multiprocessors."""
    from .common import launch
    from .common.cuda import Kernel, cuda, thread

    addresses = itertools.count(1 << 40, 1 << 36)

    def note(kernel, grid, *arguments, shared=0):
        named = dict(zip(kernel.parameters, arguments, strict=True))
        found.append(Launch(kernel.name, int(np.prod(grid)), kernel.launch_bounds[0], shared,
                            named))

    def device_array(size, dtype):
        return _Scratch(None, next(addresses), (size,), np.dtype(dtype))

    device = SimpleNamespace(MULTIPROCESSOR_COUNT=chip.multiprocessors,
                             compute_capability=chip.capability)
    with (mock.patch.object(Kernel, "launch", note),
          mock.patch.object(cuda, "device_array", device_array),
          mock.patch.object(cuda, "current_context", lambda: SimpleNamespace(device=device)),
          mock.patch.object(launch._scratch, "buffers", {}),
          mock.patch.object(thread, "device", 0),
          mock.patch.object(thread, "stream", SimpleNamespace(handle=0))):
        yield


def _without_memory(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with arrays at made-up addresses; one array stays one array."""
    addresses: dict[int, int] = {}
    made = {}
    for name, value in arguments.items():
        if hasattr(value, "shape"):
            address = addresses.setdefault(id(value), (len(addresses) + 1) << 36)
            made[name] = DeviceArray(None, address, tuple(value.shape), np.dtype(value.dtype))
        else:
            made[name] = value
    return made


def _predict(launch: Launch, call: Mapping[str, Any], gpu: str, outputs: set[int],
             added: set[int], told: float | None) -> Prediction:
    chip, row = CHIPS[gpu], _row(launch.kernel, CHIPS[gpu].capability)
    arrays = {array.address: array.nbytes for array in launch.arguments.values()
              if isinstance(array, DeviceArray)}
    nbytes = sum(size * (2 if place in added else 1) for place, size in arrays.items())
    nbytes = nbytes if told is None else told
    seconds = {"memory": nbytes / (1e9 * ceilings(gpu).bandwidth)}
    alone = chip.latency  # cycles in which nothing else runs
    total, largest = _work(launch, call)
    warps, loop = -(-launch.threads // LANES), row.loop
    of_a_turn = loop.hmma * MMA * warps or loop.ffma * launch.threads
    if total and of_a_turn:
        turns = max(total / chip.multiprocessors, largest)
        resident = resident_blocks(chip.capability, launch.threads, row.registers,
                                   row.shared + launch.shared)
        of_one = -(-launch.blocks // chip.multiprocessors)  # blocks, on a multiprocessor
        if largest * launch.blocks == total:
            turns = of_one * largest
        written = sum(size for place, size in arrays.items() if place in outputs)
        alone += written / launch.blocks / PORT
        if resident == 1:
            alone *= of_one
        cycles = {
            "tensor": loop.hmma * chip.hmma * warps / PARTITIONS,
            "issue": loop.instructions * warps / PARTITIONS,
            "shared": loop.wavefronts * warps,
            "special": loop.mufu * launch.threads / SPECIAL,
            "float32": loop.ffma * launch.threads / ARCHITECTURES[chip.capability].float32,
            "l2": loop.loaded * warps / min(PORT, chip.l2 / chip.multiprocessors),
        }
        for resource, of_turn in cycles.items():
            seconds[resource] = turns / of_a_turn * of_turn / (1e9 * chip.clock)
    bound = max(seconds, key=seconds.get)
    wait = alone / (1e9 * chip.clock) + GRAPH_GAP
    return Prediction(launch.kernel, seconds[bound] + wait, sum(seconds.values()) + wait, bound,
                      seconds)


@functools.cache
def _table() -> dict[tuple[str, str], Row]:
    return {(row.kernel, row.capability): row for row in read_table()}


def _row(kernel: str, capability: tuple[int, int]) -> Row:
    try:
        return _table()[kernel, "{}.{}".format(*capability)]
    except KeyError:
        raise ValueError(f"kernel {kernel} is not in the table of resources: run "
                         "python -m kernels.compile_report") from None


def _work(launch: Launch, call: Mapping[str, Any]) -> tuple[int, int]:
    """Multiply-adds of all blocks, and of the largest; 0, 0 where memory alone is modelled."""
    for pattern, work in WORK:
        if found := re.search(pattern, launch.kernel):
            return work(launch, call, int(found[1]))
    return 0, 0


def _product(rows: int | None, depth: int) -> Callable:
    """Tiles are computed whole, `depth` terms at a time; rows None: a tile is square."""

    def work(launch, call, columns):
        of_k = next(launch.arguments[key] for key in ("K", "terms", "M")
                    if key in launch.arguments)
        of_one = (rows or columns) * columns * -(-of_k // depth) * depth
        return launch.blocks * of_one, of_one

    return work


def _attention(products: int) -> Callable:
    """Tile i of a head needs the i tiles up to the diagonal, each whole, in so many products."""

    def work(launch, call, width):
        batch, heads, length = call["lse"].shape
        tiles = launch.blocks // (batch * heads)
        rows = -(-length // tiles)
        of_a_tile = products * rows * rows * width
        return batch * heads * tiles * (tiles + 1) // 2 * of_a_tile, tiles * of_a_tile

    return work


# By the name of a kernel, and a size in it: columns of a product's tile, width of a head.
WORK = (
    (r"^matmul\.gpu\._(?:linear|add_product)\w*?_(\d+)(?:_odd)?$", _product(None, 8)),
    (r"^matmul\.gpu_bf16\._(?:linear|add_product)\w*?_(\d+)(?:_odd)?$", _product(128, 32)),
    (r"^attention\.\w+\.forward_(\d+)", _attention(2)),
    (r"^attention\.\w+\.backward_queries_(\d+)", _attention(3)),
    (r"^attention\.\w+\.backward_keys_(\d+)", _attention(4)),
)
