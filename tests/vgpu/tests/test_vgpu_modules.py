"""Linking: the PTX that runs, the cubin, and what the assembler says about it."""

import linecache
import pickle

import numpy as np
import pytest
import vgpu
from numba import cuda
from vgpu import VirtualGPUError, cubin, launch, modules

pytestmark = pytest.mark.skipif(not vgpu.installed(), reason="a real GPU is used")

HEADER = ".version 9.0\n.target TARGET\n.address_size 64\n"
KERNEL = HEADER + """
.extern .func (.param .b32 result) triple(.param .b32 value);
.extern .global .align 4 .u32 bias;
.visible .entry apply(.param .u64 out) .maxntid 64, 2, 1 {
  .shared .align 4 .b8 buffer[100];
  .reg .b32 %r<3>; .reg .b64 %rd<2>;
  ld.param.u64 %rd1, [out];
  mov.u32 %r1, 14;
  { .param .b32 a; .param .b32 b;
    st.param.b32 [a], %r1;
    call.uni (b), triple, (a);
    ld.param.b32 %r2, [b]; }
  ld.global.u32 %r1, [bias];
  add.u32 %r2, %r2, %r1;
  st.shared.u32 [buffer+96], %r2;
  st.global.u32 [%rd1], %r2;
  ret;
}
"""
HELPER = HEADER + """
.visible .global .align 4 .u32 bias = 5;
.visible .func (.param .b32 result) triple(.param .b32 value) {
  .reg .b32 %r<3>;
  ld.param.u32 %r1, [value];
  mul.lo.s32 %r2, %r1, 3;
  st.param.b32 [result], %r2;
  ret;
}
"""


@cuda.jit(device=True)
def helper(x):
    return 2 * x + 1


def run(kernel):
    x = cuda.to_device(np.arange(32, dtype=np.int32))
    kernel[1, 32](x)
    return x.copy_to_host()


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90a", "sm_100", "sm_120a"])
def test_several_ptx_texts_link_into_one(target):
    from cuda.core import ObjectCode

    texts = [text.replace("TARGET", target) for text in (KERNEL, HELPER)]
    code = modules.link([ObjectCode.from_ptx(t.encode(), name="part") for t in texts], target)
    resources = cubin.kernel_resources(code.code, code.log)["apply"]
    assert (resources.shared_bytes, resources.max_threads) == (100, 128)
    assert 0 < resources.registers < 40 and resources.spill_bytes == 0
    if target != "sm_90a":
        return
    kernel = pickle.loads(pickle.dumps(code)).get_kernel("apply")
    out = cuda.to_device(np.zeros(1, np.int32))
    launch.launch(0, launch.LaunchConfig(), kernel, out.device_ctypes_pointer)
    assert out.copy_to_host()[0] == 47


def test_spills_are_read_from_the_log():
    log = ("ptxas info    : Function properties for kernel_a\n"
           "ptxas         .     416 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
           "ptxas info    : Function properties for kernel_b\n"
           "ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n")
    assert cubin._spills(log) == {"kernel_a": 8, "kernel_b": 0}


@pytest.mark.parametrize("lto", [False, True])
@pytest.mark.parametrize("kind", ["ptx", "cu"])
def test_linked_files(tmp_path, lto, kind):
    file = tmp_path / f"triple.{kind}"
    file.write_text(
        'extern "C" __device__ int triple(int *out, int x) { *out = 3 * x; return 0; }'
        if kind == "cu" else HEADER.replace("TARGET", "sm_90") + """
        .visible .func (.param .b32 status) triple(.param .b64 out, .param .b32 x) {
          .reg .b32 %r<3>; .reg .b64 %rd<2>;
          ld.param.u32 %r1, [x]; ld.param.u64 %rd1, [out];
          mul.lo.s32 %r2, %r1, 3; st.u32 [%rd1], %r2;
          mov.u32 %r1, 0; st.param.b32 [status], %r1;
          ret;
        }""")
    triple = cuda.declare_device("triple", "int32(int32)", link=str(file))

    @cuda.jit(lto=lto)
    def kernel(x):
        x[cuda.grid(1)] = helper(triple(x[cuda.grid(1)]))

    np.testing.assert_array_equal(run(kernel), 6 * np.arange(32) + 1)


def test_debug_code_of_several_functions():
    @cuda.jit(device=True, debug=True, opt=False)
    def divide(x):
        return x // 3

    @cuda.jit(debug=True, opt=False)
    def kernel(x):
        x[cuda.grid(1)] = divide(x[cuda.grid(1)])

    np.testing.assert_array_equal(run(kernel), np.arange(32) // 3)


def test_debug_code_of_a_loop():
    """It copies the loop's iterator with its padding, which nothing ever initialises."""
    @cuda.jit(debug=True, opt=False)
    def kernel(x):
        total = 0
        for i in range(x[cuda.grid(1)]):
            total += i
        x[cuda.grid(1)] = total

    np.testing.assert_array_equal(run(kernel), np.cumsum(np.arange(32)) - np.arange(32))


def test_errors_name_the_source_line():
    @cuda.jit(lineinfo=True)
    def kernel(x):
        x[cuda.threadIdx.x + 20] = 3

    with pytest.raises(VirtualGPUError) as caught:
        run(kernel)
    file, line = caught.value.source
    assert file == __file__ and "threadIdx.x + 20" in linecache.getline(file, line)


def test_code_without_ptx_is_refused():
    @cuda.jit
    def kernel(x):
        cuda.cg.this_grid().sync()

    with pytest.raises(VirtualGPUError, match=r"not supported: linked code without .*cudadevrt"):
        run(kernel)


def test_text_that_ptxas_refuses():
    text = ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry f() { fly; ret; }"
    with pytest.raises(VirtualGPUError, match=r"(?s)ptxas refuses the PTX.*line 4.*'fly'"):
        modules.assemble(text)


def test_unloaded_code_can_be_loaded_again():
    code = modules.assemble(HELPER.replace("TARGET", "sm_90")
                            + ".visible .entry nothing() { ret; }")
    cuda.current_context().memory_manager.deallocations.clear()
    before = cuda.current_context().get_memory_info().free
    kernel = code.get_kernel("nothing")
    assert cuda.current_context().get_memory_info().free == before - 4
    code.module.unload()
    assert cuda.current_context().get_memory_info().free == before
    with pytest.raises(VirtualGPUError, match="no kernel is loaded"):
        modules.loaded_kernel(kernel)
    launch.launch(0, launch.LaunchConfig(), code.get_kernel("nothing"))


def test_constants_and_resets():
    table = np.arange(10, dtype=np.int32) * 7

    @cuda.jit
    def kernel(x):
        i = cuda.grid(1)
        x[i] = cuda.const.array_like(table)[i % 10]

    np.testing.assert_array_equal(run(kernel), np.resize(table, 32))
    kept = cuda.to_device(table)
    cuda.close()
    assert not vgpu.leaks()
    assert kept.size == 10
    np.testing.assert_array_equal(run(cuda.jit(kernel.py_func)), np.resize(table, 32))
