"""What a device of some compute capability offers: attributes, occupancy, launch limits."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from .cubin import KernelResources
from .report import VirtualGPUError

WARP = 32
REGISTERS = 65536  # of one multiprocessor, and the most one block may use
REGISTER_UNIT = 256  # a warp gets registers in this unit
PARTITIONS = 4  # of a multiprocessor; each holds a quarter of the registers
SHARED_UNIT = 128
RESERVED_SHARED = 1024  # bytes of each block that belong to the system
DEFAULT_SHARED = 48 << 10  # static + dynamic bytes of a block without the opt-in attribute
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)
MAX_THREADS = 1024


@dataclass(frozen=True)
class Model:
    """A typical product of one compute capability."""

    multiprocessors: int
    threads: int  # resident, per multiprocessor
    blocks: int  # resident, per multiprocessor
    shared: int  # KiB per multiprocessor
    l2: int  # MiB
    clock: int  # kHz
    memory_clock: int  # kHz
    bus: int  # bits


MODELS = {
    (8, 0): Model(108, 2048, 32, 164, 40, 1410000, 1215000, 5120),
    (8, 6): Model(84, 1536, 16, 100, 6, 1695000, 9751000, 384),
    (8, 9): Model(128, 1536, 24, 100, 72, 2520000, 10501000, 384),
    (9, 0): Model(132, 2048, 32, 228, 50, 1980000, 2619000, 5120),
    (10, 0): Model(148, 2048, 32, 228, 126, 1965000, 3996000, 8192),
    (12, 0): Model(170, 1536, 24, 100, 96, 2407000, 14001000, 512),
}

# The same for every model.
COMMON_ATTRIBUTES = {
    "MAX_THREADS_PER_BLOCK": MAX_THREADS,
    "MAX_BLOCK_DIM_X": MAX_BLOCK[0], "MAX_BLOCK_DIM_Y": MAX_BLOCK[1],
    "MAX_BLOCK_DIM_Z": MAX_BLOCK[2], "MAX_GRID_DIM_X": MAX_GRID[0],
    "MAX_GRID_DIM_Y": MAX_GRID[1], "MAX_GRID_DIM_Z": MAX_GRID[2],
    "MAX_SHARED_MEMORY_PER_BLOCK": DEFAULT_SHARED, "TOTAL_CONSTANT_MEMORY": 65536,
    "WARP_SIZE": WARP, "MAX_PITCH": 2**31 - 1, "MAX_REGISTERS_PER_BLOCK": REGISTERS,
    # older names of the same numbers, which cuda-bindings may prefer
    "SHARED_MEMORY_PER_BLOCK": DEFAULT_SHARED, "REGISTERS_PER_BLOCK": REGISTERS,
    "MAX_REGISTERS_PER_MULTIPROCESSOR": REGISTERS, "TEXTURE_ALIGNMENT": 512,
    "KERNEL_EXEC_TIMEOUT": 0, "INTEGRATED": 0, "CAN_MAP_HOST_MEMORY": 0, "COMPUTE_MODE": 0,
    "CONCURRENT_KERNELS": 1, "ECC_ENABLED": 0, "PCI_BUS_ID": 0, "PCI_DEVICE_ID": 0,
    "PCI_DOMAIN_ID": 0, "TCC_DRIVER": 0, "ASYNC_ENGINE_COUNT": 3, "GPU_OVERLAP": 1,
    "UNIFIED_ADDRESSING": 1, "STREAM_PRIORITIES_SUPPORTED": 1, "GLOBAL_L1_CACHE_SUPPORTED": 1,
    "LOCAL_L1_CACHE_SUPPORTED": 1, "MANAGED_MEMORY": 0, "MULTI_GPU_BOARD": 0,
    "HOST_NATIVE_ATOMIC_SUPPORTED": 0, "PAGEABLE_MEMORY_ACCESS": 0,
    "CONCURRENT_MANAGED_ACCESS": 0, "COMPUTE_PREEMPTION_SUPPORTED": 1,
    "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM": 0, "COOPERATIVE_LAUNCH": 1, "CLUSTER_LAUNCH": 0,
    "RESERVED_SHARED_MEMORY_PER_BLOCK": RESERVED_SHARED, "MEMORY_POOLS_SUPPORTED": 0,
}


class Limits:
    """The limits of one compute capability."""

    def __init__(self, cc: tuple[int, int]):
        self.cc = cc
        self.model = model = MODELS[cc]
        self.optin_shared = (model.shared << 10) - RESERVED_SHARED
        self.attributes = {
            **COMMON_ATTRIBUTES,
            "COMPUTE_CAPABILITY_MAJOR": cc[0], "COMPUTE_CAPABILITY_MINOR": cc[1],
            "MULTIPROCESSOR_COUNT": model.multiprocessors, "CLOCK_RATE": model.clock,
            "MEMORY_CLOCK_RATE": model.memory_clock, "GLOBAL_MEMORY_BUS_WIDTH": model.bus,
            "L2_CACHE_SIZE": model.l2 << 20, "MAX_THREADS_PER_MULTIPROCESSOR": model.threads,
            "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": model.shared << 10,
            "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": self.optin_shared,
            "MAX_BLOCKS_PER_MULTIPROCESSOR": model.blocks,
            "SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO": 2 if cc in ((8, 0), (9, 0), (10, 0)) else 64,
        }

    def attribute(self, name: str) -> int:
        """A device attribute by its name without prefix; unknown ones are refused."""
        if name not in self.attributes:
            raise VirtualGPUError("bad driver call", f"device attribute {name} is not modelled")
        return self.attributes[name]

    def max_threads(self, resources: KernelResources) -> int:
        """The most threads of a block, by launch bound and by registers."""
        return min(MAX_THREADS, resources.max_threads, _resident_warps(resources) * WARP)

    def resident_blocks(self, resources: KernelResources, threads: int,
                        dynamic_shared: int) -> int:
        """Blocks of a kernel that fit on one multiprocessor at the same time."""
        warps = -(-threads // WARP)
        shared = _round_up(resources.shared_bytes + dynamic_shared + RESERVED_SHARED, SHARED_UNIT)
        if threads > self.max_threads(resources):
            return 0
        return min(self.model.blocks, self.model.threads // (warps * WARP),
                   _resident_warps(resources) // warps, (self.model.shared << 10) // shared)

    def check_launch(self, kernel, grid: tuple[int, int, int], block: tuple[int, int, int],
                     dynamic_shared: int, cooperative: bool) -> None:
        """Refuse what the driver refuses: VirtualGPUError "bad launch" with limit and value.

        kernel: a modules.LoadedKernel.
        """
        for refusal in self._refusals(kernel, grid, block, dynamic_shared, cooperative):
            raise VirtualGPUError("bad launch", refusal, kernel=kernel.code.title)

    def _refusals(self, kernel, grid, block, dynamic_shared, cooperative):
        for what, sizes, bounds in (("grid", grid, MAX_GRID), ("block", block, MAX_BLOCK)):
            for axis, size, bound in zip("xyz", sizes, bounds, strict=True):
                if size < 1:
                    yield f"{what} {sizes} is empty"
                if size > bound:
                    yield f"{what} size {axis} is {size}, the limit is {bound}"
        resources, threads = kernel.resources, prod(block)
        if threads > MAX_THREADS:
            yield f"block of {threads} threads, the limit is {MAX_THREADS}"
        required = kernel.code.reqntid
        if required and _three(required) != block:
            yield f"block {block}, but the kernel requires {_three(required)}"
        if threads > resources.max_threads:
            yield (f"block of {threads} threads, but the kernel's launch bound is "
                   f"{resources.max_threads}")
        if -(-threads // WARP) > _resident_warps(resources):
            yield (f"{threads} threads with {resources.registers} registers each do not fit into "
                   f"{REGISTERS} registers: at most {_resident_warps(resources) * WARP} threads")
        if not runs_on(kernel.target, self.cc):
            yield f"the kernel is compiled for {kernel.target}, the device is sm_{self.cc[0]}" \
                  f"{self.cc[1]}"
        yield from self._shared_refusals(kernel, dynamic_shared)
        if cooperative:
            resident = self.resident_blocks(resources, threads, dynamic_shared) \
                * self.model.multiprocessors
            if prod(grid) > resident:
                yield (f"cooperative grid of {prod(grid)} blocks, at most {resident} are "
                       "resident at the same time")

    def _shared_refusals(self, kernel, dynamic_shared):
        static = kernel.resources.shared_bytes
        total = static + dynamic_shared
        text = f"{total} bytes of shared memory ({static} static, {dynamic_shared} dynamic)"
        if total > self.optin_shared:
            yield f"{text}, the device's limit is {self.optin_shared}"
        opted = kernel.max_dynamic_shared
        if opted is None and total > DEFAULT_SHARED:
            yield (f"{text}, the limit is {DEFAULT_SHARED} unless the kernel's attribute "
                   "MAX_DYNAMIC_SHARED_SIZE_BYTES is raised")
        if opted is not None and dynamic_shared > opted:
            yield f"{text}, but the kernel's MAX_DYNAMIC_SHARED_SIZE_BYTES is {opted}"


def runs_on(target: str, cc: tuple[int, int]) -> bool:
    """Whether a cubin of `target` (such as "sm_90a") runs on a device of `cc`."""
    number = target.removeprefix("sm_")
    specific = not number[-1].isdigit()
    major, minor = divmod(int(number.rstrip("af")), 10)
    return (major, minor) == cc if specific else major == cc[0] and minor <= cc[1]


def _resident_warps(resources: KernelResources) -> int:
    """Warps of a kernel that the registers of one multiprocessor allow."""
    unit = _round_up(max(resources.registers, 1) * WARP, REGISTER_UNIT)
    return REGISTERS // PARTITIONS // unit * PARTITIONS


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _three(sizes) -> tuple[int, int, int]:
    return (*sizes, 1, 1)[:3]
