"""The public functions with device arrays: of numba and of other libraries, on any stream."""

import ctypes
import inspect
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("numba_cuda")

import kernels
from kernels.common.cuda import address, cuda
from kernels.registry import load_op, problem

N = 20


class Foreign:
    """An array of another library that has the CUDA array interface."""

    def __init__(self, array, **more):
        self.array, self.shape = array, array.shape
        self.__cuda_array_interface__ = array.__cuda_array_interface__ | more


class Tensor:
    """A DLPack tensor in device memory; it counts the capsules that were given back."""

    def __init__(self, array, device=(2, 0), code=2, strides=True):
        self.array, self.device, self.code, self.released = array, device, code, 0
        self.strides = strides
        self.asked_for = []

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, stream=None):
        self.asked_for.append(stream)
        shape = (ctypes.c_int64 * self.array.ndim)(*self.array.shape)
        strides = (ctypes.c_int64 * self.array.ndim)(*(s // 4 for s in self.array.strides))
        offset = 4  # the data begin after this many bytes
        managed = Managed(address(self.array) - offset, *self.device, self.array.ndim, self.code,
                          32, 1, shape, strides if self.strides else None, offset)

        def release(capsule):
            self.released += 1

        self.release = DESTRUCTOR(release)
        self.memory = managed, shape, strides
        return new_capsule(ctypes.addressof(managed), b"dltensor", self.release)


class Managed(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("device", ctypes.c_int32), ("id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("offset", ctypes.c_uint64),
                ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


DESTRUCTOR = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = ctypes.c_void_p, ctypes.c_char_p, DESTRUCTOR


@pytest.fixture
def arrays():
    """x [N] and room for y [N] on the device, and GELU(x) by the oracle."""
    x = np.random.default_rng(0).standard_normal(N).astype(np.float32)
    expected = np.empty_like(x)
    load_op("gelu", "oracle").forward(expected, x)
    y = np.full_like(x, np.nan)
    return cuda.to_device(y), cuda.to_device(x), expected


def close(y, expected):
    cuda.synchronize()
    return np.allclose(y.copy_to_host(), expected, atol=1e-6)


def test_numba_arrays(arrays):
    y, x, expected = arrays
    kernels.gelu.forward(y, x)
    assert close(y, expected)


def test_arrays_of_other_libraries(arrays):
    y, x, expected = arrays
    kernels.gelu.forward(Foreign(y), Foreign(x))
    assert close(y, expected)


@pytest.mark.parametrize("strides", [True, False])
def test_dlpack_tensors_are_read_in_place_and_released(arrays, strides):
    y, x, expected = arrays
    tensors = Tensor(y, strides=strides), Tensor(x, strides=strides)
    kernels.gelu.forward(*tensors)
    assert close(y, expected)
    assert [tensor.released for tensor in tensors] == [1, 1]
    assert tensors[0].asked_for == [1], "the default stream is 1 in DLPack"


class Bare:
    """An array that has the CUDA array interface and nothing else."""

    def __init__(self, array):
        self.__cuda_array_interface__ = array.__cuda_array_interface__


@pytest.mark.parametrize("wrap", [Bare, Foreign, Tensor])
def test_an_array_needs_no_more_than_its_protocol(wrap):
    """Where a function looks at more than the shapes of its table: no len, no attributes."""
    rng = np.random.default_rng(0)
    held = []

    def given(*shape, dtype=np.float32):
        array = cuda.to_device(rng.integers(1, 3, shape).astype(dtype))
        code = {"code": 0} if wrap is Tensor and dtype == np.int32 else {}
        held.append((array, wrap(array, **code)))
        return held[-1][1]

    kernels.adamw.update(given(7), None, given(7), given(7), given(7), given(1), given(3), 3, 0.9,
                         0.95, 1e-8, 0.1, 1.0)
    ids = given(2, 3, dtype=np.int32)
    kernels.embedding.forward(given(6, 5), ids, given(3, 5), given(4, 5), given(1, dtype=np.int32))
    kernels.embedding.backward(given(3, 5), given(4, 5), given(6, 5), ids)
    kernels.attention.append(given(2, 2, 5, 3), given(2, 2, 5, 3), given(4, 18),
                             given(1, dtype=np.int32))
    kernels.attention.decode(given(2, 6), given(2, 18), given(2, 2, 5, 3), given(2, 2, 5, 3),
                             given(1, dtype=np.int32))
    kernels.attention.forward(given(6, 4), given(2, 2, 3), given(6, 12))
    kernels.cross_entropy.forward(given(4), given(4, 5), given(4, dtype=np.int32), 5)
    cuda.synchronize()


def test_dlpack_tensors_of_other_types_are_refused(arrays):
    y, x, _ = arrays
    with pytest.raises(TypeError, match=r"gelu.forward: y has dtype int32, expected float32"):
        kernels.gelu.forward(Tensor(y, code=0), x)
    with pytest.raises(TypeError, match=r"gelu.forward: .*type code 4"):
        kernels.gelu.forward(Tensor(y, code=4), x)
    with pytest.raises(TypeError, match="y is Tensor, expected a NumPy array or a device array"):
        kernels.gelu.forward(Tensor(y, device=(1, 0)), x)


def test_a_tensor_that_refuses_its_interface_says_why(arrays):
    class NeedsGradient:
        @property
        def __cuda_array_interface__(self):
            raise RuntimeError("requires grad: use var.detach()")

    with pytest.raises(TypeError, match=r"gelu.forward: x: requires grad: use var.detach\(\)"):
        kernels.gelu.forward(arrays[0], NeedsGradient())


def test_host_and_device_arrays_do_not_mix(arrays):
    with pytest.raises(TypeError, match="y is in device memory but x in host memory"):
        kernels.gelu.forward(arrays[0], np.zeros(N, np.float32))


def test_device_arrays_are_checked(arrays):
    y, x, _ = arrays
    with pytest.raises(ValueError, match=r"gelu.forward: x has shape \(19,\), expected \(20,\)"):
        kernels.gelu.forward(y, x[1:])
    with pytest.raises(ValueError, match="not C-contiguous"):
        kernels.gelu.forward(y[::2], x[:10])
    with pytest.raises(ValueError, match="read-only"):
        kernels.gelu.forward(Foreign(y, data=(address(y), True)), x)
    with pytest.raises(TypeError, match=r"gelu.forward: x has a mask, expected an array .*; fill"):
        kernels.gelu.forward(y, Foreign(x, mask=y))
    with pytest.raises(ValueError, match="y overlaps x"):
        kernels.gelu.forward(x[:10], x[5:15])


def as_handle(stream):
    return int(stream.handle)


@pytest.mark.parametrize("wrap", [
    lambda stream: stream,
    as_handle,
    lambda stream: SimpleNamespace(__cuda_stream__=lambda: (0, as_handle(stream))),
    lambda stream: SimpleNamespace(handle=as_handle(stream)),
    lambda stream: SimpleNamespace(cuda_stream=as_handle(stream)),
    lambda stream: SimpleNamespace(stream=SimpleNamespace(handle=as_handle(stream))),
], ids=["numba", "int", "protocol", "handle", "torch", "graph"])
def test_streams(arrays, wrap, monkeypatch):
    used = []
    from kernels.common import cuda as layer

    def launch(stream, *rest):
        used.append(int(stream.handle))
        return original(stream, *rest)

    original = layer.core.launch
    monkeypatch.setattr(layer.core, "launch", launch)
    y, x, expected = arrays
    stream = cuda.stream()
    kernels.gelu.forward(y, x, stream=wrap(stream))
    kernels.gelu.forward(y, x)
    assert used == [int(stream.handle), 0]
    assert close(y, expected)


def test_the_stream_that_wrote_an_array_is_waited_for(arrays):
    vgpu = pytest.importorskip("vgpu")
    if not vgpu.installed():
        pytest.skip("needs streams that run as late as they may")
    y, x, expected = arrays
    writer, reader = cuda.stream(), cuda.stream()
    late = cuda.device_array_like(x)
    with vgpu.options(lazy_streams=True):
        late.copy_to_device(x, stream=writer)
        kernels.gelu.forward(y, Foreign(late, stream=as_handle(writer)), stream=reader)
        reader.synchronize()
        assert close(y, expected)


def test_wrong_streams_are_refused(arrays):
    y, x, _ = arrays
    with pytest.raises(TypeError, match=r"gelu.forward: stream is str, expected a CUDA stream"):
        kernels.gelu.forward(y, x, stream="0")
    for handle in (-1, 2**64):
        message = f"gelu.forward: stream is the handle {handle}, expected 0 to .*; pass the"
        with pytest.raises(ValueError, match=message):
            kernels.gelu.forward(y, x, stream=handle)
    host = np.zeros(N, np.float32)
    with pytest.raises(TypeError, match=r"gelu.forward: stream is for device arrays.*leave it out"):
        kernels.gelu.forward(host.copy(), host, stream=0)


class Sized:
    """An array of which only the sizes are looked at."""

    def __init__(self, *shape):
        self.shape = shape


INT32 = 2**31 - 1
OF_MATMUL = 2**31 - 256  # its last tile, of at most 256 rows or columns, ends there
OF_GRID_Y = 65535 * 1024  # blocks of layernorm.backward, and columns of each


def linear(M, N, K):
    return Sized(M, N), None, Sized(M, K), None, None, None, False


def linear_gradients(M, N, K):
    return None, None, None, Sized(M, N), Sized(M, K), None, None, False


def norm(N, d):
    return None, None, None, Sized(N, d), None, None, 1e-5


def norm_gradients(N, d):
    return None, None, None, None, None, Sized(N, d), None, None, None, None


@pytest.mark.parametrize(("name", "call", "size", "limit"), [
    *(("matmul.forward", linear, size, OF_MATMUL) for size in "MNK"),
    *(("matmul.backward", linear_gradients, size, OF_MATMUL) for size in "MNK"),
    *(("layernorm.forward", norm, size, INT32) for size in "Nd"),
    ("layernorm.backward", norm_gradients, "N", INT32),
    ("layernorm.backward", norm_gradients, "d", OF_GRID_Y),
])
def test_sizes_that_a_kernel_cannot_count_are_refused(name, call, size, limit):
    op, _, function = name.partition(".")
    sizes = dict.fromkeys(inspect.signature(call).parameters, 9) | {size: limit + 1}
    with pytest.raises(ValueError, match=f"^{size} is {limit + 1}, expected at most {limit} on"):
        getattr(load_op(op, "gpu"), function)(*call(**sizes))


def test_the_gpu_has_no_problem_here():
    assert problem("gpu") == "" and problem("cpu") == ""
