"""Sums, maxima and counts: warp shuffles, trees in shared memory, atomics and block-wide votes."""

import math

import numpy as np
from numba import cuda, float32, int32

WARP = 32
BLOCK = 128
WARPS = 4  # of a block
BINS = 64


@cuda.jit(device=True)
def warp_sum(value):
    """The sum over the warp, in every lane."""
    for distance in (16, 8, 4, 2, 1):
        value += cuda.shfl_xor_sync(0xFFFFFFFF, value, distance)
    return value


@cuda.jit(device=True)
def warp_max(value):
    """The maximum over the warp, in every lane."""
    for distance in (16, 8, 4, 2, 1):
        value = max(value, cuda.shfl_xor_sync(0xFFFFFFFF, value, distance))
    return value


@cuda.jit
def layernorm_rows(x, gain, bias, out, means, scales):
    """LayerNorm of each row of x; keeps mean and 1 / deviation. One warp per row."""
    row = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
    if row >= x.shape[0]:
        return
    lane, width = cuda.threadIdx.x, x.shape[1]
    total = float32(0)
    for column in range(lane, width, WARP):
        total += x[row, column]
    mean = warp_sum(total) / float32(width)
    squares = float32(0)
    for column in range(lane, width, WARP):
        squares += (x[row, column] - mean) ** 2
    scale = float32(1) / math.sqrt(warp_sum(squares) / float32(width) + float32(1e-5))
    for column in range(lane, width, WARP):
        out[row, column] = (x[row, column] - mean) * scale * gain[column] + bias[column]
    if lane == 0:
        means[row] = mean
        scales[row] = scale


@cuda.jit
def block_sums(x, sums):
    """Each block of 128 threads adds the sum of its 128 elements of x to sums[0]."""
    scratch = cuda.shared.array(BLOCK, float32)
    thread, index = cuda.threadIdx.x, cuda.grid(1)
    scratch[thread] = x[index] if index < x.shape[0] else float32(0)
    cuda.syncthreads()
    half = BLOCK // 2
    while half > 0:
        if thread < half:
            scratch[thread] += scratch[thread + half]
        cuda.syncthreads()
        half //= 2
    if thread == 0:
        cuda.atomic.add(sums, 0, scratch[0])


@cuda.jit
def running_sums(x, out):
    """The running sums of x, anew for every 32 elements; blocks of 128 threads.

    Lanes talk through shared memory; two buffers in turn need one barrier of the warp per step.
    """
    scratch = cuda.shared.array((2, BLOCK), float32)
    thread, index = cuda.threadIdx.x, cuda.grid(1)
    value = x[index]
    for step in range(5):
        buffer, distance = scratch[step & 1], 1 << step
        buffer[thread] = value
        cuda.syncwarp()
        if cuda.laneid >= distance:
            value += buffer[thread - distance]
    out[index] = value


@cuda.jit
def softmax_rows(x, out):
    """Softmax of each row of x; a block of 128 threads per row, its four warps combined."""
    scratch = cuda.shared.array(WARPS, float32)
    row, thread = cuda.blockIdx.x, cuda.threadIdx.x
    lane, warp = thread & 31, thread >> 5
    largest = float32(-math.inf)
    for column in range(thread, x.shape[1], BLOCK):
        largest = max(largest, x[row, column])
    largest = warp_max(largest)
    if lane == 0:
        scratch[warp] = largest
    cuda.syncthreads()
    largest = max(max(scratch[0], scratch[1]), max(scratch[2], scratch[3]))
    cuda.syncthreads()
    total = float32(0)
    for column in range(thread, x.shape[1], BLOCK):
        value = math.exp(x[row, column] - largest)
        out[row, column] = value
        total += value
    total = warp_sum(total)
    if lane == 0:
        scratch[warp] = total
    cuda.syncthreads()
    total = scratch[0] + scratch[1] + scratch[2] + scratch[3]
    for column in range(thread, x.shape[1], BLOCK):
        out[row, column] /= total


@cuda.jit
def extremes(x, out):
    """out[0] = max(x) and out[1] = min(x), by float atomics (compare-and-swap loops)."""
    index = cuda.grid(1)
    if index < x.shape[0]:
        cuda.atomic.max(out, 0, x[index])
        cuda.atomic.min(out, 1, x[index])


@cuda.jit
def wrapped_product(x, out):
    """out[0] *= x[i] modulo 2^32 for all i, by a hand-written compare-and-swap loop."""
    index = cuda.grid(1)
    if index >= x.shape[0]:
        return
    seen = out[0]
    while True:
        found = cuda.atomic.cas(out, 0, seen, int32(seen * x[index]))
        if found == seen:
            break
        seen = found


@cuda.jit
def histogram(x, counts):
    """counts[b] = how many x are b, for b < 64: counted per block first, then merged."""
    local = cuda.shared.array(BINS, int32)
    for bin in range(cuda.threadIdx.x, BINS, cuda.blockDim.x):
        local[bin] = 0
    cuda.syncthreads()
    for index in range(cuda.grid(1), x.shape[0], cuda.gridsize(1)):
        cuda.atomic.add(local, x[index], 1)
    cuda.syncthreads()
    for bin in range(cuda.threadIdx.x, BINS, cuda.blockDim.x):
        cuda.atomic.add(counts, bin, local[bin])


@cuda.jit
def votes_of_block(x, out):
    """out[block] = (threads with x > 0, whether all are, whether any is)."""
    positive = int32(x[cuda.grid(1)] > 0)
    count = cuda.syncthreads_count(positive)
    everyone = cuda.syncthreads_and(positive)
    anyone = cuda.syncthreads_or(positive)
    if cuda.threadIdx.x == 0:
        out[cuda.blockIdx.x, 0] = count
        out[cuda.blockIdx.x, 1] = int32(everyone != 0)
        out[cuda.blockIdx.x, 2] = int32(anyone != 0)


def layernorm(x: np.ndarray, gain: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """LayerNorm of the rows of a float32 matrix, computed on the device."""
    out = cuda.device_array_like(x)
    means, scales = (cuda.device_array(x.shape[0], np.float32) for _ in range(2))
    layernorm_rows[-(-x.shape[0] // 4), (WARP, 4)](
        cuda.to_device(x), cuda.to_device(gain), cuda.to_device(bias), out, means, scales
    )
    return out.copy_to_host()


def total(x: np.ndarray) -> np.ndarray:
    """The sum of a float32 vector, computed on the device."""
    sums = cuda.to_device(np.zeros(1, np.float32))
    block_sums[-(-x.shape[0] // BLOCK), BLOCK](cuda.to_device(x), sums)
    return sums.copy_to_host()


def scan(x: np.ndarray) -> np.ndarray:
    """The running sums of each 32 elements of a float32 vector, computed on the device."""
    out = cuda.device_array_like(x)
    running_sums[x.shape[0] // BLOCK, BLOCK](cuda.to_device(x), out)
    return out.copy_to_host()


def softmax(x: np.ndarray) -> np.ndarray:
    """Softmax of the rows of a float32 matrix, computed on the device."""
    out = cuda.device_array_like(x)
    softmax_rows[x.shape[0], BLOCK](cuda.to_device(x), out)
    return out.copy_to_host()


def largest_and_smallest(x: np.ndarray) -> np.ndarray:
    """The extremes of a float32 vector, computed on the device."""
    out = cuda.to_device(np.array([-np.inf, np.inf], np.float32))
    extremes[-(-x.shape[0] // BLOCK), BLOCK](cuda.to_device(x), out)
    return out.copy_to_host()


def product(x: np.ndarray) -> np.ndarray:
    """The product of an int32 vector modulo 2^32, computed on the device."""
    out = cuda.to_device(np.ones(1, np.int32))
    wrapped_product[-(-x.shape[0] // BLOCK), BLOCK](cuda.to_device(x), out)
    return out.copy_to_host()


def count(x: np.ndarray) -> np.ndarray:
    """The histogram of an int32 vector with values below 64, computed on the device."""
    counts = cuda.to_device(np.zeros(BINS, np.int32))
    histogram[3, BLOCK](cuda.to_device(x), counts)
    return counts.copy_to_host()


def vote(x: np.ndarray) -> np.ndarray:
    """(count, all, any) of x > 0 for each block of 96 elements, computed on the device."""
    out = cuda.device_array((x.shape[0] // 96, 3), np.int32)
    votes_of_block[x.shape[0] // 96, 96](cuda.to_device(x), out)
    return out.copy_to_host()
