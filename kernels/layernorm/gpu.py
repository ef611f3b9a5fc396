"""GPU LayerNorm: a warp per row forward, a block per run of rows backward.

A row is read from memory once and stays in registers. Of a row that is too wide for them, later
passes read again, from the cache.
"""

import math

from ..common.access import BFLOATS, FLOATS, LANES, ByOperand
from ..common.cuda import Bfloats, Floats, cuda, device_function, float32, int32, int64, kernel
from ..common.launch import MAX_GRID_Y, MAX_INT32, ceil_div, check_sizes, scratch
from ..common.reduce import warp_sum

ROWS = 8  # rows, and so warps, of a forward block
KEPT = 32  # numbers that a forward lane keeps in registers
SPAN = KEPT * LANES  # columns that a forward warp keeps
THREADS = 128  # of a backward block
WARPS = THREADS // LANES
BLOCKS = 5  # of a multiprocessor, backward
COLUMNS = 8  # that a backward thread keeps, with their gradients and the sums for gamma and beta
TILE = THREADS * COLUMNS  # columns of a backward block; wider rows take several blocks
ROW_BLOCKS = 512  # at most, all at work together; the same on every device, so that the sums are
ADDERS = 16  # threads that add up the partial sums of a column


def forward(y, mean, rstd, x, gamma, beta, eps: float) -> None:
    """y = gamma * (x - mean) * rstd + beta for each row of x [N,d]; stores mean and rstd [N]."""
    rows, width = x.shape
    check_sizes(MAX_INT32, N=rows, d=width)
    _, normalize = _forward.choose(width, y, x, gamma, beta)
    normalize.launch(ceil_div(rows, ROWS), y, mean, rstd, x, gamma, beta, rows, width,
                     gamma is not None, eps)


def backward(dx, dx_bf16, dgamma, dbeta, dy, x, mean, rstd, gamma, residual) -> None:
    """dx = residual + the gradient through the norm, and dx_bf16 is dx rounded.

    dgamma and dbeta [d] are added to; they are None when the norm has none.
    """
    rows, width = x.shape
    check_sizes(MAX_INT32, N=rows)
    check_sizes(MAX_GRID_Y * TILE, d=width)
    run = ceil_div(rows, ROW_BLOCKS)
    blocks = ceil_div(rows, run)
    partials = scratch(2 * blocks * width)  # [2, blocks, d]: for gamma, for beta
    _, differentiate = _backward.choose(width, dy, dx, dx_bf16, partials, x, gamma, residual)
    differentiate.launch((blocks, ceil_div(width, TILE)), dx, dx_bf16, partials, dy, x, mean, rstd,
                         gamma, residual, rows, width, run, dx_bf16 is not None,
                         gamma is not None, residual is not None)
    if gamma is not None:
        _add_partials.launch((ceil_div(width, LANES), 2), dgamma, dbeta, partials, blocks, width)


def _make_forward(access):
    words, Operands, store = access.words, access.pointer, access.store
    load = FLOATS[words].load
    groups = KEPT // words  # a lane's columns lie in groups of `words` neighbours

    @device_function
    def read(kept, x, first, begin, width):
        """The lane's columns of x[first + begin : first + begin + SPAN], as far as the row goes."""
        values = cuda.local.array(words, float32)
        for group in range(groups):
            column = int32(begin + words * LANES * group + words * cuda.laneid)
            if column < width:
                load(values, x, first + column)
                for j in range(words):
                    kept[words * group + j] = values[j]

    @kernel(threads=ROWS * LANES, name=f"_forward_{access.name}")
    def _forward(y: Operands, mean: Floats, rstd: Floats, x: Floats, gamma: Floats, beta: Floats,
                 rows: int32, width: int32, affine: int32, eps: float32):
        kept = cuda.local.array(KEPT, float32)
        values = cuda.local.array(words, float32)
        gains = cuda.local.array(words, float32)
        offsets = cuda.local.array(words, float32)
        row = cuda.blockIdx.x * ROWS + cuda.threadIdx.x // LANES
        own = int32(words * cuda.laneid)
        if row < rows:  # the same for all lanes
            first = int64(row) * width
            total = float32(0.0)
            for begin in range(0, width, SPAN):
                read(kept, x, first, begin, width)
                for group in range(groups):
                    if int32(begin + words * LANES * group + own) < width:
                        for j in range(words):
                            total += kept[words * group + j]
            mu = warp_sum(total) / float32(width)

            squares = float32(0.0)
            for begin in range(0, width, SPAN):
                if width > SPAN:
                    read(kept, x, first, begin, width)
                for group in range(groups):
                    if int32(begin + words * LANES * group + own) < width:
                        for j in range(words):
                            centred = kept[words * group + j] - mu
                            squares += centred * centred
            scale = float32(1.0) / math.sqrt(warp_sum(squares) / float32(width) + eps)

            for begin in range(0, width, SPAN):
                if width > SPAN:
                    read(kept, x, first, begin, width)
                for group in range(groups):
                    column = int32(begin + words * LANES * group + own)
                    if column < width:
                        for j in range(words):
                            values[j] = (kept[words * group + j] - mu) * scale
                        if affine:
                            load(gains, gamma, column)
                            load(offsets, beta, column)
                            for j in range(words):
                                values[j] = values[j] * gains[j] + offsets[j]
                        store(y, first + column, values)
            if cuda.laneid == 0:
                mean[row] = mu
                rstd[row] = scale

    return _forward


def _make_backward(access):
    words, Operands, load_operand = access.words, access.pointer, access.load
    load, store, store_bf16 = FLOATS[words].load, FLOATS[words].store, BFLOATS[words].store
    groups = COLUMNS // words

    @kernel(threads=THREADS, min_blocks=BLOCKS, name=f"_backward_{access.name}")
    def _backward(dx: Floats, dx_bf16: Bfloats, partials: Floats, dy: Operands, x: Floats,
                  mean: Floats, rstd: Floats, gamma: Floats, residual: Floats, rows: int32,
                  width: int32, run: int32, rounded: int32, affine: int32, has_residual: int32):
        """Block (b, t): dx of rows [b * run, (b + 1) * run) in the columns of tile t, and the
        sums over these rows that belong to dgamma and dbeta."""
        of_warps = cuda.shared.array((2, WARPS, 2), float32)
        values = cuda.local.array(words, float32)
        others = cuda.local.array(words, float32)
        factors = cuda.local.array(words, float32)
        gains = cuda.local.array(COLUMNS, float32)
        gradients = cuda.local.array(COLUMNS, float32)
        centred = cuda.local.array(COLUMNS, float32)
        addends = cuda.local.array(COLUMNS, float32)
        sums_gamma = cuda.local.array(COLUMNS, float32)
        sums_beta = cuda.local.array(COLUMNS, float32)
        block = cuda.blockIdx.x
        own = int32(cuda.blockIdx.y * TILE + words * cuda.threadIdx.x)
        for k in range(COLUMNS):  # 0 also in columns that the row does not have
            gains[k] = float32(1.0)
            gradients[k] = float32(0.0)
            centred[k] = float32(0.0)
            addends[k] = float32(0.0)
            sums_gamma[k] = float32(0.0)
            sums_beta[k] = float32(0.0)
        if affine:
            for group in range(groups):
                column = int32(own + words * THREADS * group)
                if column < width:
                    load(values, gamma, column)
                    for j in range(words):
                        gains[words * group + j] = values[j]

        for row in range(block * run, min((block + 1) * run, rows)):
            first = int64(row) * width
            mu = mean[row]
            scale = rstd[row]
            for group in range(groups):
                column = int32(own + words * THREADS * group)
                if column < width:
                    load_operand(values, dy, first + column)
                    load(others, x, first + column)
                    for j in range(words):
                        gradients[words * group + j] = values[j]
                        centred[words * group + j] = others[j] - mu
                    if has_residual:
                        load(values, residual, first + column)
                        for j in range(words):
                            addends[words * group + j] = values[j]

            sum_g = float32(0.0)  # of g = gamma * dy over the whole row
            sum_gx = float32(0.0)  # of g * (x - mean)
            for k in range(COLUMNS):
                g = gradients[k] * gains[k]
                sum_g += g
                sum_gx += g * centred[k]
            if width > TILE:
                for j in range(words):
                    factors[j] = float32(1.0)
                for column in range(words * cuda.threadIdx.x, width, words * THREADS):
                    if column < own or column >= own + TILE:
                        load_operand(values, dy, first + column)
                        load(others, x, first + column)
                        if affine:
                            load(factors, gamma, column)
                        for j in range(words):
                            g = values[j] * factors[j]
                            sum_g += g
                            sum_gx += g * (others[j] - mu)
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
                column = int32(own + words * THREADS * group)
                if column < width:
                    for j in range(words):
                        k = words * group + j
                        sums_gamma[k] += gradients[k] * (centred[k] * scale)
                        sums_beta[k] += gradients[k]
                        values[j] = addends[k] + scale * (gradients[k] * gains[k] - mean_g
                                                          - centred[k] * slope)
                    store(dx, first + column, values)
                    if rounded:
                        store_bf16(dx_bf16, first + column, values)

        if affine:  # to partials [2, blocks, d]
            for group in range(groups):
                column = int32(own + words * THREADS * group)
                if column < width:
                    for j in range(words):
                        values[j] = sums_gamma[words * group + j]
                        others[j] = sums_beta[words * group + j]
                    store(partials, block * width + column, values)
                    store(partials, (cuda.gridDim.x + block) * width + column, others)

    return _backward


_forward = ByOperand(_make_forward)
_backward = ByOperand(_make_backward)


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
