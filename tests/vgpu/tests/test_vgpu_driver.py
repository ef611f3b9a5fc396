"""The driver calls and the launch limits of the virtual GPU, through cuda.bindings and numba."""

import ctypes
import threading

import numpy as np
import pytest
import vgpu
from cuda.bindings import driver
from numba import cuda
from numba.cuda.cudadrv.driver import CudaAPIError
from vgpu import VirtualGPUError, launch, modules

pytestmark = pytest.mark.skipif(not vgpu.installed(), reason="a real GPU is used")

RESULT = driver.CUresult
KERNELS = """
.version 8.0
.target sm_90
.address_size 64
.global .align 4 .u32 counter = 7;
.visible .entry scale(.param .u64 data, .param .f32 factor, .param .u32 count) {
  .reg .pred %p; .reg .f32 %f<3>; .reg .b32 %r<5>; .reg .b64 %rd<4>;
  mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x;
  mad.lo.s32 %r1, %r1, %r2, %r3;
  ld.param.u32 %r4, [count];
  setp.ge.s32 %p, %r1, %r4;
  @%p ret;
  ld.param.u64 %rd1, [data]; ld.param.f32 %f1, [factor];
  mul.wide.s32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2;
  ld.global.f32 %f2, [%rd3]; mul.f32 %f2, %f2, %f1; st.global.f32 [%rd3], %f2;
  ret;
}
.visible .entry bounded() .maxntid 128, 1, 1 { ret; }
.visible .entry required() .reqntid 64, 2, 1 { ret; }
.visible .entry shared_memory(.param .u64 out) {
  .shared .align 4 .b8 buffer[40000];
  .reg .b32 %r<2>; .reg .b64 %rd<2>;
  mov.u32 %r1, 5; st.shared.u32 [buffer+400], %r1; ld.shared.u32 %r1, [buffer+400];
  ld.param.u64 %rd1, [out]; st.global.u32 [%rd1], %r1;
  ret;
}
.visible .entry heavy(.param .u64 data) {
  .reg .b32 %r<101>; .reg .b64 %rd<2>;
  ld.param.u64 %rd1, [data];
LOADS
STORES
  ret;
}
""".replace("LOADS", "\n".join(f"ld.volatile.global.u32 %r{i}, [%rd1+{4 * i}];"
                               for i in range(100))).replace(
    "STORES", "\n".join(f"st.volatile.global.u32 [%rd1+{396 - 4 * i}], %r{i};"
                        for i in range(100)))


def ok(result):
    """The values of a driver call that has to succeed."""
    code, *values = result
    assert code == RESULT.CUDA_SUCCESS, (code, vgpu.refusals()[-1:])
    return values[0] if len(values) == 1 else values


@pytest.fixture(scope="module")
def library():
    loaded = ok(driver.cuLibraryLoadData(KERNELS.encode(), [], [], 0, [], [], 0))
    yield loaded
    ok(driver.cuLibraryUnload(loaded))


@pytest.fixture
def kernel(library):
    return lambda name: ok(driver.cuLibraryGetKernel(library, name.encode()))


def start(handle, grid=(1, 1, 1), block=(32, 1, 1), shared=0, arguments=None):
    return ok(driver.cuLaunchKernel(handle, *grid, *block, shared, 0, arguments, 0))


@cuda.jit(cache=True)
def add(out, x, y):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = x[i] + y[i]


@cuda.jit(cache=True)
def transpose(out, x):
    i, j = cuda.grid(2)
    if i < x.shape[0] and j < x.shape[1]:
        out[j, i] = x[i, j]


def test_device_and_context():
    device = cuda.get_current_device()
    assert device.compute_capability == (9, 0) and device.MULTIPROCESSOR_COUNT == 132
    assert device.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN == 227 << 10
    assert device.MAX_SHARED_MEMORY_PER_BLOCK == 48 << 10  # it has two names, as has the next
    assert device.MAX_REGISTERS_PER_BLOCK == 65536
    assert cuda.is_available() and len(cuda.gpus) == 1
    assert ok(driver.cuCtxGetCurrent()) is cuda.current_context().handle
    cuda.select_device(0)
    with pytest.raises(VirtualGPUError, match="MAXIMUM_TEXTURE1D_WIDTH"):
        driver.cuDeviceGetAttribute(
            driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_WIDTH, 0)


def test_a_forked_process_may_not_use_the_device(monkeypatch):
    cuda.synchronize()
    monkeypatch.setattr(vgpu.device.device, "_process", 1)  # this process is another one now
    assert driver.cuCtxSynchronize() == (RESULT.CUDA_ERROR_NOT_INITIALIZED,)
    assert "forked" in vgpu.refusals()[-1]


def test_unimplemented_calls_name_themselves():
    with pytest.raises(VirtualGPUError, match="bad driver call: cuTexObjectCreate"):
        driver.cuTexObjectCreate()


def test_memory_round_trips():
    cuda.current_context().memory_manager.deallocations.clear()
    free = cuda.current_context().get_memory_info().free
    host = np.arange(60, dtype=np.float32).reshape(5, 12)
    array = cuda.to_device(host)
    assert cuda.current_context().get_memory_info().free == free - host.nbytes
    np.testing.assert_array_equal(array.copy_to_host(), host)
    np.testing.assert_array_equal(array[1:4].copy_to_host(), host[1:4])
    row = array[2]
    row.copy_to_device(np.ones(12, np.float32))
    host[2] = 1
    np.testing.assert_array_equal(array.copy_to_host(), host)
    fortran = np.asfortranarray(host)
    np.testing.assert_array_equal(cuda.to_device(fortran).copy_to_host(), host)
    copy = cuda.device_array_like(array)
    copy.copy_to_device(array)
    np.testing.assert_array_equal(copy.copy_to_host(), host)
    with cuda.defer_cleanup():
        del array, row, copy
    cuda.current_context().memory_manager.deallocations.clear()
    assert cuda.current_context().get_memory_info().free == free


def test_pinned_memory():
    host = cuda.pinned_array(100, np.int32)
    host[:] = np.arange(100)
    pageable = np.zeros(100, np.int32)
    stream = cuda.stream()
    with cuda.pinned(pageable):
        array = cuda.to_device(host, stream=stream)
        array.copy_to_host(pageable, stream=stream)
        stream.synchronize()
        code, = driver.cuMemHostRegister(pageable.ctypes.data, 4, 0)
        assert code == RESULT.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
    np.testing.assert_array_equal(pageable, host)
    with pytest.raises(VirtualGPUError, match="mapped"):
        cuda.mapped_array(4)


def test_fills_copies_and_pointer_attributes():
    pointer = ok(driver.cuMemAlloc(64))
    ok(driver.cuMemsetD32(pointer, 0x01020304, 16))
    ok(driver.cuMemsetD8(int(pointer) + 4, 0xFF, 4))
    ok(driver.cuMemsetD16(int(pointer) + 8, 0xABCD, 1))
    ok(driver.cuMemcpyDtoD(int(pointer) + 12, int(pointer) + 8, 2))
    host = np.zeros(16, np.uint32)
    ok(driver.cuMemcpy(host.ctypes.data, pointer, 64))
    assert [hex(word) for word in host[:5]] == [
        "0x1020304", "0xffffffff", "0x102abcd", "0x102abcd", "0x1020304"]
    base, size = ok(driver.cuMemGetAddressRange(int(pointer) + 30))
    assert (int(base), size) == (int(pointer), 64)
    kind = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    assert ok(driver.cuPointerGetAttribute(kind, pointer)) \
        == driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    assert driver.cuPointerGetAttribute(kind, host.ctypes.data)[0] \
        == RESULT.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(VirtualGPUError, match="out of bounds: host copy from 64 bytes"):
        driver.cuMemcpyDtoH(host.ctypes.data, int(pointer) + 4, 64)
    assert driver.cuMemsetD16(int(pointer) + 1, 0, 1) == (RESULT.CUDA_ERROR_INVALID_VALUE,)
    ok(driver.cuMemFree(pointer))
    with pytest.raises(VirtualGPUError, match="use after free"):
        driver.cuMemcpyDtoH(host.ctypes.data, pointer, 4)
    with pytest.raises(VirtualGPUError, match="bad driver call: free"):
        driver.cuMemFree(pointer)


def test_out_of_memory_is_a_code():
    code, pointer = driver.cuMemAlloc(1 << 40)
    assert code == RESULT.CUDA_ERROR_OUT_OF_MEMORY and pointer is None
    assert "1099511627776 bytes asked for" in vgpu.refusals()[-1]
    with pytest.raises(CudaAPIError, match="OUT_OF_MEMORY") as caught:
        cuda.device_array(1 << 40, np.uint8)
    assert "1099511627776 bytes asked for" in caught.value.__notes__[0]


def test_allocations_tell_where_they_were_made():
    array = cuda.device_array(10)
    assert any("test_vgpu_driver.py" in a.label and a.nbytes == 80 for a in vgpu.leaks())
    assert array.size == 10


def test_arguments_of_all_kinds():
    x, y, out = (np.arange(100, dtype=np.float32), np.ones(100, np.float32),
                 np.zeros(100, np.float32))
    add[4, 32](out, x, y)
    np.testing.assert_array_equal(out, x + y)

    class Foreign:
        array = cuda.to_device(x)
        __cuda_array_interface__ = array.__cuda_array_interface__

    device_out = cuda.device_array(100, np.float32)
    add[4, 32](device_out, Foreign(), cuda.to_device(y))
    np.testing.assert_array_equal(device_out.copy_to_host(), x + y)
    add[2, 32](device_out[::2], Foreign.array[1::2], Foreign.array[:50])
    np.testing.assert_array_equal(device_out.copy_to_host()[::2], x[1::2] + x[:50])
    matrix = np.arange(15.0).reshape(3, 5)
    result = cuda.device_array((5, 3))
    transpose[(1, 1), (8, 8)](result, cuda.to_device(matrix))
    np.testing.assert_array_equal(result.copy_to_host(), matrix.T)


def test_threads_share_the_device():
    x = np.arange(64, dtype=np.float32)
    results = {}

    def work(number):
        array = cuda.to_device(x + number)
        out = cuda.device_array_like(array)
        add[2, 32](out, array, array)
        results[number] = out.copy_to_host()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, result in results.items():
        np.testing.assert_array_equal(result, 2 * (x + number))


def test_exceptions_of_debug_kernels():
    @cuda.jit(debug=True, opt=False)
    def divide(out, divisor):
        out[0] = 10 // divisor

    out = cuda.device_array(1, np.int32)
    divide[1, 1](out, 5)
    assert out.copy_to_host()[0] == 2
    with pytest.raises(ZeroDivisionError, match="tid=\\[0, 0, 0\\]"):
        divide[1, 1](out, 0)


def test_kernel_attributes(kernel):
    @cuda.jit("void(float32[::1])", launch_bounds=96)
    def small(x):
        x[cuda.threadIdx.x] += 1

    overload = next(iter(small.overloads.values()))
    assert 4 < overload.regs_per_thread < 32 and overload.max_threads_per_block == 96
    assert overload.local_mem_per_thread == 0
    kinds = driver.CUfunction_attribute
    function = ok(driver.cuKernelGetFunction(kernel("shared_memory")))
    assert ok(driver.cuFuncGetAttribute(kinds.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)) \
        == 40000
    assert ok(driver.cuKernelGetAttribute(
        kinds.CU_FUNC_ATTRIBUTE_NUM_REGS, kernel("heavy"), 0)) > 100
    assert ok(driver.cuKernelGetParamInfo(kernel("scale"), 2)) == [12, 4]


def test_launch_forms_of_the_driver(library, kernel):
    host = np.arange(50, dtype=np.float32)
    pointer = ok(driver.cuMemAlloc(host.nbytes))
    values = [np.array(int(pointer), np.uint64), np.array(2, np.float32),
              np.array(50, np.uint32)]
    addresses = np.array([value.ctypes.data for value in values], np.uint64)
    structure = (ctypes.c_void_p * 3)(*addresses.tolist())
    typed = ((pointer, 2.0, 50), (None, ctypes.c_float, ctypes.c_uint))
    for arguments in (addresses, addresses.ctypes.data, structure, typed):
        ok(driver.cuMemcpyHtoD(pointer, host.ctypes.data, host.nbytes))
        start(kernel("scale"), (2, 1, 1), arguments=arguments)
        result = np.empty_like(host)
        ok(driver.cuMemcpyDtoH(result.ctypes.data, pointer, host.nbytes))
        np.testing.assert_array_equal(result, 2 * host)
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = 2, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 32, 1, 1
    ok(driver.cuLaunchKernelEx(config, kernel("scale"), typed, 0))
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    config.attrs, config.numAttrs = [attribute], 1
    with pytest.raises(VirtualGPUError, match="CLUSTER_DIMENSION"):
        driver.cuLaunchKernelEx(config, kernel("scale"), typed, 0)
    variable, size = ok(driver.cuLibraryGetGlobal(library, b"counter"))
    word = np.zeros(1, np.uint32)
    ok(driver.cuMemcpyDtoH(word.ctypes.data, variable, size))
    assert word[0] == 7
    with pytest.raises(VirtualGPUError, match=r"free of .*variable counter"):
        driver.cuMemFree(variable)
    assert driver.cuLibraryGetGlobal(library, b"absent")[0] == RESULT.CUDA_ERROR_NOT_FOUND
    ok(driver.cuMemFree(pointer))


@pytest.mark.parametrize(("name", "grid", "block", "shared", "refusal"), [
    ("bounded", (0, 1, 1), (32, 1, 1), 0, "is empty"),
    ("bounded", (1, 65536, 1), (32, 1, 1), 0, "grid size y is 65536, the limit is 65535"),
    ("bounded", (1, 1, 1), (1, 1, 65), 0, "block size z is 65, the limit is 64"),
    ("bounded", (1, 1, 1), (129, 1, 1), 0, "129 threads, but the kernel's launch bound is 128"),
    ("scale", (1, 1, 1), (64, 32, 1), 0, "2048 threads, the limit is 1024"),
    ("required", (1, 1, 1), (128, 1, 1), 0, r"the kernel requires \(64, 2, 1\)"),
    ("heavy", (1, 1, 1), (1024, 1, 1), 0, "do not fit into 65536 registers"),
    ("shared_memory", (1, 1, 1), (32, 1, 1), 9153, "the limit is 49152 unless"),
    ("shared_memory", (1, 1, 1), (32, 1, 1), 200000, "the device's limit is 232448"),
])
def test_launch_limits(kernel, name, grid, block, shared, refusal):
    arguments = {"scale": ((0, 1.0, 0), (ctypes.c_void_p, ctypes.c_float, ctypes.c_int)),
                 "heavy": ((0,), (ctypes.c_void_p,)),
                 "shared_memory": ((0,), (ctypes.c_void_p,))}.get(name)
    with pytest.raises(VirtualGPUError, match=f"bad launch.*{refusal}") as caught:
        start(kernel(name), grid, block, shared, arguments)
    assert caught.value.kind == "bad launch" and caught.value.kernel == name


def test_opting_in_to_more_shared_memory(kernel):
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    handle = kernel("shared_memory")
    code, = driver.cuKernelSetAttribute(attribute, 200000, handle, 0)
    assert code == RESULT.CUDA_ERROR_INVALID_VALUE
    ok(driver.cuKernelSetAttribute(attribute, 60000, handle, 0))
    pointer = ok(driver.cuMemAlloc(4))
    arguments = ((pointer,), (None,))
    start(handle, block=(1, 1, 1), shared=60000, arguments=arguments)
    with pytest.raises(VirtualGPUError, match="MAX_DYNAMIC_SHARED_SIZE_BYTES is 60000"):
        start(handle, block=(1, 1, 1), shared=60001, arguments=arguments)
    ok(driver.cuKernelSetAttribute(attribute, 1000, handle, 0))
    with pytest.raises(VirtualGPUError, match="MAX_DYNAMIC_SHARED_SIZE_BYTES is 1000"):
        start(handle, block=(1, 1, 1), shared=1001, arguments=arguments)
    ok(driver.cuMemFree(pointer))


def test_python_integers_fit_every_width(kernel):
    scale = modules.loaded_kernel(kernel("scale"))
    packed = launch.pack(scale, [2**64 - 1, np.float32(1), -2])
    assert packed == b"\xff" * 8 + np.float32(1).tobytes() + b"\xfe\xff\xff\xff"
    assert launch.pack(scale, [0, np.float32(1), 2**32 - 1])[12:] == b"\xff" * 4
    with pytest.raises(VirtualGPUError, match="argument 2"):
        launch.pack(scale, [0, np.float32(1), 2**32])


def test_arguments_that_do_not_fit(kernel):
    with pytest.raises(VirtualGPUError, match="2 arguments for 3 parameters"):
        start(kernel("scale"), arguments=((1, 2), (ctypes.c_void_p, ctypes.c_int)))
    with pytest.raises(VirtualGPUError, match=r"argument 1 .* has 8 bytes, the parameter has 4"):
        start(kernel("scale"), arguments=((1, 2.0, 3), (ctypes.c_void_p, ctypes.c_double,
                                                        ctypes.c_int)))


def test_cooperative_grids_have_to_be_resident(kernel):
    arguments = ((0, 1.0, 0), (ctypes.c_void_p, ctypes.c_float, ctypes.c_int))
    ok(driver.cuLaunchCooperativeKernel(
        kernel("scale"), 132, 1, 1, 32, 1, 1, 0, 0, arguments))
    with pytest.raises(VirtualGPUError, match="at most 4224 are resident"):
        driver.cuLaunchCooperativeKernel(kernel("scale"), 4225, 1, 1, 32, 1, 1, 0, 0, arguments)


def test_occupancy(kernel):
    blocks = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
    assert ok(blocks(kernel("scale"), 256, 0)) == 8
    assert ok(blocks(kernel("shared_memory"), 32, 0)) == 5
    assert ok(blocks(kernel("heavy"), 256, 0)) == 2
    assert ok(blocks(kernel("heavy"), 1024, 0)) == 0
    grid, block = ok(driver.cuOccupancyMaxPotentialBlockSize(kernel("scale"), 0, 0, 0))
    assert (grid, block) == (264, 1024)


def test_code_of_another_architecture():
    text = KERNELS.replace("sm_90", "sm_80").partition(".visible .entry shared")[0]
    module = ok(driver.cuModuleLoadData(text.encode()))
    function = ok(driver.cuModuleGetFunction(module, b"bounded"))
    with pytest.raises(VirtualGPUError, match="compiled for sm_80, the device is sm_90"):
        start(function)
    ok(driver.cuModuleUnload(module))
    with pytest.raises(VirtualGPUError, match="no kernel is loaded"):
        start(function)


def test_ptx_that_ptxas_rejects():
    with pytest.raises(Exception, match=r"(?i)ptx"):
        driver.cuModuleLoadData(KERNELS.replace("mul.f32", "mul.u64").encode())


def test_runs_of_ptx_text():
    data = np.arange(6, dtype=np.float32)
    statistics = vgpu.run_ptx(KERNELS, "scale", 1, 32, [data, np.float32(3), np.uint32(6)])
    np.testing.assert_array_equal(data, 3 * np.arange(6))
    assert statistics.instructions > 100
