"""GPU softmax cross-entropy: one block per row, which is read from memory once.

The sum of exponentials keeps pace with the largest logit so far, so one pass finds both. Backward
needs the row again, for the gradient: a row that fits is kept in shared memory, where each thread
reads only what it has copied itself, and a wider one is read twice. An ignored row is a row without
used columns. A target outside the vocabulary gives a NaN loss.
"""

import math

from ..common.access import BFLOATS, FLOATS, LANES, ByOperand
from ..common.cuda import (
    Bfloats,
    Floats,
    Ints,
    cuda,
    device_function,
    float32,
    int32,
    int64,
    kernel,
    uint32,
)
from ..common.launch import MAX_INT32, check_sizes
from ..common.ptx import (
    cp_async,
    cp_async_commit,
    cp_async_wait_0,
    dynamic_shared,
    exp2,
    load4_words_shared,
)
from ..common.reduce import LOWEST, block_max, block_sum

THREADS = 256
WARPS = THREADS // LANES
VECTOR = 16  # bytes that a thread copies at a time
MOST_KEPT = 47 << 10  # bytes of a row in shared memory; every GPU gives a block 48 KiB
LOG2_E = float32(1.4426950408889634)


def forward(losses, logits, targets, vocab_size: int) -> None:
    """losses[i] = log sum_{j < vocab_size} exp(logits[i,j]) - logits[i,targets[i]]; 0 if -1."""
    rows, columns = logits.shape
    check_sizes(MAX_INT32, N=rows, Vp=columns)
    _, lose = _forward.choose(columns, logits)
    lose.launch(rows, losses, logits, targets, columns, vocab_size)


def backward(losses, dlogits, logits, targets, vocab_size: int, scale: float) -> None:
    """losses as in forward, and dlogits = scale * (softmax - onehot); dlogits may be logits."""
    rows, columns = logits.shape
    check_sizes(MAX_INT32, N=rows, Vp=columns)
    access, differentiate = _backward.choose(columns, logits, dlogits)
    row_bytes = columns * logits.dtype.itemsize
    is_kept = access in _backward_kept and row_bytes <= MOST_KEPT
    if is_kept:
        differentiate = _backward_kept[access]
    differentiate.launch(rows, losses, dlogits, logits, targets, columns, vocab_size, scale,
                         shared=row_bytes if is_kept else 0)


def _from_memory(access):
    """How a thread prepares to read a row, and reads `words` columns of it: from memory."""
    load = access.load

    @device_function
    def prepare(logits, first, used):
        pass

    @device_function
    def read(values, logits, first, column):
        load(values, logits, first + column)

    return prepare, read


def _from_shared(access):
    """The same from shared memory, where the thread copies all columns that it will read."""
    words, unpack, itemsize = access.words, access.unpack, VECTOR // access.words

    @device_function
    def place(column):
        return uint32(dynamic_shared() + uint32(itemsize) * uint32(column))

    @device_function
    def prepare(logits, first, used):
        for column in range(words * cuda.threadIdx.x, used, words * THREADS):
            cp_async(place(column), logits, first + column, int32(VECTOR))
        cp_async_commit()
        cp_async_wait_0()

    @device_function
    def read(values, logits, first, column):
        a, b, c, d = load4_words_shared(place(column))
        unpack(values, 0, a, b, c, d)

    return prepare, read


@device_function
def _exp(x):
    return exp2(x * LOG2_E)


@device_function
def _loss(peak, total, wanted, target):
    if target == -1:
        return float32(0.0)
    return math.log(total) + (peak - wanted)


def _make_row_loss(access, prepare, read):
    words, load_one = access.words, (BFLOATS if access.pointer is Bfloats else FLOATS)[1].load

    @device_function
    def row_loss(losses, logits, targets, columns, vocab_size, of_warps):
        """Store the loss of the block's row; gives what the row's gradient needs.

        That is the row's first element, its target, the columns in use (none if the target is
        ignored), and the largest logit with the sum of exp(logit - largest).
        """
        values = cuda.local.array(words, float32)
        wanted = cuda.local.array(1, float32)
        row = cuda.blockIdx.x
        first = int64(row) * columns
        target = targets[row]
        used = vocab_size if target != -1 else int32(0)
        prepare(logits, first, used)
        wanted[0] = float32(math.nan)
        if 0 <= target < used:  # every thread reads it before the row may be overwritten
            load_one(wanted, logits, first + target)
        largest = LOWEST
        total = float32(0.0)
        for column in range(words * cuda.threadIdx.x, used, words * THREADS):
            read(values, logits, first, column)
            if column + words > used:
                for j in range(words):
                    if column + j >= used:
                        values[j] = float32(-math.inf)
            before = largest
            for j in range(words):
                largest = max(largest, values[j])
            total *= _exp(before - largest)
            for j in range(words):
                total += _exp(values[j] - largest)  # NaN stays NaN
        peak = block_max(largest, of_warps)
        total = block_sum(total * _exp(largest - peak), of_warps)
        if cuda.threadIdx.x == 0:
            losses[row] = _loss(peak, total, wanted[0], target)
        return first, target, used, peak, total

    return row_loss


def _make_forward(access):
    Operands = access.pointer
    row_loss = _make_row_loss(access, *_from_memory(access))

    @kernel(threads=THREADS, name=f"_forward_{access.name}")
    def _forward(losses: Floats, logits: Operands, targets: Ints, columns: int32,
                 vocab_size: int32):
        of_warps = cuda.shared.array(WARPS, float32)
        row_loss(losses, logits, targets, columns, vocab_size, of_warps)

    return _forward


def _make_backward(access, source=_from_memory, name="_backward"):
    words, Operands, store = access.words, access.pointer, access.store
    prepare, read = source(access)
    row_loss = _make_row_loss(access, prepare, read)

    @kernel(threads=THREADS, name=f"{name}_{access.name}")
    def _backward(losses: Floats, dlogits: Operands, logits: Operands, targets: Ints,
                  columns: int32, vocab_size: int32, scale: float32):
        of_warps = cuda.shared.array(WARPS, float32)
        values = cuda.local.array(words, float32)
        first, target, used, peak, total = row_loss(losses, logits, targets, columns, vocab_size,
                                                    of_warps)
        factor = scale / total
        for column in range(words * cuda.threadIdx.x, columns, words * THREADS):
            if column < used:
                read(values, logits, first, column)
                for j in range(words):
                    values[j] = factor * _exp(values[j] - peak)
            if column <= target < column + words:
                for j in range(words):
                    if column + j == target:
                        values[j] -= scale
            if column + words > used:
                for j in range(words):
                    if column + j >= used:
                        values[j] = float32(0.0)
            store(dlogits, first + column, values)

    return _backward


_forward = ByOperand(_make_forward, bf16_words=8)
_backward = ByOperand(_make_backward, bf16_words=8)
_backward_kept = {access: _make_backward(access, _from_shared, "_backward_kept")
                  for access in (FLOATS[4], BFLOATS[8])}
