"""GPU embedding: a warp per row forward; backward a block per token and a warp per position.

Backward has no atomics: the block of a token looks through all ids for its own, in order, and
adds up the rows it finds, in order. An id or a position outside its table gives a row of NaN, an
id no gradient.
"""

import math

from ..common.access import LANES, ByAccess
from ..common.cuda import Floats, Ints, cuda, float32, int32, int64, kernel, uint32
from ..common.launch import MAX_INT32, ceil_div, check_sizes
from ..common.reduce import ALL_LANES

ROWS = 8  # rows or positions, and so warps, of a block
THREADS = ROWS * LANES
VOTES = 4  # ids that a thread looks at before the block meets
IDS = THREADS * VOTES


def forward(x, ids, wte, wpe, start) -> None:
    """x[b*T+t] = wte[ids[b,t]] + wpe[start+t]; a row of NaN for an id outside wte.

    start [1] is 0 where it is None.
    """
    (B, T), (tokens, width) = ids.shape, wte.shape
    _check_sizes(B * T, tokens, width, wpe)
    _check_positions(T, wpe)
    _, look_up = _forward.choose(width, x, wte, wpe)
    look_up.launch(ceil_div(B * T, ROWS), x, ids, wte, wpe, start, B * T, T, width, tokens,
                   wpe.shape[0], start is not None)


def backward(dwte, dwpe, dx, ids) -> None:
    """dwte[ids[b,t]] += dx[b*T+t] and dwpe[t] += dx[b*T+t], in the order of the rows."""
    (B, T), (tokens, width) = ids.shape, dwte.shape
    _check_sizes(B * T, tokens, width, dwpe)
    _check_positions(T, dwpe)
    _, add_to_tokens = _add_to_tokens.choose(width, dwte, dx)
    add_to_tokens.launch(tokens, dwte, dx, ids, B * T, width)
    _, add_to_positions = _add_to_positions.choose(width, dwpe, dx)
    add_to_positions.launch(ceil_div(T, ROWS), dwpe, dx, B, T, width)


def _check_sizes(rows: int, tokens: int, width: int, wpe) -> None:
    check_sizes(MAX_INT32, **{"B*T": rows}, Vp=tokens, d=width, context=wpe.shape[0])


def _check_positions(T: int, wpe) -> None:
    if wpe.shape[0] < T:
        raise ValueError(f"positions 0..{T - 1} are outside the position table of {wpe.shape[0]} "
                         "rows: shorten the sequence")


def _make_forward(words, load, store):
    @kernel(threads=THREADS, name=f"_forward_{words}")
    def _forward(x: Floats, ids: Ints, wte: Floats, wpe: Floats, start: Ints, rows: int32,
                 T: int32, width: int32, tokens: int32, context: int32, has_start: int32):
        """Warp b*T + t: the row of token t of sequence b."""
        values = cuda.local.array(words, float32)
        position = cuda.local.array(words, float32)
        row = cuda.blockIdx.x * ROWS + cuda.threadIdx.x // LANES
        if row < rows:
            place = int32(uint32(row) % uint32(T))  # a 32-bit division is much the shorter one
            if has_start:
                place = int32(place + start[0])
            token = ids[row]
            for column in range(words * cuda.laneid, width, words * LANES):
                for j in range(words):
                    values[j] = float32(math.nan)
                if 0 <= token < tokens and 0 <= place < context:
                    load(values, wte, int64(token) * width + column)
                    load(position, wpe, int64(place) * width + column)
                    for j in range(words):
                        values[j] += position[j]
                store(x, row * width + column, values)

    return _forward


def _make_add_to_tokens(words, load, store):
    @kernel(threads=THREADS, name=f"_add_to_tokens_{words}")
    def _add_to_tokens(dwte: Floats, dx: Floats, ids: Ints, rows: int32, width: int32):
        """Block i: dwte[i] += dx[row] for each row with ids[row] = i, in order."""
        counts = cuda.shared.array(ROWS, int32)  # rows found by each warp
        found = cuda.shared.array(IDS, int32)
        votes = cuda.local.array(VOTES, uint32)
        sums = cuda.local.array(words, float32)
        values = cuda.local.array(words, float32)
        token = cuda.blockIdx.x
        lane = uint32(cuda.laneid)
        warp = cuda.threadIdx.x // LANES
        for first in range(0, rows, IDS):
            mine = first + warp * VOTES * LANES + lane  # and every 32nd after it
            count = int32(0)
            for k in range(VOTES):
                row = mine + k * LANES
                votes[k] = cuda.ballot_sync(ALL_LANES, row < rows and ids[row] == token)
                count += cuda.popc(votes[k])
            if cuda.syncthreads_or(count):  # most tokens are not among most ids
                if lane == 0:
                    counts[warp] = count
                cuda.syncthreads()
                place = int32(0)
                total = int32(0)
                for other in range(ROWS):
                    if other == warp:
                        place = total
                    total += counts[other]
                for k in range(VOTES):
                    if (votes[k] >> lane) & uint32(1):
                        before = votes[k] & ((uint32(1) << lane) - uint32(1))
                        found[place + cuda.popc(before)] = mine + k * LANES
                    place += cuda.popc(votes[k])
                cuda.syncthreads()
                for column in range(words * cuda.threadIdx.x, width, words * THREADS):
                    load(sums, dwte, int64(token) * width + column)
                    for k in range(total):
                        load(values, dx, int64(found[k]) * width + column)
                        for j in range(words):
                            sums[j] += values[j]
                    store(dwte, int64(token) * width + column, sums)

    return _add_to_tokens


def _make_add_to_positions(words, load, store):
    @kernel(threads=THREADS, name=f"_add_to_positions_{words}")
    def _add_to_positions(dwpe: Floats, dx: Floats, B: int32, T: int32, width: int32):
        """Warp t: dwpe[t] += dx[b*T + t] for each sequence b, in order."""
        sums = cuda.local.array(words, float32)
        values = cuda.local.array(words, float32)
        t = cuda.blockIdx.x * ROWS + cuda.threadIdx.x // LANES
        if t < T:
            for column in range(words * cuda.laneid, width, words * LANES):
                load(sums, dwpe, int64(t) * width + column)
                for b in range(B):
                    load(values, dx, (int64(b) * T + t) * width + column)
                    for j in range(words):
                        sums[j] += values[j]
                store(dwpe, int64(t) * width + column, sums)

    return _add_to_positions


_forward = ByAccess(_make_forward)
_add_to_tokens = ByAccess(_make_add_to_tokens)
_add_to_positions = ByAccess(_make_add_to_positions)
