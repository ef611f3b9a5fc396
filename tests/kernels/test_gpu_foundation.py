"""The layer below the CUDA kernels: launches, streams, scratch, 128-bit accesses, reductions."""

import gc
import subprocess
import sys

import numpy as np
import pytest
import vgpu

pytest.importorskip("numba_cuda")

from kernels.common import cuda as layer
from kernels.common.cuda import Floats, all_kernels, cuda, float32, int32, kernel
from kernels.common.launch import aligned, ceil_div, current_stream, scratch, using_stream
from kernels.common.ptx import exp2, load4, load4_shared, store4, store4_shared
from kernels.common.reduce import block_max, block_sum

THREADS = 128
WARPS = 4
virtual = pytest.mark.skipif(not vgpu.installed(), reason="breaks the context of a real GPU")


@kernel(threads=THREADS)
def scale(out: Floats, x: Floats, n: int32, factor: float32):
    i = cuda.grid(1)
    if i < n:
        out[i] = x[i] * factor


@kernel(threads=32, min_blocks=2)
def reverse_fours(out: Floats, x: Floats, n: int32):
    """out[4i : 4i + 4] is x[4i : 4i + 4] backwards, by way of shared memory."""
    rows = cuda.shared.array((32, 4), float32, alignment=16)
    i = 4 * cuda.grid(1)
    lane = 4 * cuda.threadIdx.x
    if i < n:
        a, b, c, d = load4(x, i)
        store4_shared(rows, lane, d, c, b, a)
        a, b, c, d = load4_shared(rows, lane)
        store4(out, i, a, b, c, d)


@kernel(threads=THREADS)
def sums_and_maxima(out: Floats, x: Floats):
    partials = cuda.shared.array(WARPS, float32)
    i = cuda.grid(1)
    total = block_sum(x[i], partials)
    largest = block_max(x[i], partials)
    out[2 * i] = total
    out[2 * i + 1] = largest


@kernel(threads=32)
def powers(out: Floats, x: Floats):
    i = cuda.grid(1)
    out[i] = exp2(x[i])


@kernel(threads=32)
def last_of_dynamic(out: Floats, n: int32):
    memory = cuda.shared.array(0, float32, alignment=16)
    memory[n - 32 + cuda.threadIdx.x] = float32(cuda.threadIdx.x)
    out[cuda.threadIdx.x] = memory[n - 32 + cuda.threadIdx.x]


def numbers(n):
    return np.random.default_rng(n).standard_normal(n).astype(np.float32)


@pytest.mark.parametrize("n", [1, 127, 128, 129, 1000])
def test_launch(n):
    x, out = cuda.to_device(numbers(n)), cuda.device_array(n, np.float32)
    scale.launch(ceil_div(n, THREADS), out, x, n, 0.5)
    assert (out.copy_to_host() == numbers(n) * np.float32(0.5)).all()


def test_reverse_fours():
    x, out = cuda.to_device(numbers(200)), cuda.device_array(200, np.float32)
    reverse_fours.launch(2, out, x, 200)
    assert (out.copy_to_host().reshape(-1, 4) == numbers(200).reshape(-1, 4)[:, ::-1]).all()


def test_reductions_give_every_thread_the_same_bits():
    x, out = cuda.to_device(numbers(3 * THREADS)), cuda.device_array(6 * THREADS, np.float32)
    sums_and_maxima.launch(3, out, x)
    got = out.copy_to_host().reshape(3, THREADS, 2)
    rows = numbers(3 * THREADS).reshape(3, THREADS)
    assert (got == got[:, :1]).all()
    assert np.allclose(got[:, 0, 0], rows.sum(axis=1, dtype=np.float64), rtol=1e-5, atol=1e-5)
    assert (got[:, 0, 1] == rows.max(axis=1)).all()


def test_exp2():
    x, out = cuda.to_device(numbers(32)), cuda.device_array(32, np.float32)
    powers.launch(1, out, x)
    assert np.allclose(out.copy_to_host(), np.exp2(numbers(32)), rtol=1e-6)


def test_dynamic_shared_memory_beyond_48_kilobytes():
    out = cuda.device_array(32, np.float32)
    for kilobytes in (16, 64, 80, 64):
        last_of_dynamic.launch(1, out, 256 * kilobytes, shared=kilobytes << 10)
        assert (out.copy_to_host() == np.arange(32)).all()


def test_wrong_arguments_are_refused_in_one_line():
    x = cuda.to_device(numbers(4))
    with pytest.raises(TypeError, match=r"foundation.scale: x: ndarray is no device array; copy"):
        scale.launch(1, x, numbers(4), 4, 1.0)
    with pytest.raises(TypeError, match="got 3 arguments, expected 4: out, x, n, factor"):
        scale.launch(1, x, x, 4)
    with pytest.raises(OverflowError, match=r"scale: n: "):
        scale.launch(1, x, x, 2**31, 1.0)
    with pytest.raises(TypeError, match="annotated"):
        kernel(threads=32)(lambda x: None)
    with pytest.raises(ValueError, match="two kernels are named"):
        kernel(threads=32, name="scale")(scale.function)


@virtual
def test_a_launch_that_waits_names_the_kernel_that_fails(monkeypatch):
    """Otherwise the error is that of a later call, here of the synchronisation."""
    x, out, stream = cuda.to_device(numbers(4)), cuda.to_device(numbers(4)), cuda.stream()
    expected = (r"^kernel \S*foundation\.scale failed on grid \(2,\) of 128 threads: "
                r"out of bounds: [^\n]*$")
    with vgpu.options(lazy_streams=True), using_stream(stream):
        scale.launch(2, out, x, 200, 0.5)
        with pytest.raises(vgpu.VirtualGPUError, match="out of bounds"):
            stream.synchronize()
        monkeypatch.setattr(layer, "BLOCKING", True)
        with pytest.raises(RuntimeError, match=expected):
            scale.launch(2, out, x, 200, 0.5)
        scale.launch(1, out, x, 4, 0.5)
    assert (out.copy_to_host() == numbers(4) * np.float32(0.5)).all()


def test_a_launch_that_is_captured_does_not_wait(monkeypatch):
    monkeypatch.setattr(layer, "BLOCKING", True)
    x, out, stream = cuda.to_device(numbers(4)), cuda.to_device(numbers(4)), cuda.stream()
    scale.launch(1, out, x, 4, 0.5)
    handle, driver = int(stream.handle), layer.driver
    gc.disable()  # memory of earlier tests must not be freed inside the capture
    try:
        driver.cuStreamBeginCapture(handle, layer.binding.CUstreamCaptureMode(0))
        with using_stream(stream):
            scale.launch(1, out, x, 4, 3.0)
        graph = driver.cuStreamEndCapture(handle)
    finally:
        gc.enable()
    assert (out.copy_to_host() == numbers(4) * np.float32(0.5)).all()
    executable = driver.cuGraphInstantiate(graph, 0)
    driver.cuGraphLaunch(executable, handle)
    stream.synchronize()
    assert (out.copy_to_host() == numbers(4) * np.float32(3)).all()


@pytest.mark.parametrize(("setting", "expected"), [("1", True), ("0", False), (None, False)])
def test_launches_wait_if_the_environment_says_so(monkeypatch, setting, expected):
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    if setting:
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", setting)
    program = f"from kernels.common.cuda import BLOCKING; assert BLOCKING is {expected}"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_registry():
    assert all_kernels()[scale.name] is scale and scale.name.endswith("test_gpu_foundation.scale")


def test_streams():
    stream = cuda.stream()
    default = current_stream()
    with using_stream(stream):
        assert int(current_stream().handle) == int(stream.handle)
        with using_stream(None):
            assert int(current_stream().handle) == int(stream.handle)
    assert current_stream() is default
    with pytest.raises(TypeError, match="expected a CUDA stream"), using_stream("0"):
        pass


def test_scratch_is_one_buffer_per_stream():
    buffer = scratch(1000)
    assert scratch(1000) is scratch(10) is buffer
    with using_stream(cuda.stream()):
        assert scratch(10) is not buffer
    assert scratch(buffer.size + 1).size > buffer.size


def test_alignment():
    x = cuda.device_array(8, np.float32)
    assert aligned(x, None)
    assert not aligned(x, x[1:])
