"""What GPUs can do at most: memory bandwidth and float32 rate as NVIDIA publishes them, and how
many blocks a multiprocessor of each architecture can hold.

The float32 rate counts a fused multiply-add as two operations, outside the tensor cores, at the
boost clock; a GPU at its power limit runs slower. The names are those that the driver reports.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """The published ceilings of one product."""

    name: str  # how the driver's name for it begins, or all of it
    bandwidth: float  # GB/s
    float32: float  # TFLOP/s
    source: str


# The longest name that fits counts: "NVIDIA A100-SXM4-80GB" before "NVIDIA A100".
GPUS = (
    Gpu("NVIDIA A100-SXM4-40GB", 1555, 19.5, "NVIDIA A100 datasheet (2020)"),
    Gpu("NVIDIA A100-PCIE-40GB", 1555, 19.5, "NVIDIA A100 datasheet (2020)"),
    Gpu("NVIDIA A100-SXM4-80GB", 2039, 19.5, "NVIDIA A100 datasheet (2021)"),
    Gpu("NVIDIA A100 80GB PCIe", 1935, 19.5, "NVIDIA A100 datasheet (2021)"),
    Gpu("NVIDIA A10", 600, 31.2, "NVIDIA A10 datasheet"),
    Gpu("NVIDIA A40", 696, 37.4, "NVIDIA A40 datasheet"),
    Gpu("NVIDIA H100 80GB HBM3", 3350, 67, "NVIDIA H100 datasheet, SXM"),
    Gpu("NVIDIA H100 PCIe", 2000, 51, "NVIDIA H100 datasheet, PCIe"),
    Gpu("NVIDIA H100 NVL", 3900, 60, "NVIDIA H100 datasheet, NVL"),
    Gpu("NVIDIA H200", 4800, 67, "NVIDIA H200 datasheet, SXM"),
    Gpu("NVIDIA H200 NVL", 4800, 60, "NVIDIA H200 datasheet, NVL"),
    Gpu("NVIDIA B200", 8000, 75, "NVIDIA HGX platform datasheet, one of 8 GPUs"),
    Gpu("NVIDIA L4", 300, 30.3, "NVIDIA L4 datasheet"),
    Gpu("NVIDIA L40S", 864, 91.6, "NVIDIA L40S datasheet"),
    Gpu("NVIDIA GeForce RTX 3090", 936, 35.6, "NVIDIA Ampere GA102 whitepaper"),
    Gpu("NVIDIA GeForce RTX 4090", 1008, 82.6, "NVIDIA Ada architecture whitepaper"),
    Gpu("NVIDIA GeForce RTX 5090", 1792, 104.8, "NVIDIA RTX Blackwell architecture whitepaper"),
)


def ceilings(name: str) -> Gpu | None:
    """The entry of the GPU that the driver calls `name`, None if it is not in the table."""
    fitting = [gpu for gpu in GPUS if f"{name} ".startswith(f"{gpu.name} ")]
    return max(fitting, key=lambda gpu: len(gpu.name), default=None)


def least_seconds(gpu: Gpu, flops: int, nbytes: int) -> float:
    """The time that no kernel with this arithmetic and memory traffic can beat on this GPU."""
    return max(flops / (1e12 * gpu.float32), nbytes / (1e9 * gpu.bandwidth))


@dataclass(frozen=True)
class Architecture:
    """Limits of a multiprocessor, from "Compute Capabilities" in the CUDA programming guide."""

    warps: int
    blocks: int
    shared: int  # KiB


ARCHITECTURES = {
    (8, 0): Architecture(64, 32, 164),
    (8, 6): Architecture(48, 16, 100),
    (8, 9): Architecture(48, 24, 100),
    (9, 0): Architecture(64, 32, 228),
    (10, 0): Architecture(64, 32, 228),
    (12, 0): Architecture(48, 24, 100),
}
REGISTERS = 65536  # of a multiprocessor, a quarter in each of its partitions
PARTITIONS = 4
REGISTER_UNIT = 256  # in which a warp gets registers
SHARED_UNIT = 128  # in which a block gets shared memory
RESERVED_SHARED = 1024  # bytes that the system takes for itself in each block
MOST_SHARED = 48 << 10  # of a block, unless its launch asks for more


def occupancy(capability: tuple[int, int], threads: int, registers: int, shared: int) -> float:
    """Resident warps as a share of the most: what registers, shared memory and blocks allow."""
    limits = ARCHITECTURES[capability]
    warps = -(-threads // 32)
    registers_of_warp = -(-32 * registers // REGISTER_UNIT) * REGISTER_UNIT
    by_registers = REGISTERS // PARTITIONS // registers_of_warp * PARTITIONS // warps
    shared_of_block = -(-(shared + RESERVED_SHARED) // SHARED_UNIT) * SHARED_UNIT
    by_shared = (limits.shared << 10) // shared_of_block
    blocks = min(limits.blocks, limits.warps // warps, by_registers, by_shared)
    return blocks * warps / limits.warps
