"""Tiles of a head for the CUDA kernels: who owns what, and the products of tiles.

A block keeps a stationary tile of `rows` rows and walks over a streamed tile of `streamed` rows
of the same head; rows are padded with zeros to `width` = 32, 64 or 128 columns. Eight threads,
the lanes of a row group, own four stationary rows (two where rows are 128 wide):

    scores [rows, streamed]   rows own_rows*group + i, columns per_lane*lane + j
    sums   [rows, width]      rows own_rows*group + i, columns 32*strip + 4*lane + 0..3

A thread's values live in registers: local arrays [own_rows, per_lane] and [own_rows, strips, 4].
Tiles in shared memory are accessed 128 bits at a time. Chunk c (4 columns) of a row lies at chunk
c ^ (owner % 8), owner being the row's group or lane: eight threads that read the same chunk of
their own rows then use all 32 banks, and no padding is needed.
"""

import functools
from types import SimpleNamespace

from ..common.cuda import cuda, device_function, float32, int64, uint32
from ..common.ptx import load4, load4_shared, store4, store4_shared
from ..common.reduce import LOWEST, max_over, sum_over

LANES = 8  # threads of a row group
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
HIDDEN = LOWEST  # the score of a later key: finite, so that differences are not NaN

# width: stationary rows of a block, stationary rows of a thread, streamed rows. Backward keeps two
# stationary tiles, a streamed tile and a tile of weights: at most the 48 KB that a block may have,
# so that two blocks fit everywhere.
SHAPES = {32: (64, 4, 32), 64: (64, 4, 32), 128: (32, 2, 16)}
MIN_BLOCKS = 3  # on a multiprocessor, for 168 registers a thread

lane_sum, lane_max = sum_over(LANES), max_over(LANES)  # of the lanes of a row group


@device_function
def zero(values):
    for i in range(values.size):
        values[i] = float32(0.0)


@device_function
def thread_index():
    """The thread's number, zero-extended: the compiler then sees that // and % are shifts."""
    return int64(uint32(cuda.threadIdx.x))


@device_function
def read4(source, place, n_columns, is_aligned):
    """source[place : place + 4], of which only n_columns are there; zeros for the others."""
    a = b = c = d = float32(0.0)
    if is_aligned:
        if n_columns > 0:
            a, b, c, d = load4(source, place)
    else:
        if n_columns > 0:
            a = source[place]
        if n_columns > 1:
            b = source[place + 1]
        if n_columns > 2:
            c = source[place + 2]
        if n_columns > 3:
            d = source[place + 3]
    return a, b, c, d


@device_function
def write4(target, place, n_columns, is_aligned, a, b, c, d):
    """The counterpart of `read4`: writes the first n_columns of the four values."""
    if is_aligned:
        if n_columns > 0:
            store4(target, place, a, b, c, d)
    else:
        if n_columns > 0:
            target[place] = a
        if n_columns > 1:
            target[place + 1] = b
        if n_columns > 2:
            target[place + 2] = c
        if n_columns > 3:
            target[place + 3] = d


@functools.cache
def make_tile_functions(width: int) -> SimpleNamespace:
    """The device functions for rows of `width` columns, and the sizes that go with them.

    The layout of a head in global memory is (elements from row to row, head_dim, is_aligned);
    is_aligned says that 128-bit accesses may begin at every row.
    """
    rows, own_rows, streamed = SHAPES[width]
    threads = rows // own_rows * LANES
    per_lane = streamed // LANES
    chunks = width // 4
    strips = width // 32  # chunks of a row of sums that one thread owns
    weight_chunks = streamed // 4  # of a row of weights: 8 or 4
    row_step = threads // chunks  # rows that the block reads at once
    fetches = streamed // row_step
    tile_rows_size, factors_size = 4 * per_lane, 4 * own_rows

    @device_function
    def fetch(fetched, source, start, count, layout):
        """Global memory -> registers: rows 0..count - 1 of a streamed tile, zeros below.

        Apart from `put`, so that the loads are on their way while the block computes.
        """
        stride, head_dim, is_aligned = layout
        row, column = thread_index() // chunks, thread_index() % chunks * 4
        place = start + row * stride + column
        for k in range(fetches):
            n_columns = head_dim - column if row + k * row_step < count else 0
            a, b, c, d = read4(source, place, n_columns, is_aligned)
            fetched[4 * k], fetched[4 * k + 1] = a, b
            fetched[4 * k + 2], fetched[4 * k + 3] = c, d
            place += row_step * stride

    @device_function
    def put(tile, fetched):
        """Registers -> shared memory: what `fetch` fetched becomes the streamed tile."""
        for k in range(fetches):
            row, chunk = thread_index() // chunks + k * row_step, thread_index() % chunks
            place = row * width + (chunk ^ row // per_lane % 8) * 4
            store4_shared(tile, place, fetched[4 * k], fetched[4 * k + 1], fetched[4 * k + 2],
                          fetched[4 * k + 3])

    @device_function
    def load(tile, source, start, count, layout, factor):
        """Global -> shared memory: factor times the stationary tile, zeros from row `count` on."""
        stride, head_dim, is_aligned = layout
        column = thread_index() % chunks * 4
        for row in range(thread_index() // chunks, rows, row_step):
            n_columns = head_dim - column if row < count else 0
            a, b, c, d = read4(source, start + row * stride + column, n_columns, is_aligned)
            place = row * width + (column // 4 ^ row // own_rows % 8) * 4
            store4_shared(tile, place, factor * a, factor * b, factor * c, factor * d)

    @device_function
    def dots(scores, stationary, tile, head_dim, group, lane):
        """scores[i, j] = the dot product of stationary row i and streamed row j."""
        tile_rows = cuda.local.array(tile_rows_size, float32)  # [per_lane, 4]
        zero(scores)
        for chunk in range((head_dim + 3) // 4):
            for j in range(per_lane):
                place = (per_lane * lane + j) * width + (chunk ^ lane) * 4
                a, b, c, d = load4_shared(tile, place)
                tile_rows[4 * j], tile_rows[4 * j + 1] = a, b
                tile_rows[4 * j + 2], tile_rows[4 * j + 3] = c, d
            for i in range(own_rows):
                place = (own_rows * group + i) * width + (chunk ^ group % 8) * 4
                a, b, c, d = load4_shared(stationary, place)
                for j in range(per_lane):
                    score = scores[per_lane * i + j]
                    score += a * tile_rows[4 * j]
                    score += b * tile_rows[4 * j + 1]
                    score += c * tile_rows[4 * j + 2]
                    score += d * tile_rows[4 * j + 3]
                    scores[per_lane * i + j] = score

    @device_function
    def share(weights, values, group, lane):
        """Registers -> shared memory: the values of all threads as a tile [rows, streamed]."""
        for i in range(own_rows):
            start = (own_rows * group + i) * streamed
            chunk = per_lane * lane // 4 ^ group % weight_chunks
            if per_lane == 4:
                store4_shared(weights, start + chunk * 4, values[4 * i], values[4 * i + 1],
                              values[4 * i + 2], values[4 * i + 3])
            else:
                for j in range(per_lane):
                    weights[start + chunk * 4 + per_lane * lane % 4 + j] = \
                        values[per_lane * i + j]

    @device_function
    def add_product(sums, weights, tile, count, group, lane):
        """sums[i, :] += weights[i, :] · tile, of which the first `count` rows are not zero."""
        factors = cuda.local.array(factors_size, float32)  # [own_rows, 4 streamed rows]
        for quad in range((min(count, streamed) + 3) // 4):
            for i in range(own_rows):
                place = (own_rows * group + i) * streamed + (quad ^ group % weight_chunks) * 4
                a, b, c, d = load4_shared(weights, place)
                factors[4 * i], factors[4 * i + 1] = a, b
                factors[4 * i + 2], factors[4 * i + 3] = c, d
            for r in range(4):
                row = 4 * quad + r
                chunk = lane ^ row // per_lane % 8
                for strip in range(strips):
                    a, b, c, d = load4_shared(tile, row * width + strip * 32 + chunk * 4)
                    for i in range(own_rows):
                        sums[4 * (strips * i + strip)] += factors[4 * i + r] * a
                        sums[4 * (strips * i + strip) + 1] += factors[4 * i + r] * b
                        sums[4 * (strips * i + strip) + 2] += factors[4 * i + r] * c
                        sums[4 * (strips * i + strip) + 3] += factors[4 * i + r] * d

    @device_function
    def store(target, start, count, layout, sums, factor, group, lane):
        """Registers -> global memory: factor times the sums, rows 0..count - 1 of the tile."""
        stride, head_dim, is_aligned = layout
        for i in range(own_rows):
            row = own_rows * group + i
            for strip in range(strips):
                column = strip * 32 + 4 * lane
                n_columns = head_dim - column if row < count else 0
                own = 4 * (strips * i + strip)
                write4(target, start + row * stride + column, n_columns, is_aligned,
                       factor * sums[own], factor * sums[own + 1], factor * sums[own + 2],
                       factor * sums[own + 3])

    return SimpleNamespace(
        rows=rows, own_rows=own_rows, streamed=streamed, threads=threads, per_lane=per_lane,
        strips=strips, stationary_size=rows * width, streamed_size=streamed * width,
        weights_size=rows * streamed, fetched_size=4 * fetches, scores_size=own_rows * per_lane,
        sums_size=own_rows * 4 * strips, fetch=fetch, put=put, load=load, dots=dots, share=share,
        add_product=add_product, store=store,
    )


def padded_width(head_dim: int) -> int:
    """The least width that holds a head; ValueError above the largest."""
    for width in SHAPES:
        if head_dim <= width:
            return width
    raise ValueError(f"head_dim {head_dim} is more than the {max(SHAPES)} columns whose tiles fit "
                     "into shared memory: use more heads, or the CPU")
