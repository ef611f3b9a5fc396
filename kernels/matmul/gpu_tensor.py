"""Matrix products on the tensor cores: C = A·B with bf16 operands and float32 sums.

A is stored as [M, K] or, transposed, as [K, M], and B as [K, N] or [N, K]. A block of 8 warps owns
a tile of C and walks along K, DEPTH terms at a time; every warp keeps its part of C in registers.

    tile of C    warps    C of a warp    fragments          blocks on a multiprocessor
    128 x 256    2 x 4    64 x 64        read one step ahead    1, with 255 registers a thread
    128 x 128    4 x 2    32 x 64        read when needed       2, each hides the other's waits

    global memory --cp.async--> shared memory --ldmatrix--> fragments --mma--> sums
                                                                                 |
    global memory <--16 bytes-- finish <--a row's 8 neighbours-- shared memory <-+

Pipeline. Shared memory is a ring of STAGES tiles of A and B. While one is multiplied, the copies
of the next two are under way: each step issues those of the tile that is STAGES - 1 steps ahead,
into the place that all warps left before the last barrier. It is one wait and one barrier a step:

    wait until this tile has arrived; barrier; issue tile + 2; 2 x (ldmatrix, mma)     128 x 128
    mma of k = 0..15 | wait for the next tile; barrier; its ldmatrix | mma of 16..31   128 x 256

Layout. A row of a tile in shared memory is a run of 16-byte chunks, as neighbours in global memory
are. Eight addresses of an ldmatrix are served at once, and they are those of 8 rows: chunks of a
row are permuted by XOR so that these 8 lie in different banks. Where rows run along K, a tile has
4 chunks a row, and two rows fill the 32 banks; elsewhere, a row is 2 or 4 times the banks.

    operand stored along K: chunk ^ (row / 2 % 4)       across K, rows are k: chunk ^ (k % 8)

    row 0  | 0 1 2 3 |                                  k = 0  | 0 1 2 3 4 5 6 7 | 8 9 ..
    row 1  | 0 1 2 3 |   one line of                    k = 1  | 1 0 3 2 5 4 7 6 | 9 8 ..
    row 2  | 1 0 3 2 |   128 bytes                      k = 2  | 2 3 0 1 6 7 4 5 | ..
    row 3  | 1 0 3 2 |   is two rows                    k = 3  | 3 2 1 0 7 6 5 4 | ..

Fragments. `ldmatrix` reads four 8 x 8 matrices, two along K and two across. Operands stored along K
are read as they lie, the others transposed on the way (`ldmatrix_transposed`), so that all four
forms of a product have the same loop. Sums: see `mma_bf16`.

Edges. Past K, copies of 0 bytes fill with zeros; rows past M or N are replaced by the last one, and
what comes of them is not stored. Each element of C is one chain of tensor-core sums in the order of
k: the same bits every time, and with either tile.

Source: NVIDIA's CUTLASS (the loop and the permuted layout, "Developing CUDA kernels to push tensor
cores to the absolute limit on NVIDIA A100", GTC 2020); V. Volkov and J. Demmel (see gpu_product).
"""

from collections.abc import Callable

from ..common.cuda import cuda, device_function, float32, int32, int64, uint32
from ..common.octet import OCTET, octet_access
from ..common.ptx import (
    bits_float,
    cp_async,
    cp_async_commit,
    cp_async_wait_0,
    cp_async_wait_1,
    dynamic_shared,
    ldmatrix,
    ldmatrix_transposed,
    load4_words_shared,
    mma_bf16,
    store2_shared_at,
    store4_words_shared,
)

THREADS = 256
ROWS = 128  # of a tile of C
DEPTH = 32  # terms of K in a tile
STAGES = 3
GROUP = 8  # rows of tiles that run together, so that L2 serves both operands
WARP_COLUMNS = 64
STEP = 16  # terms of an mma
ROW_BYTES = 2 * DEPTH  # of an operand stored along K
CHUNK = 16  # bytes
ROUND = THREADS * CHUNK  # bytes that the threads copy at once
# Sums on their way out: 16 rows of a warp, a row as its even and its odd quads (of 4 floats). The
# gaps put 4 rows of pairs, as fragments are written, and 8 quads, as they are read, in 32 banks.
HALF_BYTES = 4 * 36
PARKED_BYTES = 4 * 72
PARKED = STEP * PARKED_BYTES
ZERO = float32(0)


def shared_bytes(columns: int) -> int:
    """Dynamic shared memory of a block whose tile of C has so many columns."""
    return STAGES * (ROWS + columns) * ROW_BYTES


def blocks_together(columns: int) -> int:
    """Blocks on a multiprocessor: bounds registers at 128 or 255."""
    return 256 // columns


def tensor_product(columns: int, transpose_a: bool, transpose_b: bool, wide: bool,
                   finish: Callable) -> Callable:
    """The device function product(outputs, a, b, M, N, K, k, end, block) of a block of 256 threads.

    It computes the sums over k, k + 1, ..., end - 1 (end at most K; k a multiple of DEPTH) of tile
    number `block` of C, and calls finish(outputs, at, column, count, values) for each octet of C:
    8 values of a row from `column` on, at offset `at` of C, the first `count` of them inside.
    columns: of the tile, 128 or 256. wide: all rows can be accessed 16 bytes at a time, see
    `octet_access`; it saves the detour of operands through registers.
    """
    warps_across = columns // WARP_COLUMNS
    warp_rows = ROWS * warps_across // 8
    row_steps = warp_rows // STEP  # 16 rows of A for an mma
    a_words, b_words = 4 * row_steps, 2 * WARP_COLUMNS // 8
    elements = warp_rows * WARP_COLUMNS // 32
    ahead = columns == 256
    stage = (ROWS + columns) * ROW_BYTES
    a_bytes = ROWS * ROW_BYTES
    begin_a, copy_a = _copies(ROWS, not transpose_a, wide)
    begin_b, copy_b = _copies(columns, transpose_b, wide)
    place_a, load_a = _fragments(ROWS, warp_rows, not transpose_a, True)
    place_b, load_b = _fragments(columns, WARP_COLUMNS, transpose_b, False)

    @device_function
    def multiply(sums, a, b):
        """sums += the products of one step of 16 terms."""
        for i in range(row_steps):
            for j in range(8):
                at = 32 * i + 4 * j
                sums[at], sums[at + 1], sums[at + 2], sums[at + 3] = mma_bf16(
                    a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3], b[2 * j], b[2 * j + 1],
                    sums[at], sums[at + 1], sums[at + 2], sums[at + 3])

    @device_function
    def finish_rows(outputs, M, N, row, column, sums, i, parked):
        """Finish 16 rows of a warp, from `row` on: fragments to octets, through shared memory."""
        lane = uint32(cuda.laneid)
        row_of_pair, pair = uint32(lane // uint32(4)), uint32(lane % uint32(4))
        at = uint32(parked + row_of_pair * PARKED_BYTES + pair // uint32(2) * HALF_BYTES
                    + pair % uint32(2) * 8)
        for j in range(8):
            store2_shared_at(uint32(at + 16 * j), sums[i + 4 * j], sums[i + 4 * j + 1])
            store2_shared_at(uint32(at + 16 * j + 8 * PARKED_BYTES),
                             sums[i + 4 * j + 2], sums[i + 4 * j + 3])
        cuda.syncwarp()
        values = cuda.local.array(OCTET, float32)
        across, down = uint32(lane % uint32(8)), uint32(lane // uint32(8))
        at = uint32(parked + down * PARKED_BYTES + across * CHUNK)
        column = int32(column + across * OCTET)
        last = min(M, int32(row + STEP))
        row = int32(row + down)
        while row < last and column < N:
            q0, q1, q2, q3 = load4_words_shared(at)
            q4, q5, q6, q7 = load4_words_shared(uint32(at + HALF_BYTES))
            values[0], values[1] = bits_float(q0), bits_float(q1)
            values[2], values[3] = bits_float(q2), bits_float(q3)
            values[4], values[5] = bits_float(q4), bits_float(q5)
            values[6], values[7] = bits_float(q6), bits_float(q7)
            finish(outputs, int64(row) * N + column, column, int32(N - column), values)
            row = int32(row + 4)
            at = uint32(at + 4 * PARKED_BYTES)

    @device_function
    def issue(a, b, a_from, b_from, memory, M, N, K, k, end):
        """Begin to copy the tiles of A and B that start at k."""
        copy_a(memory, a, a_from, M, K, k, end)
        copy_b(uint32(memory + a_bytes), b, b_from, N, K, k, end)
        cp_async_commit()

    @device_function
    def product(outputs, a, b, M, N, K, k, end, block):
        sums = cuda.local.array(elements, float32)  # [row_steps, 8, 4]: fragments of 16 x 8
        a_now = cuda.local.array(a_words, uint32)
        b_now = cuda.local.array(b_words, uint32)
        a_next = cuda.local.array(a_words, uint32)
        b_next = cuda.local.array(b_words, uint32)
        for i in range(elements):
            sums[i] = ZERO
        tile_row, tile_column = _tile(M, N, columns, block)
        memory = dynamic_shared()
        warp = uint32(cuda.threadIdx.x) // uint32(32)
        warp_row = uint32(warp // uint32(warps_across) * uint32(warp_rows))
        warp_column = uint32(warp % uint32(warps_across) * uint32(WARP_COLUMNS))
        a_from, b_from = begin_a(M, tile_row), begin_b(N, tile_column)
        a_at = uint32(memory + place_a(warp_row))
        b_at = uint32(memory + a_bytes + place_b(warp_column))
        issue(a, b, a_from, b_from, memory, M, N, K, k, end)
        issue(a, b, a_from, b_from, uint32(memory + stage), M, N, K, int32(k + DEPTH), end)
        slot = uint32(0)  # of the tile that is multiplied, in bytes
        if ahead:
            cp_async_wait_1()
            cuda.syncthreads()
            load_a(a_now, a_at, 0)
            load_b(b_now, b_at, 0)
        while k < end:
            free = uint32(slot - stage) if slot >= stage else uint32(slot + 2 * stage)
            if ahead:
                load_a(a_next, uint32(a_at + slot), 1)
                load_b(b_next, uint32(b_at + slot), 1)
                issue(a, b, a_from, b_from, uint32(memory + free), M, N, K,
                      int32(k + 2 * DEPTH), end)
                multiply(sums, a_now, b_now)
                cp_async_wait_1()
                cuda.syncthreads()
                slot = uint32(slot + stage) if slot < 2 * stage else uint32(0)
                load_a(a_now, uint32(a_at + slot), 0)
                load_b(b_now, uint32(b_at + slot), 0)
                multiply(sums, a_next, b_next)
            else:
                cp_async_wait_1()
                cuda.syncthreads()
                issue(a, b, a_from, b_from, uint32(memory + free), M, N, K,
                      int32(k + 2 * DEPTH), end)
                load_a(a_now, uint32(a_at + slot), 0)
                load_b(b_now, uint32(b_at + slot), 0)
                multiply(sums, a_now, b_now)
                load_a(a_now, uint32(a_at + slot), 1)
                load_b(b_now, uint32(b_at + slot), 1)
                multiply(sums, a_now, b_now)
                slot = uint32(slot + stage) if slot < 2 * stage else uint32(0)
            k = int32(k + DEPTH)
        cp_async_wait_0()  # the zeros past the end
        cuda.syncthreads()  # all have read their last tile: its memory is free
        parked = uint32(memory + warp * uint32(PARKED))
        row, column = int32(tile_row + warp_row), int32(tile_column + warp_column)
        # calls, as a loop around a body of this size would stay a loop; each uses the same memory
        finish_rows(outputs, M, N, row, column, sums, 0, parked)
        cuda.syncwarp()
        finish_rows(outputs, M, N, row + 16, column, sums, 32, parked)
        if row_steps == 4:
            cuda.syncwarp()
            finish_rows(outputs, M, N, row + 32, column, sums, 64, parked)
            cuda.syncwarp()
            finish_rows(outputs, M, N, row + 48, column, sums, 96, parked)

    return product


@device_function
def _tile(M, N, columns, block):
    """First row and column of a tile of C; groups of GROUP rows of tiles, column after column."""
    across = uint32((N + columns - 1) // columns)
    group = uint32(block // uint32(GROUP * across))
    first = uint32(GROUP * group)
    within = uint32(block - uint32(first * across))
    high = uint32(min(uint32(uint32((M + ROWS - 1) // ROWS) - first), uint32(GROUP)))
    row = uint32(first + within % high)
    return int32(row * ROWS), int32(within // high * columns)


def _copies(tile: int, along_k: bool, wide: bool) -> tuple[Callable, Callable]:
    """(begin, copy): how a thread's chunks of an operand's tile come into shared memory.

    The operand, with `rows` rows (A) or columns (B), is stored as [rows, K] (along_k) or
    [K, rows]. The thread's chunks lie one below the other, ROUND bytes apart.
    """
    chunks = DEPTH // OCTET if along_k else tile // OCTET  # of a row
    rows_together = THREADS // chunks
    rounds = tile * ROW_BYTES // ROUND
    words = octet_access(wide).words

    @device_function
    def begin(rows, first):
        """The thread's place in shared memory; its first row and k in the operand."""
        thread = uint32(cuda.threadIdx.x)
        row, chunk = uint32(thread // uint32(chunks)), uint32(thread % uint32(chunks))
        if along_k:
            swapped = uint32(chunk ^ (row >> uint32(1) & uint32(3)))
            return (uint32(row * ROW_BYTES + swapped * CHUNK), int32(first + row),
                    int32(chunk * OCTET))
        swapped = uint32(chunk ^ (row & uint32(7)))
        column = int32(first + chunk * OCTET)
        if wide:
            column = int32(min(column, int32(rows - OCTET)))
        return uint32(row * uint32(2 * tile) + swapped * CHUNK), column, int32(row)

    @device_function
    def put(destination, operand, at, count):
        """Copy an octet of which the first `count` are there, and zeros for the rest."""
        if wide:
            cp_async(destination, operand, at, int32(CHUNK) if count > 0 else int32(0))
        else:
            w0, w1, w2, w3 = words(operand, at, count)
            store4_words_shared(destination, w0, w1, w2, w3)

    @device_function
    def copy(memory, operand, start, rows, K, k, end):
        place, row, first_k = start
        destination, k = uint32(memory + place), int32(k + first_k)
        for i in range(rounds):
            if along_k:
                the_row = int32(min(int32(row + i * rows_together), int32(rows - 1)))
                column = int32(min(k, int32(K - OCTET))) if wide else k
                put(uint32(destination + i * ROUND), operand, int64(the_row) * K + column,
                    int32(end - k))
            else:
                the_k = int32(k + i * rows_together)
                count = int32(rows - row) if the_k < end else int32(0)
                the_k = int32(min(the_k, int32(K - 1)))
                put(uint32(destination + i * ROUND), operand, int64(the_k) * rows + row, count)

    return begin, copy


def _fragments(tile: int, rows: int, along_k: bool, is_a: bool) -> tuple[Callable, Callable]:
    """(place, load): how a warp reads the fragments of its `rows` rows (A) or columns (B).

    Of the four matrices of an ldmatrix, the second is 8 rows further in A and 8 terms further
    in B, the third the other way round; see `mma_bf16`.
    """
    @device_function
    def place(first):
        """Where the lane's row of an ldmatrix lies in the tile, for the warp's first row."""
        lane = uint32(cuda.laneid)
        second, third = uint32(lane >> uint32(3) & uint32(1)), uint32(lane >> uint32(4))
        row_half, k_half = (second, third) if is_a else (third, second)
        in_matrix = uint32(lane & uint32(7))
        if along_k:
            row = uint32(first + in_matrix + row_half * 8)
            return uint32(row * ROW_BYTES + (k_half ^ (in_matrix >> uint32(1))) * CHUNK)
        chunk = uint32(first // uint32(OCTET) + row_half)
        k = uint32(in_matrix + k_half * 8)
        return uint32(k * uint32(2 * tile) + (chunk ^ in_matrix) * CHUNK)

    @device_function
    def load(fragments, at, step):
        """The fragments of one step of 16 terms, 0 or 1, in the tile whose `place` is `at`."""
        for i in range(rows // STEP):
            if along_k:
                w = ldmatrix(uint32((at ^ uint32(2 * CHUNK * step)) + i * STEP * ROW_BYTES))
            else:
                w = ldmatrix_transposed(uint32((at ^ uint32(2 * CHUNK * i))
                                               + step * STEP * 2 * tile))
            (fragments[4 * i], fragments[4 * i + 1], fragments[4 * i + 2],
             fragments[4 * i + 3]) = w

    return place, load
