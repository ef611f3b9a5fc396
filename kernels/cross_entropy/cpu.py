"""CPU softmax cross-entropy: one parallel pass over rows, each row stays in the cache.

The exponentials of a row go to scratch, one row of float32 for each thread, so that gradients in
bfloat16 are rounded once, and may overwrite their logits.
"""

import math

import numpy as np
from numba import get_num_threads, prange

from ..common.cache import njit
from ..common.cpu_features import VECTORS
from ..common.cpu_math import F, as_float, flat, pointer, words
from ..common.cpu_tile import scratch

if VECTORS:
    from .cpu_vector import exponentials, fill, largest_of, scaled
else:
    from .cpu_loops import exponentials, fill, largest_of, scaled


def forward(losses, logits, targets, vocab_size: int) -> None:
    """losses[i] = log sum_{j < vocab_size} exp(logits[i,j]) - logits[i,targets[i]]; 0 if -1."""
    _run(losses, logits[:0], logits, targets, vocab_size, 0.0)


def backward(losses, dlogits, logits, targets, vocab_size: int, scale: float) -> None:
    """losses as in forward, and dlogits = scale * (softmax - onehot); dlogits may be logits."""
    _run(losses, dlogits, logits, targets, vocab_size, scale)


def _run(losses, dlogits, logits, targets, vocab_size: int, scale: float) -> None:
    threads = get_num_threads()
    if not _all_rows(losses, flat(words(dlogits)), flat(words(logits)), targets, vocab_size,
                     logits.shape[1], F(scale), scratch("a", np.float32, threads * vocab_size),
                     threads):
        raise ValueError(f"targets {np.min(targets)}..{np.max(targets)} are not all in "
                         f"-1..{vocab_size - 1}: use the tokenizer the model was built for")


@njit()
def _in_range(targets, vocab_size):
    bad = 0
    for i in range(targets.size):
        bad += (targets[i] < -1) | (targets[i] >= vocab_size)
    return bad == 0


@njit()
def _loss(total, largest, wanted):
    """Without fastmath: in another order two large logits would swallow the logarithm."""
    return math.log(np.float64(total)) + (np.float64(largest) - np.float64(wanted))


@njit(parallel=True)
def _all_rows(losses, dlogits, logits, targets, vocab_size, width, scale, scratch_rows, threads):
    """False, and nothing is written, if there is a target out of range; dlogits may be empty."""
    if not _in_range(targets, vocab_size):
        return False
    rows = targets.size
    for worker in prange(threads):
        row = pointer(scratch_rows, worker * vocab_size)
        for i in range(worker * rows // threads, (worker + 1) * rows // threads):
            source = pointer(logits, i * width)
            total = F(1.0)
            if targets[i] < 0:
                losses[i] = F(0.0)
                fill(row, vocab_size, F(0.0))
            else:
                largest = largest_of(source, vocab_size)
                total = exponentials(row, source, vocab_size, largest)
                losses[i] = _loss(total, largest, as_float(source[targets[i]]))
                row[targets[i]] -= total
            if dlogits.size > 0:
                target = pointer(dlogits, i * width)
                scaled(target, row, vocab_size, scale / total)
                fill(pointer(target, vocab_size), width - vocab_size, F(0.0))
    return True
