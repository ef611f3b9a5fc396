"""Kernels given as the body of their PTX, run on the machine alone: no driver and no ptxas."""

import functools

import numpy as np
import pytest
from vgpu import VirtualGPUError, machine
from vgpu.lower import compile_kernel
from vgpu.memory import Arena
from vgpu.options import Options
from vgpu.ptx import parse

REGISTERS = """
    .reg .pred %p<16>;
    .reg .b16 %rs<16>;
    .reg .b32 %r<64>;
    .reg .b64 %rd<64>;
    .reg .f32 %f<64>;
    .reg .f64 %fd<16>;
"""


@functools.lru_cache
def compiled(body: str, parameters: tuple[str, ...], dynamic: bool):
    declared = ", ".join(f".param .{kind} p{k}" for k, kind in enumerate(parameters))
    shared = ".extern .shared .align 16 .b8 dynamic[];\n" if dynamic else ""
    text = (f".version 8.0\n.target sm_90\n.address_size 64\n{shared}"
            f".visible .entry kernel({declared})\n{{{REGISTERS}{body}}}\n")
    module = parse(text)
    module.addresses = {}
    return compile_kernel(module, "kernel")


class Machine:
    """One kernel with an arena of its own; `options` are those of the virtual GPU.

    The parameters p0, p1, … have the PTX types `parameters`; with `dynamic` the kernel may use the
    dynamic shared memory `dynamic`.
    """

    def __init__(self, body: str, parameters=("u64",), dynamic: bool = False, **options):
        self.kernel = compiled(body, tuple(parameters), dynamic)
        self.parameters = parameters
        self.options = Options(**options)
        self.arena = Arena(1 << 26)

    def array(self, values: np.ndarray) -> int:
        """The address of a copy of an array."""
        address = self.arena.allocate(values.nbytes)
        self.arena.write(address, values)
        return address

    def empty(self, nbytes: int) -> int:
        return self.arena.allocate(nbytes)

    def read(self, address: int, dtype, count: int) -> np.ndarray:
        return self.arena.read(address, np.dtype(dtype).itemsize * count).view(dtype)

    def launch(self, grid, block, *arguments, dynamic_shared: int = 0, cooperative: bool = False):
        grid, block = (((*size, 1, 1)[:3] if isinstance(size, tuple) else (size, 1, 1))
                       for size in (grid, block))
        packed = b"".join(
            np.array(value).astype(f"{kind[0]}{int(kind[1:]) // 8}").tobytes()
            for value, kind in zip(arguments, self.parameters, strict=True))
        return machine.launch(self.kernel, grid, block, packed, dynamic_shared, self.options,
                              self.arena, cooperative)


def failure(kind: str, machine: Machine, *launch, **how) -> VirtualGPUError:
    """The error of that kind that a launch raises."""
    with pytest.raises(VirtualGPUError) as caught:
        machine.launch(*launch, **how)
    assert caught.value.kind == kind, caught.value
    return caught.value
