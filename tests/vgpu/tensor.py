"""Tensor-core instructions: mma, ldmatrix and the cp.async copies that feed them.

Fragments are laid out over the 32 lanes of a warp as the PTX ISA says: with group = lane // 4 and
quad = lane % 4, a register holds the elements of one row (of a and c; column of b) at `group`, and
neighbouring columns that start at `quad` times the elements of a register.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .lanes import Lanes, Value, is_scalar
from .report import VirtualGPUError

TF32 = np.uint32(0xFFFFE000)  # the bits of a float32 that a tf32 operand has
# kind -> (depth k, type of a and b, type of c and d)
KINDS = {
    "m16n8k8.f32.bf16.bf16.f32": (8, "bf16", "f32"),
    "m16n8k16.f32.bf16.bf16.f32": (16, "bf16", "f32"),
    "m16n8k8.f32.f16.f16.f32": (8, "f16", "f32"),
    "m16n8k16.f32.f16.f16.f32": (16, "f16", "f32"),
    "m16n8k8.f16.f16.f16.f16": (8, "f16", "f16"),
    "m16n8k16.f16.f16.f16.f16": (16, "f16", "f16"),
    "m16n8k4.f32.tf32.tf32.f32": (4, "tf32", "f32"),
    "m16n8k8.f32.tf32.tf32.f32": (8, "tf32", "f32"),
}


def _unpacked(register: np.ndarray, kind: str) -> np.ndarray:
    """The elements of registers (…) of a type as float64 (…, elements of a register)."""
    if kind == "bf16":
        halves = np.stack([register << np.uint32(16), register & np.uint32(0xFFFF0000)], axis=-1)
        return halves.view(np.float32).astype(np.float64)
    if kind == "f16":
        return register[..., None].view(np.float16).astype(np.float64)
    bits = register & TF32 if kind == "tf32" else register
    return bits[..., None].view(np.float32).astype(np.float64)


def _fragment(registers: tuple, kind: str, warps: int) -> np.ndarray:
    """float64 (warps, registers, group, quad, element)."""
    stacked = np.stack([np.broadcast_to(register, warps * 32) for register in registers])
    stacked = stacked.reshape(len(registers), warps, 8, 4).swapaxes(0, 1)
    return _unpacked(np.ascontiguousarray(stacked), kind)


def mma(chunk, kind: str, a: tuple, b: tuple, c: tuple, lanes: Lanes, site: int) -> tuple:
    """d = a @ b + c for each warp: a (16, k), b (k, 8), c and d (16, 8).

    Registers are uint32, but c and d are float32 where the accumulator is. The sum is exact to
    float64 and rounded once. Raises "not supported" for an unknown kind.
    """
    if kind not in KINDS:
        raise VirtualGPUError("not supported", f"mma {kind}", kernel=chunk.kernel.title)
    depth, operand, accumulator = KINDS[kind]
    warps = chunk.active_count(lanes) // 32
    across = 4 if operand == "tf32" else 8  # elements that a group of lanes has in one register
    # (warps, block of columns, block of rows, row, column) -> (warps, row, column)
    left = _fragment(a, operand, warps).reshape(warps, -1, 2, 8, across)
    left = left.transpose(0, 2, 3, 1, 4).reshape(warps, 16, depth)
    # (warps, block of rows, column, row) -> (warps, row, column)
    right = _fragment(b, operand, warps).reshape(warps, -1, 8, across)
    right = right.transpose(0, 1, 3, 2).reshape(warps, depth, 8)
    product = (left @ right).reshape(warps, 2, 8, 4, 2)  # block of rows, group, quad, element
    if accumulator == "f16":
        product += _fragment(c, "f16", warps)
        packed = np.ascontiguousarray(product.astype(np.float16)).view(np.uint32)[..., 0]
        return tuple(packed[:, half].reshape(-1) for half in range(2))
    sums = _fragment(c, "f32", warps)[..., 0].reshape(warps, 2, 2, 8, 4)
    product += sums.transpose(0, 1, 3, 4, 2)
    rounded = product.astype(np.float32)
    return tuple(np.ascontiguousarray(rounded[:, half, :, :, column]).reshape(-1)
                 for half in range(2) for column in range(2))


def ldmatrix(chunk, count: int, transposed: bool, address: Value, lanes: Lanes, site: int) -> tuple:
    """`count` matrices; lane i gives the address of row i % 8 of matrix i // 8."""
    shared = chunk.shared
    warps = chunk.active_count(lanes) // 32
    everybody = np.arange(chunk.lane_count) if lanes is None else lanes
    givers = everybody.reshape(warps, 32)[:, :8 * count].reshape(-1)
    address = np.broadcast_to(address, everybody.shape)
    address = np.ascontiguousarray(address.reshape(warps, 32)[:, :8 * count]).reshape(-1)
    offset = shared.matrix_rows(address, givers, site)
    first = offset >> 3
    rows = np.stack([shared.words[8].take(first), shared.words[8].take(first + 1)], axis=-1)
    # (warps, matrix, row, column)
    elements = rows.view(np.uint16).reshape(warps, count, 8, 8)
    if transposed:
        elements = np.ascontiguousarray(elements.swapaxes(2, 3))
    registers = elements.view(np.uint32).reshape(warps, count, 32)
    return tuple(np.ascontiguousarray(registers[:, matrix]).reshape(-1) for matrix in range(count))


@dataclass
class Copy:
    """A cp.async that has not been waited for: of some lanes (None: all)."""

    lanes: np.ndarray | None
    offset: np.ndarray | int  # in the shared memory of the chunk
    source: np.ndarray
    size: int
    source_size: np.ndarray | None
    site: int
    group: np.ndarray | int  # by lane; OPEN before the commit


OPEN = 1 << 60


class AsyncCopies:
    """The cp.async copies of a chunk, done as late as allowed: when their thread waits.

    Groups are numbered for each thread: `committed` is a number, or an array over the lanes when
    the threads differ.
    """

    def __init__(self, chunk):
        self.chunk = chunk
        self.pending: list[Copy] = []
        self.committed: np.ndarray | int = 0

    def issue(self, destination, source, size: int, source_size, lanes: Lanes, site: int) -> None:
        """cp.async: `size` bytes (4, 8, 16), of which `source_size` are read and the rest is 0."""
        chunk = self.chunk
        if size not in (4, 8, 16):
            raise VirtualGPUError("not supported", f"cp.async of {size} bytes")
        if np.bitwise_or.reduce(np.atleast_1d(source)) & np.uint64(size - 1):
            chunk.fail_misaligned(source, size, lanes, site)
        if source_size is not None and (source_size > size).any():
            position = int(np.argmax(np.atleast_1d(source_size > size)))
            chunk.fail("out of bounds", f"reads more than the {size} bytes of the copy", position,
                       lanes, site)
        offset = chunk.shared.start_copy(destination, size, lanes, site)
        shape = chunk.active_count(lanes)
        offset, source = np.broadcast_to(offset, shape), np.broadcast_to(source, shape)
        if source_size is not None:
            source_size = np.broadcast_to(source_size, shape)
        self.pending.append(Copy(lanes, offset, source, size, source_size, site, OPEN))

    def commit(self, lanes: Lanes) -> None:
        """cp.async.commit_group: the threads' open copies become their next group."""
        if self.together(lanes):
            for copy in self.pending:
                if is_scalar(copy.group) and copy.group == OPEN:
                    copy.group = self.committed
            self.committed += 1
            return
        committed = np.broadcast_to(self.committed, self.chunk.lane_count).copy()
        for copy in self.pending:
            own = self.members(copy)
            group = np.broadcast_to(copy.group, own.size)
            closing = self.among(own, lanes) & (group == OPEN)
            copy.group = np.where(closing, committed[own], group)
        committed[self.everybody(lanes)] += 1
        self.committed = committed

    def wait(self, newest: int | None, lanes: Lanes, site: int) -> None:
        """cp.async.wait_group: all but the newest groups arrive; None: every copy does."""
        waiting, self.pending = self.pending, []
        for copy in waiting:
            if is_scalar(copy.group) and self.together(lanes):
                if newest is None or copy.group < self.committed - newest:
                    self.arrive(copy)
                else:
                    self.pending.append(copy)
                continue
            own = self.members(copy)
            due = self.among(own, lanes)
            if newest is not None:
                committed = np.broadcast_to(self.committed, self.chunk.lane_count)[own]
                due &= copy.group < committed - newest
            if due.any():
                self.arrive(self.part(copy, own, due))
            if not due.all():
                self.pending.append(self.part(copy, own, ~due))

    def finish(self) -> None:
        """The threads have exited: nobody sees the pending copies, but they read their source."""
        for copy in self.pending:
            self.read_source(copy, np.uint32, copy.size // 4)
        self.pending.clear()

    def together(self, lanes: Lanes) -> bool:
        """Whether all living threads are here, and have committed the same number of groups."""
        return is_scalar(self.committed) and self.chunk.active_count(lanes) == self.chunk.alive

    def everybody(self, lanes: Lanes) -> np.ndarray:
        return np.arange(self.chunk.lane_count) if lanes is None else lanes

    def members(self, copy: Copy) -> np.ndarray:
        return self.everybody(copy.lanes)

    def among(self, own: np.ndarray, lanes: Lanes) -> np.ndarray:
        here = np.zeros(self.chunk.lane_count, bool)
        here[self.everybody(lanes)] = True
        return here[own]

    def part(self, copy: Copy, own: np.ndarray, chosen: np.ndarray) -> Copy:
        group = np.broadcast_to(copy.group, own.size)[chosen]
        source_size = None if copy.source_size is None else copy.source_size[chosen]
        return Copy(own[chosen], copy.offset[chosen], copy.source[chosen], copy.size, source_size,
                    copy.site, group)

    def arrive(self, copy: Copy) -> None:
        dtype = np.uint32 if copy.size == 4 else np.uint64
        values = self.read_source(copy, dtype, copy.size // np.dtype(dtype).itemsize)
        self.chunk.shared.finish_copy(copy.offset, values, dtype, copy.lanes, copy.site)

    def read_source(self, copy: Copy, dtype, count: int) -> tuple:
        load = self.chunk.load_global
        if copy.source_size is None or (copy.source_size == copy.size).all():
            return load(copy.source, dtype, count, copy.lanes, copy.site)
        own = self.members(copy)
        found = np.zeros((own.size, copy.size), np.uint8)
        for byte in range(int(copy.source_size.max())):
            chosen = np.flatnonzero(copy.source_size > byte)
            address = copy.source[chosen] + np.uint64(byte)
            found[chosen, byte], = load(address, np.uint8, 1, own[chosen], copy.site)
        words = found.view(dtype)
        return tuple(np.ascontiguousarray(words[:, k]) for k in range(count))
