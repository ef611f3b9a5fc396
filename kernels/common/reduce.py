"""Sums and maxima over lanes of a warp and over a block, in an order that never changes.

The butterfly adds the same pairs in every lane, so all lanes, and then all threads, get the
same bits. Blocks are one-dimensional with a whole number of warps, and every thread takes part.
"""

from collections.abc import Callable

from .cuda import cuda, device_function, float32, uint32
from .unroll import unroll, unrolled

ALL_LANES = 0xFFFFFFFF
WARP = uint32(32)  # unsigned: an index that cannot be negative costs fewer instructions
LOWEST = float32(-3.4028235e38)  # of all finite float32 numbers


def sum_over(lanes: int, apart: int = 1) -> Callable:
    """A device function: the sum of x over `lanes` lanes, in each of them.

    They are neighbours, or lie `apart` from each other; their number is a power of two.
    """
    halvings, farthest = lanes.bit_length() - 1, lanes * apart // 2

    @unrolled
    def lane_sum(x):
        for k in unroll(halvings):
            x += cuda.shfl_xor_sync(ALL_LANES, x, farthest >> k)
        return x

    return lane_sum


def max_over(lanes: int) -> Callable:
    """A device function: the largest x of `lanes` neighbours; a NaN is passed over."""
    halvings, farthest = lanes.bit_length() - 1, lanes // 2

    @unrolled
    def lane_max(x):
        for k in unroll(halvings):
            x = max(x, cuda.shfl_xor_sync(ALL_LANES, x, farthest >> k))
        return x

    return lane_max


warp_sum, warp_max = sum_over(32), max_over(32)


@device_function
def block_sum(x, partials):
    """The sum of x over the block, in every thread.

    partials: a shared float32 array with one element per warp of the block.
    """
    lane = uint32(cuda.laneid)
    x = warp_sum(x)
    cuda.syncthreads()  # the last call's partials have been read
    if lane == 0:
        partials[uint32(cuda.threadIdx.x) // WARP] = x
    cuda.syncthreads()
    x = float32(0.0)
    if lane < partials.size:
        x = partials[lane]
    return warp_sum(x)


@device_function
def block_max(x, partials):
    """The largest x of the block, in every thread; see `block_sum`."""
    lane = uint32(cuda.laneid)
    x = warp_max(x)
    cuda.syncthreads()
    if lane == 0:
        partials[uint32(cuda.threadIdx.x) // WARP] = x
    cuda.syncthreads()
    x = LOWEST
    if lane < partials.size:
        x = partials[lane]
    return warp_max(x)
