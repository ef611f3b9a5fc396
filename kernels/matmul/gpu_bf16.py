"""GPU matrix products of bf16 operands: on the tensor cores (gpu_tensor), with FP32 sums.

As in gpu.py, three forms of one loop over tiles serve a layer. Each exists in tiles of

    128 x 256   the fewest bytes of shared memory for each multiply-add
    128 x 128   twice the blocks, for products that leave much of the GPU idle otherwise
    128 x 128   for rows that cannot be read 16 bytes at a time: odd lengths or addresses

A weight gradient may have few tiles and many terms: its rows are then split among several blocks
for each tile, whose sums a second kernel adds to dw in the order of the rows. Up to FEW_ROWS rows,
as in generation, reading the weights takes the time, and the tensor cores are of no use.
"""

from ..common.access import LANES, ByAccess, low_bf16
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
from ..common.launch import aligned, ceil_div, scratch
from ..common.octet import OCTET, ZERO, octet_access, unpack_octet
from ..common.ptx import pack_bf16
from ..common.reduce import sum_over, warp_sum
from .gpu_epilogue import GELU, PLAIN, RESIDUAL, SLOPE, epilogue_of, gelu_slope, gelu_value
from .gpu_tensor import DEPTH, ROWS, blocks_together, shared_bytes, tensor_product
from .gpu_tensor import THREADS as TENSOR_THREADS

LARGE, SMALL = 256, 128  # columns of a tile
TILES = ((LARGE, True), (SMALL, True), (SMALL, False))  # and whether octets are accessed whole
FEW_ROWS = 8  # all rows use the weights that a thread has read
DOTS = 8  # warps of a block, one for each column of y = x·wᵀ
COLUMNS = 16  # of a block of y = x·w: 32 bytes, the least that memory moves
SLICES = 256  # of a column, each for a thread: enough reads under way with few blocks, too
WARPS = COLUMNS // OCTET * SLICES // LANES
ADDERS = 256  # threads of a block that adds partial sums
MOST_SPLITS = 32  # blocks for one tile of a weight gradient
# Writing a partial sum and reading it again are 8 bytes, in which time the tensor cores could do
# this many multiply-adds: 150 operations a byte is between A100 and H200.
TERMS_OF_A_PARTIAL_SUM = 600


def forward(y, pre_gelu, x, w, bias, residual, transpose_w: bool) -> None:
    """See gpu.forward; x, w, pre_gelu and, without a residual, y are bf16."""
    _linear(y, pre_gelu, x, w, bias, residual, epilogue_of(pre_gelu, residual), transpose_w)


def backward_input(dx, dy, w, pre_gelu, transpose_w: bool) -> None:
    """dx = dy·wᵀ, times GELU'(pre_gelu) if that is given."""
    epilogue = PLAIN if pre_gelu is None else SLOPE
    _linear(dx, pre_gelu, dy, w, None, None, epilogue, not transpose_w)


def add_product(dw, a, b) -> None:
    """dw [rows, columns] += aᵀ·b for a [M, rows] and b [M, columns]."""
    M, (rows, columns) = a.shape[0], dw.shape
    processors = cuda.current_context().device.MULTIPROCESSOR_COUNT
    size, splits, terms = _choose_gradient(rows, columns, M, processors)
    wide = rows % OCTET == 0 and columns % OCTET == 0 and aligned(dw, a, b)
    size = size if wide else SMALL
    tiles = _tiles(rows, columns, size)
    target = dw if splits == 1 else scratch(splits * dw.size)
    _add_products[size, wide].launch(tiles * splits, target, a, b, rows, columns, M, terms, tiles,
                                     splits == 1, shared=shared_bytes(size))
    if splits > 1:
        words, add = _add_partials.choose(dw.size, dw, target)
        add.launch(ceil_div(dw.size, ADDERS * words), dw, target, dw.size, splits)


def _linear(y, pre_gelu, x, w, bias, residual, epilogue: int, transpose_w: bool) -> None:
    (M, K), N = x.shape, y.shape[1]
    # y is there twice, since a pointer has one type: the residual sum is float32
    arrays = (y, y, pre_gelu, residual, x, w, bias)
    arguments = (*arrays, M, N, K, bias is not None, epilogue)
    processors = cuda.current_context().device.MULTIPROCESSOR_COUNT
    size, wide = _choose(M, N, K, processors, *arrays)
    if M > FEW_ROWS:
        _linears[transpose_w, size, wide].launch(_tiles(M, N, size), *arguments,
                                                 shared=shared_bytes(size))
    else:
        blocks = ceil_div(N, DOTS if transpose_w else COLUMNS)
        _few_rows[transpose_w, wide].launch(blocks, *arguments)


def _choose(rows: int, columns: int, row_of_a: int, processors: int, *arrays) -> tuple[int, bool]:
    """Columns of a tile for a product [rows, columns], and whether octets are accessed whole.

    All rows in memory are as long as those of a, row_of_a, or those of the product.
    """
    if row_of_a % OCTET or columns % OCTET or not aligned(*arrays):
        return SMALL, False
    return min((LARGE, SMALL), key=lambda size: _turns(_tiles(rows, columns, size), size,
                                                       processors)), True


def _choose_gradient(rows: int, columns: int, M: int, processors: int) -> tuple[int, int, int]:
    """Columns of a tile, blocks for each tile and terms of a block, of dw [rows, columns]."""
    partial_sum = 10 * TERMS_OF_A_PARTIAL_SUM * rows * columns / (ROWS * LARGE * processors)

    def time(choice: tuple[int, int, int]) -> float:
        size, splits, terms = choice
        blocks = splits * _tiles(rows, columns, size)
        return _turns(blocks, size, processors) * terms + (splits > 1) * splits * partial_sum

    choices = []
    for splits in range(1, MOST_SPLITS + 1):
        terms = ceil_div(ceil_div(M, splits), DEPTH) * DEPTH
        choices += [(size, ceil_div(M, terms), terms) for size in (LARGE, SMALL)]
    return min(choices, key=time)


def _turns(blocks: int, size: int, processors: int) -> int:
    """How long the multiprocessors take for so many tiles, in tenths of a large one.

    A large tile fills a multiprocessor. Two small tiles are as much work and read a third more of
    shared memory; one by itself has nobody to wait with. The three numbers are estimates from
    instruction counts, to be measured on each GPU: python -m kernels.bench --tiles.
    """
    if size == LARGE:
        return 10 * ceil_div(blocks, processors)
    full, rest = divmod(blocks, 2 * processors)
    return 11 * full + (0 if rest == 0 else 6 if rest <= processors else 11)


def _tiles(rows: int, columns: int, size: int) -> int:
    return ceil_div(rows, ROWS) * ceil_div(columns, size)


def _make_linear(size: int, transpose_w: bool, wide: bool) -> Kernel:
    access = octet_access(wide)
    read_bf16, read_float = access.read_bf16, access.read_float
    write_bf16, write_float = access.write_bf16, access.write_float

    @device_function
    def finish(outputs, at, column, count, values):
        """Bias and epilogue of one octet; see `tensor_product`."""
        y, sums, pre_gelu, residual, bias, has_bias, epilogue = outputs
        other = cuda.local.array(OCTET, float32)
        if has_bias:
            read_float(other, bias, column, count)
            for i in range(OCTET):
                values[i] += other[i]
        if epilogue == RESIDUAL:
            read_float(other, residual, at, count)
            for i in range(OCTET):
                values[i] += other[i]
            write_float(sums, at, count, values)
        else:
            if epilogue == GELU:
                write_bf16(pre_gelu, at, count, values)
                for i in range(OCTET):
                    values[i] = gelu_value(values[i])
            elif epilogue == SLOPE:
                read_bf16(other, pre_gelu, at, count)
                for i in range(OCTET):
                    values[i] *= gelu_slope(other[i])
            write_bf16(y, at, count, values)

    product = tensor_product(size, False, transpose_w, wide, finish)

    @kernel(threads=TENSOR_THREADS, min_blocks=blocks_together(size),
            name=_name("_linear", transpose_w, f"_{size}", wide))
    def _linear(y: Bfloats, sums: Floats, pre_gelu: Bfloats, residual: Floats, x: Bfloats,
                w: Bfloats, bias: Floats, M: int32, N: int32, K: int32, has_bias: int32,
                epilogue: int32):
        product((y, sums, pre_gelu, residual, bias, has_bias, epilogue), x, w, M, N, K, 0, K,
                uint32(cuda.blockIdx.x))

    return _linear


def _make_add_product(size: int, wide: bool) -> Kernel:
    access = octet_access(wide)
    read_float, write_float = access.read_float, access.write_float

    @device_function
    def finish(outputs, at, column, count, values):
        """Add one octet to dw, or write partial sums; see `tensor_product`."""
        target, first, is_all = outputs
        at = at + first
        if is_all:
            other = cuda.local.array(OCTET, float32)
            read_float(other, target, at, count)
            for i in range(OCTET):
                values[i] += other[i]
        write_float(target, at, count, values)

    product = tensor_product(size, True, False, wide, finish)

    @kernel(threads=TENSOR_THREADS, min_blocks=blocks_together(size),
            name=_name("_add_product", False, f"_{size}", wide))
    def _add_product(target: Floats, a: Bfloats, b: Bfloats, rows: int32, columns: int32, M: int32,
                     terms: int32, tiles: int32, is_all: int32):
        """target [rows, columns] += aᵀ·b, or target [splits, rows, columns] = its partial sums."""
        block = uint32(cuda.blockIdx.x)
        split = uint32(block // uint32(tiles))
        k = int32(split * terms)
        product((target, int64(split) * rows * columns, is_all), a, b, rows, columns, M, k,
                int32(min(M, int32(k + terms))), uint32(block % uint32(tiles)))

    return _add_product


def _make_add_partials(words, load, store):
    @kernel(threads=ADDERS, name=f"_add_partials_{words}")
    def _add_partials(dw: Floats, partials: Floats, n: int64, splits: int32):
        """dw [n] += the sums of partials [splits, n], the first split first."""
        total = cuda.local.array(words, float32)
        values = cuda.local.array(words, float32)
        i = words * cuda.grid(1)
        if i < n:
            load(total, partials, i)
            for split in range(1, splits):
                load(values, partials, split * n + i)
                for j in range(words):
                    total[j] += values[j]
            load(values, dw, i)
            for j in range(words):
                values[j] += total[j]
            store(dw, i, values)

    return _add_partials


def _name(form: str, transpose_w: bool, size: str, wide: bool) -> str:
    return f"{form}{'_transposed' if transpose_w else ''}{size}{'' if wide else '_odd'}"


def _make_few_rows(transpose_w: bool, wide: bool) -> Kernel:
    words = octet_access(wide).words

    @device_function
    def octet(pointer, row, column, width, count):
        """8 neighbours of a row, as they are in memory."""
        return words(pointer, int64(row) * width + column, count)

    @device_function
    def dots(sums, x, M, K, k, w0, w1, k_step):
        """sums[m] += the products of two octets of a row of w with those of each row of x."""
        first = cuda.local.array(OCTET, float32)
        second = cuda.local.array(OCTET, float32)
        other = cuda.local.array(OCTET, float32)
        unpack_octet(first, w0)
        unpack_octet(second, w1)
        for m in range(FEW_ROWS):
            if m < M:
                unpack_octet(other, octet(x, m, k, K, K - k))
                for i in range(OCTET):
                    sums[m] += first[i] * other[i]
                unpack_octet(other, octet(x, m, k + k_step, K, K - k - k_step))
                for i in range(OCTET):
                    sums[m] += second[i] * other[i]

    if transpose_w:
        @kernel(threads=DOTS * LANES, name=_name("_few_rows", True, "", wide))
        def _few_rows(y: Bfloats, sums: Floats, pre_gelu: Bfloats, residual: Floats, x: Bfloats,
                      w: Bfloats, bias: Floats, M: int32, N: int32, K: int32, has_bias: int32,
                      epilogue: int32):
            """8 columns of y = x·wᵀ; a warp takes one row of w [N, K], two octets at a time."""
            step = LANES * OCTET
            totals = cuda.local.array(FEW_ROWS, float32)
            for m in range(FEW_ROWS):
                totals[m] = ZERO
            column = int32(cuda.blockIdx.x * DOTS + cuda.threadIdx.x // LANES)
            if column < N:
                k = int32(OCTET * cuda.laneid)
                while k < K:
                    w0 = octet(w, column, k, K, K - k)
                    w1 = octet(w, column, k + step, K, K - k - step)
                    dots(totals, x, M, K, k, w0, w1, step)
                    k = int32(k + 2 * step)
                total = ZERO
                for m in range(FEW_ROWS):
                    if m < M:
                        the_sum = warp_sum(totals[m])
                        if cuda.laneid == m:
                            total = the_sum
                if cuda.laneid < M:
                    _finish(y, sums, pre_gelu, residual, bias, cuda.laneid, column, N, total,
                            has_bias, epilogue)

        return _few_rows

    @device_function
    def add_row(totals, x, M, K, k, w_row):
        """totals[m, 8] += x[m, k] times 8 elements of row k of w."""
        row = cuda.local.array(OCTET, float32)
        unpack_octet(row, w_row)
        for m in range(FEW_ROWS):
            if m < M:
                factor = low_bf16(x[int64(m) * K + k]) if k < K else ZERO
                for i in range(OCTET):
                    totals[OCTET * m + i] += factor * row[i]

    values_of_thread = FEW_ROWS * OCTET

    @kernel(threads=COLUMNS // OCTET * SLICES, name=_name("_few_rows", False, "", wide))
    def _few_rows(y: Bfloats, sums: Floats, pre_gelu: Bfloats, residual: Floats, x: Bfloats,
                  w: Bfloats, bias: Floats, M: int32, N: int32, K: int32, has_bias: int32,
                  epilogue: int32):
        """16 columns of y = x·w; a thread takes 8 columns of every 256th row of w [K, N]."""
        partials = cuda.shared.array((WARPS, FEW_ROWS, COLUMNS), float32)
        totals = cuda.local.array(values_of_thread, float32)
        for i in range(values_of_thread):
            totals[i] = ZERO
        thread = int32(cuda.threadIdx.x)
        first = int32(cuda.blockIdx.x * COLUMNS)
        place = int32(thread % 2 * OCTET)
        column = int32(first + place)
        k = int32(thread // 2)
        while k < K:
            row0 = octet(w, k, column, N, N - column)
            k1 = int32(k + SLICES)
            row1 = octet(w, k1, column, N, N - column if k1 < K else 0)
            add_row(totals, x, M, K, k, row0)
            add_row(totals, x, M, K, k1, row1)
            k = int32(k + 2 * SLICES)
        warp, lane = thread // LANES, thread % LANES
        for m in range(FEW_ROWS):
            if m < M:
                for i in range(OCTET):
                    total = _sum_slices(totals[OCTET * m + i])
                    if lane < 2:
                        partials[warp, m, place + i] = total
        cuda.syncthreads()
        row, column = thread // COLUMNS, int32(first + thread % COLUMNS)
        if row < M and column < N:
            total = ZERO
            for part in range(WARPS):
                total += partials[part, row, thread % COLUMNS]
            _finish(y, sums, pre_gelu, residual, bias, row, column, N, total, has_bias, epilogue)

    return _few_rows


_sum_slices = sum_over(16, 2)  # of the lanes that have the same columns


@device_function
def _finish(y, sums, pre_gelu, residual, bias, row, column, N, value, has_bias, epilogue):
    """Bias and epilogue of one element."""
    at = int64(row) * N + column
    if has_bias:
        value += bias[column]
    if epilogue == RESIDUAL:
        sums[at] = value + residual[at]
    else:
        if epilogue == GELU:
            pre_gelu[at] = pack_bf16(value, ZERO) & uint32(0xFFFF)
            value = gelu_value(value)
        elif epilogue == SLOPE:
            value *= gelu_slope(low_bf16(pre_gelu[at]))
        y[at] = pack_bf16(value, ZERO) & uint32(0xFFFF)


_linears = {(transpose_w, size, wide): _make_linear(size, transpose_w, wide)
            for transpose_w in (False, True) for size, wide in TILES}
_add_products = {(size, wide): _make_add_product(size, wide) for size, wide in TILES}
_add_partials = ByAccess(_make_add_partials)
_few_rows = {(transpose_w, wide): _make_few_rows(transpose_w, wide)
             for transpose_w in (False, True) for wide in (True, False)}
