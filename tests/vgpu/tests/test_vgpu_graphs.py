"""CUDA graphs made by stream capture, and what a capture forbids."""

import gc
import threading

import numpy as np
import pytest
import vgpu
from cuda.bindings import driver
from numba import cuda
from vgpu import VirtualGPUError

pytestmark = pytest.mark.skipif(not vgpu.installed(), reason="a real GPU is used")

RESULT = driver.CUresult
GLOBAL, LOCAL, RELAXED = (getattr(driver.CUstreamCaptureMode, f"CU_STREAM_CAPTURE_MODE_{name}")
                          for name in ("GLOBAL", "THREAD_LOCAL", "RELAXED"))
ONES = np.ones(32, np.float32)


@cuda.jit(cache=True)
def increment(x):
    x[cuda.grid(1)] += 1


@cuda.jit(cache=True)
def double(x):
    x[cuda.grid(1)] *= 2


@pytest.fixture(params=[False, True], ids=["eager", "lazy"])
def stream(request):
    """A stream of a device whose kernels are loaded.

    The arrays of earlier tests must not be freed inside a capture, which would break it: they are
    freed before, and the garbage collector finds no others meanwhile.
    """
    gc.collect()
    cuda.current_context().deallocations.clear()
    gc.disable()
    try:
        x = cuda.to_device(ONES)
        increment[1, 32](x)
        double[1, 32](x)
        with vgpu.options(lazy_streams=request.param):
            made = cuda.stream()
            yield made
            driver.cuStreamEndCapture(made.handle)  # of a test that failed before its end
            cuda.synchronize()
    finally:
        gc.enable()


def ok(result):
    code, *values = result
    assert code == RESULT.CUDA_SUCCESS, (code, vgpu.refusals()[-1:])
    return values[0] if len(values) == 1 else values


def begin(stream, mode=GLOBAL):
    ok(driver.cuStreamBeginCapture(stream.handle, mode))


def end(stream):
    return ok(driver.cuStreamEndCapture(stream.handle))


def broken(stream):
    """End a capture that must be invalid; returns the code."""
    code, graph = driver.cuStreamEndCapture(stream.handle)
    assert graph is None
    return code


def test_capture_and_replay(stream):
    x = cuda.to_device(ONES)
    host = cuda.pinned_array(32, np.float32)
    begin(stream)
    kind = driver.CUstreamCaptureStatus
    assert ok(driver.cuStreamIsCapturing(stream.handle)) == kind.CU_STREAM_CAPTURE_STATUS_ACTIVE
    x.copy_to_device(host, stream=stream)
    increment[1, 32, stream](x)
    double[1, 32, stream](x)
    x.copy_to_host(host, stream=stream)
    driver.cuMemsetD32Async(x.gpu_data.device_pointer, 0, 32, stream.handle)
    graph = end(stream)
    assert ok(driver.cuGraphGetNodes(graph)) == [[], 5]
    assert ok(driver.cuGraphGetEdges(graph))[3] == 4
    first, _ = ok(driver.cuGraphGetNodes(graph, 1))
    assert ok(driver.cuGraphNodeGetType(first[0])) \
        == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMCPY
    np.testing.assert_array_equal(x.copy_to_host(), ONES)  # nothing ran yet
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    ok(driver.cuGraphDestroy(graph))
    ok(driver.cuGraphUpload(executable, stream.handle))
    host[:] = 1
    for expected in (4, 10, 22):
        ok(driver.cuGraphLaunch(executable, stream.handle))
        stream.synchronize()
        assert host[0] == expected
    assert x.copy_to_host()[0] == 0
    ok(driver.cuGraphExecDestroy(executable))
    with pytest.raises(VirtualGPUError, match="no executable graph"):
        driver.cuGraphLaunch(executable, stream.handle)


def test_branches_join_by_events(stream):
    other = cuda.stream()
    x, y = cuda.to_device(ONES), cuda.to_device(ONES)
    fork, join = cuda.event(), cuda.event()
    begin(stream)
    increment[1, 32, stream](x)
    fork.record(stream)
    fork.wait(other)
    increment[1, 32, other](y)
    double[1, 32, stream](x)
    join.record(other)
    join.wait(stream)
    double[1, 32, stream](y)
    graph = end(stream)
    assert ok(driver.cuGraphGetNodes(graph))[1] == 4
    assert ok(driver.cuGraphGetEdges(graph))[3] == 4
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    ok(driver.cuGraphLaunch(executable, stream.handle))
    stream.synchronize()
    assert x.copy_to_host()[0] == 4 and y.copy_to_host()[0] == 4
    increment[1, 32, other](x)  # the other stream is free again
    other.synchronize()
    assert x.copy_to_host()[0] == 5


def test_unjoined_branches_are_refused(stream):
    other, fork = cuda.stream(), cuda.event()
    x = cuda.to_device(ONES)
    begin(stream)
    increment[1, 32, stream](x)
    fork.record(stream)
    fork.wait(other)
    increment[1, 32, other](x)
    assert broken(stream) == RESULT.CUDA_ERROR_STREAM_CAPTURE_UNJOINED
    assert "1 branches" in vgpu.refusals()[-1]
    increment[1, 32, other](x)


@pytest.mark.parametrize(("call", "code"), [
    (lambda s, x: driver.cuMemAlloc(4)[:1], "STREAM_CAPTURE_UNSUPPORTED"),
    (lambda s, x: driver.cuMemFree(x.gpu_data.device_pointer), "STREAM_CAPTURE_UNSUPPORTED"),
    (lambda s, x: driver.cuMemHostAlloc(4, 0)[:1], "STREAM_CAPTURE_UNSUPPORTED"),
    (lambda s, x: driver.cuCtxSynchronize(), "STREAM_CAPTURE_UNSUPPORTED"),
    (lambda s, x: driver.cuStreamSynchronize(s.handle), "STREAM_CAPTURE_UNSUPPORTED"),
    (lambda s, x: driver.cuStreamQuery(s.handle), "STREAM_CAPTURE_UNSUPPORTED"),
    (lambda s, x: driver.cuEventQuery(cuda.event().handle), "STREAM_CAPTURE_UNSUPPORTED"),
    (lambda s, x: driver.cuMemsetD8Async(x.gpu_data.device_pointer, 0, 4, 0),
     "STREAM_CAPTURE_IMPLICIT"),
    (lambda s, x: driver.cuMemcpyHtoDAsync(x.gpu_data.device_pointer, ONES.ctypes.data, 4,
                                           s.handle), "STREAM_CAPTURE_UNSUPPORTED"),
])
def test_forbidden_calls_break_the_capture(stream, call, code):
    x = cuda.to_device(ONES)
    begin(stream)
    increment[1, 32, stream](x)
    assert call(stream, x)[0] == getattr(RESULT, f"CUDA_ERROR_{code}")
    assert vgpu.refusals()[-1].startswith(f"CUDA_ERROR_{code}: ")
    kinds = driver.CUstreamCaptureStatus
    assert ok(driver.cuStreamIsCapturing(stream.handle)) \
        == kinds.CU_STREAM_CAPTURE_STATUS_INVALIDATED
    assert broken(stream) == RESULT.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    increment[1, 32, stream](x)  # the stream is usable again


def test_numba_raises_what_a_capture_forbids(stream):
    x = cuda.to_device(ONES)

    @cuda.jit
    def fresh(x):
        x[0] = 3

    for forbidden in (lambda: increment[1, 32](x), lambda: cuda.device_array(4),
                      lambda: fresh[1, 32, stream](x), lambda: x.copy_to_host(),
                      lambda: x.copy_to_host(stream=stream), cuda.synchronize,
                      stream.synchronize):
        begin(stream)
        with pytest.raises(VirtualGPUError) as caught:
            forbidden()
        assert caught.value.kind == "stream capture"
        assert broken(stream) == RESULT.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED


def test_events_of_a_capture_cannot_be_asked(stream):
    event, outside, x = cuda.event(), cuda.event(), cuda.to_device(ONES)
    outside.record(stream)
    begin(stream)
    increment[1, 32, stream](x)
    event.record(stream)
    assert driver.cuEventQuery(event.handle) == (RESULT.CUDA_ERROR_CAPTURED_EVENT,)
    assert broken(stream) == RESULT.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    begin(stream)
    assert driver.cuStreamWaitEvent(stream.handle, outside.handle, 0) \
        == (RESULT.CUDA_ERROR_STREAM_CAPTURE_ISOLATION,)
    assert broken(stream) == RESULT.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED


def test_captures_do_not_merge(stream):
    other, event = cuda.stream(), cuda.event()
    begin(stream)
    begin(other)
    event.record(stream)
    assert driver.cuStreamWaitEvent(other.handle, event.handle, 0) \
        == (RESULT.CUDA_ERROR_STREAM_CAPTURE_MERGE,)
    for either in (stream, other):
        assert broken(either) == RESULT.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED


def elsewhere(function):
    """The result of a function in another thread."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_modes_say_whose_calls_are_forbidden(stream):
    def allocate():
        code, pointer = driver.cuMemAlloc(4)
        if pointer is not None:
            driver.cuThreadExchangeStreamCaptureMode(RELAXED)
            driver.cuMemFree(pointer)
        return code

    unsupported = RESULT.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    for mode, here, there in ((GLOBAL, unsupported, unsupported),
                              (LOCAL, unsupported, RESULT.CUDA_SUCCESS),
                              (RELAXED, RESULT.CUDA_SUCCESS, RESULT.CUDA_SUCCESS)):
        begin(stream, mode)
        assert elsewhere(allocate) == there
        assert allocate() == here
        driver.cuThreadExchangeStreamCaptureMode(GLOBAL)
        driver.cuStreamEndCapture(stream.handle)
    begin(stream)
    assert ok(driver.cuThreadExchangeStreamCaptureMode(RELAXED)) == GLOBAL
    assert allocate() == RESULT.CUDA_SUCCESS
    assert ok(driver.cuThreadExchangeStreamCaptureMode(GLOBAL)) == RELAXED
    assert elsewhere(lambda: driver.cuStreamEndCapture(stream.handle)[0]) \
        == RESULT.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD
    assert broken(stream) == RESULT.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED


def test_what_relaxed_and_non_blocking_captures_allow(stream):
    x = cuda.to_device(ONES)
    begin(stream, RELAXED)
    increment[1, 32, stream](x)
    ok(driver.cuGraphDestroy(elsewhere(lambda: end(stream))))
    code, handle = driver.cuStreamCreate(1)
    assert code == RESULT.CUDA_SUCCESS
    free = cuda.external_stream(int(handle))
    begin(free)
    increment[1, 32, free](x)
    double[1, 32](x)  # the default stream does not wait for a non-blocking stream
    ok(driver.cuGraphDestroy(end(free)))
    assert x.copy_to_host()[0] == 2


def test_launches_of_one_graph_do_not_overlap(stream):
    other = cuda.external_stream(int(driver.cuStreamCreate(1)[1]))
    x = cuda.to_device(ONES)
    begin(stream)
    increment[1, 32, stream](x)
    executable = ok(driver.cuGraphInstantiate(end(stream), 0))
    double[1, 32, stream](x)
    ok(driver.cuGraphLaunch(executable, stream.handle))
    ok(driver.cuGraphLaunch(executable, other.handle))
    other.synchronize()
    ok(driver.cuMemFree(ok(driver.cuMemAlloc(4))))
    assert x.copy_to_host()[0] == 4


def test_graphs_need_their_pinned_memory(stream):
    x, host = cuda.to_device(ONES), cuda.pinned_array(32, np.float32)
    begin(stream)
    x.copy_to_device(host, stream=stream)
    executable = ok(driver.cuGraphInstantiate(end(stream), 0))
    del host
    cuda.current_context().memory_manager.deallocations.clear()
    with pytest.raises(VirtualGPUError, match="page-locked host memory was released"):
        driver.cuGraphLaunch(executable, stream.handle)
        stream.synchronize()


def test_misuse_of_captures(stream):
    assert driver.cuStreamBeginCapture(0, GLOBAL) \
        == (RESULT.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,)
    assert broken(stream) == RESULT.CUDA_ERROR_ILLEGAL_STATE
    begin(stream)
    assert driver.cuStreamBeginCapture(stream.handle, GLOBAL) == (RESULT.CUDA_ERROR_ILLEGAL_STATE,)
    status, number, *_ = ok(driver.cuStreamGetCaptureInfo(stream.handle))
    assert status == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    assert int(number) > 0
    ok(driver.cuGraphDestroy(end(stream)))


def test_graphs_see_unloaded_code(stream):
    text = ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry nothing() { ret; }"
    module = ok(driver.cuModuleLoadData(text.encode()))
    function = ok(driver.cuModuleGetFunction(module, b"nothing"))
    begin(stream)
    ok(driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream.handle, None, 0))
    executable = ok(driver.cuGraphInstantiate(end(stream), 0))
    ok(driver.cuModuleUnload(module))
    with pytest.raises(VirtualGPUError, match="module was unloaded"):
        driver.cuGraphLaunch(executable, stream.handle)
        stream.synchronize()


def test_graphs_see_freed_memory(stream):
    x = cuda.to_device(ONES)
    begin(stream)
    increment[1, 32, stream](x)
    executable = ok(driver.cuGraphInstantiate(end(stream), 0))
    del x
    cuda.current_context().memory_manager.deallocations.clear()
    with pytest.raises(VirtualGPUError, match="use after free"):
        driver.cuGraphLaunch(executable, stream.handle)
        stream.synchronize()
