"""GPU softmax cross-entropy: one block per row, which is read twice: for the sum, for the gradient.

The sum of exponentials keeps pace with the largest logit so far, so one pass finds both. An
ignored row is a row without used columns. A target outside the vocabulary gives a NaN loss.
"""

import math

from ..common.access import LANES, ByAccess
from ..common.cuda import Floats, Ints, cuda, device_function, float32, int32, int64, kernel
from ..common.launch import MAX_INT32, check_sizes
from ..common.reduce import LOWEST, block_max, block_sum

THREADS = 256
WARPS = THREADS // LANES


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
    _, differentiate = _backward.choose(columns, dlogits, logits)
    differentiate.launch(rows, losses, dlogits, logits, targets, columns, vocab_size, scale)


def _make_peak_and_sum(words, load):
    @device_function
    def peak_and_sum(logits, first, used, of_warps):
        """The largest of logits[first : first + used], and the sum of exp(logit - largest)."""
        values = cuda.local.array(words, float32)
        largest = LOWEST
        total = float32(0.0)
        for column in range(words * cuda.threadIdx.x, used, words * THREADS):
            load(values, logits, first + column)
            before = largest
            for j in range(words):
                if column + j < used:
                    largest = max(largest, values[j])
            total *= math.exp(before - largest)
            for j in range(words):
                if column + j < used:
                    total += math.exp(values[j] - largest)  # NaN stays NaN
        peak = block_max(largest, of_warps)
        return peak, block_sum(total * math.exp(largest - peak), of_warps)

    return peak_and_sum


@device_function
def _target_logit(logits, first, target, used):
    """Every thread reads it before the row may be overwritten."""
    if 0 <= target < used:
        return logits[first + target]
    return float32(math.nan)


@device_function
def _loss(peak, total, wanted, target):
    if target == -1:
        return float32(0.0)
    return math.log(total) + (peak - wanted)


def _make_row_loss(words, load):
    peak_and_sum = _make_peak_and_sum(words, load)

    @device_function
    def row_loss(losses, logits, targets, columns, vocab_size, of_warps):
        """Store the loss of the block's row; gives what the row's gradient needs.

        That is the row's first element, its target, the columns in use (none if the target is
        ignored), and the largest logit with the sum of exp(logit - largest).
        """
        row = cuda.blockIdx.x
        first = int64(row) * columns
        target = targets[row]
        used = vocab_size if target != -1 else int32(0)
        wanted = _target_logit(logits, first, target, used)
        peak, total = peak_and_sum(logits, first, used, of_warps)
        if cuda.threadIdx.x == 0:
            losses[row] = _loss(peak, total, wanted, target)
        return first, target, used, peak, total

    return row_loss


def _make_forward(words, load, store):
    row_loss = _make_row_loss(words, load)

    @kernel(threads=THREADS, name=f"_forward_{words}")
    def _forward(losses: Floats, logits: Floats, targets: Ints, columns: int32, vocab_size: int32):
        of_warps = cuda.shared.array(WARPS, float32)
        row_loss(losses, logits, targets, columns, vocab_size, of_warps)

    return _forward


def _make_backward(words, load, store):
    row_loss = _make_row_loss(words, load)

    @kernel(threads=THREADS, name=f"_backward_{words}")
    def _backward(losses: Floats, dlogits: Floats, logits: Floats, targets: Ints, columns: int32,
                  vocab_size: int32, scale: float32):
        of_warps = cuda.shared.array(WARPS, float32)
        values = cuda.local.array(words, float32)
        first, target, used, peak, total = row_loss(losses, logits, targets, columns, vocab_size,
                                                    of_warps)
        factor = scale / total
        for column in range(words * cuda.threadIdx.x, columns, words * THREADS):
            load(values, logits, first + column)
            for j in range(words):
                gradient = factor * math.exp(values[j] - peak)
                if column + j == target:
                    gradient -= scale
                values[j] = gradient if column + j < used else float32(0.0)
            store(dlogits, first + column, values)

    return _backward


_forward = ByAccess(_make_forward)
_backward = ByAccess(_make_backward)
