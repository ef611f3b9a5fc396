"""CPU embedding: one parallel pass over rows forward, over column blocks backward."""

import numpy as np
from numba import prange

from ..common.cache import njit

COLUMNS = 64  # columns of one backward task


def forward(x, ids, wte, wpe, start) -> None:
    """x[b*T+t] = wte[ids[b,t]] + wpe[start+t]; raises ValueError for an id outside wte.

    start [1] is 0 where it is None.
    """
    first = 0 if start is None else int(start[0])
    _check_positions(ids, wpe, first)
    if not _forward(x, ids, wte, wpe, first):
        _refuse(ids, wte)


def backward(dwte, dwpe, dx, ids) -> None:
    """dwte[ids[b,t]] += dx[b*T+t] and dwpe[t] += dx[b*T+t], in the order of the rows."""
    _check_positions(ids, dwpe, 0)
    if not _backward(dwte, dwpe, dx, ids):
        _refuse(ids, dwte)


def _check_positions(ids, wpe, start: int) -> None:
    if start < 0 or start + ids.shape[1] > wpe.shape[0]:
        raise ValueError(f"positions {start}..{start + ids.shape[1] - 1} are outside the position "
                         f"table of {wpe.shape[0]} rows: shorten the sequence")


def _refuse(ids, wte) -> None:
    raise ValueError(f"token ids {np.min(ids)}..{np.max(ids)} are outside the embedding table of "
                     f"{wte.shape[0]} rows: use the tokenizer the model was built for")


@njit()
def _in_range(ids, rows):
    bad = 0
    for b in range(ids.shape[0]):
        row = ids[b]
        for t in range(row.size):
            bad += (row[t] < 0) | (row[t] >= rows)
    return bad == 0


@njit(parallel=True)
def _forward(x, ids, wte, wpe, start):
    if not _in_range(ids, wte.shape[0]):
        return False
    length = ids.shape[1]
    width = x.shape[1]
    for row in prange(ids.size):
        b = row // length
        t = row - b * length
        token = wte[ids[b, t]]
        position = wpe[start + t]
        y = x[row]
        for j in range(width):
            y[j] = token[j] + position[j]
    return True


@njit(parallel=True)
def _backward(dwte, dwpe, dx, ids):
    """Each task owns some columns of both tables, so equal ids meet in row order, race-free."""
    if not _in_range(ids, dwte.shape[0]):
        return False
    width = dx.shape[1]
    for block in prange((width + COLUMNS - 1) // COLUMNS):
        lo = block * COLUMNS
        hi = min(lo + COLUMNS, width)
        for b in range(ids.shape[0]):
            for t in range(ids.shape[1]):
                gradient = dx[b * ids.shape[1] + t, lo:hi]
                token = dwte[ids[b, t], lo:hi]
                position = dwpe[t, lo:hi]
                for j in range(gradient.size):
                    token[j] += gradient[j]
                for j in range(gradient.size):
                    position[j] += gradient[j]
    return True
