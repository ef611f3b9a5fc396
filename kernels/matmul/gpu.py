"""GPU matrix products: in exact FP32 here; those of bf16 operands are in gpu_bf16.

Three forms of one loop over tiles (gpu_product) serve a layer: x·w and x·wᵀ, which with dy in the
place of x is also the gradient of x, and xᵀ·dy, which is added to dw. Each form exists in tiles of

    128 x 128   the fewest reads for each multiply-add
    64 x 64     four times the blocks, for products that leave much of the GPU idle otherwise
    64 x 64     for rows that cannot be read 16 bytes at a time: odd lengths or addresses

and all give the same bits. Up to FEW_ROWS rows, as in generation, reading the weights takes the
time, and a product would have too few tiles to do it fast: such rows have kernels of their own.
"""

from ..common.access import LANES, low_bf16
from ..common.cuda import (
    Bfloats,
    Floats,
    Kernel,
    cuda,
    device_function,
    float32,
    int32,
    int64,
    kernel,
    uint32,
)
from ..common.launch import MAX_INT32, aligned, ceil_div, check_sizes
from ..common.reduce import ALL_LANES, warp_sum
from ..common.spec import is_bf16
from . import gpu_bf16
from .gpu_epilogue import GELU, PLAIN, RESIDUAL, SLOPE, epilogue_of, gelu_slope, gelu_value
from .gpu_product import ZERO, quad_access, tile_product

TILES = ((128, True), (64, True), (64, False))  # size, and whether quads are read whole
MAX_SIZE = MAX_INT32 // 256 * 256  # the last tile's rows, columns and terms are int32 too
THREADS_TOGETHER = 512  # on a multiprocessor, at least: each may have 128 registers
FEW_ROWS = 8  # the weights are read for each row, though from L2 for all but the first
COLUMNS = 8  # of a block that sums columns: 32 bytes, the least that memory moves
SLICES = 128  # of a column, each for one thread: enough reads under way with few blocks, too
THREADS = COLUMNS * SLICES
PADDED_WARPS = THREADS // LANES + 1  # so that the partial sums of 8 columns lie in 8 banks
DOTS = 8  # warps of a block, one for each dot product


def forward(y, pre_gelu, x, w, bias, residual, transpose_w: bool) -> None:
    """y = x·w + bias; with pre_gelu, that is its value, and y = GELU(pre_gelu).

    x [M,K]; w [K,N], or [N,K] with transpose_w; y, pre_gelu and residual [M,N]; residual is added
    to y. pre_gelu, bias and residual may be None.
    """
    check_sizes(MAX_SIZE, M=x.shape[0], N=y.shape[1], K=x.shape[1])
    if is_bf16(x):
        gpu_bf16.forward(y, pre_gelu, x, w, bias, residual, transpose_w)
    else:
        other = residual if pre_gelu is None else pre_gelu
        _forward(y, other, x, w, bias, epilogue_of(pre_gelu, residual), transpose_w)


def backward(dx, dw, dbias, dy, x, w, pre_gelu, transpose_w: bool) -> None:
    """dx [M,K] is overwritten (None: not wanted); dw and dbias (may be None) are added to.

    With pre_gelu [M,K], where x = GELU(pre_gelu), dx is the gradient of that.
    """
    M, N = dy.shape
    check_sizes(MAX_SIZE, M=M, N=N, K=x.shape[1])
    a, b = (dy, x) if transpose_w else (x, dy)  # dw = aᵀ·b
    if is_bf16(x):
        if dx is not None:
            gpu_bf16.backward_input(dx, dy, w, pre_gelu, transpose_w)
        gpu_bf16.add_product(dw, a, b)
    else:
        if dx is not None:
            epilogue = PLAIN if pre_gelu is None else SLOPE
            _forward(dx, pre_gelu, dy, w, None, epilogue, not transpose_w)
        rows, columns = dw.shape
        add_product, blocks = _choose(_add_product, rows, columns, rows, dw, a, b)
        add_product.launch(blocks, dw, a, b, rows, columns, M)
    if dbias is not None:
        columns, add_column_sums = _add_column_sums[is_bf16(dy)]
        add_column_sums.launch(ceil_div(N, columns), dbias, dy, M, N)


def _forward(y, other, x, w, bias, epilogue: int, transpose_w: bool) -> None:
    """y = x·w + bias and an epilogue, whose second array is `other`."""
    (M, K), N = x.shape, y.shape[1]
    arguments = (y, other, x, w, bias, M, N, K, bias is not None, epilogue)
    if M > FEW_ROWS:
        linear, blocks = _choose(_linear[transpose_w], M, N, K, y, other, x, w, bias)
        linear.launch(blocks, *arguments)
    elif transpose_w:
        _few_rows_transposed.launch(M * ceil_div(N, DOTS), *arguments)
    else:
        _few_rows.launch(M * ceil_div(N, COLUMNS), *arguments)


def _choose(kernels: dict[tuple[int, bool], Kernel], rows: int, columns: int, row_of_a: int,
            *arrays) -> tuple[Kernel, int]:
    """The kernel for a product [rows, columns], and its number of blocks.

    All rows in memory are as long as those of a, row_of_a, or those of the product.
    """
    if row_of_a % 4 or columns % 4 or not aligned(*arrays):
        return kernels[64, False], _tiles(rows, columns, 64)
    # A wave is one block on each multiprocessor. Those of small tiles are a quarter of the work,
    # at four fifths of the speed, since they read 3 quads for 32 multiply-adds, not 4 for 64.
    processors = cuda.current_context().device.MULTIPROCESSOR_COUNT
    large, small = _tiles(rows, columns, 128), _tiles(rows, columns, 64)
    if 5 * ceil_div(small, processors) < 16 * ceil_div(large, processors):
        return kernels[64, True], small
    return kernels[128, True], large


def _tiles(rows: int, columns: int, tile: int) -> int:
    return ceil_div(rows, tile) * ceil_div(columns, tile)


def _make_linear(tile: int, transpose_w: bool, quads: bool) -> Kernel:
    read, write = quad_access(quads)

    @device_function
    def finish(outputs, at, column, count, values):
        """Bias and epilogue of one quad; see `tile_product`."""
        y, other, bias, has_bias, epilogue = outputs
        if has_bias:
            values = _sum4(values, read(bias, column, count))
        if epilogue == GELU:
            write(other, at, count, values)
            values = (gelu_value(values[0]), gelu_value(values[1]),
                      gelu_value(values[2]), gelu_value(values[3]))
        elif epilogue == RESIDUAL:
            values = _sum4(values, read(other, at, count))
        elif epilogue == SLOPE:
            pre_gelu = read(other, at, count)
            values = (values[0] * gelu_slope(pre_gelu[0]), values[1] * gelu_slope(pre_gelu[1]),
                      values[2] * gelu_slope(pre_gelu[2]), values[3] * gelu_slope(pre_gelu[3]))
        write(y, at, count, values)

    product = tile_product(tile, False, transpose_w, quads, finish)

    @kernel(threads=2 * tile, min_blocks=THREADS_TOGETHER // (2 * tile),
            name=_name("_linear_transposed" if transpose_w else "_linear", tile, quads))
    def _linear(y: Floats, other: Floats, x: Floats, w: Floats, bias: Floats,
                M: int32, N: int32, K: int32, has_bias: int32, epilogue: int32):
        product((y, other, bias, has_bias, epilogue), x, w, M, N, K)

    return _linear


def _make_add_product(tile: int, quads: bool) -> Kernel:
    read, write = quad_access(quads)

    @device_function
    def finish(outputs, at, column, count, values):
        """Add one quad to dw; see `tile_product`."""
        (dw,) = outputs
        write(dw, at, count, _sum4(read(dw, at, count), values))

    product = tile_product(tile, True, False, quads, finish)

    @kernel(threads=2 * tile, min_blocks=THREADS_TOGETHER // (2 * tile),
            name=_name("_add_product", tile, quads))
    def _add_product(dw: Floats, a: Floats, b: Floats, rows: int32, columns: int32, M: int32):
        """dw [rows, columns] += aᵀ·b for a [M, rows] and b [M, columns]."""
        product((dw,), a, b, rows, columns, M)

    return _add_product


@device_function
def _sum4(a, b):
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]


def _name(form: str, tile: int, quads: bool) -> str:
    return f"{form}_{tile}{'' if quads else '_odd'}"


@kernel(threads=THREADS)
def _few_rows(y: Floats, other: Floats, x: Floats, w: Floats, bias: Floats,
              M: int32, N: int32, K: int32, has_bias: int32, epilogue: int32):
    """8 columns of one row of y = x·w; a thread takes every 128th row of w [K, N]."""
    partials = cuda.shared.array((COLUMNS, PADDED_WARPS), float32)
    row, block = _row_and_block(M)
    column = block * COLUMNS + cuda.threadIdx.x % COLUMNS
    total = ZERO
    if column < N:
        total = _dot(x, int64(row) * K, w, column, N, cuda.threadIdx.x // COLUMNS, K, SLICES)
    total = _sum_slices(total, partials)
    column = block * COLUMNS + cuda.threadIdx.x // LANES
    if cuda.threadIdx.x < COLUMNS * LANES and cuda.laneid == 0 and column < N:
        _finish(y, other, bias, int64(row) * N + column, column, total, has_bias, epilogue)


@kernel(threads=DOTS * LANES)
def _few_rows_transposed(y: Floats, other: Floats, x: Floats, w: Floats, bias: Floats,
                         M: int32, N: int32, K: int32, has_bias: int32, epilogue: int32):
    """8 columns of one row of y = x·wᵀ; a warp takes one row of w [N, K]."""
    row, block = _row_and_block(M)
    column = block * DOTS + cuda.threadIdx.x // LANES
    if column < N:
        total = warp_sum(_dot(x, int64(row) * K, w, int64(column) * K, 1, cuda.laneid, K, LANES))
        if cuda.laneid == 0:
            _finish(y, other, bias, int64(row) * N + column, column, total, has_bias, epilogue)


@device_function
def _row_and_block(M):
    """The row of x and the block of columns; all rows of a block of columns run together."""
    block = uint32(cuda.blockIdx.x)
    return int32(block % uint32(M)), int32(block // uint32(M))


@device_function
def _dot(x, x_at, w, w_at, w_step, first, K, stride):
    """The sum of x[k]·w[k] over k = first, first + stride, ...; four reads are under way."""
    total = ZERO
    for k in range(first, K, 4 * stride):
        total += ((_term(x, x_at, w, w_at, w_step, k, K)
                   + _term(x, x_at, w, w_at, w_step, k + stride, K))
                  + (_term(x, x_at, w, w_at, w_step, k + 2 * stride, K)
                     + _term(x, x_at, w, w_at, w_step, k + 3 * stride, K)))
    return total


@device_function
def _term(x, x_at, w, w_at, w_step, k, K):
    return x[x_at + k] * w[w_at + int64(k) * w_step] if k < K else ZERO


@device_function
def _sum_slices(total, partials):
    """Sum over the threads of each column: that of column c in warp c, in a fixed order.

    A warp's lanes hold the columns of `partials` again and again.
    """
    columns = partials.shape[0]
    if columns == COLUMNS:
        total += cuda.shfl_xor_sync(ALL_LANES, total, COLUMNS)
    total += cuda.shfl_xor_sync(ALL_LANES, total, 16)
    warp, lane = cuda.threadIdx.x // LANES, cuda.laneid
    if lane < columns:
        partials[lane, warp] = total
    cuda.syncthreads()
    return warp_sum(partials[warp % columns, lane])


@device_function
def _finish(y, other, bias, at, column, value, has_bias, epilogue):
    """Bias and epilogue of one element."""
    if has_bias:
        value += bias[column]
    if epilogue == GELU:
        other[at] = value
        value = gelu_value(value)
    elif epilogue == RESIDUAL:
        value += other[at]
    elif epilogue == SLOPE:
        value *= gelu_slope(other[at])
    y[at] = value


def _make_add_column_sums(columns: int, pointer, number, name: str) -> tuple[int, Kernel]:
    """The columns of a block, and the kernel; number(element) is an element of dy as float32."""
    slices = THREADS // columns

    @device_function
    def element(dy, row, M, N, column):
        return number(dy[int64(row) * N + column]) if row < M else ZERO

    @kernel(threads=THREADS, name=name)
    def _add_column_sums(dbias: Floats, dy: pointer, M: int32, N: int32):
        """dbias [N] += the sums of the columns of dy [M, N]; rows are dealt to the threads."""
        partials = cuda.shared.array((columns, PADDED_WARPS), float32)
        first = cuda.blockIdx.x * columns
        column = first + cuda.threadIdx.x % columns
        total = ZERO
        if column < N:
            for m in range(cuda.threadIdx.x // columns, M, 4 * slices):  # four reads under way
                total += ((element(dy, m, M, N, column) + element(dy, m + slices, M, N, column))
                          + (element(dy, m + 2 * slices, M, N, column)
                             + element(dy, m + 3 * slices, M, N, column)))
        total = _sum_slices(total, partials)
        column = first + cuda.threadIdx.x // LANES
        if cuda.threadIdx.x < columns * LANES and cuda.laneid == 0 and column < N:
            dbias[column] += total

    return columns, _add_column_sums


@device_function
def _same(value):
    return value


_linear = {
    transpose_w: {(tile, quads): _make_linear(tile, transpose_w, quads)
                  for tile, quads in TILES}
    for transpose_w in (False, True)
}
_add_product = {(tile, quads): _make_add_product(tile, quads) for tile, quads in TILES}
_add_column_sums = {  # by whether dy is bf16; 32 bytes of a row for each block
    False: _make_add_column_sums(COLUMNS, Floats, _same, "_add_column_sums"),
    True: _make_add_column_sums(2 * COLUMNS, Bfloats, low_bf16, "_add_column_sums_bf16"),
}
