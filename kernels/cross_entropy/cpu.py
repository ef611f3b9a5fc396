"""CPU softmax cross-entropy: one parallel pass over rows, each row stays in the cache.

The maximum is taken over integer images of the floats: that vectorises, and a NaN still reaches
the loss through the sum of exponentials.
"""

import math

import numpy as np
from numba import prange

from ..common.cache import njit
from ..common.cpu_math import FAST_SUM, F, exp, from_ordered_bits, ordered_bits

_LOWEST = np.int32(-(2**31))


def forward(losses, logits, targets, vocab_size: int) -> None:
    """losses[i] = log sum_{j < vocab_size} exp(logits[i,j]) - logits[i,targets[i]]; 0 if -1."""
    if not _forward(losses, logits, targets, vocab_size):
        _refuse(targets, vocab_size)


def backward(losses, dlogits, logits, targets, vocab_size: int, scale: float) -> None:
    """losses as in forward, and dlogits = scale * (softmax - onehot); dlogits may be logits."""
    if not _backward(losses, dlogits, logits, targets, vocab_size, F(scale), dlogits is logits):
        _refuse(targets, vocab_size)


def _refuse(targets, vocab_size: int) -> None:
    raise ValueError(f"targets {np.min(targets)}..{np.max(targets)} are not all in "
                     f"-1..{vocab_size - 1}: use the tokenizer the model was built for")


@njit()
def _in_range(targets, vocab_size):
    bad = 0
    for i in range(targets.size):
        bad += (targets[i] < -1) | (targets[i] >= vocab_size)
    return bad == 0


@njit()
def _maximum(row):
    largest = _LOWEST
    for j in range(row.size):
        bits = ordered_bits(row[j])
        largest = bits if bits > largest else largest
    return from_ordered_bits(largest)


@njit()
def _loss(total, largest, wanted):
    """Without fastmath: in another order two large logits would swallow the logarithm."""
    return math.log(np.float64(total)) + (np.float64(largest) - np.float64(wanted))


@njit(parallel=True, fastmath=FAST_SUM)
def _forward(losses, logits, targets, vocab_size):
    if not _in_range(targets, vocab_size):
        return False
    for i in prange(targets.size):
        if targets[i] < 0:
            losses[i] = F(0.0)
        else:
            row = logits[i, :vocab_size]
            largest = _maximum(row)
            total = F(0.0)
            for j in range(row.size):
                total += exp(row[j] - largest)
            losses[i] = _loss(total, largest, row[targets[i]])
    return True


@njit(parallel=True, fastmath=FAST_SUM)
def _backward(losses, dlogits, logits, targets, vocab_size, scale, in_place):
    if not _in_range(targets, vocab_size):
        return False
    for i in prange(targets.size):
        row = dlogits[i, :vocab_size]
        padding = dlogits[i, vocab_size:]
        if targets[i] < 0:
            losses[i] = F(0.0)
            for j in range(row.size):
                row[j] = F(0.0)
        else:
            if not in_place:
                source = logits[i, :vocab_size]
                for j in range(row.size):
                    row[j] = source[j]
            target = targets[i]
            wanted = row[target]
            largest = _maximum(row)
            total = F(0.0)
            for j in range(row.size):
                e = exp(row[j] - largest)
                total += e
                row[j] = e
            losses[i] = _loss(total, largest, wanted)
            factor = scale / total
            for j in range(row.size):
                row[j] *= factor
            row[target] -= scale
        for j in range(padding.size):
            padding[j] = F(0.0)
    return True
