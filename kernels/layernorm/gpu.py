"""GPU LayerNorm: a warp per row forward, a block per run of rows backward.

A row is read from memory once; its later passes find it in the cache.
"""

import math

from ..common.access import LANES, ByAccess
from ..common.cuda import Floats, cuda, float32, int32, int64, kernel
from ..common.launch import MAX_GRID_Y, MAX_INT32, ceil_div, check_sizes, scratch
from ..common.reduce import warp_sum

ROWS = 8  # rows, and so warps, of a forward block
THREADS = 128  # of a backward block
WARPS = THREADS // LANES
COLUMNS = 16  # of a backward thread: it keeps their sums for gamma and beta in registers
TILE = THREADS * COLUMNS  # columns of a backward block; wider rows take several blocks
ROW_BLOCKS = 768  # at most; the same on every device, so that the sums are
ADDERS = 16  # threads that add up the partial sums of a column


def forward(y, mean, rstd, x, gamma, beta, eps: float) -> None:
    """y = gamma * (x - mean) * rstd + beta for each row of x [N,d]; stores mean and rstd [N]."""
    rows, width = x.shape
    check_sizes(MAX_INT32, N=rows, d=width)
    _, normalize = _forward.choose(width, y, x, gamma, beta)
    normalize.launch(ceil_div(rows, ROWS), y, mean, rstd, x, gamma, beta, rows, width,
                     gamma is not None, eps)


def backward(dx, dgamma, dbeta, dy, x, mean, rstd, gamma) -> None:
    """dx is overwritten, dgamma and dbeta [d] are added to; None when the norm has none."""
    rows, width = x.shape
    check_sizes(MAX_INT32, N=rows)
    check_sizes(MAX_GRID_Y * TILE, d=width)
    run = ceil_div(rows, ROW_BLOCKS)
    blocks = ceil_div(rows, run)
    partials = scratch(2 * blocks * width)  # [2, blocks, d]: for gamma, for beta
    _, differentiate = _backward.choose(width, dx, partials, dy, x, gamma)
    differentiate.launch((blocks, ceil_div(width, TILE)), dx, partials, dy, x, mean, rstd, gamma,
                         rows, width, run, gamma is not None)
    if gamma is not None:
        _add_partials.launch((ceil_div(width, LANES), 2), dgamma, dbeta, partials, blocks, width)


def _make_forward(words, load, store):
    @kernel(threads=ROWS * LANES, name=f"_forward_{words}")
    def _forward(y: Floats, mean: Floats, rstd: Floats, x: Floats, gamma: Floats, beta: Floats,
                 rows: int32, width: int32, affine: int32, eps: float32):
        values = cuda.local.array(words, float32)
        gains = cuda.local.array(words, float32)
        offsets = cuda.local.array(words, float32)
        row = cuda.blockIdx.x * ROWS + cuda.threadIdx.x // LANES
        lane = cuda.laneid
        if row < rows:  # the same for all lanes
            first = int64(row) * width
            total = float32(0.0)
            for column in range(words * lane, width, words * LANES):
                load(values, x, first + column)
                for j in range(words):
                    total += values[j]
            mu = warp_sum(total) / float32(width)

            squares = float32(0.0)
            for column in range(words * lane, width, words * LANES):
                load(values, x, first + column)
                for j in range(words):
                    squares += (values[j] - mu) * (values[j] - mu)
            scale = float32(1.0) / math.sqrt(warp_sum(squares) / float32(width) + eps)

            for column in range(words * lane, width, words * LANES):
                load(values, x, first + column)
                for j in range(words):
                    values[j] = (values[j] - mu) * scale
                if affine:
                    load(gains, gamma, column)
                    load(offsets, beta, column)
                    for j in range(words):
                        values[j] = values[j] * gains[j] + offsets[j]
                store(y, first + column, values)
            if lane == 0:
                mean[row] = mu
                rstd[row] = scale

    return _forward


def _make_backward(words, load, store):
    groups = COLUMNS // words  # a thread's columns lie in groups of `words` neighbours

    @kernel(threads=THREADS, name=f"_backward_{words}")
    def _backward(dx: Floats, partials: Floats, dy: Floats, x: Floats, mean: Floats, rstd: Floats,
                  gamma: Floats, rows: int32, width: int32, run: int32, affine: int32):
        """Block (b, t): dx of rows [b * run, (b + 1) * run) in the columns of tile t, and the
        sums over these rows that belong to dgamma and dbeta."""
        of_warps = cuda.shared.array((2, WARPS, 2), float32)
        values = cuda.local.array(words, float32)
        gradients = cuda.local.array(words, float32)
        gains = cuda.local.array(words, float32)
        sums_gamma = cuda.local.array(COLUMNS, float32)
        sums_beta = cuda.local.array(COLUMNS, float32)
        for k in range(COLUMNS):
            sums_gamma[k] = float32(0.0)
            sums_beta[k] = float32(0.0)
        for j in range(words):
            gains[j] = float32(1.0)
        block = cuda.blockIdx.x
        own = words * cuda.threadIdx.x

        for row in range(block * run, min((block + 1) * run, rows)):
            first = int64(row) * width
            mu = mean[row]
            scale = rstd[row]
            sum_g = float32(0.0)  # of g = gamma * dy over the whole row
            sum_gx = float32(0.0)  # of g * (x - mean)
            for column in range(own, width, words * THREADS):
                load(gradients, dy, first + column)
                load(values, x, first + column)
                if affine:
                    load(gains, gamma, column)
                for j in range(words):
                    g = gradients[j] * gains[j]
                    sum_g += g
                    sum_gx += g * (values[j] - mu)
            sum_g = warp_sum(sum_g)
            sum_gx = warp_sum(sum_gx)
            turn = row & 1  # rows take turns with two buffers, so one barrier per row is enough
            if cuda.laneid == 0:
                of_warps[turn, cuda.threadIdx.x // LANES, 0] = sum_g
                of_warps[turn, cuda.threadIdx.x // LANES, 1] = sum_gx
            cuda.syncthreads()
            sum_g = of_warps[turn, 0, 0]
            sum_gx = of_warps[turn, 0, 1]
            for warp in range(1, WARPS):
                sum_g += of_warps[turn, warp, 0]
                sum_gx += of_warps[turn, warp, 1]
            mean_g = sum_g / float32(width)
            slope = sum_gx * scale * scale / float32(width)

            for group in range(groups):
                column = cuda.blockIdx.y * TILE + group * words * THREADS + own
                if column < width:
                    load(gradients, dy, first + column)
                    load(values, x, first + column)
                    if affine:
                        load(gains, gamma, column)
                    for j in range(words):
                        centred = values[j] - mu
                        sums_gamma[group * words + j] += gradients[j] * (centred * scale)
                        sums_beta[group * words + j] += gradients[j]
                        values[j] = scale * (gradients[j] * gains[j] - mean_g - centred * slope)
                    store(dx, first + column, values)

        if affine:  # to partials [2, blocks, d]
            for group in range(groups):
                column = cuda.blockIdx.y * TILE + group * words * THREADS + own
                if column < width:
                    for j in range(words):
                        values[j] = sums_gamma[group * words + j]
                        gradients[j] = sums_beta[group * words + j]
                    store(partials, block * width + column, values)
                    store(partials, (cuda.gridDim.x + block) * width + column, gradients)

    return _backward


_forward = ByAccess(_make_forward)
_backward = ByAccess(_make_backward)


@kernel(threads=(LANES, ADDERS))
def _add_partials(dgamma: Floats, dbeta: Floats, partials: Floats, blocks: int32, width: int32):
    """Block (c, 0) adds to 32 columns of dgamma, block (c, 1) to 32 columns of dbeta."""
    sums = cuda.shared.array((ADDERS, LANES), float32)
    lane, adder = cuda.threadIdx.x, cuda.threadIdx.y
    column = cuda.blockIdx.x * LANES + lane
    total = float32(0.0)
    if column < width:
        for block in range(adder, blocks, ADDERS):
            total += partials[(cuda.blockIdx.y * blocks + block) * width + column]
    sums[adder, lane] = total
    cuda.syncthreads()
    if adder == 0 and column < width:
        for other in range(1, ADDERS):
            total += sums[other, lane]
        if cuda.blockIdx.y == 0:
            dgamma[column] += total
        else:
            dbeta[column] += total
