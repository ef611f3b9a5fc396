"""Streams and events, above all the lazy mode that shows missing synchronisation."""

import ctypes

import numpy as np
import pytest
import vgpu
from cuda.bindings import driver
from numba import cuda
from vgpu import VirtualGPUError, streams
from vgpu.device import device

pytestmark = pytest.mark.skipif(not vgpu.installed(), reason="a real GPU is used")

RESULT = driver.CUresult
ONES = np.ones(32, np.float32)


@cuda.jit(cache=True)
def increment(x):
    x[cuda.grid(1)] += 1


@cuda.jit(cache=True)
def double(x):
    x[cuda.grid(1)] *= 2


@pytest.fixture
def lazy():
    with vgpu.options(lazy_streams=True) as options:
        yield options
        cuda.synchronize()


def non_blocking():
    code, handle = driver.cuStreamCreate(1)
    assert code == RESULT.CUDA_SUCCESS
    return cuda.external_stream(int(handle))


def test_work_waits_for_its_own_stream(lazy):
    first, second = cuda.stream(), cuda.stream()
    x, y = cuda.to_device(ONES), cuda.to_device(ONES)
    before = len(vgpu.launches())
    increment[1, 32, first](x)
    increment[1, 32, second](y)
    double[1, 32, first](x)
    assert len(vgpu.launches()) == before
    first.synchronize()
    assert [r.kernel for r in vgpu.launches()[before:]] == ["increment", "double"]
    second.synchronize()
    assert len(vgpu.launches()) == before + 3


@pytest.mark.parametrize("ordered", [False, True])
def test_a_missing_wait_between_streams_shows(lazy, ordered):
    first, second = cuda.stream(), cuda.stream()
    x = cuda.to_device(ONES)
    event = cuda.event()
    increment[1, 32, first](x)
    event.record(first)
    if ordered:
        event.wait(second)
    double[1, 32, second](x)
    cuda.synchronize()
    assert x.copy_to_host()[0] == (4 if ordered else 3)


def test_a_wait_needs_no_more_than_the_event(lazy):
    first, second = cuda.stream(), cuda.stream()
    x, y = cuda.to_device(ONES), cuda.to_device(ONES)
    event = cuda.event()
    increment[1, 32, first](x)
    event.record(first)
    double[1, 32, first](x)
    event.wait(second)
    increment[1, 32, second](y)
    before = len(vgpu.launches())
    second.synchronize()
    assert [r.kernel for r in vgpu.launches()[before:]] == ["increment", "increment"]


def test_pinned_memory_is_read_late(lazy):
    stream = cuda.stream()
    host = cuda.pinned_array(32, np.float32)
    host[:] = 1
    array = cuda.to_device(host, stream=stream)
    host[:] = 2  # a mistake: the copy is still queued
    stream.synchronize()
    assert array.copy_to_host()[0] == 2
    host = np.ones(32, np.float32)
    array.copy_to_device(host, stream=stream)
    host[:] = 3  # pageable memory was staged
    stream.synchronize()
    assert array.copy_to_host()[0] == 1


def test_pinned_memory_is_written_late(lazy):
    stream = cuda.stream()
    host = cuda.pinned_array(32, np.float32)
    array = cuda.to_device(ONES)
    host[:] = 0
    array.copy_to_host(host, stream=stream)
    assert host[0] == 0
    stream.synchronize()
    assert host[0] == 1


def test_default_stream_order(lazy):
    blocking, free = cuda.stream(), non_blocking()
    x, y = cuda.to_device(ONES), cuda.to_device(ONES)
    increment[1, 32, blocking](x)
    double[1, 32](x)  # waits for the blocking stream
    assert x.copy_to_host()[0] == 4
    increment[1, 32, free](y)
    assert y.copy_to_host()[0] == 1  # does not wait
    free.synchronize()
    assert y.copy_to_host()[0] == 2
    double[1, 32](y)
    increment[1, 32, blocking](y)  # waits for the default stream
    blocking.synchronize()
    assert y.copy_to_host()[0] == 5


def test_queries_let_work_finish(lazy):
    stream, event = cuda.stream(), cuda.event()
    x = cuda.to_device(ONES)
    increment[1, 32, stream](x)
    event.record(stream)
    assert not event.query()
    for _ in range(5):
        if event.query():
            break
    assert event.query()
    assert driver.cuStreamQuery(stream.handle) == (RESULT.CUDA_SUCCESS,)


def test_errors_surface_when_something_waits(lazy):
    stream = cuda.stream()
    x = cuda.to_device(ONES)
    increment[2, 32, stream](x[:16])
    with pytest.raises(VirtualGPUError, match="out of bounds"):
        stream.synchronize()
    stream.synchronize()  # what was queued is dropped, the device can be used again
    np.testing.assert_array_equal(cuda.to_device(ONES).copy_to_host(), ONES)


def test_free_waits_for_everything(lazy):
    # Numba frees by itself once ten arrays wait, and other tests may have left nine.
    cuda.current_context().memory_manager.deallocations.clear()
    stream = cuda.stream()
    x, y = cuda.to_device(ONES), cuda.to_device(ONES)
    increment[1, 32, stream](x)
    del y
    before = len(vgpu.launches())
    cuda.current_context().memory_manager.deallocations.clear()
    assert len(vgpu.launches()) == before + 1


def test_release_of_pinned_memory_waits(lazy):
    cuda.current_context().memory_manager.deallocations.clear()
    stream, host = cuda.stream(), cuda.pinned_array(32, np.float32)
    host[:] = 5
    x = cuda.to_device(ONES)
    x.copy_to_device(host, stream=stream)
    del host
    cuda.current_context().memory_manager.deallocations.clear()
    assert x.copy_to_host()[0] == 5


def test_leaving_the_lazy_mode_keeps_the_order():
    x, stream = cuda.to_device(ONES), cuda.stream()
    with vgpu.options(lazy_streams=True):
        increment[1, 32, stream](x)
    double[1, 32, stream](x)
    assert x.copy_to_host()[0] == 4


def test_only_the_last_record_of_an_event_counts(lazy):
    first, second, start, event = cuda.stream(), cuda.stream(), cuda.event(), cuda.event()
    start.record(second)
    event.record(first)
    double[1, 32, second](cuda.to_device(ONES))
    event.record(second)
    second.synchronize()
    time = start.elapsed_time(event)
    assert time > 0
    first.synchronize()
    assert start.elapsed_time(event) == time


@pytest.mark.parametrize("is_lazy", [False, True])
def test_memory_collected_while_it_is_used_is_freed_afterwards(is_lazy):
    """The garbage collector may run in the middle of a kernel."""
    x, stream = cuda.to_device(ONES), cuda.stream()
    pointer = int(driver.cuMemAlloc(128)[1])

    def free_and_copy():
        assert driver.cuMemFree(pointer) == (RESULT.CUDA_SUCCESS,)
        device.arena.copy(x.gpu_data.device_pointer_value, pointer, 128)

    driver.cuMemcpyHtoD(pointer, (2 * ONES).ctypes.data, 128)
    with vgpu.options(lazy_streams=is_lazy):
        streams.stream_of(stream.handle).submit("memcpy", free_and_copy)
        stream.synchronize()
    assert x.copy_to_host()[0] == 2
    with pytest.raises(VirtualGPUError, match="use after free"):
        driver.cuMemcpyDtoH(ONES.ctypes.data, pointer, 4)


def test_stream_ordered_free(lazy):
    stream = cuda.stream()
    code, pointer = driver.cuMemAllocAsync(128, stream.handle)
    assert code == RESULT.CUDA_SUCCESS
    driver.cuMemsetD8Async(pointer, 0, 128, stream.handle)
    driver.cuMemFreeAsync(pointer, stream.handle)
    driver.cuMemsetD8Async(pointer, 0, 128, stream.handle)
    with pytest.raises(VirtualGPUError, match="use after free"):
        stream.synchronize()


@pytest.mark.parametrize("is_lazy", [False, True])
def test_host_functions_run_in_stream_order_and_may_not_call_the_driver(is_lazy):
    calls = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    def callback(stream, status, data):
        calls.append((status, data, driver.cuMemAlloc(4)[0]))

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def function(data):
        calls.append(len(vgpu.launches()))

    with vgpu.options(lazy_streams=is_lazy):
        before = len(vgpu.launches())
        stream = cuda.stream()
        x = cuda.to_device(ONES)
        increment[1, 32, stream](x)
        address = ctypes.cast(callback, ctypes.c_void_p).value
        driver.cuStreamAddCallback(stream.handle, driver.CUstreamCallback(address), 7, 0)
        address = ctypes.cast(function, ctypes.c_void_p).value
        driver.cuLaunchHostFunc(stream.handle, driver.CUhostFn(address), 0)
        assert bool(calls) != is_lazy
        stream.synchronize()
    assert calls == [(0, 7, RESULT.CUDA_ERROR_NOT_PERMITTED), before + 1]


def test_times_and_events():
    start, end, untimed = cuda.event(), cuda.event(), cuda.event(timing=False)
    x = cuda.to_device(ONES)
    start.record()
    increment[1, 32](x)
    end.record()
    untimed.record()
    end.synchronize()
    assert 0 < start.elapsed_time(end) < 10_000
    assert driver.cuEventElapsedTime(start.handle, untimed.handle)[0] \
        == RESULT.CUDA_ERROR_INVALID_HANDLE


def test_streams_have_properties():
    code, handle = driver.cuStreamCreateWithPriority(1, -100)
    assert code == RESULT.CUDA_SUCCESS
    assert driver.cuStreamGetPriority(handle)[1] == -5
    assert driver.cuStreamGetFlags(handle)[1] == 1
    driver.cuStreamDestroy(handle)
    with pytest.raises(VirtualGPUError, match="no stream"):
        driver.cuStreamSynchronize(handle)


def test_without_execution_nothing_runs():
    x = cuda.to_device(ONES)
    with vgpu.options(execute=False):
        increment[1, 32](x)
        x.copy_to_host()
        cuda.synchronize()
    assert x.copy_to_host()[0] == 1


@pytest.mark.parametrize("seed", range(6))
def test_ordered_programs_do_not_depend_on_lateness(seed):
    """Random work on random streams, each ordered by events after what it conflicts with."""
    results = []
    for is_lazy in (False, True):
        random = np.random.default_rng(seed)
        with vgpu.options(lazy_streams=is_lazy):
            streams = [cuda.stream(), cuda.stream(), non_blocking(), non_blocking()]
            buffers = [cuda.to_device(np.full(4, i, np.uint32)) for i in range(5)]
            pointers = [int(b.gpu_data.device_pointer) for b in buffers]
            host = cuda.pinned_array((5, 4), np.uint32)
            host[:] = random.integers(0, 1000, (5, 4))
            marks = {}
            for step in range(60):
                stream = streams[random.integers(4)]
                target, source = random.choice(5, 2, replace=False)
                for buffer in (target, source):
                    if buffer in marks:
                        marks[buffer].wait(stream)
                kind, handle = random.integers(4), stream.handle
                if kind == 0:
                    driver.cuMemsetD32Async(pointers[target] + 4, step, 2, handle)
                elif kind == 1:
                    driver.cuMemcpyDtoDAsync(pointers[target], pointers[source] + 4, 8, handle)
                elif kind == 2:
                    driver.cuMemcpyHtoDAsync(pointers[target], host[source].ctypes.data, 16, handle)
                else:
                    driver.cuMemcpyDtoHAsync(host[target].ctypes.data, pointers[target], 16, handle)
                marks[target] = marks[source] = cuda.event()
                marks[target].record(stream)
            cuda.synchronize()
            results.append([host.copy(), *(b.copy_to_host() for b in buffers)])
    for eager, late in zip(*results, strict=True):
        np.testing.assert_array_equal(eager, late)


def test_forms_of_pointers_sizes_and_streams():
    """What cuda.bindings takes besides integers, and what it does not."""
    host, copied = np.arange(4, dtype=np.uint32), bytearray(16)
    _, pointer = driver.cuMemAlloc(np.int64(16))
    driver.cuMemcpyHtoD(pointer, host, 16)
    driver.cuMemcpyDtoHAsync(copied, pointer, 16, None)
    driver.cuStreamSynchronize(None)
    assert copied == host.tobytes()
    driver.cuMemcpyHtoD(pointer, bytes(16), 16)
    driver.cuMemcpyDtoH(host.ctypes.data, pointer, 16)
    assert not host.any()
    for value in (-1, 256):
        with pytest.raises(VirtualGPUError, match=f"memset of uint8 to {value}"):
            driver.cuMemsetD8(pointer, value, 16)
    driver.cuMemFree(pointer)
