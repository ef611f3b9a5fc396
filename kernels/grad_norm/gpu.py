"""GPU gradient norm: partial sums of a fixed number of blocks, then one block adds them up.

No float32 sum is long: 92 million gradients are four sums of 88 squares in each thread, and all
above that is a tree. A gradient above 1.8e19, whose square no float32 can hold, counts as infinite.
"""

import math

from ..common.access import LANES, ByAccess
from ..common.cuda import Floats, cuda, float32, int32, int64, kernel
from ..common.launch import ceil_div, scratch
from ..common.reduce import block_sum

THREADS = 256
WARPS = THREADS // LANES
BLOCKS = 1024  # of the first launch, at most: the same on every device, so that the bits are


def forward(norm, grads, previous) -> None:
    """norm[0] = sqrt(sum of squares of grads [P]); not finite if any element is not.

    NaN if previous[0] is not finite; previous may be None, or norm itself.
    """
    words, sum_squares = _sum_squares.choose(grads.size, grads)
    step = THREADS * words
    run = step * ceil_div(grads.size, BLOCKS * step)
    blocks = ceil_div(grads.size, run)
    partials = scratch(blocks)
    sum_squares.launch(blocks, partials, grads, grads.size, run)
    _root_of_sum.launch(1, norm, partials, blocks, previous, previous is not None)


def _make_sum_squares(words, load, store):
    @kernel(threads=THREADS, name=f"_sum_squares_{words}")
    def _sum_squares(partials: Floats, grads: Floats, n: int64, run: int64):
        """partials[block] = the sum of the squares of grads[block * run : (block + 1) * run]"""
        of_warps = cuda.shared.array(WARPS, float32)
        values = cuda.local.array(words, float32)
        sums = cuda.local.array(words, float32)
        for j in range(words):
            sums[j] = float32(0.0)
        first = cuda.blockIdx.x * run
        own = first + words * cuda.threadIdx.x
        for i in range(own, min(first + run, n), words * THREADS):
            load(values, grads, i)
            for j in range(words):
                sums[j] += values[j] * values[j]
        total = sums[0]
        for j in range(1, words):
            total += sums[j]
        total = block_sum(total, of_warps)
        if cuda.threadIdx.x == 0:
            partials[cuda.blockIdx.x] = total

    return _sum_squares


_sum_squares = ByAccess(_make_sum_squares)


@kernel(threads=THREADS)
def _root_of_sum(norm: Floats, partials: Floats, count: int32, previous: Floats,
                 has_previous: int32):
    """norm[0] = sqrt(sum of partials [count]), but NaN after a norm that is not finite; one block
    """
    of_warps = cuda.shared.array(WARPS, float32)
    total = float32(0.0)
    for i in range(cuda.threadIdx.x, count, THREADS):
        total += partials[i]
    total = block_sum(total, of_warps)
    if cuda.threadIdx.x == 0:
        length = math.sqrt(total)
        if has_previous and not abs(previous[0]) < float32(math.inf):  # true for NaN too
            length = float32(math.nan)
        norm[0] = length
