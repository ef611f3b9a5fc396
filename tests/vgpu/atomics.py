"""Atomic read-modify-write of many lanes at once, in ascending order of lanes."""

from __future__ import annotations

import numpy as np

STEPS = {
    "add": np.add,
    "min": np.fmin,
    "max": np.fmax,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exch": lambda old, new: new,
    "inc": lambda old, bound: np.where(old >= bound, 0, old + 1),
    "dec": lambda old, bound: np.where((old == 0) | (old > bound), bound, old - 1),
    "cas": lambda old, expected, new: np.where(old == expected, new, old),
}
# The same for Python numbers, where many lanes change one address one after the other.
NUMBER_STEPS = {
    "exch": lambda old, new: new,
    "inc": lambda old, bound: 0 if old >= bound else old + 1,
    "dec": lambda old, bound: bound if old == 0 or old > bound else old - 1,
    "cas": lambda old, expected, new: new if old == expected else old,
}


def apply(operation: str, data: np.ndarray, index: np.ndarray, operands: tuple) -> np.ndarray:
    """Update `data[index]`, lane by lane, and return what each lane found there.

    data is a 1-D array of the operation's dtype, index an int64 array of one element a lane,
    operands are arrays of as many elements or scalars. ValueError for an unknown operation.
    """
    if operation not in STEPS:
        raise ValueError(f"unknown atomic operation {operation!r}")
    step = STEPS[operation]
    operands = [np.broadcast_to(np.asarray(operand, data.dtype), index.shape)
                for operand in operands]
    order = np.argsort(index, kind="stable")
    ordered = index[order]
    first = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    length = np.diff(np.append(first, index.size))
    old = np.empty(index.size, data.dtype)
    if length.max() <= first.size:
        _by_rounds(step, data, index, operands, order, first, length, old)
    else:
        for start, count in zip(first, length, strict=True):
            _one_address(operation, data, index, operands, order[start:start + count], old)
    return old


def _by_rounds(step, data, index, operands, order, first, length, old) -> None:
    """Round r applies the r-th lane of each address: best when few lanes share one."""
    for turn in range(length.max()):
        lanes = order[first[length > turn] + turn]
        place = index[lanes]
        old[lanes] = data[place]
        data[place] = step(old[lanes], *(operand[lanes] for operand in operands))


def _one_address(operation, data, index, operands, lanes, old) -> None:
    """All lanes of one address, in order."""
    place = index[lanes[0]]
    if operation in NUMBER_STEPS:
        step = NUMBER_STEPS[operation]
        results = [data[place].item()]
        for values in zip(*(operand[lanes].tolist() for operand in operands), strict=True):
            results.append(step(results[-1], *values))
    else:
        values = np.concatenate([data[place:place + 1], operands[0][lanes]])
        # accumulate rounds after every element, as the lanes do one after the other
        results = STEPS[operation].accumulate(values, dtype=data.dtype)
    old[lanes] = results[:-1]
    data[place] = results[-1]
