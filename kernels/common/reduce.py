"""Sums and maxima over a warp and over a block, in an order that never changes.

The butterfly adds the same pairs in every lane, so all lanes, and then all threads, get the
same bits. Blocks are one-dimensional with a whole number of warps, and every thread takes part.
"""

from .cuda import cuda, device_function, float32, uint32

ALL_LANES = 0xFFFFFFFF
WARP = uint32(32)  # unsigned: an index that cannot be negative costs fewer instructions
LOWEST = float32(-3.4028235e38)  # of all finite float32 numbers


@device_function
def warp_sum(x):
    """The sum of x over the 32 lanes, in every lane."""
    x += cuda.shfl_xor_sync(ALL_LANES, x, 16)
    x += cuda.shfl_xor_sync(ALL_LANES, x, 8)
    x += cuda.shfl_xor_sync(ALL_LANES, x, 4)
    x += cuda.shfl_xor_sync(ALL_LANES, x, 2)
    x += cuda.shfl_xor_sync(ALL_LANES, x, 1)
    return x


@device_function
def warp_max(x):
    """The largest x of the 32 lanes, in every lane; a NaN is passed over."""
    x = max(x, cuda.shfl_xor_sync(ALL_LANES, x, 16))
    x = max(x, cuda.shfl_xor_sync(ALL_LANES, x, 8))
    x = max(x, cuda.shfl_xor_sync(ALL_LANES, x, 4))
    x = max(x, cuda.shfl_xor_sync(ALL_LANES, x, 2))
    x = max(x, cuda.shfl_xor_sync(ALL_LANES, x, 1))
    return x


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
