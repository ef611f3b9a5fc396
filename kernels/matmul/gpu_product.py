"""Tiles of a matrix product in registers: the device functions that all large products share.

C[M, N] = A·B, where A is stored as [M, K] or, transposed, as [K, M], and B as [K, N] or [N, K].
A block of 2·tile threads owns tile x tile elements of C and walks along K, DEPTH terms at a time.
Each thread keeps 8 rows of 4 or 8 columns of them in registers: with 8, it reads 4 quads (of 4
floats, 16 bytes) from shared memory for 64 multiply-adds, few enough that arithmetic sets the pace.

    global memory --fetch--> registers --put--> shared memory --multiply_add--> sums --> finish

Shared memory holds two buffers: while one is multiplied, the next tile is on its way from global
memory into registers, and one barrier for each tile is enough. Each element of C is one chain of
multiply-adds in the order of k: the same bits every time, and with every size of tile.

Source: V. Volkov and J. Demmel, "Benchmarking GPUs to tune dense linear algebra" (SC 2008), and
the tiles of NVIDIA's CUTLASS.
"""

from collections.abc import Callable

from ..common.cuda import cuda, device_function, float32, int32, int64, uint32, uint64
from ..common.ptx import load4, load4_shared, store4, store4_shared

DEPTH = 8  # terms of a tile: one quad of each operand for each thread
ROWS = 8  # of C for each thread: two groups of 4, half a tile apart
ZERO = float32(0)


def tile_product(tile: int, transpose_a: bool, transpose_b: bool, quads: bool,
                 finish: Callable) -> Callable:
    """The device function product(outputs, a, b, M, N, K) of a block; tile is 64 or 128.

    It calls finish(outputs, at, column, count, values) for each quad of C: 4 values of a row from
    `column` on, at offset `at` of C, the first `count` of them inside. quads: global memory is
    accessed 16 bytes at a time, see `quad_access`.
    """
    columns = tile // 16
    elements = ROWS * columns
    half = tile // 2
    stride = tile + 4  # between two k in shared memory; see `put`
    size = DEPTH * stride
    buffers = 2 * size
    begin_a, fetch_a, put_a = _operand(tile, not transpose_a, quads)
    begin_b, fetch_b, put_b = _operand(tile, transpose_b, quads)

    @device_function
    def multiply_add(sums, a_tiles, b_tiles, a_at, b_at):
        """sums += 8 elements of a column of A times 4 or 8 of a row of B."""
        a = cuda.local.array(ROWS, float32)
        b = cuda.local.array(columns, float32)
        a[0], a[1], a[2], a[3] = load4_shared(a_tiles, a_at)
        a[4], a[5], a[6], a[7] = load4_shared(a_tiles, a_at + half)
        b[0], b[1], b[2], b[3] = load4_shared(b_tiles, b_at)
        if columns == 8:
            b[4], b[5], b[6], b[7] = load4_shared(b_tiles, b_at + half)
        for i in range(ROWS):
            for j in range(columns):
                sums[i * columns + j] += a[i] * b[j]

    @device_function
    def finish_row(outputs, M, N, row, column, sums, i):
        """Finish the quads of a row of C, whose sums begin at i."""
        if row < M:
            finish(outputs, int64(row) * N + column, column, int32(N - column),
                   (sums[i], sums[i + 1], sums[i + 2], sums[i + 3]))
            if columns == 8:
                column = int32(column + half)
                finish(outputs, int64(row) * N + column, column, int32(N - column),
                       (sums[i + 4], sums[i + 5], sums[i + 6], sums[i + 7]))

    @device_function
    def product(outputs, a, b, M, N, K):
        sums = cuda.local.array(elements, float32)  # [ROWS, columns]
        a_tiles = cuda.shared.array(buffers, float32, alignment=16)  # [2, DEPTH, stride]
        b_tiles = cuda.shared.array(buffers, float32, alignment=16)
        tiles_of_row = uint32((N + tile - 1) // tile)
        block = uint32(cuda.blockIdx.x)
        row = int32(block // tiles_of_row * tile)
        column = int32(block % tiles_of_row * tile)
        a_at, a_step, a_end, a_across, a_put = begin_a(M, K, row)
        b_at, b_step, b_end, b_across, b_put = begin_b(N, K, column)
        thread_row, thread_column = thread_place()
        for i in range(elements):
            sums[i] = ZERO
        put_a(a_tiles, a_put, fetch_a(a, a_at, a_end, a_across))
        put_b(b_tiles, b_put, fetch_b(b, b_at, b_end, b_across))
        cuda.syncthreads()
        buffer = uint32(0)
        k = int32(0)
        while k < K:
            k = int32(k + DEPTH)
            a_at += a_step  # the tile after this one; past K it is all zeros
            b_at += b_step
            a_next = fetch_a(a, a_at, int32(a_end - k), a_across)
            b_next = fetch_b(b, b_at, int32(b_end - k), b_across)
            a_from = uint32(buffer + thread_row)
            b_from = uint32(buffer + thread_column)
            # DEPTH calls: a loop around a body of this size would stay a loop
            multiply_add(sums, a_tiles, b_tiles, a_from, b_from)
            multiply_add(sums, a_tiles, b_tiles, a_from + stride, b_from + stride)
            multiply_add(sums, a_tiles, b_tiles, a_from + 2 * stride, b_from + 2 * stride)
            multiply_add(sums, a_tiles, b_tiles, a_from + 3 * stride, b_from + 3 * stride)
            multiply_add(sums, a_tiles, b_tiles, a_from + 4 * stride, b_from + 4 * stride)
            multiply_add(sums, a_tiles, b_tiles, a_from + 5 * stride, b_from + 5 * stride)
            multiply_add(sums, a_tiles, b_tiles, a_from + 6 * stride, b_from + 6 * stride)
            multiply_add(sums, a_tiles, b_tiles, a_from + 7 * stride, b_from + 7 * stride)
            buffer = uint32(size - buffer)
            put_a(a_tiles, uint32(buffer + a_put), a_next)
            put_b(b_tiles, uint32(buffer + b_put), b_next)
            cuda.syncthreads()
        row = int32(row + thread_row)
        column = int32(column + thread_column)
        # ROWS calls, for the same reason
        finish_row(outputs, M, N, row, column, sums, 0)
        finish_row(outputs, M, N, row + 1, column, sums, columns)
        finish_row(outputs, M, N, row + 2, column, sums, 2 * columns)
        finish_row(outputs, M, N, row + 3, column, sums, 3 * columns)
        finish_row(outputs, M, N, row + half, column, sums, 4 * columns)
        finish_row(outputs, M, N, row + half + 1, column, sums, 5 * columns)
        finish_row(outputs, M, N, row + half + 2, column, sums, 6 * columns)
        finish_row(outputs, M, N, row + half + 3, column, sums, 7 * columns)

    return product


@device_function
def thread_place():
    """First row and column of the thread's elements within the tile of its block.

    A warp is 4 x 8 threads: the 8 lanes that are served at once read 8 neighbouring quads of B
    and one quad of A, and write 128 neighbouring bytes of C. Two warps lie side by side.
    """
    thread = uint32(cuda.threadIdx.x)
    warp, lane = thread // uint32(32), thread % uint32(32)
    row = warp // uint32(2) * uint32(4) + lane // uint32(8)
    column = warp % uint32(2) * uint32(8) + lane % uint32(8)
    return int32(row * 4), int32(column * 4)


def quad_access(quads: bool) -> tuple[Callable, Callable]:
    """(read, write) for 4 elements of global memory of which the first `count` are there.

    quads: in one access of 16 bytes, so that `count` is at least 4 or below 1, and the address a
    multiple of 16.
    """

    @device_function
    def read(pointer, at, count):
        """pointer[at : at + 4], and zeros from `count` on."""
        if quads:
            return load4(pointer, at) if count > 0 else (ZERO, ZERO, ZERO, ZERO)
        return (pointer[at] if count > 0 else ZERO,
                pointer[at + 1] if count > 1 else ZERO,
                pointer[at + 2] if count > 2 else ZERO,
                pointer[at + 3] if count > 3 else ZERO)

    @device_function
    def write(pointer, at, count, values):
        """pointer[at : at + 4] = values, up to `count`."""
        if quads:
            if count > 0:
                store4(pointer, at, values[0], values[1], values[2], values[3])
        else:
            if count > 0:
                pointer[at] = values[0]
            if count > 1:
                pointer[at + 1] = values[1]
            if count > 2:
                pointer[at + 2] = values[2]
            if count > 3:
                pointer[at + 3] = values[3]

    return read, write


def _operand(tile: int, along_k: bool, quads: bool) -> tuple[Callable, Callable, Callable]:
    """(begin, fetch, put): how a thread moves its quad of an operand's tile to shared memory.

    The operand, with `rows` rows (A) or columns (B), is stored as [rows, K] (along_k) or
    [K, rows]. A quad is 4 elements that are neighbours in memory.
    """
    stride = tile + 4
    quads_of_k = tile // 4
    read, _ = quad_access(quads)

    @device_function
    def begin(rows, K, tile_row):
        """Where the thread's quad is in the tile that starts at tile_row, for k = 0.

        Its offset in the operand, and the step to the next tile; terms that are left before K,
        0 below the last row; rows that are left; offset in a buffer of shared memory.
        """
        thread = uint32(cuda.threadIdx.x)
        if along_k:
            k, quad_row = thread % uint32(2) * 4, thread // uint32(2)
        else:
            k, quad_row = thread // uint32(quads_of_k), thread % uint32(quads_of_k) * 4
        row = int32(tile_row + quad_row)
        across = int32(rows - row)
        end = int32(K - k) if across > 0 else int32(0)
        if along_k:
            at, step = int64(row) * K + k, int64(DEPTH)
        else:
            at, step = int64(k) * rows + row, int64(DEPTH) * rows
        return at, step, end, across, uint32(k * stride + quad_row)

    @device_function
    def fetch(operand, at, left, across):
        """The quad at offset `at`; zeros outside of the operand."""
        if along_k:
            return read(operand, at, left)
        return read(operand, at, across if left > 0 else int32(0))

    @device_function
    def put(tiles, at, values):
        """Store a quad as tiles[k, row]."""
        if along_k:
            # 16 lanes of a warp hold k = 0 to 3 of 16 rows, 16 hold k = 4 to 7: with 4 more than
            # a multiple of 32 words between two k, they store to different banks.
            at = uint64(at)
            tiles[at] = values[0]
            tiles[at + uint64(stride)] = values[1]
            tiles[at + uint64(2 * stride)] = values[2]
            tiles[at + uint64(3 * stride)] = values[3]
        else:
            store4_shared(tiles, at, values[0], values[1], values[2], values[3])

    return begin, fetch, put
