"""Tiles of a head on tensor cores: who owns what, where it lies, and the two products.

A block of four warps keeps stationary rows of a head and walks over tiles of `streamed` rows; rows
are padded with zeros to `width` = 32, 64 or 128 columns of bf16. A warp owns 16 * row_tiles
stationary rows, and holds them as A fragments of the instruction mma (ptx.mma_bf16), so that only
streamed tiles are read again and again. Both products have float32 accumulators:

    dots          scores [own rows, streamed] = rows · tileᵀ
    add_product   sums   [own rows, width]   += weights [own rows, streamed] · tile

An accumulator is [row tile, column tile, 4], and lane l of the warp owns of every 16 x 8 tile

                columns   2(l % 4)      2(l % 4) + 1
    row l // 4                0               1
    row l // 4 + 8            2               3

The A fragment of 16 x 16 weights is two such tiles side by side, each pair rounded to a word: what
`dots` leaves in a lane is what `add_product` wants there, and weights never leave the registers.

In shared memory a row has width / 8 chunks of 16 bytes, and chunk c of row r lies at chunk
c ^ (r % 8); at c ^ (r // 2 % 4) where a row is 64 bytes long. Eight rows of one chunk, which is
what ldmatrix reads at once, then lie in all 32 banks:

    row 0   0 1 2 3 4 5 6 7
    row 1   1 0 3 2 5 4 7 6
    row 2   2 3 0 1 6 7 4 5   ...

A step along the columns changes two chunks further on: bits of the address that, below the row,
only the swizzle uses. So it is an exclusive or with a constant, and a step along rows is a sum.
"""

import functools
from types import SimpleNamespace

from ..common.cuda import Bfloats, cuda, device_function, float32, int32, int64, kernel, uint32
from ..common.launch import ceil_div
from ..common.ptx import (
    cp_async,
    ldmatrix,
    ldmatrix_transposed,
    load4_words_shared,
    mma_bf16,
    pack_bf16,
    store4_words,
    store_word_shared,
)
from ..common.reduce import max_over, sum_over
from ..common.unroll import unroll, unrolled
from .gpu_tile import padded_width

WARPS = 4
THREADS = 32 * WARPS
WIDTHS = 32, 64, 128
CHUNK = 8  # columns in 16 bytes

quad_sum, quad_max = sum_over(4), max_over(4)  # of the lanes that share rows


def whole_chunks(head_dim: int) -> int:
    """head_dim, or the next multiple of the 8 columns in 16 bytes."""
    return CHUNK * ceil_div(head_dim, CHUNK)


def copy_rows(target, to_columns: int, source, from_columns: int, n_rows: int) -> None:
    """Rows of bf16 into wider rows, whose other columns become zeros, or into narrower ones.

    The kernels here access 16 bytes at a time. Heads that do not allow that are copied to
    scratch memory that does, and results back.
    """
    lanes = padded_width(max(to_columns, from_columns))  # of a row
    _copy_rows.launch(ceil_div(n_rows, THREADS // lanes), target, to_columns, source,
                      from_columns, n_rows, lanes)


@kernel(threads=THREADS)
def _copy_rows(target: Bfloats, to_columns: int32, source: Bfloats, from_columns: int32,
               n_rows: int64, lanes: int32):
    thread = int32(cuda.threadIdx.x)
    row = int64(cuda.blockIdx.x) * (THREADS // lanes) + thread // lanes
    column = thread % lanes
    if row < n_rows and column < to_columns:
        value = uint32(0)
        if column < from_columns:
            value = uint32(source[row * from_columns + column])
        target[row * to_columns + column] = value


@device_function
def lane_index():
    return uint32(cuda.threadIdx.x) & uint32(31)


@device_function
def warp_index():
    return uint32(cuda.threadIdx.x) >> uint32(5)


@device_function
def block_place(rows, length, heads):
    """(tile, number of tiles, head of all sequences, sequence, head of it) of the block.

    In unsigned 32-bit divisions: those of 64 bits are functions of a hundred instructions.
    """
    block, n_heads = uint32(cuda.blockIdx.x), uint32(heads)
    n_tiles = uint32(uint32(length + rows - 1) // uint32(rows))
    n_all = uint32(uint32(cuda.gridDim.x) // n_tiles)
    tile = uint32(block // n_all)
    head = uint32(block - tile * n_all)
    sequence = uint32(head // n_heads)
    return (int32(tile), int32(n_tiles), int32(head), int32(sequence),
            int32(head - sequence * n_heads))


@functools.cache
def make_tensor_functions(width: int, row_tiles: int, streamed: int) -> SimpleNamespace:
    """The device functions for these tiles, and the sizes that go with them.

    The layout of a head in global memory is (elements from row to row, head_dim): head_dim, every
    row and the array itself begin at multiples of 16 bytes.
    """
    row_bytes, chunks = 2 * width, width // 8
    row_step = THREADS // chunks  # rows that the block copies at once: a multiple of 8
    steps, pairs = width // 16, streamed // 16  # along the columns, and along a tile's rows
    score_tiles, sum_tiles = streamed // 8, width // 8
    own_rows = 16 * row_tiles
    scores_size, sums_size = 4 * row_tiles * score_tiles, 4 * row_tiles * sum_tiles

    @device_function
    def chunk_place(row, chunk):
        """Where a chunk of a row lies, in bytes from the beginning of its tile."""
        swizzle = row >> uint32(1) & uint32(3) if width == 32 else row & uint32(7)
        return uint32(row * uint32(row_bytes) + ((chunk ^ swizzle) << uint32(4)))

    @device_function
    def copy(tile, rows, source, start, count, layout):
        """Begin to copy a tile of `rows` rows: zeros from row `count` and column head_dim on."""
        stride, head_dim = layout
        thread = uint32(cuda.threadIdx.x)
        row, chunk = thread // uint32(chunks), thread % uint32(chunks)
        target = uint32(tile + chunk_place(row, chunk))
        column = int32(uint32(8) * chunk)
        n_rows = int32(count - int32(row)) if column < head_dim else int32(0)  # from its own on
        place = int32(int32(row) * stride + column)
        for k in range(rows // row_step):
            is_there = k * row_step < n_rows
            size = int32(16) if is_there else int32(0)
            cp_async(uint32(target + uint32(k * row_step * row_bytes)), source,
                     start + (place if is_there else int32(0)), size)
            place = int32(place + int32(row_step) * stride)

    @device_function
    def lane_along_rows(lane):
        """The row that a lane names to ldmatrix where 16 rows of two chunks are wanted."""
        return chunk_place(lane & uint32(15), lane >> uint32(4))

    @device_function
    def lane_along_columns(lane):
        """The same with the two matrices of a row one after the other: B fragments of dots."""
        row = (lane & uint32(7)) + (lane >> uint32(4) << uint32(3))
        return chunk_place(row, lane >> uint32(3) & uint32(1))

    @unrolled
    def clear(scores):
        for tile in unroll(scores_size // 8):
            for i in range(8):
                scores[8 * tile + i] = float32(0.0)

    @unrolled
    def clear_sums(sums):
        for tile in unroll(sums_size // 8):
            for i in range(8):
                sums[8 * tile + i] = float32(0.0)

    @unrolled
    def load(fragments, tile, lane):
        """The warp's own rows, which begin at `tile`, as A fragments [row_tiles, steps, 4]."""
        own = lane_along_rows(lane)
        for m in unroll(row_tiles):
            for step in range(steps):
                place = uint32(own ^ uint32(step * 32)) + uint32(m * 16 * row_bytes)
                a, b, c, d = ldmatrix(uint32(tile + place))
                to = 4 * (m * steps + step)
                fragments[to], fragments[to + 1], fragments[to + 2], fragments[to + 3] = a, b, c, d

    @device_function
    def multiply(sums, own, fragments, used, b0, b1):
        """sums[own : own + 4] += A fragment number `used` · B fragment."""
        sums[own], sums[own + 1], sums[own + 2], sums[own + 3] = mma_bf16(
            fragments[used], fragments[used + 1], fragments[used + 2], fragments[used + 3],
            b0, b1, sums[own], sums[own + 1], sums[own + 2], sums[own + 3])

    @device_function
    def dots(scores, fragments, tile, lane):
        """scores = own rows · tileᵀ; fragments as `load` leaves them."""
        clear(scores)
        add_dots(scores, fragments, tile, lane)

    @unrolled
    def add_dots(scores, fragments, tile, lane):
        """scores += own rows · tileᵀ."""
        own = lane_along_columns(lane)
        for step in unroll(steps):
            along = uint32(tile + (own ^ uint32(step * 32)))
            for pair in range(pairs):
                b0, b1, b2, b3 = ldmatrix(uint32(along + uint32(pair * 16 * row_bytes)))
                for m in unroll(row_tiles):
                    multiply(scores, 4 * (m * score_tiles + 2 * pair), fragments,
                             4 * (m * steps + step), b0, b1)
                    multiply(scores, 4 * (m * score_tiles + 2 * pair) + 4, fragments,
                             4 * (m * steps + step), b2, b3)

    @unrolled
    def add_product(sums, weights, tile, lane):
        """sums += weights · tile; weights as `pack` leaves them."""
        own = lane_along_rows(lane)
        for pair in unroll(pairs):
            for step in range(steps):
                place = uint32(own ^ uint32(step * 32)) + uint32(pair * 16 * row_bytes)
                b0, b1, b2, b3 = ldmatrix_transposed(uint32(tile + place))
                for m in unroll(row_tiles):
                    multiply(sums, 4 * (m * sum_tiles + 2 * step), weights,
                             4 * (m * pairs + pair), b0, b1)
                    multiply(sums, 4 * (m * sum_tiles + 2 * step) + 4, weights,
                             4 * (m * pairs + pair), b2, b3)

    @unrolled
    def weigh(dscores, scores):
        """dscores *= scores."""
        for tile in unroll(scores_size // 8):
            for i in range(8):
                dscores[8 * tile + i] *= scores[8 * tile + i]

    @unrolled
    def pack(weights, scores):
        """Accumulators [row_tiles, score_tiles, 4] as A fragments [row_tiles, pairs, 4] of bf16."""
        for tile in unroll(scores_size // 8):
            for i in range(4):
                weights[4 * tile + i] = pack_bf16(scores[8 * tile + 2 * i],
                                                  scores[8 * tile + 2 * i + 1])

    @unrolled
    def store(target, start, count, layout, sums, factor, tile, lane):
        """factor times the sums, rounded, to rows 0..count - 1 of the warp's own.

        By way of `tile`, shared memory for its own rows: a lane then writes 16 bytes at once.
        """
        stride, head_dim = layout
        row, word = lane >> uint32(2), (lane & uint32(3)) << uint32(2)
        for m in unroll(row_tiles):
            for n in range(sum_tiles):
                place = tile + chunk_place(row + uint32(16 * m), uint32(n)) + word
                own = 4 * (m * sum_tiles + n)
                store_word_shared(uint32(place),
                                  pack_bf16(factor * sums[own], factor * sums[own + 1]))
                store_word_shared(uint32(place + uint32(8 * row_bytes)),
                                  pack_bf16(factor * sums[own + 2], factor * sums[own + 3]))
        cuda.syncwarp()
        for k in range(own_rows * chunks // 32):
            row = uint32((lane + uint32(32 * k)) // uint32(chunks))
            chunk = uint32((lane + uint32(32 * k)) % uint32(chunks))
            a, b, c, d = load4_words_shared(uint32(tile + chunk_place(row, chunk)))
            column = int32(uint32(8) * chunk)
            if int32(row) < count and column < head_dim:
                store4_words(target, start + int64(row) * stride + column, a, b, c, d)

    return SimpleNamespace(
        own_rows=own_rows, rows=WARPS * own_rows, own_bytes=own_rows * row_bytes,
        stationary_bytes=WARPS * own_rows * row_bytes, streamed_bytes=streamed * row_bytes,
        fragments_size=4 * row_tiles * steps, scores_size=scores_size,
        weights_size=4 * row_tiles * pairs, sums_size=sums_size, clear=clear_sums,
        copy=copy, load=load, dots=dots, add_dots=add_dots,
        add_product=add_product, weigh=weigh, pack=pack, store=store,
    )
