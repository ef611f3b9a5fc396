"""JSON of unknown origin: read in bounded memory and time, or refused with a reason."""

from __future__ import annotations

import itertools
import json
import math
import re
from typing import Any

MAX_BYTES = 12 << 20  # a BPE of 128,000 tokens and 280,000 merges takes 9 MiB
MAX_DEPTH = 16
MAX_KEYS = 1 << 18  # of all objects; two moments of a model of 1,000 blocks have 96,000
MAX_KEY = 200  # characters
MAX_MARKS = 1 << 20  # brackets and commas outside of strings; quotes
MAX_NUMBER = 64  # characters; the state of a random generator has 39
# One that is not closed goes on to the end, so that looking for the next one never starts again.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")
_LONG_NUMBER = re.compile(rb"[-+.0-9eE]{%d}" % (MAX_NUMBER + 1))


def loads(raw: bytes, max_bytes: int = MAX_BYTES, max_marks: int = MAX_MARKS) -> Any:
    """The value that `raw`, JSON in UTF-8, stands for.

    Raises ValueError, in one line, for anything else, for a key given twice, for a number that is
    not finite, and beyond the limits above, which are looked at before anything is built.
    """
    if len(raw) > max_bytes:
        raise ValueError(f"longer than {max_bytes:,} bytes")
    if raw.count(b'"') > max_marks:
        raise ValueError(f"more than {max_marks:,} quotes")
    _check_structure(_STRING.sub(b"", raw), max_marks)
    return json.loads(raw.decode("utf-8"), parse_float=_finite, parse_constant=_refuse,
                      object_pairs_hook=_object)


def _check_structure(outside: bytes, max_marks: int) -> None:
    """`outside` is the text without its strings."""
    if sum(outside.count(mark) for mark in (b",", b"[", b"]", b"{", b"}")) > max_marks:
        raise ValueError(f"more than {max_marks:,} brackets and commas")
    if outside.count(b":") > MAX_KEYS:
        raise ValueError(f"more than {MAX_KEYS:,} keys")
    if _LONG_NUMBER.search(outside):
        raise ValueError(f"a number of more than {MAX_NUMBER} characters")
    steps = (1 if bracket in b"[{" else -1 for bracket in _BRACKET.findall(outside))
    if max(itertools.accumulate(steps), default=0) > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def _refuse(text: str) -> None:
    raise ValueError(f"{text} is not a finite number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key is given twice")
    if any(len(key) > MAX_KEY for key in value):
        raise ValueError(f"a key of more than {MAX_KEY} characters")
    return value
