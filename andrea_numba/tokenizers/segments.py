"""Morphemes by letter variety, after Zellig Harris (From Phoneme to Morpheme, 1955).

Inside a morpheme the next letter is nearly certain; after its end many letters can follow, and
before the beginning of the next one many can stand. A word is cut where both varieties together
jump. Only integers are compared, so a text has the same segments on every machine.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from kernels.common.cache import njit

from .trie import SEPARATOR, Trie
from .words import LETTER

_IS_LETTERS = re.compile(rf"[{LETTER}]").match


@njit()
def varieties(letters, offsets, longest):
    """Successor varieties in sorted words: (int64 [len(letters)], that of the empty prefix).

    Word w is letters[offsets[w]:offsets[w + 1]], at most `longest` long. The value at a letter is
    the number of different letters that follow the prefix ending there; an end of the word counts
    as a letter.
    """
    found = np.zeros(len(letters), np.int64)
    followers = np.zeros(len(letters) + 1, np.int64)  # of each prefix, in order of appearance
    path = np.zeros(longest + 1, np.int64)            # the prefixes of the present word
    for reading in range(2):
        prefixes = 0
        for word in range(len(offsets) - 1):
            start, end = offsets[word], offsets[word + 1]
            length = end - start
            common = 0
            if word:
                before = offsets[word - 1]
                while (common < min(length, start - before)
                       and letters[start + common] == letters[before + common]):
                    common += 1
            for depth in range(common, length):
                if reading == 0:
                    followers[path[depth]] += 1
                prefixes += 1
                path[depth + 1] = prefixes
            if reading == 0:
                followers[path[length]] += 1
            else:
                for depth in range(length):
                    found[start + depth] = followers[path[depth + 1]]
    return found, followers[0]


@njit()
def jumps(successors, predecessors, last, offsets):
    """bool [letters]: before which letters words are cut.

    There the successor variety of the prefix times the predecessor variety of the suffix is at
    least 5 times the geometric mean of the outer ones: those of the prefix and of the suffix one
    letter shorter. `last` is the variety of the empty suffix. No cut leaves a prefix of one letter,
    which is too short to tell anything.
    """
    found = np.zeros(len(successors), np.bool_)
    for word in range(len(offsets) - 1):
        start, end = offsets[word], offsets[word + 1]
        for at in range(start + 2, end):
            here = successors[at - 1] * predecessors[at]
            shorter_suffix = predecessors[at + 1] if at + 1 < end else last
            found[at] = here * here >= 25 * successors[at - 2] * shorter_suffix
    return found


def _sorted_varieties(words: Sequence[str]) -> tuple[np.ndarray, np.ndarray, int]:
    """The offsets [n + 1] of sorted words among their letters, and what `varieties` finds."""
    lengths = np.array([len(word) for word in words], np.int64)
    letters = np.frombuffer("".join(words).encode("utf-32-le"), "<u4")
    offsets = np.append(0, np.cumsum(lengths))
    return offsets, *varieties(letters, offsets, lengths.max(initial=0))


def _cuts(words: Iterable[str]) -> dict[str, list[int]]:
    """Where each of the different words is cut: positions between 1 and its length - 1."""
    words = sorted(words)
    offsets, successors, _ = _sorted_varieties(words)
    mirrored = [word[::-1] for word in words]
    order = sorted(range(len(words)), key=mirrored.__getitem__)
    mirrored_offsets, values, last = _sorted_varieties([mirrored[i] for i in order])
    predecessors = np.empty_like(successors)
    for place, i in enumerate(order):
        predecessors[offsets[i]:offsets[i + 1]] = \
            values[mirrored_offsets[place]:mirrored_offsets[place + 1]][::-1]
    cuts = np.flatnonzero(jumps(successors, predecessors, last, offsets))
    bounds = np.searchsorted(cuts, offsets)
    return {word: (cuts[bounds[i]:bounds[i + 1]] - offsets[i]).tolist()
            for i, word in enumerate(words)}


def _pieces(word: str, cuts: dict[str, list[int]]) -> Iterator[str]:
    """The word between its cuts; its space stays with the first piece."""
    space = word.startswith(" ")
    stem = word[space:].lower()
    inner = cuts.get(stem, []) if len(stem) == len(word) - space else []
    ends = [*(cut + space for cut in inner), len(word)]
    yield from (word[start:end] for start, end in zip([0, *ends], ends, strict=False))


def find_segments(counts: Counter[str]) -> Counter[str]:
    """The pieces of more than one byte between the cuts of words, with their frequency."""
    stems = {word.removeprefix(" ").lower() for word in counts}
    cuts = _cuts(filter(_IS_LETTERS, stems))
    found: Counter[str] = Counter()
    for word, n in counts.items():
        for piece in _pieces(word, cuts):
            found[piece] += n
    return Counter({piece: n for piece, n in found.items() if len(piece.encode()) > 1})


def choose_segments(counts: Counter[str], segments: Counter[str], number: int) -> list[str]:
    """The `number` segments that longest matching uses most, the most used first.

    From four times as many, the most frequent, a quarter is dropped at a time: each one dropped
    changes the use of others.
    """
    kept = sorted(segments, key=lambda segment: (-segments[segment], segment))[:4 * number]
    text = bytes([SEPARATOR]).join(word.encode() for word in counts)
    frequency = np.fromiter(counts.values(), np.int64, len(counts))
    while True:
        ids = Trie([segment.encode() for segment in kept]).encode(text)
        separators = ids == SEPARATOR
        word_of = np.cumsum(separators)[~separators]
        used = np.bincount(ids[~separators], frequency[word_of], 257 + len(kept))
        use = dict(zip(kept, used[257:].tolist(), strict=True))
        kept.sort(key=lambda segment: (-use[segment], segment))
        if len(kept) == number:
            return kept
        del kept[max(number, len(kept) * 3 // 4):]
