"""Greedy longest match: which strings of bytes a text begins with, compiled with Numba."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kernels.common.cache import njit

SPACE = 0x20
SEPARATOR = 0xFF  # no UTF-8, so part of no piece: stands between texts in one buffer
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio: Fibonacci hashing


@njit()
def _slot(keys, key):
    """Where `key` stands in the hash table, or the free place where it belongs."""
    mask = len(keys) - 1
    slot = np.int64((np.uint64(key) * _SPREAD) >> np.uint64(32)) & mask
    while keys[slot] != key and keys[slot] != -1:
        slot = (slot + 1) & mask
    return slot


@njit()
def insert(keys, values, new_keys, new_values):
    """Put pairs into a hash table: int64 keys [2^k], -1 where free, and int32 values [2^k]."""
    for i in range(len(new_keys)):
        slot = _slot(keys, new_keys[i])
        keys[slot], values[slot] = new_keys[i], new_values[i]


@njit(nogil=True)
def longest_match(data, keys, children, token_of, ids):
    """Write the ids of uint8 `data` [n] to `ids` [n]; returns how many there are.

    The trie's node 0 is the root and node 1 + b stands for byte b; the child of a node by byte b
    is in the hash table under 256 * node + b. `token_of` is the id of a node, -1 if it has none.
    A space before anything but space is left for the word it precedes.
    """
    count = 0
    start = 0
    while start < len(data):
        node = 1 + np.int64(data[start])
        end = start + 1
        token = token_of[node]
        at = end
        while at < len(data):
            key = 256 * node + data[at]
            slot = _slot(keys, key)
            if keys[slot] != key:
                break
            node = np.int64(children[slot])
            at += 1
            takes_space = (data[at - 1] == SPACE and at < len(data)
                           and SPACE < data[at] < SEPARATOR)
            if token_of[node] >= 0 and not takes_space:
                token, end = token_of[node], at
        ids[count] = token
        count += 1
        start = end
    return count


class Trie:
    """Cuts bytes into the longest of `pieces` at each place; piece i has id 257 + i.

    A byte at which no piece begins has its value as id. Pieces are at least two bytes long.
    """

    def __init__(self, pieces: Sequence[bytes]):
        child_of: dict[int, int] = {}
        token_of = [-1, *range(256)]
        for token, piece in enumerate(pieces, start=257):
            node = 1 + piece[0]
            for byte in piece[1:]:
                node = child_of.setdefault(256 * node + byte, len(token_of))
                if node == len(token_of):
                    token_of.append(-1)
            token_of[node] = token
        self._token_of = np.array(token_of, np.int32)
        size = 1 << (4 * len(child_of)).bit_length()  # at least three of four places stay free
        self._keys, self._children = np.full(size, -1, np.int64), np.zeros(size, np.int32)
        insert(self._keys, self._children, np.fromiter(child_of.keys(), np.int64, len(child_of)),
               np.fromiter(child_of.values(), np.int32, len(child_of)))

    def encode(self, data: bytes) -> np.ndarray:
        """int32 ids of `data`."""
        ids = np.empty(len(data), np.int32)
        count = longest_match(np.frombuffer(data, np.uint8), self._keys, self._children,
                              self._token_of, ids)
        return ids[:count].copy()
