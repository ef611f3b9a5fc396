"""Launches, opcodes and driver calls that the virtual GPU refuses, each by its name."""

import ctypes

import numpy as np
import pytest
import vgpu
from cuda.bindings import driver as bindings
from numba import cuda, float32
from numba.cuda.cudadrv.driver import driver
from vgpu.examples.numba_features import allow_dynamic_shared

pytestmark = pytest.mark.skipif(not vgpu.installed(), reason="tests the virtual GPU's own errors")


@cuda.jit
def filled(out):
    tile = cuda.shared.array(0, float32)
    tile[cuda.threadIdx.x] = float32(1)
    out[0] = tile[cuda.threadIdx.x]


@cuda.jit(launch_bounds=64)
def bounded(out):
    out[0] = float32(1)


@cuda.jit(fastmath=True)
def hungry(out):
    """Sixty-odd values that are all alive at the same time."""
    values = cuda.local.array(80, float32)
    for i in range(80):
        values[i] = out[i]
    cuda.syncthreads()
    for i in range(80):
        out[79 - i] = values[i]


def refusal(kernel, grid, block, dynamic_shared=0):
    out = cuda.to_device(np.zeros(80, np.float32))
    with pytest.raises(vgpu.VirtualGPUError) as caught:
        kernel[grid, block, 0, dynamic_shared](out)
    assert caught.value.kind == "bad launch" and caught.value.kernel == kernel.py_func.__name__
    return caught.value.detail


def test_launch_within_all_limits():
    out = cuda.to_device(np.zeros(80, np.float32))
    bounded[(1, 65535), 1](out)
    bounded[1, 64](out)
    filled[1, 1024, 0, 48 << 10](out)


@pytest.mark.parametrize("grid, block, words", [
    ((1, 65536), 32, "grid size y is 65536, the limit is 65535"),
    ((1, 1, 65536), 32, "grid size z is 65536"),
    (1, (1, 1, 65), "block size z is 65"),
    (1, 1025, "1025"),
    (1, (64, 32), "2048"),
])
def test_sizes_beyond_the_limits(grid, block, words):
    assert words in refusal(filled, grid, block, 4096)


def test_block_beyond_the_launch_bounds():
    detail = refusal(bounded, 1, 65)
    assert "65" in detail and "launch bound is 64" in detail


def test_more_registers_than_there_are():
    out = cuda.to_device(np.zeros(80, np.float32))
    hungry[1, 32](out)
    registers = hungry.get_regs_per_thread()
    registers = next(iter(registers.values())) if isinstance(registers, dict) else registers
    assert registers > 64
    assert "registers" in refusal(hungry, 1, 1024)


def test_dynamic_shared_memory_beyond_48_kb_needs_the_attribute():
    nbytes = 50 << 10
    assert str(nbytes) in refusal(filled, 1, 32, nbytes)
    out = cuda.to_device(np.zeros(80, np.float32))
    kernel = filled.specialize(out)
    allow_dynamic_shared(next(iter(kernel.overloads.values())), nbytes)
    kernel[1, 32, 0, nbytes](out)


PTX = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry kernel(.param .u64 out)
{
    .reg .b32 %r<4>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [out];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r1, 5;
    INSTRUCTION
    st.global.u32 [%rd2], %r2;
    ret;
}
"""


def test_unknown_opcode():
    out = np.zeros(1, np.uint32)
    vgpu.run_ptx(PTX.replace("INSTRUCTION", "add.u32 %r2, %r1, %r1;"), "kernel", 1, 1, [out])
    assert out[0] == 10
    with pytest.raises(vgpu.UnknownOpcode, match=r"vabsdiff4\.u32\.u32\.u32\.add") as caught:
        vgpu.run_ptx(
            PTX.replace("INSTRUCTION", "vabsdiff4.u32.u32.u32.add %r2, %r1, %r1, %r1;"),
            "kernel", 1, 1, [out],
        )
    assert caught.value.ptx_line == PTX.splitlines().index("    INSTRUCTION") + 1


def test_ptxas_has_its_say():
    """Text that only the emulator would understand is refused by the real assembler."""
    with pytest.raises(Exception, match=r"(?i)ptx|link"):
        vgpu.run_ptx(PTX.replace("INSTRUCTION", "add.u32 %r2, %r1, %rd1;"), "kernel", 1, 1,
                     [np.zeros(1, np.uint32)])


def test_unknown_driver_call():
    with pytest.raises(vgpu.VirtualGPUError, match="cuTexObjectCreate") as caught:
        driver.cuTexObjectCreate(None, None, None)
    assert caught.value.kind in ("bad driver call", "not supported")


def test_memory_leaks_are_listed():
    before = {allocation.address for allocation in vgpu.leaks()}
    kept = cuda.device_array(1000, np.float32)
    leaked = [a for a in vgpu.leaks() if a.address not in before]
    assert [a.nbytes for a in leaked] == [4000]
    assert __file__ in leaked[0].label
    del kept
    cuda.current_context().memory_manager.deallocations.clear()
    assert {allocation.address for allocation in vgpu.leaks()} <= before


ADDRESS = bindings.CUdeviceptr(1 << 40)


def launch_with_argument(value, kind, size):
    text = (f".version 8.0\n.target sm_90\n.address_size 64\n"
            f".visible .entry kernel(.param .b{8 * size} p) {{ ret; }}")
    module = bindings.cuModuleLoadData(text.encode())[1]
    function = bindings.cuModuleGetFunction(module, b"kernel")[1]
    try:
        return bindings.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, (value, kind), 0)
    finally:
        bindings.cuModuleUnload(module)


@pytest.mark.parametrize("value, kind, size", [
    (ADDRESS, None, 8), (5, ctypes.c_void_p, 8), (ctypes.c_void_p(5), ctypes.c_void_p, 8),
    (np.int32(5), ctypes.c_int, 4), (ctypes.c_float(5), ctypes.c_double, 8),
    (-1, ctypes.c_uint64, 8), (5, ctypes.c_float, 4), (np.uint64(5), ctypes.c_uint64, 8)])
def test_arguments_that_cuda_bindings_takes(value, kind, size):
    code, = launch_with_argument((value,), (kind,), size)
    assert code == bindings.CUresult.CUDA_SUCCESS


@pytest.mark.parametrize("value, kind, size", [
    (5, None, 8), (np.uint64(5), None, 8), (np.uint64(5), ctypes.c_void_p, 8),
    (ADDRESS, ctypes.c_void_p, 8), (ADDRESS, ctypes.c_uint64, 8), (1.5, ctypes.c_int, 4),
    (1 << 40, ctypes.c_int, 4), (ctypes.c_int(5), ctypes.c_uint, 4), (5, np.int32, 4)])
def test_arguments_that_cuda_bindings_refuses(value, kind, size):
    """All are TypeErrors there, but CUdeviceptr as c_void_p: the address of the Python object."""
    with pytest.raises(vgpu.VirtualGPUError, match="argument 0") as caught:
        launch_with_argument((value,), (kind,), size)
    assert caught.value.kind == "bad launch"
    with pytest.raises(vgpu.VirtualGPUError, match="a tuple of values"):
        launch_with_argument([5], [ctypes.c_int], 4)
