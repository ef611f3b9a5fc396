"""Each mistake of a kernel is reported at its place, and its correct twin is not reported.

A function below makes both kernels from one source: the twin is the kernel with correct=True. The
line at which the mistake must be found ends in `# fault`.
"""

import ctypes
import inspect
import re
from dataclasses import dataclass, field

import numpy as np
import pytest
import vgpu
from llvmlite import ir
from numba import cuda, float32, uint32
from numba.cuda import types
from numba.cuda.cudadrv.devicearray import DeviceNDArray
from numba.cuda.cudadrv.driver import MemoryPointer
from numba.cuda.extending import intrinsic
from vgpu.examples import tensor_core

pytestmark = pytest.mark.skipif(not vgpu.installed(), reason="a real GPU reports no such mistakes")
THREADS = 64
ELEMENTS = 2 * THREADS
CASES = {}


@dataclass(frozen=True)
class Case:
    """What the report of a kernel's mistake must say."""

    make: callable
    kind: str
    opcode: str  # how the reported instruction starts
    block: int  # block index x
    threads: tuple  # thread indices x, one of which must be named
    detail: str  # regular expression
    options: dict = field(default_factory=dict)
    dynamic_shared: int = 0


def case(kind, opcode, block=0, threads=range(THREADS), detail="", **others):
    def register(make):
        CASES[make.__name__] = Case(make, kind, opcode, block, tuple(threads), detail, **others)
        return make
    return register


@intrinsic
def load_read_only(typing_context, address):
    """ld.global.nc, which the hardware may serve from a cache that stores do not update."""
    def generate(context, builder, signature, arguments):
        ptx = "ld.global.nc.f32 $0, [$1];"
        return tensor_core.inline_ptx(builder, ptx, ir.FloatType(), "=f,l,~{memory}", arguments)
    return types.float32(types.uint64), generate


@case("out of bounds", "st.global.f32", block=1, threads=[60],
      detail=r"4 bytes.*\b0 bytes after.*512 bytes")
def out_of_bounds(correct):
    shift = 0 if correct else 4

    @cuda.jit(lineinfo=True)
    def kernel(x, out):
        value = x[cuda.grid(1)]
        out[cuda.grid(1) + shift] = value  # fault
    return kernel


@case("out of bounds", "st.global.f32", threads=[3], detail=r"4 bytes.*\b4 bytes before")
def out_of_bounds_below(correct):
    size = 4 if correct else -4
    first = 0 if correct else -1

    @cuda.jit(lineinfo=True)
    def kernel(x, out):
        value = x[cuda.grid(1)]
        if cuda.grid(1) == 3:
            # Twice the negative index, so that Python's wrap-around does not save it.
            out[first * (out.shape[0] + 1)] = value + float32(size)  # fault
        elif correct:
            out[cuda.grid(1)] = value
    return kernel


@case("uninitialised read", "ld.global", block=1, threads=[32], detail=r"4 bytes")
def uninitialised_global(correct):
    written = 128 if correct else 96

    @cuda.jit(lineinfo=True)
    def kernel(x, out):
        thread = cuda.grid(1)
        if thread < written:
            out[thread] = x[thread]
        cuda.syncthreads()
        out[thread] += float32(1)  # fault
    return kernel


@case("uninitialised read", "ld.shared", threads=[40], detail=r"4 bytes at shared offset")
def uninitialised_shared(correct):
    written = 64 if correct else 40

    @cuda.jit(lineinfo=True)
    def kernel(x, out):
        tile = cuda.shared.array(THREADS, float32)
        thread = cuda.threadIdx.x
        if thread < written:
            tile[thread] = x[cuda.grid(1)]
        cuda.syncthreads()
        out[cuda.grid(1)] = tile[thread]  # fault
    return kernel


@case("shared-memory race", "ld.shared", detail=r"thread .*\(\d+, 0, 0\)")
def race_read_write(correct):
    @cuda.jit(lineinfo=True)
    def kernel(x, out):
        tile = cuda.shared.array(THREADS, float32)
        thread = cuda.threadIdx.x
        tile[thread] = x[cuda.grid(1)]
        if correct:
            cuda.syncthreads()
        out[cuda.grid(1)] = tile[thread ^ 32]  # fault
    return kernel


@case("shared-memory race", "st.shared", detail=r"thread .*\(\d+, 0, 0\)")
def race_write_write(correct):
    mask = 63 if correct else 31

    @cuda.jit(lineinfo=True)
    def kernel(x, out):
        tile = cuda.shared.array(THREADS, float32)
        thread = cuda.threadIdx.x
        tile[thread & mask] = x[cuda.grid(1)]  # fault
        cuda.syncthreads()
        out[cuda.grid(1)] = tile[thread & mask]
    return kernel


@case("shared-memory race", "ld.shared", detail=r"thread .*\(\d+, 0, 0\)")
def race_inside_a_warp(correct):
    @cuda.jit(lineinfo=True)
    def kernel(x, out):
        tile = cuda.shared.array(THREADS, float32)
        thread = cuda.threadIdx.x
        tile[thread] = x[cuda.grid(1)]
        if correct:
            cuda.syncwarp()
        out[cuda.grid(1)] = tile[thread ^ 1]  # fault
    return kernel


@case("global race", "st.global", detail=r"thread .* of block \(1, 0, 0\)",
      options=dict(global_race=True))
def race_between_blocks(correct):
    @cuda.jit(lineinfo=True)
    def kernel(x, out):
        place = cuda.grid(1) if correct else cuda.threadIdx.x
        out[place] = x[cuda.grid(1)]  # fault
    return kernel


@case("barrier divergence", "bar.sync", detail="waits")
def barrier_divergence(correct):
    @cuda.jit(lineinfo=True)
    def kernel(x, out):
        tile = cuda.shared.array(THREADS, float32)
        thread = cuda.threadIdx.x
        tile[thread] = x[cuda.grid(1)]
        if correct or thread < 32:
            cuda.syncthreads()  # fault
            out[cuda.grid(1)] = tile[thread ^ 1]
        cuda.syncthreads()
    return kernel


@case("missing lanes", "shfl.sync", threads=[*range(16), *range(32, 48)], detail="lane")
def shuffle_with_missing_lanes(correct):
    members = 0xFFFF if correct else 0xFFFFFFFF

    @cuda.jit(lineinfo=True)
    def kernel(x, out):
        value = x[cuda.grid(1)]
        if cuda.laneid < 16:
            value += cuda.shfl_xor_sync(members, value, 8)  # fault
        out[cuda.grid(1)] = value
    return kernel


@case("deadlock", "bra", detail="128 threads repeat themselves")
def endless_loop(correct):
    awaited = 0 if correct else 1

    @cuda.jit(lineinfo=True)
    def kernel(x, out):
        while x[0] != awaited:  # fault
            pass
        out[cuda.grid(1)] = x[cuda.grid(1)]
    return kernel


@case("missing cp.async wait", "ld.shared", detail="still being copied")
def missing_copy_wait(correct):
    @cuda.jit(lineinfo=True)
    def kernel(x, out):
        tile = cuda.shared.array(THREADS, float32, alignment=16)
        thread = cuda.threadIdx.x
        if thread < 16:
            target = uint32(tensor_core.shared_address(tile) + 16 * thread)
            source = tensor_core.global_address(x) + 16 * thread
            tensor_core.copy_async(target, source)
            tensor_core.commit_copies()
            tensor_core.commit_copies()
            if correct:
                tensor_core.wait_for_all_but_one_group()
        cuda.syncthreads()
        out[cuda.grid(1)] = tile[thread]  # fault
    return kernel


@case("out of bounds", "cp.async", block=1, threads=range(8), detail="16 bytes|8 bytes|4 bytes")
def copy_out_of_bounds_that_nobody_waits_for(correct):
    ahead = 0 if correct else 256

    @cuda.jit(lineinfo=True)
    def kernel(x, out):
        tile = cuda.shared.array(THREADS, float32, alignment=16)
        thread = cuda.threadIdx.x
        out[cuda.grid(1)] = x[cuda.grid(1)]
        if thread < 16:
            target = uint32(tensor_core.shared_address(tile) + 16 * thread)
            source = tensor_core.global_address(x) + 16 * (thread + 16 * cuda.blockIdx.x)
            tensor_core.copy_async(target, source + ahead)  # fault
            tensor_core.commit_copies()
    return kernel


@case("read-only load of written memory", "ld.global.nc", detail="4 bytes")
def read_only_load_of_stored_bytes(correct):
    @cuda.jit(lineinfo=True)
    def kernel(x, out):
        thread = cuda.grid(1)
        out[thread] = float32(1)
        cuda.syncthreads()
        source = tensor_core.global_address(x if correct else out)
        out[thread] = load_read_only(source + 4 * (thread ^ 1))  # fault
    return kernel


@case("out of bounds", "st.shared", threads=[32], detail="0 bytes after its end",
      dynamic_shared=128)
def too_little_dynamic_shared(correct):
    @cuda.jit(lineinfo=True)
    def kernel(x, out):
        tile = cuda.shared.array(0, float32)
        thread = cuda.threadIdx.x
        if correct and thread >= 32:
            return
        tile[thread] = x[cuda.grid(1)]  # fault
        cuda.syncthreads()
        out[cuda.grid(1)] = tile[thread ^ 1]
    return kernel


def run(case, kernel):
    x = cuda.to_device(np.arange(ELEMENTS, dtype=np.float32))
    out = cuda.device_array(ELEMENTS, np.float32)
    with vgpu.options(**case.options):
        kernel[ELEMENTS // THREADS, THREADS, 0, case.dynamic_shared](x, out)
        cuda.synchronize()


def fault_line(kernel):
    lines, first = inspect.getsourcelines(kernel.py_func)
    return first + next(i for i, line in enumerate(lines) if line.rstrip().endswith("# fault"))


def linked_ptx(kernel):
    """The lines of the PTX that ran."""
    compiled = next(iter(kernel.overloads.values()))
    return compiled._codelibrary.get_cubin().ptx.splitlines()


def assert_place(error, kernel, opcode):
    """The report names the kernel, an instruction of its PTX and the line of its source."""
    assert error.kernel == "kernel"
    assert linked_ptx(kernel)[error.ptx_line - 1] == error.ptx_text
    assert opcode in error.ptx_text
    assert error.source == (__file__, fault_line(kernel))
    text = str(error)
    assert text.startswith(f"{error.kind}: {error.detail}")
    assert f'File "{__file__}", line {error.source[1]}' in text and "# fault" in text


@pytest.mark.parametrize("name", CASES)
def test_mistake_is_reported(name):
    case = CASES[name]
    kernel = case.make(correct=False)
    with pytest.raises(vgpu.VirtualGPUError) as caught:
        run(case, kernel)
    error = caught.value
    assert error.kind == case.kind, error
    assert_place(error, kernel, case.opcode)
    assert error.block == (case.block, 0, 0)
    assert error.thread[0] in case.threads and error.thread[1:] == (0, 0)
    assert re.search(case.detail, error.detail), error.detail


@pytest.mark.parametrize("name", CASES)
def test_correct_twin_is_not_reported(name):
    case = CASES[name]
    run(case, case.make(correct=True))


@cuda.jit(lineinfo=True)
def kernel(x, out):
    value = x[cuda.grid(1)]  # fault
    out[cuda.grid(1)] = value


def array_at(address, length):
    """A float32 device array at an address, which does not keep the memory there alive."""
    pointer = MemoryPointer(cuda.current_context(), ctypes.c_void_p(address), 4 * length)
    return DeviceNDArray((length,), (4,), np.float32, gpu_data=pointer)


def test_use_after_free():
    x = cuda.to_device(np.ones(64, np.float32))
    dangling = array_at(x.device_ctypes_pointer.value, 64)
    out = cuda.device_array(64, np.float32)
    kernel[2, 32](dangling, out)
    del x
    cuda.current_context().memory_manager.deallocations.clear()
    with pytest.raises(vgpu.VirtualGPUError) as caught:
        kernel[2, 32](dangling, out)
    assert caught.value.kind == "use after free"
    assert (caught.value.block, caught.value.thread) == ((0, 0, 0), (0, 0, 0))
    assert_place(caught.value, kernel, "ld.global")


def test_misaligned_address():
    x, out = cuda.to_device(np.ones(65, np.float32)), cuda.device_array(64, np.float32)
    address = x.device_ctypes_pointer.value
    kernel[2, 32](array_at(address + 4, 64), out)
    with pytest.raises(vgpu.VirtualGPUError) as caught:
        kernel[2, 32](array_at(address + 2, 64), out)
    assert caught.value.kind == "misaligned"
    assert caught.value.thread == (0, 0, 0)
    assert_place(caught.value, kernel, "ld.global")


LOCAL_PTX = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry local_kernel(.param .u64 out)
{
    .local .align 4 .b8 scratch[8];
    .reg .b32 %r<4>;
    .reg .b64 %rd<6>;
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd1, %r1, 4;
    mov.u64 %rd2, scratch;
    add.u64 %rd3, %rd2, %rd1;
    st.local.u32 [%rd3], %r1;
    ld.local.u32 %r2, [scratch+OFFSET];
    ld.param.u64 %rd4, [out];
    add.u64 %rd5, %rd4, %rd1;
    st.global.u32 [%rd5], %r2;
    ret;
}
"""


def test_uninitialised_local():
    """Of hand-written PTX: numba fills its local arrays with zeros."""
    out = np.zeros(2, np.uint32)
    vgpu.run_ptx(LOCAL_PTX.replace("OFFSET", "0"), "local_kernel", 1, 1, [out])
    with pytest.raises(vgpu.VirtualGPUError) as caught:
        vgpu.run_ptx(LOCAL_PTX.replace("OFFSET", "4"), "local_kernel", 1, 2, [out])
    error = caught.value
    assert (error.kind, error.kernel, error.thread) == (
        "uninitialised read", "local_kernel", (0, 0, 0))
    assert error.ptx_text.strip() == "ld.local.u32 %r2, [scratch+4];"
    assert error.ptx_text == LOCAL_PTX.replace("OFFSET", "4").splitlines()[error.ptx_line - 1]


def test_device_works_after_a_report():
    """Unlike a real context, which an illegal address destroys."""
    x, out = cuda.to_device(np.ones(64, np.float32)), cuda.device_array(64, np.float32)
    with pytest.raises(vgpu.VirtualGPUError):
        kernel[3, 32](x, out)
    kernel[2, 32](x, out)
    assert (out.copy_to_host() == 1).all()
