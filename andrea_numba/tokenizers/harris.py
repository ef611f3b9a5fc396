"""The Harris tokenizer: bytes, a document mark, and segments cut where letters vary.

Ids 0-255 are bytes, 256 separates documents, segments follow from 257, the most used first. Text
is encoded by the longest match at each place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import UserError
from .byte import BYTES, MARK, first_token
from .errors import too_little_text
from .pieces import DOCUMENTS_APART, PieceTokenizer, checked_start
from .segments import choose_segments, find_segments
from .trie import Trie
from .words import count_words

MOST = 8449  # ids, where the text decides: those of andrea-120m


class HarrisTokenizer(PieceTokenizer):
    """Knows every text; see the package's docstring for the interface."""

    name = "harris"

    def __init__(self, segments: list[str], start_token: int):
        self.segments = segments
        encoded = [segment.encode() for segment in segments]
        super().__init__([*BYTES, DOCUMENTS_APART, *encoded], MARK, start_token)
        self.encode_bytes = Trie(encoded).encode

    @classmethod
    def build(cls, chunks: Iterable[str], documents: int, vocab_size: int) -> HarrisTokenizer:
        """Of `vocab_size` ids, or as many as the text has up to MOST if 0.

        Raises UserError when the text has not so many segments.
        """
        if 0 < vocab_size <= MARK:
            raise UserError(f"--vocab-size {vocab_size} is too small for --tokenizer harris: the "
                            f"bytes and the mark take {MARK + 1}")
        counts = count_words(chunks)
        found = find_segments(counts)
        number = vocab_size - MARK - 1 if vocab_size else min(MOST - MARK - 1, len(found))
        if len(found) < number:
            raise too_little_text(cls.name, vocab_size, MARK + 1 + len(found))
        return cls(choose_segments(counts, found, number), first_token(documents))

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> HarrisTokenizer:
        segments = d.get("segments")
        good = (isinstance(segments, list) and all(isinstance(s, str) for s in segments)
                and len(set(segments)) == len(segments)
                and not any("\ud800" <= c <= "\udfff" for s in segments for c in s)
                and all(len(s.encode()) > 1 for s in segments))
        if not good:
            raise UserError("saved harris tokenizer is damaged: expected `segments`, distinct "
                            "texts of at least two bytes")
        start = checked_start(d.get("start_token"), MARK + 1 + len(segments), cls.name)
        return cls(segments, start)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "start_token": self.start_token, "segments": self.segments}
