"""A reduction with a planted fault: the barrier inside its loop is missing.

On a real GPU it may give the right sums for years. The virtual GPU raises an error that names both
threads and both lines.
"""

import numpy as np
from numba import cuda, float32

BLOCK = 128


@cuda.jit(lineinfo=True)
def racing_sum(x, sums):
    """sums[block] = sum of the block's 128 elements of x, or so it is meant."""
    scratch = cuda.shared.array(BLOCK, float32)
    thread = cuda.threadIdx.x
    scratch[thread] = x[cuda.grid(1)]
    cuda.syncthreads()
    half = BLOCK // 2
    while half > 0:
        if thread < half:
            scratch[thread] += scratch[thread + half]
        half //= 2  # here `cuda.syncthreads()` is missing
    if thread == 0:
        sums[cuda.blockIdx.x] = scratch[0]


def main() -> None:
    """Sum 512 ones in four blocks and print the four sums."""
    sums = cuda.device_array(4, np.float32)
    racing_sum[4, BLOCK](cuda.to_device(np.ones(512, np.float32)), sums)
    print(sums.copy_to_host())


if __name__ == "__main__":
    main()
