"""What GPUs can do at most: memory bandwidth and arithmetic as NVIDIA publishes them, how many
blocks a multiprocessor of each architecture can hold, and what it does in a cycle.

Rates count a fused multiply-add as two operations, at the boost clock; a GPU at its power limit
runs slower. float32 is outside the tensor cores, bfloat16 on them, with float32 sums and without
sparsity. The names are those that the driver reports.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """The published ceilings of one product."""

    name: str  # how the driver's name for it begins, or all of it
    bandwidth: float  # GB/s
    float32: float  # TFLOP/s
    bfloat16: float  # TFLOP/s
    source: str


# The longest name that fits counts: "NVIDIA A100-SXM4-80GB" before "NVIDIA A100".
GPUS = (
    Gpu("NVIDIA A100-SXM4-40GB", 1555, 19.5, 312, "NVIDIA A100 datasheet (2020)"),
    Gpu("NVIDIA A100-PCIE-40GB", 1555, 19.5, 312, "NVIDIA A100 datasheet (2020)"),
    Gpu("NVIDIA A100-SXM4-80GB", 2039, 19.5, 312, "NVIDIA A100 datasheet (2021)"),
    Gpu("NVIDIA A100 80GB PCIe", 1935, 19.5, 312, "NVIDIA A100 datasheet (2021)"),
    Gpu("NVIDIA A10", 600, 31.2, 125, "NVIDIA A10 datasheet"),
    Gpu("NVIDIA A40", 696, 37.4, 149.7, "NVIDIA A40 datasheet"),
    Gpu("NVIDIA H100 80GB HBM3", 3350, 67, 989.4, "NVIDIA H100 datasheet, SXM"),
    Gpu("NVIDIA H100 PCIe", 2000, 51, 756, "NVIDIA H100 datasheet, PCIe"),
    Gpu("NVIDIA H100 NVL", 3900, 60, 835, "NVIDIA H100 datasheet, NVL"),
    Gpu("NVIDIA H200", 4800, 67, 989.4, "NVIDIA H200 datasheet, SXM"),
    Gpu("NVIDIA H200 NVL", 4800, 60, 835, "NVIDIA H200 datasheet, NVL"),
    Gpu("NVIDIA B200", 8000, 75, 2250, "NVIDIA HGX platform datasheet, one of 8 GPUs"),
    Gpu("NVIDIA L4", 300, 30.3, 121, "NVIDIA L4 datasheet"),
    Gpu("NVIDIA L40S", 864, 91.6, 362, "NVIDIA L40S datasheet"),
    Gpu("NVIDIA GeForce RTX 3090", 936, 35.6, 71, "NVIDIA Ampere GA102 whitepaper"),
    Gpu("NVIDIA GeForce RTX 4090", 1008, 82.6, 165.2, "NVIDIA Ada architecture whitepaper"),
    Gpu("NVIDIA GeForce RTX 5090", 1792, 104.8, 209.5, "NVIDIA RTX Blackwell whitepaper"),
)


def ceilings(name: str) -> Gpu | None:
    """The entry of the GPU that the driver calls `name`, None if it is not in the table."""
    fitting = [gpu for gpu in GPUS if f"{name} ".startswith(f"{gpu.name} ")]
    return max(fitting, key=lambda gpu: len(gpu.name), default=None)


def least_seconds(gpu: Gpu, flops: int, nbytes: int, in_bf16: bool = False) -> float:
    """The time that no kernel with this arithmetic and memory traffic can beat on this GPU."""
    rate = gpu.bfloat16 if in_bf16 else gpu.float32
    return max(flops / (1e12 * rate), nbytes / (1e9 * gpu.bandwidth))


@dataclass(frozen=True)
class Architecture:
    """A multiprocessor, from "Compute Capabilities" and "Throughput of Native Arithmetic
    Instructions" in the CUDA programming guide."""

    warps: int
    blocks: int
    shared: int  # KiB
    float32: int  # multiply-adds in a cycle


ARCHITECTURES = {
    (8, 0): Architecture(64, 32, 164, 64),
    (8, 6): Architecture(48, 16, 100, 128),
    (8, 9): Architecture(48, 24, 100, 128),
    (9, 0): Architecture(64, 32, 228, 128),
    (10, 0): Architecture(64, 32, 228, 128),
    (12, 0): Architecture(48, 24, 100, 128),
}
OLDEST = min(ARCHITECTURES)  # bf16 and cp.async begin there
REGISTERS = 65536  # of a multiprocessor, a quarter in each of its partitions
PARTITIONS = 4
REGISTER_UNIT = 256  # in which a warp gets registers
SHARED_UNIT = 128  # in which a block gets shared memory
RESERVED_SHARED = 1024  # bytes that the system takes for itself in each block
MOST_SHARED = 48 << 10  # of a block, unless its launch asks for more


def dotted(version: tuple[int, ...]) -> str:
    """As NVIDIA writes compute capabilities, and versions of CUDA."""
    return ".".join(map(str, version))


def resident_blocks(capability: tuple[int, int], threads: int, registers: int,
                    shared: int) -> int:
    """Blocks on a multiprocessor together: what registers, shared memory and blocks allow."""
    limits = ARCHITECTURES[capability]
    warps = -(-threads // 32)
    registers_of_warp = -(-32 * registers // REGISTER_UNIT) * REGISTER_UNIT
    by_registers = REGISTERS // PARTITIONS // registers_of_warp * PARTITIONS // warps
    shared_of_block = -(-(shared + RESERVED_SHARED) // SHARED_UNIT) * SHARED_UNIT
    by_shared = (limits.shared << 10) // shared_of_block
    return min(limits.blocks, limits.warps // warps, by_registers, by_shared)


def occupancy(capability: tuple[int, int], threads: int, registers: int, shared: int) -> float:
    """Resident warps as a share of the most."""
    blocks = resident_blocks(capability, threads, registers, shared)
    return blocks * -(-threads // 32) / ARCHITECTURES[capability].warps


@dataclass(frozen=True)
class Chip:
    """What a product's time model knows beside its ceilings; see `CHIPS` for the sources."""

    capability: tuple[int, int]
    multiprocessors: int
    clock: float  # GHz
    hmma: float  # cycles that a product of 16 x 8 x 16 keeps a partition's tensor core busy
    l2: int  # bytes that the L2 cache gives in a cycle
    latency: int  # cycles until a word from memory arrives


# multiprocessors, clock: the architecture's whitepaper (GA100, AD102, GH100); H200 as H100. The
#     clock of H100 is the one that its published tensor rate implies.
# hmma: 4 partitions x 2 x 2048 operations x multiprocessors x clock / the published bfloat16 rate.
#     Hopper's would be 4, but not through mma.sync: Luo et al., "Benchmarking and dissecting the
#     NVIDIA Hopper GPU architecture" (arXiv 2402.13499), saw about 62 % of the peak.
# l2: A100 whitepaper. Not published for the others: H100 taken as A100, AD102 as 2 KB.
# latency: as in arXiv 2402.13499, from its pointer chase.
# The last two, and Hopper's 62 %, are quoted from memory, and none was measured here.
CHIPS = {
    "NVIDIA A100-SXM4-80GB": Chip((8, 0), 108, 1.41, 8, 5120, 470),
    "NVIDIA GeForce RTX 4090": Chip((8, 9), 128, 2.52, 32, 2048, 540),
    "NVIDIA H100 80GB HBM3": Chip((9, 0), 132, 1.83, 6.5, 5120, 480),
    "NVIDIA H200": Chip((9, 0), 132, 1.83, 6.5, 5120, 480),
}
SPECIAL = 16  # exp2, 1/x and the like in a cycle of a multiprocessor: the programming guide
WAVEFRONT = 128  # bytes of shared memory in a cycle: the programming guide, 32 banks of 4 bytes
PORT = 64  # bytes between a multiprocessor and L2 in a cycle, each way: unpublished, from memory
GRAPH_GAP = 1e-6  # seconds between kernels of a CUDA graph that wait for each other: from memory
LAUNCH = 6e-6  # seconds of the host for a launch: 3 of Python, as cuda.py says, and the driver's
