"""What numba-cuda programs use besides arithmetic on arrays, one small kernel for each feature."""

import math

import numpy as np
from cuda.bindings import driver as bindings
from numba import cuda, float32, int32, uint32, uint64
from numba.cuda import types
from numba.cuda.cudadrv.driver import driver

TAPS = np.array([0.25, -0.5, 1.0, -0.5, 0.25], np.float32)
PARTICLE = np.dtype([("position", np.float32, 3), ("charge", np.int32), ("mass", np.float64)],
                    align=True)
VOLUME_SHAPE = (5, 7, 11)


@cuda.jit
def running_median(x, out):
    """Median of five neighbours, sorted by insertion in a local array; ends repeat."""
    index = cuda.grid(1)
    if index >= x.shape[0]:
        return
    window = cuda.local.array(5, float32)
    for offset in range(5):
        value = x[min(max(index + offset - 2, 0), x.shape[0] - 1)]
        position = offset
        while position > 0 and window[position - 1] > value:
            window[position] = window[position - 1]
            position -= 1
        window[position] = value
    out[index] = window[2]


@cuda.jit(device=True)
def collatz_step(value):
    """The next number of the Collatz sequence."""
    if value % 2 == 0:
        return value // 2
    return 3 * value + 1


@cuda.jit
def collatz_lengths(x, out):
    """Steps until 1; -1 for numbers below 1, -2 for sequences that pass 10000."""
    index = cuda.grid(1)
    if index >= x.shape[0]:
        return
    value, steps = x[index], 0
    if value < 1:
        out[index] = -1
        return
    while value != 1:
        value = collatz_step(value)
        if value > 10000:
            steps = -2
            break
        steps += 1
    out[index] = steps


@cuda.jit
def warp_operations(x, out):
    """Votes, matches and shuffles of whole and half warps, one result per column of out."""
    index, lane = cuda.grid(1), cuda.laneid
    value = x[index]
    out[index, 0] = int32(cuda.ballot_sync(0xFFFFFFFF, value > 4))
    out[index, 1] = int32(cuda.all_sync(0xFFFFFFFF, value >= 0))
    out[index, 2] = int32(cuda.any_sync(0xFFFFFFFF, value > 8))
    out[index, 3] = int32(cuda.match_any_sync(0xFFFFFFFF, value))
    out[index, 4] = int32(cuda.match_all_sync(0xFFFFFFFF, value)[1])
    out[index, 5] = cuda.shfl_up_sync(0xFFFFFFFF, value, 3)
    out[index, 6] = cuda.shfl_down_sync(0xFFFFFFFF, value, 5)
    out[index, 7] = cuda.shfl_xor_sync(0xFFFFFFFF, value, 9)
    out[index, 8] = cuda.shfl_sync(0xFFFFFFFF, value, (lane * 7) & 31)
    if lane < 16:
        out[index, 9] = cuda.shfl_sync(0x0000FFFF, value, 15 - lane)
    else:
        out[index, 9] = cuda.shfl_xor_sync(0xFFFF0000, value, 1)
    out[index, 10] = int32(cuda.popc(uint32(value)) + cuda.clz(int32(value)))


@cuda.jit
def wide_arithmetic(x, y, integers, floats):
    """A 64-bit hash, signed division and remainder, and float64 arithmetic."""
    index = cuda.grid(1)
    if index >= x.shape[0]:
        return
    state = uint64(x[index])
    state = (state ^ (state >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> uint64(27))) * uint64(0x94D049BB133111EB)
    integers[index, 0] = types.int64(state ^ (state >> uint64(31)))
    integers[index, 1] = x[index] // y[index]
    integers[index, 2] = x[index] % y[index]
    floats[index, 0] = types.float64(x[index]) / types.float64(y[index])
    floats[index, 1] = math.sqrt(abs(types.float64(x[index]))) + 1.0 / 3.0


@cuda.jit
def half_precision(x, y, out):
    """out = x * y + x in float16, and the larger of the two."""
    index = cuda.grid(1)
    if index < x.shape[0]:
        out[index, 0] = x[index] * y[index] + x[index]
        out[index, 1] = x[index] if x[index] > y[index] else y[index]


def elementary(x, out):
    """Elementary functions of positive float32 numbers, one per column of out."""
    index = cuda.grid(1)
    if index >= x.shape[0]:
        return
    value = x[index]
    out[index, 0] = math.exp(-value)
    out[index, 1] = math.log(value)
    out[index, 2] = math.sin(value)
    out[index, 3] = math.cos(value)
    out[index, 4] = math.tanh(value)
    out[index, 5] = math.sqrt(value)
    out[index, 6] = float32(1) / value
    out[index, 7] = math.pow(value, float32(1.5))
    out[index, 8] = math.erf(value)
    out[index, 9] = math.floor(value)
    out[index, 10] = math.fabs(float32(2) - value)


elementary_exact = cuda.jit(elementary)
elementary_fast = cuda.jit(elementary, fastmath=True)


@cuda.jit
def filtered(x, out):
    """Convolution with five taps from a constant array; zero beyond the ends."""
    taps = cuda.const.array_like(TAPS)
    index = cuda.grid(1)
    if index >= x.shape[0]:
        return
    total = float32(0)
    for tap in range(TAPS.shape[0]):
        source = index + tap - 2
        if 0 <= source < x.shape[0]:
            total += taps[tap] * x[source]
    out[index] = total


@cuda.jit
def laplacian(volume, out):
    """Seven-point Laplacian of the inner points of a 3-D array, -1 on its faces."""
    i, j, k = cuda.grid(3)
    if i >= volume.shape[0] or j >= volume.shape[1] or k >= volume.shape[2]:
        return
    if (i == 0 or j == 0 or k == 0 or i == volume.shape[0] - 1 or j == volume.shape[1] - 1
            or k == volume.shape[2] - 1):
        out[i, j, k] = float32(-1)
        return
    out[i, j, k] = (
        volume[i - 1, j, k] + volume[i + 1, j, k] + volume[i, j - 1, k] + volume[i, j + 1, k]
        + volume[i, j, k - 1] + volume[i, j, k + 1] - float32(6) * volume[i, j, k]
    )


@cuda.jit
def reversed_rows(x, out):
    """Each row reversed through dynamic shared memory that holds the whole row."""
    row = cuda.shared.array(0, float32)
    width = x.shape[1]
    for column in range(cuda.threadIdx.x, width, cuda.blockDim.x):
        row[column] = x[cuda.blockIdx.x, column]
    cuda.syncthreads()
    for column in range(cuda.threadIdx.x, width, cuda.blockDim.x):
        out[cuda.blockIdx.x, column] = row[width - 1 - column]


@cuda.jit
def moved(particles, seconds):
    """Fields of a structured array, among them an array: moves each particle along its axis."""
    index = cuda.grid(1)
    if index < particles.shape[0]:
        axis = particles[index].charge % 3
        step = float32(seconds / particles[index].mass)
        particles[index].position[axis] = particles[index].position[axis] + step
        particles[index].charge = particles[index].charge + 1


@cuda.jit
def counted_under_lock(lock, counter):
    """The first thread of each block adds its block's number to a counter, under a spin lock."""
    if cuda.threadIdx.x != 0:
        return
    while cuda.atomic.cas(lock, 0, 0, 1) != 0:
        pass
    cuda.threadfence()
    counter[0] += cuda.blockIdx.x
    cuda.threadfence()
    cuda.atomic.exch(lock, 0, 0)


@cuda.jit(debug=True, opt=False)
def checked_quotients(x, y, out):
    """x // y with Python's exceptions: a debug kernel raises ZeroDivisionError on the host."""
    index = cuda.grid(1)
    if index < x.shape[0]:
        out[index] = x[index] // y[index]


def elementwise(kernel, inputs: list, shape, dtype, threads: int = 64) -> np.ndarray:
    """Run `kernel(*inputs, out)` with one thread per row of out; returns out as a NumPy array."""
    out = cuda.device_array(shape, dtype)
    kernel[-(-out.shape[0] // threads), threads](*[cuda.to_device(x) for x in inputs], out)
    return out.copy_to_host()


def wide(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(int64 [n, 3], float64 [n, 2]) results of `wide_arithmetic` for int64 vectors."""
    integers = cuda.device_array((x.shape[0], 3), np.int64)
    floats = cuda.device_array((x.shape[0], 2), np.float64)
    wide_arithmetic[-(-x.shape[0] // 64), 64](
        cuda.to_device(x), cuda.to_device(y), integers, floats
    )
    return integers.copy_to_host(), floats.copy_to_host()


def laplacian_of(volume: np.ndarray) -> np.ndarray:
    """The Laplacian of a 3-D float32 array, in ragged blocks of 2 x 4 x 8 threads."""
    out = cuda.device_array_like(volume)
    block = (2, 4, 8)
    grid = tuple(-(-n // b) for n, b in zip(volume.shape, block, strict=True))
    laplacian[grid, block](cuda.to_device(volume), out)
    return out.copy_to_host()


def allow_dynamic_shared(kernel, nbytes: int) -> None:
    """Let a compiled kernel use more than 48 KB of dynamic shared memory.

    numba-cuda has no call for it, so this asks the driver.
    """
    attribute = bindings.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    function = kernel._codelibrary.get_cufunc()
    driver.cuKernelSetAttribute(attribute, nbytes, function.handle, cuda.get_current_device().id)


def reverse_rows(x: np.ndarray) -> np.ndarray:
    """The rows of a float32 matrix reversed; a row may have up to 99 KB."""
    source, out = cuda.to_device(x), cuda.device_array_like(x)
    nbytes = x.shape[1] * x.itemsize
    kernel = reversed_rows.specialize(source, out)
    allow_dynamic_shared(next(iter(kernel.overloads.values())), nbytes)
    kernel[x.shape[0], 256, 0, nbytes](source, out)
    return out.copy_to_host()


def move(particles: np.ndarray, seconds: float) -> np.ndarray:
    """The particles of a PARTICLE array after `seconds`."""
    there = cuda.to_device(particles)
    moved[-(-particles.shape[0] // 32), 32](there, seconds)
    return there.copy_to_host()


def count_under_lock(blocks: int) -> np.ndarray:
    """The sum of the block numbers, added one by one under a lock."""
    lock, counter = cuda.to_device(np.zeros(1, np.int32)), cuda.to_device(np.zeros(1, np.int64))
    counted_under_lock[blocks, 32](lock, counter)
    return counter.copy_to_host()
